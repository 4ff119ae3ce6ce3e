"""Ten thousand agents in one process: form, lose 1 % of the nodes, form again, take the lost ones back.

The agents and their loops are real. The clock is virtual, and workers start and stop at once. All agents share one
journal. Its fold is made once and handed to every reader as a `base`, which has the same effect as folding alone. After
a read, a reader pauses for a time in proportion to the number of nodes, as the readers of the real journals do.

These figures are printed for each phase, per living node: entries said, reads that brought something, entries that came
one by one (a read of more than 32 entries takes the fold instead), counters read, and steps. A figure that grows with
the number of nodes shows something that does not scale.

    python benchmarks/crowd.py [--nodes 10000] [--spread 2] [--profile]
"""

from __future__ import annotations

import argparse
import gc
import heapq
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from reknit.adapters.runtime.loop import Loop, Ports
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Counters, EntriesRead, Event, Started, Woken
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import PortReserved, StartWorkers, WorkersStarted, WorkersStopped
from reknit.core.job.entries import Entry, Node, NodeId, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Job

TRIP_S = 0.002
"""Time of one round trip to the store. Virtual seconds."""
WORKERS_S = 0.01
MANY = 32
"""A read of more entries than this takes the fold instead."""
LONGEST_S = 120.0
"""A phase that takes longer than this has failed. Virtual seconds."""
LOOK, OWED = Woken(-1.0), Woken(-2.0)
"""Two events that stand for a read. `LOOK`: told to the agent if there is news. `OWED`: told in any case."""


