"""Events per second through `step`, on one core, of whole jobs: nodes that form, beat, fail and finish.

A job is played once, with every agent's events recorded; what is timed is the replay of one agent's events, which by
construction makes the same steps. Idle agents mostly beat, so the number of beats per round decides what is measured;
it is printed.

    python benchmarks/step.py [--nodes 4] [--rounds 20] [--beats 10] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections import deque

from reknit.core.agent import Agent, Spec
from reknit.core.commands import Append, Beat, Finish, ReservePort, StartWorkers, StopWorkers
from reknit.core.entries import Entry, Node, NodeId, RestartPolicy, Terms, WorkerFailure
from reknit.core.events import (
    Counters,
    EntriesRead,
    Event,
    PortReserved,
    Started,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.step import step

GOAL = 50_000


class Cluster:
    """Agents on one journal, each entry read at once; every event is recorded."""

    def __init__(self, nodes: int, rounds: int, workers: int) -> None:
        terms = Terms(min_nodes=nodes, max_nodes=nodes, restarts=RestartPolicy(max_restarts=rounds))
        self.workers = workers
        self.agents = [
            Agent(Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms, local_world_size=workers)) for i in range(nodes)
        ]
        self.first = self.agents[0]
        self.recorded: list[Event] = []
        self.queue: deque[tuple[int, Event]] = deque()
        self.counts: dict[Node, int] = {}
        self.at = 0.0

    def tell_all(self, *events: Event) -> None:
        for event in events:
            self.queue.extend((i, event) for i in range(len(self.agents)))
        while self.queue:
            self._step(*self.queue.popleft())

    def _step(self, i: int, event: Event) -> None:
        if i == 0:
            self.recorded.append(event)
        after = step(self.agents[i], event)
        self.agents[i] = after.agent
        for command in after.commands:
            match command:
                case Append(entry):
                    self._append(entry)
                case StartWorkers(round_):
                    self.queue.append((i, WorkersStarted(self.at, round_)))
                case StopWorkers(round_):
                    self.queue.append((i, WorkersStopped(self.at, round_, port=1000 + round_)))
                case Beat(node, watch):
                    self.counts[node] = self.counts.get(node, 0) + 1
                    counts = {n: self.counts[n] for n in (node, *watch) if n in self.counts}
                    self.queue.append((i, Counters(self.at, counts)))
                case ReservePort():
                    self.queue.append((i, PortReserved(self.at, port=1)))
                case Finish():
                    pass

    def _append(self, entry: Entry) -> None:
        self.queue.extend((i, EntriesRead(self.at, (entry,))) for i in range(len(self.agents)))


def play(nodes: int, rounds: int, beats: int, workers: int) -> tuple[Agent, list[Event]]:
    """A job that fails `rounds - 1` times, with `beats` seconds of quiet in each round."""
    from reknit.core.events import Woken

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
    assert cluster.agents[0].result is not None, "the job must end"
    return cluster.first, cluster.recorded


def rate(agent: Agent, events: list[Event]) -> float:
    began = time.process_time()
    for event in events:
        agent = step(agent, event).agent
    return len(events) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=8, help="per node")
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
