"""What an adapter owes the core, asked while it runs. docs/embedding.md#owes has the rules, under the same numbers.

Each agent has an observer of its own, which a `Loop` calls after every step. A program without `Loop` calls it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from attrs import define, field, frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import SIGKILL, Beat, Command, Finish, StopWorkers
from reknit.core.agent.events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    RestartsLimited,
    Started,
    StopRequested,
    Woken,
)
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import (
    MOST_AWAITED,
    PortReserved,
    ReservePort,
    StartWorkers,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.entries import Entry
from reknit.core.job.fold import fold
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.workers import NoProgress

from .violation import Violation

OWES = {
    "owes 1": "all commands of a step are carried out, in their order, before the next event is fed",
    "owes 2": "the agent is woken at `next_wake`, if no other event comes before",
    "owes 3": "nothing is fed after `Finish`",
    "owes 4": "`Started` comes first, once, with a nonce of its own, and each port tells in the order of time",
    "owes 5": "every agent gets the same entries in the same order",
    "owes 6": "a `Beat` is answered by `Counters` and a read that follows, or `JournalFailed` says why not",
    "owes 7": "`WorkersStarted` and `WorkersExited` tell of workers of a round that was started, each worker once",
    "owes 8": "`WorkersStopped` answers `StopWorkers`, when no process is left, and brings another port",
    "owes 9": "a worker that cannot be started has failed: each start is answered, and failures name their worker",
}
"""The rules by name. `Violation.check` is one of these names."""


PORTS = (
    (EntriesRead, Counters, JournalFailed),
    (Started, WorkersStarted, WorkersExited, WorkersStopped, PortReserved),
    (Woken, StopRequested, RestartsLimited),
)
"""The events of the link, of the workers, and of the clock and requests. Each of them tells in the order of time."""


def _owes(holds: object, rule: int, text: str) -> None:
    if not holds:
        raise Violation(f"owes {rule}", text)


@define
class _StartedRound:
    """The workers of one agent that were started last."""

    command: StartWorkers
    asked_at: float
    is_answered: bool = False
    """`WorkersStarted` or an exit has come."""
    has_started: bool = False
    exited: set[int] = field(factory=set)
    stop: StopWorkers | None = None
    """The last one of them."""
    stop_at: float = 0.0
    is_over: bool = False


@frozen
class _Life:
    """What all agents have been given of one life of the journal."""

    entries: list[Entry]
    jobs: list[Job]
    """Their folds. One more than `entries`."""


@define(eq=False)
class _Debts:
    """The observer of one agent."""

    owed: Owed
    name: str
    told_at: dict[int, float] = field(factory=dict)
    """When each port has told something last, by its place in `PORTS`."""
    is_finished: bool = False
    commands: list[Command] = field(factory=list)
    """Those of the last step that were not carried out, if `Owed.is_told`."""
    beats: list[float] = field(factory=list)
    """When each `Beat` was wanted that has no answer."""
    answered_at: float = -inf
    """When the store has answered last, or the adapter has said that it does not."""
    counted_at: float | None = None
    """When `Counters` came first since the last read. None: not since then."""
    ports: set[int] = field(factory=set)
    is_port_due: bool = False
    round: _StartedRound | None = None
    life: Life | None = None
    places: list[int] = field(factory=lambda: [0])
    """How many entries of this life it may have been given. Several: a fold to which it has skipped was there several
    times. Empty: that is not known."""

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        """`before`, `after`: the agent before and after the step. `commands`: what the step wants done."""
        _owes(not self.is_finished, 3, f"{self.name} has finished, and was fed {event}")
        _owes(not self.commands, 1, f"{self.name} was fed {event}, and {self.commands} were not carried out")
        _owes(self.life is not None or isinstance(event, Started), 4, f"{self.name} was fed {event} before `Started`")
        self._in_time(before, event)
        match event:
            case Started():
                self._started(event)
            case EntriesRead():
                self.counted_at = None
                self._read(event)
            case Counters():
                self._counted(event)
            case JournalFailed():
                self.counted_at, self.answered_at = None, event.at
            case WorkersStarted():
                round = self._of_round(event.round, event)
                _owes(not round.has_started and not round.is_over, 7, f"{self.name} was told twice: {event}")
                round.has_started = round.is_answered = True
            case WorkersExited():
                self._exited(event)
            case WorkersStopped():
                self._stopped(event)
            case PortReserved():
                _owes(self.is_port_due, 8, f"{self.name} was given port {event.port}, and wanted none")
                self.is_port_due = False
                self._offers(event.port)
        self._note(event.at, commands)

    def done(self, command: Command) -> None:
        """This command was carried out. Programs without `Loop` say so, if the `Owed` is told."""
        _owes(self.commands[:1] == [command], 1, f"{self.name} carries out {command}, not {self.commands[:1]}")
        del self.commands[0]

    def ended(self) -> None:
        """The program has ended in order: nothing may be owed any more."""
        _owes(self.is_finished, 3, f"{self.name} was given up before `Finish`")
        _owes(not self.commands, 1, f"{self.commands} of {self.name} were not carried out")
        if self.round is not None and self.round.stop is None:
            _owes(self.round.is_answered, 9, f"{self.name} was never told that its workers run")
        if self.round is not None and self.round.stop is not None:
            _owes(self.round.is_over, 8, f"{self.name} was never told that its workers are stopped")

    # ---- events ----

    def look(self, at: float) -> None:
        """Ask whether an answer is late. An observer is called only at events, so a program that waits for one asks
        this from time to time. `at`: the time on the clock of the events."""
        most_s = self.owed.answer_s
        if self.beats:
            waits_s = at - max(self.beats[0], self.answered_at)
            _owes(waits_s <= most_s, 6, f"a beat of {self.name} has no answer for {waits_s:.1f} s")
        if self.counted_at is not None:
            waits_s = at - self.counted_at
            _owes(waits_s <= most_s, 6, f"{self.name} has had counters, and no read for {waits_s:.1f} s since")
        round = self.round
        if round is None or round.is_over:
            return
        if round.stop is not None:
            waits_s = at - round.stop_at - MOST_AWAITED * round.stop.await_exits_s - round.stop.grace_s
            _owes(waits_s <= most_s, 8, f"{self.name} waits for the stop of round {round.command.round}")
        elif not round.is_answered:
            _owes(at - round.asked_at <= most_s, 9, f"{self.name} waits for the workers of {round.command.round}")

    def _in_time(self, before: Agent, event: Event) -> None:
        """Rule 2, the clock, and answers that take too long."""
        port = next(place for place, kinds in enumerate(PORTS) if isinstance(event, kinds))
        last = self.told_at.get(port, -inf)
        _owes(event.at >= last, 4, f"the clock of {self.name} goes back from {last} to {event.at}, with {event}")
        self.told_at[port] = event.at
        wakes_at = next_wake(before)
        late_s = event.at - wakes_at if wakes_at is not None else 0.0
        _owes(late_s <= self.owed.late_s, 2, f"{self.name} was woken {late_s:.1f} s late, by {event}")
        self.look(event.at)

    def _started(self, event: Started) -> None:
        _owes(self.life is None, 4, f"{self.name} was started twice")
        _owes(not self.owed.is_taken(event.nonce), 4, f"{self.name} has the nonce of another")
        self.life = Life()
        self._offers(event.port)

    def _read(self, event: EntriesRead) -> None:
        if event.life != self.life or event.base is not None:  # it begins elsewhere, or has skipped entries
            shared = self.owed.life(event.life, event.base)
            base = Job() if event.base is None else event.base
            self.life, self.places = event.life, [i for i, job in enumerate(shared.jobs) if job == base]
        shared = self.owed.life(event.life)
        for entry in event.entries if self.places else ():
            if self.places == [len(shared.entries)]:
                shared.entries.append(entry)
                shared.jobs.append(fold(shared.jobs[-1], entry))
            count, known = len(shared.entries), self.places
            self.places = [i + 1 for i in known if i < count and shared.entries[i] == entry]
            if self.places:
                continue
            if count in known:
                return  # it may have read what nobody has read before it
            others = [shared.entries[i] for i in known]
            _owes(False, 5, f"{self.name} reads {entry} at {known}, where others read {others}")

    def _counted(self, event: Counters) -> None:
        _owes(self.beats, 6, f"{self.name} has counters for which it did not ask")
        del self.beats[0]
        self.answered_at = event.at
        if self.counted_at is None:
            self.counted_at = event.at

    def _exited(self, event: WorkersExited) -> None:
        round = self._of_round(event.round, event)
        _owes(not round.is_over, 7, f"{self.name} was told of exits after the stop: {event}")
        round.is_answered = True
        workers = {worker.local_rank: worker.rank for worker in round.command.assignment.workers}
        for exit in event.exits:
            is_new = exit.local_rank in workers and exit.local_rank not in round.exited
            _owes(is_new, 7, f"{self.name} was told of an exit twice, or of no worker: {exit}")
            round.exited.add(exit.local_rank)
            failure = exit.failure
            if failure is None:
                continue
            named = failure.local_rank, failure.rank
            expected = exit.local_rank, workers[exit.local_rank]
            _owes(named == expected, 9, f"{self.name}: a failure names local rank and rank {named}, not {expected}")
            is_ours = round.stop is not None and -failure.exitcode in (round.stop.signal, SIGKILL)
            is_ours = is_ours and not isinstance(failure.cause, NoProgress)  # hung workers are ended, and reported
            _owes(not is_ours, 7, f"{self.name} was told of an exit that its own stop has caused: {exit}")

    def _stopped(self, event: WorkersStopped) -> None:
        round = self._of_round(event.round, event)
        is_asked = round.stop is not None and not round.is_over
        _owes(is_asked, 8, f"{self.name} was told of a stop for which it did not ask: {event}")
        round.is_over = True
        left = set(self.owed.alive(self.name, event.round)) - set(event.stuck)
        _owes(not left, 8, f"{self.name} was told that its workers are stopped, and {sorted(left)} live")
        self._offers(event.port)

    # ---- what it wants ----

    def _note(self, at: float, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Beat():
                    self.beats.append(at)
                case StartWorkers():
                    self.round = _StartedRound(command, at)
                case StopWorkers() if self.round is not None:
                    self.round.stop, self.round.stop_at = command, at
                case ReservePort():
                    self.is_port_due = True
                case Finish():
                    self.is_finished = True
        if self.owed.is_told:
            self.commands = list(commands)

    def _of_round(self, number: int, event: Event) -> _StartedRound:
        round = self.round
        if round is None or round.command.round != number:
            raise Violation("owes 7", f"{self.name} was told of workers that it has not started: {event}")
        return round

    def _offers(self, port: int) -> None:
        """Rule 8: another port in each round. 0: none could be reserved."""
        _owes(port == 0 or port not in self.ports, 8, f"{self.name} was given port {port} again")
        self.ports.add(port)


class Owed:
    """What the adapters of one job owe its agents. An observer raises `Violation` at the event that breaks a rule.

    owed = Owed()
    loop = Loop(agent, ports, [owed.by("node0")])
    """

    def __init__(
        self,
        *,
        late_s: float = inf,
        answer_s: float = 60.0,
        alive: Callable[[str, int], Iterable[int]] = lambda name, round: (),
        is_told: bool = False,
    ) -> None:
        """`late_s`: an agent may be woken so many seconds late. On a busy machine no small number is safe. `answer_s`:
        beats, starts and stops are answered within so many seconds; a stop after its grace.
        `alive`: given the name of an agent and a round, the ids of the processes of this round that live.
        `is_told`: the program calls `done` for each command that it has carried out. `Loop` needs that not.
        """
        self.late_s, self.answer_s, self.alive, self.is_told = late_s, answer_s, alive, is_told
        self._nonces: set[str] = set()
        self._lives: dict[Life, _Life] = {}

    def by(self, name: str) -> _Debts:
        """The observer of another agent. `name`: for messages."""
        return _Debts(self, name)

    def is_taken(self, nonce: str) -> bool:
        """Whether another agent has this nonce. From now on it is taken."""
        is_taken = not nonce or nonce in self._nonces
        self._nonces.add(nonce)
        return is_taken

    def life(self, life: Life, base: Job | None = None) -> _Life:
        """What agents have been given of this life of the journal. `base`: with which it begins, if nobody has read of
        it."""
        return self._lives.setdefault(life, _Life([], [Job() if base is None else base]))
