"""A whole cluster under one virtual clock: real agents, and simulated everything else.

1. Time jumps to the next thing that can happen. Nothing here sleeps, and nothing is drawn: delays are `luck`.
2. The world is no kinder than the real one: appends land late, twice or never; reads come piecemeal, and may have been
   taken before the agent was suspended; each agent's clock has its own zero.
3. After every step the checks look at everything; a violation carries the story.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from zlib import crc32

from attrs import evolve

from reknit.core.agent import Agent, Spec
from reknit.core.commands import Append, Beat, Command, Finish, ReservePort, StartWorkers, StopWorkers
from reknit.core.entries import Entry, Joined, Node
from reknit.core.events import Event, PortReserved, Started, Woken
from reknit.core.job import Job
from reknit.core.step import step

from . import checks, ends, staff, store
from .hosts import Group, Proc, Traced
from .oracle import Oracle
from .script import NAMES, Setup, node_id

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
        self.ports_given = 0
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
        self.outage_at = 0.0
        """When the last one began."""
        self.store_dead = False
        self.calm = False
        self.finishing = False
        self.held: list[Entry] = []
        """What was on its way when the store stopped answering."""
        self.excess = 0
        """How many entries faults may have cost: what they make agents say again, and what they double."""
        self.landed: Counter[tuple[int, int]] = Counter()
        """Entries per epoch and round."""
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

    def start(self, host: int, *, twin: bool = False, other: bool = False) -> Proc | None:
        setup, number = self.setup, len(self.procs)
        if number >= MOST_PROCS:
            return None
        spec = Spec(
            node_id=node_id(host),
            address=f"{NAMES[host]}{number}.net",
            terms=evolve(setup.terms, max_nodes=setup.max + 1) if other else setup.terms,
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
        port = self.free_port()
        self.happen(proc, lambda at: Started(at, nonce=f"n{number}", port=port))
        if store.is_unreachable(self, proc):
            store.tell_outage(self, proc)
        else:
            store.read_soon(self, proc, 0.02)
        return proc

    def free_port(self) -> int:
        self.ports_given += 1
        return 4000 + self.ports_given

    def proc_of(self, host: int, *, twin: bool = False) -> Proc | None:
        return next((p for p in self.procs if p.host == host and p.up and p.twin == twin), None)

    def happen(self, proc: Proc, make: Callable[[float], Event], then: Callable[[], None] | None = None) -> None:
        """Give the agent an event: now, or when it is no longer suspended."""
        if not proc.up:
            return
        if proc.suspended:
            proc.inbox.append(lambda: self.happen(proc, make, then))
            return
        self._step(proc, make(self.now + proc.skew))
        if then is not None and proc.up:
            then()

    def tell(self, proc: Proc, delay: float, make: Callable[[float], Event]) -> None:
        self.after(delay, lambda: self.happen(proc, make))

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
            self.happen(proc, lambda now: Woken(max(now, at)))

    def _execute(self, proc: Proc, command: Command) -> None:
        match command:
            case Append():
                store.say(self, proc, command.entry)
            case Beat():
                self.after(0.02 + 0.05 * self.luck("beat", 4), lambda: store.beat(self, proc, command))
            case StartWorkers():
                staff.start(self, proc, command)
            case StopWorkers():
                staff.stop(self, proc, command)
            case ReservePort():
                port = self.free_port()
                self.tell(proc, 0.01, lambda at: PortReserved(at, port))
            case Finish():
                self._finished(proc)

    def _finished(self, proc: Proc) -> None:
        if proc.spec.hosts_journal:
            ends.host_ends(self, proc)
            self.after(0.1, lambda: store.kill(self))

    def kill(self, proc: Proc) -> None:
        """SIGKILL. What holds its workers notices, and kills them within a moment."""
        if not proc.up:
            return
        proc.dead, proc.dead_at = True, self.now
        self.after(0.1 + 0.1 * self.luck("warden", 4), lambda: staff.die(self, proc))
        if proc.spec.hosts_journal:
            store.kill(self)
