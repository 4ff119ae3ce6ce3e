"""A few agents over one journal in memory, played step by step. Transcripts use it.

The journal answers at once, and no fault happens unless a transcript asks for it. (`property_tests` plays random
faults.) Time passes only in `advance`, from deadline to deadline. Events are printed with their commands. Beats,
wake-ups and reads are printed only if they caused a command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from attrs import define, evolve, field

from reknit.adapters.runtime.loop import Loop, Ports
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Beat, Command, StopWorkers
from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed, Started, Woken
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import (
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.entries import Entry, Node
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure

from .short import short_command, short_event

QUIET = (Woken, Counters, EntriesRead)
MAX_EVENTS = 10_000
"""Limit of events. A cluster that is still busy after so many events never comes to rest."""


@define
class Host:
    """One agent and its ports. The host does at once what the agent wants."""

    cluster: Cluster
    label: str
    spec: Spec
    inbox: deque[Event] = field(factory=deque)
    was_read: int = 0
    """Number of entries of the journal that the agent has read."""
    runs: int | None = None
    """The round whose workers exist. None: there are no workers."""
    kill_at: float | None = None
    """When workers that ignore the stop signal are killed. None: nothing is being stopped."""
    is_slow: bool = False
    """The workers of this host ignore signals."""
    is_cut: bool = False
    """The host reaches neither the journal nor the counters."""
    is_mute: bool = False
    """What the host says vanishes."""
    is_up: bool = False
    """The agent's process exists and has not finished."""
    port: int = 29500
    loop: Loop = field(init=False)

    def __attrs_post_init__(self) -> None:
        here: Any = self
        self.loop = Loop(Agent(self.spec), Ports(here, here, here, here), [partial(self.cluster.show, self)])

    @property
    def agent(self) -> Agent:
        return self.loop.agent

    # ---- what the agent wants ----

    def append(self, entry: Entry) -> None:
        if not self.is_cut and not self.is_mute:
            self.cluster.journal.append(entry)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        if not self.is_cut:
            counters = self.cluster.counters
            counters[node] = count
            counts = {n: counters[n] for n in (node, *watch) if n in counters}
            self.inbox.append(Counters(self.cluster.at, counts))

    def start(self, command: StartWorkers) -> None:
        assert self.runs is None, f"{self.label} starts round {command.round} over round {self.runs}"
        self.runs = command.round
        self.inbox.append(WorkersStarted(self.cluster.at, command.round))

    def stop(self, command: StopWorkers) -> None:
        kill_at = self.cluster.at + command.grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)
        if not self.is_slow or kill_at <= self.cluster.at:
            self.gone()

    def renew_port(self) -> None:
        self.port += 1
        self.inbox.append(PortReserved(self.cluster.at, self.port))

    def folded(self, job: Job) -> None: ...

    def gone(self) -> None:
        """All workers of the round on this host have ended. The agent is told."""
        assert self.runs is not None, f"no workers run on {self.label}"
        self.port += 1
        self.inbox.append(WorkersStopped(self.cluster.at, self.runs, self.port))
        self.runs, self.kill_at = None, None


@define
class Cluster:
    hosts: dict[str, Host] = field(factory=dict)
    journal: list[Entry] = field(factory=list)
    counters: dict[Node, int] = field(factory=dict)
    at: float = 0.0
    shown_at: float = 0.0
    lines: list[str] = field(factory=list)

    def add(self, label: str, spec: Spec) -> None:
        assert label not in self.hosts, f"there is a {label} already"
        self.hosts[label] = Host(self, label, spec)

    def start(self, label: str) -> None:
        """Start a new agent process on this host. Nothing of an earlier one is left."""
        host = self.hosts[label]
        starts = host.port - 29500
        self.hosts[label] = host = Host(self, label, host.spec, port=host.port + 1, is_up=True)
        self.feed(host, Started(self.at, f"{label}-{starts}", host.port))

    def lose(self, label: str) -> None:
        """The host dies: its agent and its workers are gone, and nobody is told."""
        host = self.hosts[label]
        host.is_up, host.runs, host.kill_at = False, None, None
        host.inbox.clear()

    def cut(self, label: str, why: str) -> None:
        self.hosts[label].is_cut = True
        self.feed(self.hosts[label], JournalFailed(self.at, why))

    def exit(self, label: str, failures: dict[int, WorkerFailure]) -> None:
        """Workers of this host exit: those in `failures`. If that is empty, all workers exit with 0."""
        host = self.hosts[label]
        assert host.runs is not None, f"no workers run on {label}"
        ranks = range(host.agent.spec.local_world_size)
        exits = [WorkerExit(r, failures.get(r)) for r in ranks if r in failures or not failures]
        self.feed(host, WorkersExited(self.at, host.runs, tuple(exits)))

    def stabilize(self) -> None:
        """Deliver everything that can be delivered without letting time pass."""
        for _ in range(MAX_EVENTS):
            delivery = next(self._deliveries(), None)
            if delivery is None:
                return
            host, event = delivery
            self.feed(host, event)
        raise AssertionError("the cluster does not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, from deadline to deadline, and come to rest after each."""
        self.stabilize()
        end = self.at + seconds
        while self.at < end:
            deadlines = [
                t for h in self._up() for t in (next_wake(h.agent), h.kill_at) if t is not None and t > self.at
            ]
            soon = min([end, *deadlines])
            self.at = max(soon, round(soon, 6))  # not before the deadline, or `advance` would never get past it
            for host in self._up():
                if host.kill_at is not None and self.at >= host.kill_at:
                    host.gone()
                # A link tells of a read at least so often. An empty one shows that the journal can be reached.
                if not host.is_cut:
                    host.inbox.append(self._read(host))
                host.inbox.append(Woken(self.at))
            self.stabilize()

    def feed(self, host: Host, event: Event) -> None:
        host.loop.feed(evolve(event, at=self.at))
        if host.loop.result is not None:
            assert host.runs is None, f"{host.label} finishes over workers of round {host.runs}"
            host.is_up = False

    def show(self, host: Host, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        """The observer of all hosts' steps."""
        shown = [c for c in commands if not isinstance(c, Beat)]
        if shown or not isinstance(event, QUIET):
            if self.at != self.shown_at:
                self.lines.append(f"at {self.at:g}s")
                self.shown_at = self.at
            self.lines.append(f"{host.label} << {short_event(event)}")
            self.lines += [f"{host.label} >> {short_command(c)}" for c in shown]

    def _up(self) -> list[Host]:
        return [h for h in self.hosts.values() if h.is_up]

    def _deliveries(self) -> Iterator[tuple[Host, Event]]:
        for host in self._up():
            if host.inbox:
                yield host, host.inbox.popleft()
            elif not host.is_cut and (host.was_read < len(self.journal) or not host.agent.was_read):
                yield host, self._read(host)

    def _read(self, host: Host) -> EntriesRead:
        entries = tuple(self.journal[host.was_read :])
        host.was_read = len(self.journal)
        return EntriesRead(self.at, entries)
