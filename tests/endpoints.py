"""Agents of a job whose store may be at two endpoints, as far as the journal is concerned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest

from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.journals.tcpstore.places import Places
from reknit.adapters.ports import Batch, Unavailable
from reknit.core.job.entries import (
    Entry,
    Failed,
    Joined,
    Node,
    NodeId,
    Opened,
    RestartPolicy,
    Terms,
)
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure
from tests.stores import HOST, JobStore, folded, free_port, stubborn

TERMS = Terms(min_nodes=2, max_nodes=3, restarts=RestartPolicy(1), needs_majority=True)


def joined(name: str, round: int = 0) -> Joined:
    return Joined(Node(NodeId(name)), nonce=name, round=round, address="10.0.0.1", port=1)


ENTRIES: list[Entry] = [Opened(TERMS, "x"), *map(joined, "abc")]
"""The job runs round 0 on a, b and c."""
OVER: list[Entry] = [*ENTRIES, Failed(Node(NodeId("a")), 0, (WorkerFailure(0, 0, 1),))]
"""Round 1 is gathered."""


class Agent:
    """What an agent does with its journal."""

    def __init__(self, name: str, stores: list[JobStore], *, founds: bool = False) -> None:
        self.joined = joined(name)
        self.places = Places([(HOST, store.port) for store in stores])
        self.journal: TCPStoreJournal = stores[0].journal(places=self.places, founds=founds)
        self.job = Job()
        self.position = 0
        self._tokens = count()

    def say(self, *entries: Entry) -> None:
        for entry in entries:
            self.journal.append(f"{self.joined.nonce} {next(self._tokens)}", entry)

    def read(self) -> Batch:
        batch = self.journal.read(self.position, 0.0)
        self.position = batch.position
        self.job = folded([*batch.entries], self.job if batch.base is None else batch.base)
        self.journal.remember(self.position, self.job)
        return batch

    @property
    def number(self) -> int:
        """Of the life of the journal in which it is. 0: the first one."""
        course = self.journal._connections._course
        return 0 if course is None else course.life.number

    def lose_home(self) -> None:
        """Its home does not answer any more, and that for long."""
        endpoints = [*self.places._endpoints]
        endpoints[self.places.home] = HOST, free_port()
        self.places._endpoints = endpoints
        self.places._reached_at = float("-inf")
        for client in self.journal._connections._lines.clients.values():
            client.close()


def at_work(stores: list[JobStore], *names: str, entries: list[Entry] = ENTRIES) -> list[Agent]:
    """Agents that have said their own entries at the first endpoint, and have read all."""
    agents = [Agent(name, stores, founds=name == "a") for name in "abc"]
    by_name = {agent.joined.node.id: agent for agent in agents}
    for entry in entries:
        speaker = by_name[entry.node.id] if isinstance(entry, Joined | Failed) else agents[0]
        stubborn(partial(speaker.say, entry))
    found = [agent for agent in agents if agent.joined.node.id in names]
    for agent in found:
        agent.read()
    return found


def at_once(*calls: Callable[[], Batch]) -> list[Batch]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(stubborn, call) for call in calls]]


def cut_off(*agents: Agent) -> None:
    for agent in agents:
        agent.lose_home()


def reconnect(*agents: Agent) -> None:
    for agent in agents:
        for client in agent.journal._connections._lines.clients.values():
            client.close()


def is_in_vain(call: Callable[[], object], why: str) -> None:
    """The call finds no journal. A pause after the call before is no answer."""
    with pytest.raises(Unavailable, match=why):
        call()