class Crowd:
    def __init__(self, nodes: int) -> None:
        self.rest_s = min(0.25, 1e-4 * nodes)
        self.terms = Terms(min_nodes=nodes * 9 // 10, max_nodes=nodes, last_call_s=60.0)
        self.agents: dict[int, Loop] = {}
        self.counters: dict[Node, int] = {}
        self.at = 0.0
        self.job = Job()
        """The fold of all `head` entries of the journal."""
        self.head = 0
        self.seen: dict[int, int] = {}
        self.idle: set[int] = set()
        """The agents whose readers wait for the next entry."""
        self.formed = 0
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.fold_s = 0.0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._tokens = count()

    def start(self, nodes: Iterable[int], spread_s: float) -> None:
        """Start agents on these hosts, in a mixed order, over `spread_s` virtual seconds."""
        hosts = sorted(nodes, key=lambda i: i * 7919 % 10007)
        for k, i in enumerate(hosts):
            here: Any = Here(self, i)
            agent = Agent(Spec(NodeId(f"node{i:05}"), f"10.0.{i // 256}.{i % 256}", self.terms))
            self.agents[i] = Loop(agent, Ports(here, here, here, here))
            self.seen[i] = 0
            delay_s = spread_s * k / len(hosts)
            self.tell(delay_s, i, Started(self.at + delay_s, f"nonce{next(self._tokens)}", 29500))
            self.tell(delay_s + TRIP_S, i, OWED)
            self.tell(delay_s + TRIP_S, i, LOOK)

    def kill(self, nodes: Iterable[int]) -> None:
        for i in nodes:
            del self.agents[i]
            self.idle.discard(i)

    def run(self) -> None:
        """Let time pass until the workers of all agents were started in one round."""
        self.formed, until = 0, self.at + LONGEST_S
        while self.formed < len(self.agents):
            at, _, i, event = heapq.heappop(self._heap)
            if at > until:
                raise SystemExit(f"{self.formed} of {len(self.agents)} agents after {LONGEST_S:g} s: {self.job.phase}")
            self.at = at
            if i in self.agents:
                self._happen(i, event)

    def _happen(self, i: int, event: Event) -> None:
        if event is LOOK or event is OWED:
            behind, self.seen[i] = self.head - self.seen[i], self.head
            if behind:
                self.counts["reads"] += 1
                self.counts["one by one"] += behind if behind <= MANY else 0
            if event is LOOK and behind:
                self.tell(self.rest_s, i, LOOK)
            elif event is LOOK:
                self.idle.add(i)
                return
            self._step(i, EntriesRead(self.at, base=self.job if behind else None))
        elif event.__class__ is not Woken or event.at == next_wake(self.agents[i].agent):
            self._step(i, event)

    def tell(self, delay_s: float, i: int, event: Event) -> None:
        heapq.heappush(self._heap, (self.at + delay_s, next(self._tokens), i, event))

    def _step(self, i: int, event: Event) -> None:
        loop = self.agents[i]
        before = next_wake(loop.agent)
        loop.feed(event)
        self.counts["steps"] += 1
        agent = loop.agent
        if agent.result is not None:
            raise SystemExit(f"{agent.me} ended: {agent.result}")
        wakes_at = next_wake(agent)
        if wakes_at is not None and wakes_at != before:
            self.tell(wakes_at - self.at, i, Woken(wakes_at))

    def append(self, entry: Entry) -> None:
        began = time.perf_counter()
        self.job = fold(self.job, entry)
        self.fold_s += time.perf_counter() - began
        self.head += 1
        self.counts["entries"] += 1
        self.kinds[type(entry).__name__] += 1
        for i in self.idle:
            self.tell(TRIP_S, i, LOOK)
        self.idle.clear()


class Here:
    """The ports of one agent."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self._crowd = crowd
        self._number = number

    def append(self, entry: Entry) -> None:
        self._crowd.append(entry)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        crowd, counters = self._crowd, self._crowd.counters
        counters[node] = count
        crowd.counts["counters"] += 1 + len(watch)
        found = {n: counters[n] for n in (node, *watch) if n in counters}
        crowd.tell(TRIP_S, self._number, Counters(crowd.at + TRIP_S, found))
        crowd.tell(TRIP_S, self._number, OWED)

    def start(self, command: StartWorkers) -> None:
        crowd = self._crowd
        crowd.tell(WORKERS_S, self._number, WorkersStarted(crowd.at + WORKERS_S, command.round))
        crowd.formed += command.assignment.group_world_size == len(crowd.agents)

    def stop(self, command: StopWorkers) -> None:
        stopped = WorkersStopped(self._crowd.at + WORKERS_S, command.round, 29500)
        self._crowd.tell(WORKERS_S, self._number, stopped)

    def renew_port(self) -> None:
        self._crowd.tell(WORKERS_S, self._number, PortReserved(self._crowd.at + WORKERS_S, 29500))

    def folded(self, job: Job) -> None:
        pass  # all agents read the same fold already


def report(what: str, crowd: Crowd) -> None:
    """Run until all agents are in one round, and print what that took."""
    crowd.counts.clear()
    crowd.kinds.clear()
    crowd.fold_s, at, began = 0.0, crowd.at, time.perf_counter()
    crowd.run()
    wall_s, alive, counts = time.perf_counter() - began, len(crowd.agents), crowd.counts
    kinds = ", ".join(f"{n} {kind}" for kind, n in crowd.kinds.most_common())
    print(f"{what}: {alive} nodes in round {crowd.job.round}")
    print(f"  {crowd.at - at:.1f} s virtual, {wall_s:.1f} s wall, of which folding {crowd.fold_s:.1f} s")
    per_node = (f"{counts[k] / alive:.2f} {k}" for k in ("entries", "reads", "one by one", "counters", "steps"))
    print(f"  per node: {', '.join(per_node)}; {counts['steps'] / wall_s:,.0f} steps per second")
    print(f"  journal: {kinds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--spread", type=float, default=2.0, help="seconds over which the agents are started")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    gc.disable()  # the collector would look at a million small values again and again, and find no cycles
    if options.profile:
        import cProfile

        cProfile.runctx("play(options)", globals(), locals(), sort="tottime")
    else:
        play(options)


def play(options: argparse.Namespace) -> None:
    nodes, few = options.nodes, max(1, options.nodes // 100)
    crowd = Crowd(nodes)
    crowd.start(range(nodes), options.spread)
    report("formed", crowd)
    spread = range(nodes // 200, nodes, nodes // few)
    crowd.kill(spread)
    report(f"{len(spread)} nodes lost, spread", crowd)
    crowd.start(spread, options.spread / 10)
    report("taken back", crowd)
    # Neighbours in the ring watch each other. So nearly all nodes that watch one of these are killed with it.
    block = [int(node.id[4:]) for node in crowd.job.ring[nodes // 2 : nodes // 2 + few]]
    crowd.kill(block)
    report(f"{few} nodes lost, neighbours", crowd)
    crowd.start(block, options.spread / 10)
    report("taken back", crowd)


if __name__ == "__main__":
    main()
