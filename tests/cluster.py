"""A few agents over one journal in memory, played by hand: what transcripts drive.

Kind weather only (`property_tests` has the storms): the journal is instant, and nothing happens but what is asked for.
Time passes in `advance` alone, from deadline to deadline. What is printed: events with their commands. Beats, wake-ups
and reads are shown only when they caused a command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from attrs import define, evolve, field

from reknit.core.agent import Agent, Spec
from reknit.core.commands import Append, Beat, Command, Finish, ReservePort, StartWorkers, StopWorkers
from reknit.core.entries import Entry, Node, WorkerFailure
from reknit.core.events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    PortReserved,
    Started,
    Woken,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.step import step

from .short import short_command, short_event

QUIET = (Woken, Counters, EntriesRead)
MAX_EVENTS = 10_000
"""A cluster that is still busy after so many events never comes to rest."""


@define
class Host:
    """One agent and the world around it."""

    label: str
    agent: Agent
    inbox: deque[Event] = field(factory=deque)
    was_read: int = 0
    """Entries of the journal that the agent has read."""
    runs: int | None = None
    """The round whose workers exist."""
    kill_at: float | None = None
    """When a slow worker that was told to stop is killed."""
    is_slow: bool = False
    """Its workers ignore signals."""
    is_cut: bool = False
    """It reaches neither the journal nor the counters."""
    is_up: bool = False
    """The agent's process exists and has not finished."""
    port: int = 29500


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
        self.hosts[label] = Host(label, Agent(spec))

    def start(self, label: str) -> None:
        """A new agent process on this host, with nothing left of an earlier one."""
        host = self.hosts[label]
        starts = host.port - 29500
        self.hosts[label] = host = Host(label, Agent(host.agent.spec), port=host.port + 1, is_up=True)
        self.feed(host, Started(self.at, f"{label}-{starts}", host.port))

    def lose(self, label: str) -> None:
        """The host dies: its agent and its workers are gone and nobody is told."""
        host = self.hosts[label]
        host.is_up, host.runs, host.kill_at = False, None, None
        host.inbox.clear()

    def cut(self, label: str, why: str) -> None:
        self.hosts[label].is_cut = True
        self.feed(self.hosts[label], JournalFailed(self.at, why))

    def exit(self, label: str, failures: dict[int, WorkerFailure]) -> None:
        """Workers of this host exit: those in `failures`, or all of them with 0."""
        host = self.hosts[label]
        assert host.runs is not None, f"no workers run on {label}"
        ranks = range(host.agent.spec.local_world_size)
        exits = [WorkerExit(r, failures.get(r)) for r in ranks if r in failures or not failures]
        self.feed(host, WorkersExited(self.at, host.runs, tuple(exits)))

    def stabilize(self) -> None:
        """Deliver all that can be delivered now, until nothing is left."""
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
            deadlines = [t for h in self._up() for t in (h.agent.wakes_at, h.kill_at) if t is not None and t > self.at]
            self.at = round(min([end, *deadlines]), 6)
            for host in self._up():
                if host.kill_at is not None and self.at >= host.kill_at:
                    self._gone(host)
                # A driver hears of a read at least that often; an empty one shows that the journal can be reached.
                if not host.is_cut:
                    host.inbox.append(self._read(host))
                host.inbox.append(Woken(self.at))
            self.stabilize()

    def feed(self, host: Host, event: Event) -> None:
        result = step(host.agent, evolve(event, at=self.at))
        host.agent = result.agent
        shown = [c for c in result.commands if not isinstance(c, Beat)]
        if shown or not isinstance(event, QUIET):
            if self.at != self.shown_at:
                self.lines.append(f"at {self.at:g}s")
                self.shown_at = self.at
            self.lines.append(f"{host.label} << {short_event(event)}")
            self.lines += [f"{host.label} >> {short_command(c)}" for c in shown]
        for command in result.commands:
            self._execute(host, command)

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

    def _execute(self, host: Host, command: Command) -> None:
        match command:
            case Append():
                if not host.is_cut:
                    self.journal.append(command.entry)
            case StartWorkers():
                assert host.runs is None, f"{host.label} starts round {command.round} over round {host.runs}"
                host.runs = command.round
                host.inbox.append(WorkersStarted(self.at, command.round))
            case StopWorkers():
                kill_at = self.at + command.grace_s
                host.kill_at = kill_at if host.kill_at is None else min(host.kill_at, kill_at)
                if not host.is_slow or kill_at <= self.at:
                    self._gone(host)
            case ReservePort():
                host.port += 1
                host.inbox.append(PortReserved(self.at, host.port))
            case Beat():
                if not host.is_cut:
                    self.counters[command.node] = self.counters.get(command.node, 0) + 1
                    wanted = (command.node, *command.watch)
                    counts = {n: self.counters[n] for n in wanted if n in self.counters}
                    host.inbox.append(Counters(self.at, counts))
            case Finish():
                assert host.runs is None, f"{host.label} finishes over workers of round {host.runs}"
                host.is_up = False

    def _gone(self, host: Host) -> None:
        """All processes of the round that the host runs have ended."""
        assert host.runs is not None, f"no workers run on {host.label}"
        host.port += 1
        host.inbox.append(WorkersStopped(self.at, host.runs, host.port))
        host.runs, host.kill_at = None, None
