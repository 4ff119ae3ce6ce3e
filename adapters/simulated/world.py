"""A whole cluster under one virtual clock: real agents in real loops, and simulated everything else.

1. Time jumps to the next thing that can happen. Nothing here sleeps, and nothing is drawn: delays come from `luck`.
2. The world is no kinder than the real one: appends land late, twice or never; reads come piecemeal, and may have been
   taken before the agent was suspended; each agent's clock has its own zero.
3. Faults are functions of a world (`faults`, `staff`). A caller makes them happen now, or schedules them with `after`.
4. Watchers are told of every step before the world does what the agent wants. They see the world as it was when the
   agent decided.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from reknit.adapters.loop import Loop, Ports
from reknit.core.agent.agent import Agent
from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed, Started
from reknit.core.job.job import Job

from . import staff, store
from .hosts import Group, Proc
from .ports import SimulatedClock, SimulatedLink, SimulatedRequests, SimulatedWorkers

if TYPE_CHECKING:
    from reknit.core.agent.commands import Command
    from reknit.core.job.entries import Entry, Node

LINK_EVENTS = (EntriesRead, Counters, JournalFailed)
"""What a link tells. All else is told by the workers."""


class Watcher(Protocol):
    """Looks at what happens in a world, and changes nothing. What a watcher raises ends the world."""

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        """An agent has made a step; `proc.agent` is the agent after it."""
        ...

    def landed(self, entry: Entry, before: Job) -> None:
        """An entry is in the journal. `before`: the job without it."""
        ...


class World:
    """One cluster."""

    def __init__(self, *, seed: int = 0, troubles: Iterable[str] = (), echo: bool = True) -> None:
        """`seed`: decides all delays and orders; 0 is the calmest world. `troubles`: what may befall an append or a
        read: lose, lag, double, partial, skip, late. `echo`: workers crash when a peer of theirs has died."""
        self.seed = seed
        self.troubles = frozenset(troubles)
        self.echo = echo
        self.watchers: list[Watcher] = []
        self.now = 0.0
        self.ports_given = 0
        self.journal: list[Entry] = []
        self.jobs: list[Job] = [Job()]
        """The folds of all prefixes of the journal."""
        self.counters: dict[Node, int] = {}
        self.moved: dict[Node, float] = {}
        """When the counter of each node was raised last."""
        self.procs: list[Proc] = []
        """All that were ever started."""
        self.groups: list[Group] = []
        self.slow: set[int] = set()
        """Hosts whose workers take all of their grace."""
        self.stuck: set[int] = set()
        """Hosts whose workers survive SIGKILL."""
        self.stale: set[int] = set()
        """Hosts whose beats are swallowed while their reads of the counters are old."""
        self.blows: list[Group] = []
        """Failures of workers that were nobody's echo."""
        self.outage = False
        self.outage_at = 0.0
        """When the last outage began."""
        self.store_dead = False
        self.calm = False
        """No more faults, and no more luck."""
        self.finishing = False
        """All workers succeed soon after they have started."""
        self.held: list[Entry] = []
        """What was on its way when the store stopped answering."""
        self.excess = 0
        """How many entries faults may have cost: what they make agents say again, and what they double."""
        self._todo: list[Callable[[], None]] = []
        """What the agent of the step under way wants done."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._draws: dict[str, int] = {}

    # ---- time ----

    def luck(self, what: str, sides: int) -> int:
        """A number below `sides` that depends on the seed alone; 0 in the calmest world."""
        if not self.seed or self.calm:
            return 0
        n = self._draws[what] = self._draws.get(what, 0) + 1
        return crc32(f"{self.seed}/{what}/{n}".encode()) // 7 % sides

    def after(self, delay: float, what: Callable[[], None]) -> None:
        """Let this happen in `delay` seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, what))

    def run_for(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass. True if it ended early, because of `until`."""
        end = self.now + seconds
        look_at = self.now
        while self._heap and self._heap[0][0] <= end:
            self.now, _, what = heapq.heappop(self._heap)
            what()
            if until is not None and self.now >= look_at:
                if until():
                    return True
                look_at = self.now + 0.3
        self.now = end
        return until is not None and until()

    # ---- agents ----

    def begin(self, proc: Proc) -> None:
        """The process of an agent is started. Give it an unused name and clock, and the number of those before it."""
        ports = Ports(
            SimulatedClock(self, proc.skew),
            SimulatedLink(self, proc),
            SimulatedWorkers(self, proc),
            SimulatedRequests(proc.inputs),
        )
        proc.started_at = self.now
        proc.agent = Agent(proc.spec)
        proc.loop = Loop(proc.agent, ports, [partial(self._stepped, proc)])
        self.procs.append(proc)
        port = self.free_port()
        self.happen(proc, lambda at: Started(at, nonce=f"n{proc.number}", port=port))
        if store.is_unreachable(self, proc):
            store.tell_outage(self, proc)
        else:
            store.read_soon(self, proc, 0.02)

    def kill(self, proc: Proc) -> None:
        """SIGKILL. What holds its workers notices, and kills them within a moment."""
        if not proc.up:
            return
        proc.dead, proc.dead_at = True, self.now
        self.after(0.1 + 0.1 * self.luck("warden", 4), lambda: staff.die(self, proc))
        if proc.spec.hosts_journal:
            store.kill(self)

    def ask_to_leave(self, proc: Proc, signal: int) -> None:
        """Somebody sends this signal to the agent."""
        proc.told_at = self.now
        self.after(0.0, partial(self._asked, proc, signal))

    def _asked(self, proc: Proc, signal: int) -> None:
        if proc.suspended:
            proc.inbox.append(partial(self._asked, proc, signal))
        elif proc.up:
            proc.inputs.signals.append(signal)
            self._turn(proc, self.now + proc.skew)

    def free_port(self) -> int:
        self.ports_given += 1
        return 4000 + self.ports_given

    def proc_of(self, host: int, *, twin: bool = False) -> Proc | None:
        """The agent that is up on this host."""
        return next((p for p in self.procs if p.host == host and p.up and p.twin == twin), None)

    def happen(self, proc: Proc, make: Callable[[float], Event], then: Callable[[], None] | None = None) -> None:
        """Give the agent an event: now, or when it is no longer suspended."""
        if not proc.up:
            return
        if proc.suspended:
            proc.inbox.append(lambda: self.happen(proc, make, then))
            return
        event = make(self.now + proc.skew)
        (proc.inputs.link if event.__class__ in LINK_EVENTS else proc.inputs.workers).append(event)
        self._turn(proc, event.at)
        if then is not None and proc.up:
            then()

    def tell(self, proc: Proc, delay: float, make: Callable[[float], Event]) -> None:
        """Give the agent an event in `delay` seconds."""
        self.after(delay, lambda: self.happen(proc, make))

    def _turn(self, proc: Proc, at: float) -> None:
        proc.loop.turn(at)
        if self._todo:
            todo, self._todo = self._todo, []
            for do in todo:
                do()
        agent = proc.agent
        if agent.result is not None:
            self._finished(proc)
        wakes_at = agent.wakes_at
        if wakes_at is not None and wakes_at != proc.scheduled:
            proc.scheduled = wakes_at
            late = 0.3 * self.luck("late", 2) if "late" in self.troubles else 0.0
            self.after(max(0.0, wakes_at - proc.skew - self.now) + late, partial(self._wake, proc, wakes_at))

    def _wake(self, proc: Proc, at: float) -> None:
        if proc.agent.wakes_at != at or not proc.up:
            return
        if proc.suspended:
            proc.inbox.append(partial(self._wake, proc, at))
            return
        self._turn(proc, max(self.now + proc.skew, at))

    def _finished(self, proc: Proc) -> None:
        if proc.spec.hosts_journal:
            self.after(0.1, lambda: store.kill(self))

    def later(self, do: Callable[[], None]) -> None:
        """Do this when the step under way was made, and the watchers have looked."""
        self._todo.append(do)

    def _stepped(self, proc: Proc, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        proc.agent = after
        for watcher in self.watchers:
            watcher.stepped(proc, before, event, commands)
