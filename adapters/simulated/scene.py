"""The state of a simulated cluster under one virtual clock: what is there, what is wrong, and what happens when.

1. Time jumps to the next thing that can happen. Nothing here sleeps, and there are no random numbers: all delays come
   from `luck`, which depends on the seed alone.
2. Watchers are told of every step before the world does what the agent wants. They see the world as it was when the
   agent decided.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from reknit.core.agent.agent import Agent
from reknit.core.agent.events import Event
from reknit.core.agent.timers import next_wake
from reknit.core.job.founding import Life, Origin
from reknit.core.job.job import Job

from .hosts import Group, Proc

if TYPE_CHECKING:
    from reknit.core.agent.commands import Command
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.founding import Offer


class Watcher(Protocol):
    """Looks at what happens in a world, and changes nothing. What a watcher raises ends the world."""

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        """An agent has made a step. `before`: the agent before it. `proc.agent`: the agent after it."""
        ...

    def landed(self, entry: Entry, before: Job) -> None:
        """An entry is in the journal. `before`: the job without it."""
        ...

    def founded(self, origin: Origin) -> None:
        """The store had lost the journal, and another life of it begins."""
        ...


class Scene:
    """The state of one cluster, and its time. `World` makes agents in it."""

    origin: Origin | None
    """Of the life in which the journal is. None: the store has lost it."""
    journal: list[Entry]
    jobs: list[Job]
    """The folds of all prefixes of the journal."""

    def __init__(self, *, seed: int = 0, troubles: Iterable[str] = (), echo: bool = True) -> None:
        """`seed`: decides all delays and orders. With 0 the world is the calmest, and every delay is the shortest.
        `troubles`: what may go wrong with appends and reads: lose, lag, double, partial, skip, late, outlive. `echo`:
        workers crash when a peer of theirs has died."""
        self.seed = seed
        self.troubles = frozenset(troubles)
        self.echo = echo
        self.watchers: list[Watcher] = []
        self.now = 0.0
        self.ports_given = 0
        self.lives: dict[Life, tuple[Origin, list[Entry], list[Job]]] = {}
        """Origin, journal and jobs of each life. A life that was founded again begins with the entries of the one
        before."""
        self.best: Offer | None = None
        """The best offer to found the journal again."""
        self.names = 0
        """How many lives were named."""
        self.counters: dict[Node, int] = {}
        self.beaten: dict[Node, tuple[int, int]] = {}
        """The last beat of each node: the number of the process, and its count."""
        self.beaten_by: dict[Node, Proc] = {}
        """Whose beat has raised each counter last. Two processes may take the same incarnation, one after another."""
        self.moved: dict[Node, float] = {}
        """When the counter of each node was raised last."""
        self.procs: list[Proc] = []
        """All processes that were ever started."""
        self.groups: list[Group] = []
        self.slow: set[int] = set()
        """Hosts whose workers take all of their grace."""
        self.stuck: set[int] = set()
        """Hosts whose workers survive SIGKILL."""
        self.stale: set[int] = set()
        """Hosts whose beats do not arrive, and which read old counters."""
        self.deaf: set[int] = set()
        """Hosts that hear no answers of the store. What they send arrives, but the links send nothing more."""
        self.blind: set[int] = set()
        """Hosts whose reads of the journal hang, without an error."""
        self.mute: set[int] = set()
        """Hosts whose entries vanish on the way to the store."""
        self.hung: set[int] = set()
        """Hosts whose keeper hangs: it stops no workers."""
        self.stalls = False
        """The store stops again and again."""
        self.blows: list[Group] = []
        """For each failure of a worker that was no echo: the group of the worker."""
        self.outage = False
        self.outage_at = 0.0
        """When the last outage began."""
        self.store_dead = False
        self.calm = False
        """No more faults, and no more luck."""
        self.finishing = False
        """All workers succeed soon after they have started."""
        self.tokens: set[str] = set()
        """The tokens of all appends that have reached the store."""
        self.lost: set[str] = set()
        """The tokens of appends that get lost on their way."""
        self.held: list[tuple[Entry, Life]] = []
        """Entries that were on their way when the store stopped answering, and the life in which they were said."""
        self.waiting: list[Callable[[], None]] = []
        """Calls that wait for the end of a stall."""
        self.excess = 0
        """Upper bound on the entries that faults have added. Agents say some again, and others are doubled."""
        self._todo: list[Callable[[], None]] = []
        """What the agent wants done in the step that is being made."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._draws = 0, dict[str, int]()
        self.live_on(Origin(Life("j")), [], [Job()])

    # ---- time ----

    def luck(self, what: str, sides: int) -> int:
        """A number below `sides`, for one decision of the kind `what`. It depends on the seed alone. 0 in the calmest
        world."""
        if not self.seed or self.calm:
            return 0
        n = self._draws[what] = self._draws.get(what, 0) + 1
        return crc32(f"{self.seed}/{what}/{n}".encode()) // 7 % sides

    def after(self, delay: float, what: Callable[[], None]) -> None:
        """Call `what` in `delay` seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, what))

    def run_for(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass, or until `until` returns True. It is called about every 0.3 s. Returns its last answer."""
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

    # ---- the journal ----

    def live_on(self, origin: Origin, journal: list[Entry], jobs: list[Job]) -> None:
        """Another life of the journal begins. `journal`: the entries before `origin.position`. `jobs`: their folds, and
        the one with which the life begins."""
        self.origin, self.journal, self.jobs = origin, journal, jobs
        self.lives[origin.life] = origin, journal, jobs
        for watcher in self.watchers:
            watcher.founded(origin)

    # ---- agents ----

    def free_port(self) -> int:
        self.ports_given += 1
        return 4000 + self.ports_given

    def proc_of(self, host: int, *, twin: bool = False) -> Proc | None:
        """The agent that is up on this host. None: there is none."""
        return next((p for p in self.procs if p.host == host and p.up and p.twin == twin), None)

    def happen(self, proc: Proc, make: Callable[[float], Event]) -> None:
        """Give the agent an event of its workers, now or when it is no longer suspended. `make`: makes the event, from
        the time on the agent's clock."""
        if not proc.up:
            return
        if proc.suspended:
            proc.inbox.append(lambda: self.happen(proc, make))
            return
        event = make(proc.clock(self.now))
        proc.inputs.workers.append(event)
        self.turn(proc, event.at)

    def tell(self, proc: Proc, delay: float, make: Callable[[float], Event]) -> None:
        """Give the agent an event of its workers in `delay` seconds."""
        self.after(delay, lambda: self.happen(proc, make))

    def turn(self, proc: Proc, at: float) -> None:
        """Let the loop of this process take what its ports have to tell."""
        proc.loop.turn(at)
        if self._todo:
            todo, self._todo = self._todo, []
            for do in todo:
                do()
        agent = proc.agent
        if agent.result is not None:
            self.finished(proc)
        wakes_at = next_wake(agent)
        if wakes_at is not None and wakes_at != proc.scheduled:
            proc.scheduled = wakes_at
            late = 0.3 * self.luck("late", 2) if "late" in self.troubles else 0.0
            self.after(max(0.0, proc.true(wakes_at) - self.now) + late, partial(self._wake, proc, wakes_at))

    def _wake(self, proc: Proc, at: float) -> None:
        if next_wake(proc.agent) != at or not proc.up:
            return
        if proc.suspended:
            proc.inbox.append(partial(self._wake, proc, at))
            return
        self.turn(proc, max(proc.clock(self.now), at))

    def finished(self, proc: Proc) -> None:
        """The agent of this process has finished."""

    def later(self, do: Callable[[], None]) -> None:
        """Call `do` when the present step was made and the watchers have seen it."""
        self._todo.append(do)

    def _stepped(self, proc: Proc, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        proc.agent = after
        for watcher in self.watchers:
            watcher.stepped(proc, before, event, commands)
