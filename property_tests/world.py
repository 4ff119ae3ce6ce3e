"""A whole cluster under one virtual clock: real agents, and simulated everything else.

1. Time jumps to the next thing that can happen. Nothing here sleeps, and nothing is drawn: delays are `luck`.
2. The world is no kinder than the real one: appends land late, twice or never; reads come piecemeal, and may have been
   taken before the agent was suspended; each agent's clock has its own zero.
3. After every step the checks look at everything; a violation carries the story.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from zlib import crc32

from reknit.core.agent import Agent, Spec
from reknit.core.commands import Append, Beat, Command, Finish, StartWorkers, StopWorkers
from reknit.core.entries import Entry, Joined, Node
from reknit.core.events import Counters, EntriesRead, Event, JournalFailed, Started, Woken
from reknit.core.fold import fold
from reknit.core.job import Job
from reknit.core.step import step

from . import checks, ends, staff
from .hosts import Group, Proc, Traced, demand
from .oracle import Oracle
from .script import NAMES, Setup, node_id

POLL_S = 3.0
"""A read that finds nothing returns after this."""
RETRY_S = 5.0
MOST_PROCS = 12


class World:
    def __init__(self, setup: Setup, *, oracle: Oracle | None = None) -> None:
        self.setup = setup
        self.oracle = oracle
        """Asked after every entry, if there is one."""
        self.sealed: dict[tuple[int, int], tuple[Joined, ...]] = {}
        """Members of every round, by epoch and round."""
        self.now = 0.0
        self.steps = 0
        self.journal: list[Entry] = []
        self.jobs: list[Job] = [Job()]
        """The folds of all prefixes."""
        self.counters: dict[Node, int] = {}
        self.moved: dict[Node, float] = {}
        self.procs: list[Proc] = []
        self.groups: list[Group] = []
        self.slow: set[int] = set()
        self.stuck: set[int] = set()
        self.stale: set[int] = set()
        """Hosts whose beats are swallowed while their reads of the counters are old."""
        self.blows: list[Group] = []
        """Failures of workers that were nobody's echo."""
        self.outage = False
        self.store_dead = False
        self.calm = False
        self.finishing = False
        self.held: list[Entry] = []
        self.story: list[tuple[float, str, Event | Entry | str, tuple[Command, ...]]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._draws: dict[str, int] = {}

    def luck(self, what: str, sides: int) -> int:
        """A number below `sides` that depends on the seed alone; 0 in the calmest world."""
        if not self.setup.seed or self.calm:
            return 0
        n = self._draws[what] = self._draws.get(what, 0) + 1
        return crc32(f"{self.setup.seed}/{what}/{n}".encode()) // 7 % sides

    def after(self, delay: float, what: Callable[[], None]) -> None:
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

    def start(self, host: int, *, twin: bool = False) -> Proc | None:
        setup, number = self.setup, len(self.procs)
        if number >= MOST_PROCS:
            return None
        spec = Spec(
            node_id=node_id(host),
            address=f"{NAMES[host]}{number}.net",
            terms=setup.terms,
            role=setup.roles[host % len(setup.roles)],
            local_world_size=setup.sizes[host % len(setup.sizes)],
            rank_hint=setup.hints[host] if host < len(setup.hints) else None,
            hosts_journal=setup.host and number == 0,
            grace_s=7.0,
            store_timeout_s=30.0,
        )
        name = NAMES[host] + str(sum(p.host == host for p in self.procs) or "")
        proc = Proc(name, host, spec, 1000.0 * (number + 1), Agent(spec), number, twin, self.now)
        self.procs.append(proc)
        proc.read_at = self.now
        self._happen(proc, lambda at: Started(at, nonce=f"n{number}", port=4000 + number))
        if self.unreachable(proc):
            self.tell_outage(proc)
        else:
            self.read_soon(proc, 0.02)
        return proc

    def proc_of(self, host: int, *, twin: bool = False) -> Proc | None:
        return next((p for p in self.procs if p.host == host and p.up and p.twin == twin), None)

    def _happen(self, proc: Proc, make: Callable[[float], Event], then: Callable[[], None] | None = None) -> None:
        """Give the agent an event: now, or when it is no longer suspended."""
        if not proc.up:
            return
        if proc.suspended:
            proc.inbox.append(lambda: self._happen(proc, make, then))
            return
        self._step(proc, make(self.now + proc.skew))
        if then is not None and proc.up:
            then()

    def tell(self, proc: Proc, delay: float, make: Callable[[float], Event]) -> None:
        self.after(delay, lambda: self._happen(proc, make))

    def _step(self, proc: Proc, event: Event) -> None:
        before = proc.agent
        self.steps += 1
        try:
            made = step(before, event)
        except Exception as error:
            raise checks.crashed(self, proc, event, error) from error
        proc.agent = made.agent
        proc.trace.append(Traced(self.now, event, made.commands, made.agent.wakes_at))
        self.story.append((self.now, proc.name, event, made.commands))
        checks.after_step(self, proc, before, event, made.commands)
        for command in made.commands:
            self._execute(proc, command)
        wakes_at = proc.agent.wakes_at
        if wakes_at is not None and wakes_at != proc.scheduled:
            proc.scheduled = wakes_at
            late = 0.3 * self.luck("late", 2) if "late" in self.setup.weather else 0.0
            self.after(max(0.0, wakes_at - proc.skew - self.now) + late, lambda: self._wake(proc, wakes_at))

    def _wake(self, proc: Proc, at: float) -> None:
        if proc.agent.wakes_at == at:
            self._happen(proc, lambda now: Woken(max(now, at)))

    def _execute(self, proc: Proc, command: Command) -> None:
        match command:
            case Append():
                self._say(proc, command.entry)
            case Beat():
                self.after(0.02 + 0.05 * self.luck("beat", 4), lambda: self._beat(proc, command))
            case StartWorkers():
                staff.start(self, proc, command)
            case StopWorkers():
                staff.stop(self, proc, command)
            case Finish():
                self._finished(proc)

    def _finished(self, proc: Proc) -> None:
        if proc.spec.hosts_journal:
            ends.host_ends(self, proc)
            self.after(0.1, self.kill_store)

    def kill(self, proc: Proc) -> None:
        """SIGKILL. What holds its workers notices, and kills them within a moment."""
        if not proc.up:
            return
        proc.dead, proc.dead_at = True, self.now
        self.after(0.1 + 0.1 * self.luck("warden", 4), lambda: staff.die(self, proc))
        if proc.spec.hosts_journal:
            self.kill_store()

    # ---- the store -----------------------------------------------------------------------------------------------

    def unreachable(self, proc: Proc) -> bool:
        return proc.cut or self.outage or self.store_dead

    def kill_store(self) -> None:
        self.store_dead = True
        for proc in self.procs:
            self.tell_outage(proc)

    def tell_outage(self, proc: Proc) -> None:
        """Its adapters notice after a moment, and go on trying."""

        def look() -> None:
            if self.unreachable(proc) and proc.up:
                self._happen(proc, lambda at: JournalFailed(at, "unreachable"))
                self.after(RETRY_S, look)

        self.after(0.3, look)

    def back(self) -> None:
        """Whoever can reach the store again reads it, and sends what was held back."""
        if self.outage or self.store_dead:
            return
        held, self.held = self.held, []
        for entry in held:
            self.after(0.01, lambda entry=entry: self.land(entry))
        for proc in self.procs:
            if proc.up and not proc.cut:
                for entry in proc.held:
                    self.after(0.05, lambda entry=entry: self.land(entry))
                proc.held = []
                self.read_soon(proc, 0.1)

    def _say(self, proc: Proc, entry: Entry) -> None:
        if self.unreachable(proc):
            if self.luck("held", 2):
                proc.held.append(entry)
            return
        fault = proc.faults.pop(0) if proc.faults and not self.calm else None
        weather = self.setup.weather
        if fault is None and weather and self.luck("fault", 6) == 5:
            trouble = ("lose", "lag", "again")[self.luck("which", 3)]
            fault = trouble if ("double" if trouble == "again" else trouble) in weather else None
        delay = 0.03 + 0.1 * self.luck("land", 4)
        if fault != "lose":
            self.after(delay + 9.0 * (fault == "lag") * (1 + self.luck("long", 3)), lambda: self.land(entry))
        if fault == "again":
            self.after(delay + 6.0 + 9.0 * self.luck("long", 3), lambda: self.land(entry))

    def land(self, entry: Entry) -> None:
        if self.store_dead:
            return
        if self.outage:
            self.held.append(entry)
            return
        before = self.jobs[-1]
        self.journal.append(entry)
        try:
            self.jobs.append(fold(before, entry))
        except Exception as error:
            demand(False, "S8", f"fold raised on {entry}: {error!r}")
        self.story.append((self.now, "journal", entry, ()))
        checks.after_landing(self, entry, before)
        for proc in self.procs:
            if proc.up:
                self.read_soon(proc, 0.02 + 0.1 * self.luck("read", 5))

    def _beat(self, proc: Proc, command: Beat) -> None:
        if self.unreachable(proc):
            return
        if proc.host in self.stale:
            self.tell(proc, 0.05, lambda at: Counters(at, proc.counts))
            return
        counters = self.counters
        counters[command.node] = counters.get(command.node, 0) + 1
        self.moved[command.node] = self.now
        counts = {n: counters[n] for n in (command.node, *command.watch) if n in counters}
        quiet = {n: self.now - self.moved[n] for n in counts}

        def make(at: float) -> Event:
            proc.quiet, proc.counts = quiet, counts
            return Counters(at, counts)

        self.tell(proc, 0.02 + 0.1 * self.luck("counts", 4), make)

    def read_soon(self, proc: Proc, delay: float) -> None:
        """One read is under way at a time; what comes meanwhile is read by the next."""
        proc.idle += 1
        if not proc.reading:
            proc.reading = True
            self.after(delay, lambda: self._read(proc))

    def _read(self, proc: Proc) -> None:
        if not proc.up or self.unreachable(proc):
            proc.reading = False
            return
        end = len(self.journal)
        if "partial" in self.setup.weather and end - proc.cursor > 1 and self.luck("piece", 2):
            end = proc.cursor + 1 + self.luck("pieces", 3)
        entries = tuple(self.journal[proc.cursor : end])
        cursor = proc.cursor + len(entries)

        def taken() -> None:
            proc.reading, idle = False, proc.idle
            if proc.cursor < len(self.journal):
                self.read_soon(proc, 0.01)
            else:
                self.after(POLL_S, lambda: self.read_soon(proc, 0.0) if proc.idle == idle else None)

        def make(at: float) -> Event:
            proc.cursor = cursor
            return EntriesRead(at, entries)

        delay = 0.01 + 0.05 * self.luck("answer", 4)
        self.after(delay, lambda: self._happen(proc, make, taken))
