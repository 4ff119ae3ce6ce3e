"""Ten thousand agents in one process: form, lose 1 % of the nodes, form again, take the lost ones back.

The agents are real (`step`), the clock is virtual, workers start and stop at once. All share one journal, whose fold is
made once and handed to every reader as a `base`: readers that fold by themselves come to the same. A reader looks again
after a moment in proportion to the number of nodes, as the journals' own readers do.

Printed per phase and node that lives: entries said, reads that brought something, entries that came one by one (at most
32 in a read, else it is the fold that is read), counters read, steps. What grows there with the number of nodes does
not scale.

    python benchmarks/crowd.py [--nodes 10000] [--spread 2] [--profile]
"""

from __future__ import annotations

import argparse
import gc
import heapq
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count

from reknit.core.agent import Agent, Spec
from reknit.core.commands import Append, Beat, Command, Finish, ReservePort, StartWorkers, StopWorkers
from reknit.core.entries import Entry, Node, NodeId, Terms
from reknit.core.events import (
    Counters,
    EntriesRead,
    Event,
    PortReserved,
    Started,
    Woken,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.fold import fold
from reknit.core.job import Job
from reknit.core.step import step

TRIP_S = 0.002
"""To the store and back."""
WORKERS_S = 0.01
MANY = 32
"""Entries that a reader reads one by one; of more it takes the fold."""
LONGEST_S = 120.0
"""Virtual: a phase that has not ended by then never will."""
LOOK, OWED = Woken(-1.0), Woken(-2.0)
"""Stand for a read, which is made when its time has come: if there is news, or in any case."""


class Crowd:
    def __init__(self, nodes: int) -> None:
        self.rest_s = min(0.25, 1e-4 * nodes)
        self.terms = Terms(min_nodes=nodes * 9 // 10, max_nodes=nodes, last_call_s=60.0)
        self.agents: dict[int, Agent] = {}
        self.counters: dict[Node, int] = {}
        self.at = 0.0
        self.job = Job()
        """The fold of all `head` entries of the journal."""
        self.head = 0
        self.seen: dict[int, int] = {}
        self.idle: set[int] = set()
        """Those whose readers wait for the next entry."""
        self.formed = 0
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.fold_s = 0.0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._tokens = count()

    def start(self, nodes: Iterable[int], spread_s: float) -> None:
        """Agents on these hosts, in an order that is nobody's, over so many seconds."""
        hosts = sorted(nodes, key=lambda i: i * 7919 % 10007)
        for k, i in enumerate(hosts):
            self.agents[i] = Agent(Spec(NodeId(f"node{i:05}"), f"10.0.{i // 256}.{i % 256}", self.terms))
            self.seen[i] = 0
            delay_s = spread_s * k / len(hosts)
            self._tell(delay_s, i, Started(self.at + delay_s, f"nonce{next(self._tokens)}", 29500))
            self._tell(delay_s + TRIP_S, i, OWED)
            self._tell(delay_s + TRIP_S, i, LOOK)

    def kill(self, nodes: Iterable[int]) -> None:
        for i in nodes:
            del self.agents[i]
            self.idle.discard(i)

    def run(self) -> None:
        """Until the workers of all agents have been started in one round."""
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
                self._tell(self.rest_s, i, LOOK)
            elif event is LOOK:
                self.idle.add(i)
                return
            self._step(i, EntriesRead(self.at, base=self.job if behind else None))
        elif event.__class__ is not Woken or event.at == self.agents[i].wakes_at:
            self._step(i, event)

    def _tell(self, delay_s: float, i: int, event: Event) -> None:
        heapq.heappush(self._heap, (self.at + delay_s, next(self._tokens), i, event))

    def _step(self, i: int, event: Event) -> None:
        before = self.agents[i]
        made = step(before, event)
        after = self.agents[i] = made.agent
        self.counts["steps"] += 1
        for command in made.commands:
            self._execute(i, command)
        if after.wakes_at is not None and after.wakes_at != before.wakes_at:
            self._tell(after.wakes_at - self.at, i, Woken(after.wakes_at))

    def _execute(self, i: int, command: Command) -> None:
        match command:
            case Append(entry):
                self._append(entry)
            case Beat(node, watch):
                self.counters[node] = self.counters.get(node, 0) + 1
                self.counts["counters"] += 1 + len(watch)
                found = {n: self.counters[n] for n in (node, *watch) if n in self.counters}
                self._tell(TRIP_S, i, Counters(self.at + TRIP_S, found))
                self._tell(TRIP_S, i, OWED)
            case StartWorkers(round, assignment):
                self._tell(WORKERS_S, i, WorkersStarted(self.at + WORKERS_S, round))
                self.formed += assignment.group_world_size == len(self.agents)
            case StopWorkers(round):
                self._tell(WORKERS_S, i, WorkersStopped(self.at + WORKERS_S, round, 29500))
            case ReservePort():
                self._tell(WORKERS_S, i, PortReserved(self.at + WORKERS_S, 29500))
            case Finish(result):
                raise SystemExit(f"{self.agents[i].me} ended: {result}")

    def _append(self, entry: Entry) -> None:
        began = time.perf_counter()
        self.job = fold(self.job, entry)
        self.fold_s += time.perf_counter() - began
        self.head += 1
        self.counts["entries"] += 1
        self.kinds[type(entry).__name__] += 1
        for i in self.idle:
            self._tell(TRIP_S, i, LOOK)
        self.idle.clear()


def report(what: str, crowd: Crowd) -> None:
    """Run until all is formed, and print what that took."""
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
    gc.disable()  # there are no cycles, and a million small values to look at
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
    # In the order in which they watch each other: nearly all who watched these go with them.
    block = [int(node.id[4:]) for node in crowd.job.ring[nodes // 2 : nodes // 2 + few]]
    crowd.kill(block)
    report(f"{few} nodes lost, neighbours", crowd)
    crowd.start(block, options.spread / 10)
    report("taken back", crowd)


if __name__ == "__main__":
    main()
