"""Events per second through `step`, on one core, in whole jobs: nodes form a round, beat, fail and finish.

A job is played once, and the events of every agent are recorded. Then one agent's events are replayed, and the replay
is timed. It makes the same steps. Idle agents do little but beat, so the number of beats per round matters for the
result. It is printed.

    python benchmarks/step.py [--nodes 4] [--rounds 20] [--beats 10] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from reknit.adapters.runtime.loop import Loop, Ports
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Counters, EntriesRead, Event, Started
from reknit.core.agent.step import step
from reknit.core.agent.worker_words import (
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.entries import Entry, Node, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure

GOAL = 50_000


class Cluster:
    """Agents on one journal. Each entry is read at once, and every event is recorded."""

    def __init__(self, nodes: int, rounds: int, workers: int) -> None:
        terms = Terms(min_nodes=nodes, max_nodes=nodes, restarts=RestartPolicy(max_restarts=rounds))
        self.loops: list[Loop] = []
        for i in range(nodes):
            here: Any = Here(self, i)
            agent = Agent(Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms, local_world_size=workers))
            self.loops.append(Loop(agent, Ports(here, here, here, here)))
        self.first = self.loops[0].agent
        self.recorded: list[Event] = []
        self.queue: deque[tuple[int, Event]] = deque()
        self.counts: dict[Node, int] = {}
        self.at = 0.0

    def tell_all(self, *events: Event) -> None:
        for event in events:
            self.queue.extend((i, event) for i in range(len(self.loops)))
        while self.queue:
            self._step(*self.queue.popleft())

    def _step(self, i: int, event: Event) -> None:
        if i == 0:
            self.recorded.append(event)
        self.loops[i].feed(event)

    def append(self, entry: Entry) -> None:
        self.queue.extend((i, EntriesRead(self.at, (entry,))) for i in range(len(self.loops)))


class Here:
    """The ports of one agent. They do at once what the agent wants."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self._number = number

    def append(self, entry: Entry) -> None:
        self._cluster.append(entry)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        counts = self._cluster.counts
        counts[node] = count
        self._tell(Counters(self._cluster.at, {n: counts[n] for n in (node, *watch) if n in counts}))

    def start(self, command: StartWorkers) -> None:
        self._tell(WorkersStarted(self._cluster.at, command.round))

    def stop(self, command: StopWorkers) -> None:
        self._tell(WorkersStopped(self._cluster.at, command.round, port=1000 + command.round))

    def renew_port(self) -> None:
        self._tell(PortReserved(self._cluster.at, port=1))

    def folded(self, job: Job) -> None:
        pass  # no reader here is ever behind

    def _tell(self, event: Event) -> None:
        self._cluster.queue.append((self._number, event))


def play(nodes: int, rounds: int, beats: int, workers: int) -> tuple[Agent, list[Event]]:
    """A job that fails `rounds - 1` times, with `beats` seconds of quiet in each round."""
    from reknit.core.agent.events import Woken

    cluster = Cluster(nodes, rounds, workers)
    for i in range(nodes):
        cluster.queue.append((i, Started(0.0, nonce=f"x{i}", port=999)))
    cluster.tell_all(EntriesRead(0.0))
    for round_ in range(rounds):
        for _ in range(beats):
            cluster.at += 1.0
            cluster.tell_all(Woken(cluster.at))
        if round_ < rounds - 1:
            failure = WorkerFailure(local_rank=0, rank=0, exitcode=1, message="ValueError: boom")
            cluster.queue.append((0, WorkersExited(cluster.at, round_, (WorkerExit(0, failure),))))
            cluster.tell_all()
    done = tuple(WorkerExit(i) for i in range(workers))
    cluster.tell_all(WorkersExited(cluster.at, rounds - 1, done))
    assert cluster.loops[0].result is not None, "the job must end"
    return cluster.first, cluster.recorded


def rate(agent: Agent, events: list[Event]) -> float:
    began = time.process_time()
    for event in events:
        agent = step(agent, event).agent
    return len(events) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=8, help="workers per node")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--beats", type=int, default=10, help="seconds of quiet in each round")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    for nodes in dict.fromkeys((1, options.nodes)):
        agent, events = play(nodes, options.rounds, options.beats, options.workers)
        rates = sorted(rate(agent, events) for _ in range(options.repeats))
        median = rates[len(rates) // 2]
        verdict = "reached" if median >= GOAL else "not reached"
        print(f"{nodes} nodes: {len(events)} events, {median:,.0f} per second, goal {GOAL:,}: {verdict}")


if __name__ == "__main__":
    main()
