"""The loop: one event, one step, all its commands, and sleep if there is nothing to do. Real workers, then fakes."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from reknit.adapters.journals.in_memory import MemoryJournal, MemoryLink
from reknit.adapters.keeper.process.processes import Processes
from reknit.adapters.keeper.protocol.wire import Configure
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.loop import Loop, Observer, Ports
from reknit.adapters.runtime.shells import run
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Append, Command, Finish, StopWorkers
from reknit.core.agent.events import Event, Started, StopRequested, Woken
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import (
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import AllSucceeded, BudgetSpent
from tests.support.processes import let_go
from tests.support.waiting import PATIENCE_S

NODE = NodeId("here")


class Requests:
    """Signals that a test sends."""

    def __init__(self) -> None:
        self.waiting: list[int] = []

    def taken(self) -> Sequence[int]:
        taken, self.waiting = self.waiting, []
        return taken


class Trace:
    """Observes the steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[Event, Sequence[Command]]] = []

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        self.steps.append((event, commands))

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event, _ in self.steps]


class RecordingClock(SystemClock):
    """The real one; it remembers until when it was told to sleep, and does something before it does."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.first_sleep: Callable[[], None] = lambda: None

    def wait(self, until: float | None) -> None:
        self.waits.append(until)
        first, self.first_sleep = self.first_sleep, lambda: None
        first()
        super().wait(self.now() + PATIENCE_S if until is None else until)


def spec(restarts: int = 0, workers: int = 1, grace_s: float = 30.0) -> Spec:
    terms = Terms(restarts=RestartPolicy(max_restarts=restarts))
    return Spec(NODE, "127.0.0.1", terms, local_world_size=workers, grace_s=grace_s, shares_journal=False)


def played(ports: Ports, observer: Observer, of: Spec | None = None) -> Agent:
    """An agent's whole life in a blocking shell."""
    loop = Loop(Agent(of or spec()), ports, [observer])
    result = run(loop)
    assert loop.result is result is loop.agent.result
    return loop.agent


# ---- real workers ----


class Here(Processes):
    """The keeper's workers, held by this very process, with the event that comes first."""

    has_told = False

    def events(self, now: float) -> list[Event]:
        first = [] if self.has_told else [Started(now, "nonce", self.reserve_port())]
        self.has_told = True
        return [*first, *super().events(now)]

    @property
    def wakes_at(self) -> float | None:
        return super().wakes_at if self.has_told else 0.0

    def close(self) -> None:
        let_go(self)


class World:
    """The ports of a standalone agent, with the real clock, journal and processes."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = RecordingClock()
        self.journal = MemoryJournal()
        self.requests = Requests()
        self.trace = Trace()
        self.console = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.workers: Here | None = None

    def run(self, script: str, spec: Spec) -> Agent:
        argv = (sys.executable, "-c", textwrap.dedent(script))
        console = self.console, self.console
        self.workers = Here(self.clock, Configure(argv, run_id="job"), env=os.environ, console=console)
        ports = Ports(self.clock, MemoryLink(self.journal, self.clock), self.workers, self.requests)
        return played(ports, self.trace, spec)

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
        self.clock.close()
        os.close(self.console)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    yield world
    world.close()


def test_a_job_that_succeeds(world: World) -> None:
    """From the first event to the result, with the state that torchelastic names."""
    agent = world.run("pass", spec(workers=2))
    assert agent.result is not None
    assert (agent.result.state, agent.result.why) == (WorkerState.SUCCEEDED, AllSucceeded())
    assert agent.result.return_values.keys() == {0, 1}
    entries = [type(entry).__name__ for entry in world.journal.since(0)]
    assert entries == ["Opened", "Joined", "Succeeded", "Left"]


def test_a_job_that_is_restarted_and_fails(world: World) -> None:
    """The journal tells the whole story: two rounds, two failures, and that nothing ran any more when it was judged."""
    agent = world.run("raise SystemExit(7)", spec(restarts=1))
    assert agent.result is not None
    assert isinstance(agent.result.why, BudgetSpent)
    assert agent.result.why.root.failure.exitcode == 7
    assert agent.job.spent == 1
    entries = [type(entry).__name__ for entry in world.journal.since(0)]
    assert entries == ["Opened", "Joined", "Failed", "Joined", "Failed", "Joined", "Left"]


def test_idle_means_no_step(world: World) -> None:
    """While workers run and nothing happens the loop sleeps, without a deadline: not one step, not one wake-up."""
    at: list[int] = []

    def release() -> None:
        at.append(len(world.trace.steps))
        os.close(held)

    ours, held = os.pipe()
    os.set_inheritable(ours, True)
    world.clock.first_sleep = release
    # The worker ends when the loop has begun to sleep; it cannot end earlier.
    agent = world.run(f"import os; os.set_blocking({ours}, True); os.read({ours}, 1)", spec())
    os.close(ours)
    assert agent.result is not None
    assert agent.result.state is WorkerState.SUCCEEDED
    assert world.clock.waits[0] is None, "no deadline: no polling"
    assert "Woken" not in world.trace.kinds[at[0] :]
    assert world.trace.kinds[at[0]] == "WorkersExited", "the very next thing to happen"


def test_a_signal_ends_it(world: World) -> None:
    """The request comes out of the port, and the stop goes into the workers'."""

    def wait(until: float | None) -> None:
        """Returns early, as it does when a signal has come."""
        world.requests.waiting.append(signal.SIGTERM)
        world.clock.wait = real  # type: ignore[method-assign]  # replaced for this test

    real, world.clock.wait = world.clock.wait, wait  # type: ignore[method-assign]  # replaced for this test
    agent = world.run("import signal; signal.pause()", spec())
    assert agent.result is not None
    assert (agent.result.state, agent.result.why) == (WorkerState.STOPPED, SignalReceived(signal.SIGTERM))


# ---- fakes at the ports ----


class FakeClock:
    """Time stands still until somebody sleeps."""

    def __init__(self) -> None:
        self.at = 100.0
        self.waits: list[float | None] = []

    def now(self) -> float:
        return self.at

    def wait(self, until: float | None) -> None:
        self.waits.append(until)
        assert len(self.waits) < 100, "spinning"
        if until is not None:
            self.at = until

    def wake(self) -> None: ...

    def fileno(self) -> int:
        raise OSError

    def watch(self, fd: int) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class FakeWorkers:
    """Workers that end with these codes, one list per round, as soon as they were started."""

    def __init__(self, *rounds: list[WorkerExit]) -> None:
        self.rounds = list(rounds)
        self.news: list[Callable[[float], Event]] = [lambda now: Started(now, "nonce", 4000)]
        self.told: list[Command] = []
        self.wakes_at: float | None = None

    def renew_port(self) -> None:
        self.news.append(lambda now: PortReserved(now, 4002))

    def start(self, command: StartWorkers) -> None:
        self.told.append(command)
        exits = tuple(self.rounds.pop(0)) if self.rounds else ()
        self.news.append(lambda now: WorkersStarted(now, command.round))
        if exits:
            self.news.append(lambda now: WorkersExited(now, command.round, exits))

    def stop(self, command: StopWorkers) -> None:
        self.told.append(command)
        self.news.append(lambda now: WorkersStopped(now, command.round, 4001))

    def events(self, now: float) -> list[Event]:
        if self.wakes_at is not None and now >= self.wakes_at:
            self.wakes_at = None
        news, self.news = self.news, []
        return [make(now) for make in news]

    def close(self) -> None: ...


def faked(workers: FakeWorkers, journal: MemoryJournal | None = None) -> tuple[Ports, Trace]:
    clock = FakeClock()
    return Ports(clock, MemoryLink(journal or MemoryJournal(), clock), workers, Requests()), Trace()


def test_every_command_is_executed_before_the_next_step() -> None:
    """And told to the observer first: what a worker writes must not come before the line that it is started."""
    workers, journal = FakeWorkers([WorkerExit(0)]), MemoryJournal()
    ports, trace = faked(workers, journal)
    due: list[StartWorkers | Append] = []

    def observe(before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        trace(before, event, after, commands)
        for command in due:
            assert command in workers.told if isinstance(command, StartWorkers) else command.entry in journal.since(0)
        due[:] = [command for command in commands if isinstance(command, StartWorkers | Append)]
        assert not any(command in workers.told for command in due)

    agent = played(ports, observe)
    commands = [command for _, commands in trace.steps for command in commands]
    assert [c for c in commands if isinstance(c, StartWorkers | StopWorkers)] == workers.told
    assert commands[-1] == Finish(agent.result)


def test_it_never_sleeps_on_news() -> None:
    """A whole job whose events are all there: the loop goes through it without a single wait."""
    ports, trace = faked(FakeWorkers([WorkerExit(0)]))
    played(ports, trace)
    assert isinstance(ports.clock, FakeClock)
    assert ports.clock.waits == []
    assert trace.kinds == [
        "Started", "EntriesRead", "EntriesRead", "EntriesRead", "WorkersStarted", "WorkersExited",
        "WorkersStopped", "EntriesRead", "EntriesRead",
    ]  # fmt: skip


def test_a_waking_up_for_nothing_is_no_step() -> None:
    """Early wake-ups are allowed, and cost a look at the ports: no port has news, and no deadline has passed."""
    workers = FakeWorkers([])
    ports, trace = faked(workers)
    clock = ports.clock
    assert isinstance(clock, FakeClock)

    def wait(until: float | None) -> None:
        clock.waits.append(until)
        if len(clock.waits) == 3:
            workers.news.append(lambda now: WorkersExited(now, 0, (WorkerExit(0),)))

    clock.wait = wait  # type: ignore[method-assign]  # replaced for this test
    agent = played(ports, trace)
    assert agent.result is not None
    assert "Woken" not in trace.kinds


class Deaf(MemoryJournal):
    """Loses the first append, so that the agent has to say it again."""

    lost = False

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        if not self.lost:
            self.lost = True
            return True
        return super().append(token, entry, life)


def test_the_earliest_deadline_counts() -> None:
    """The agent's and the ports': whichever comes first ends the sleep."""

    for deadline, expected in ((None, [102.0]), (100.5, [100.5, 102.0]), (500.0, [102.0])):
        workers = FakeWorkers([WorkerExit(0)])
        workers.wakes_at = deadline
        ports, trace = faked(workers, Deaf())
        played(ports, trace)
        assert isinstance(ports.clock, FakeClock)
        assert ports.clock.waits == expected, "said again at 102, and no wait after that"


def test_a_deadline_that_has_passed_is_a_step_if_there_is_no_news() -> None:
    """The agent is asked exactly when it wanted to be; with news it is asked anyway."""
    workers = FakeWorkers([WorkerExit(0)])
    ports, trace = faked(workers, Deaf())
    played(ports, trace)
    assert trace.kinds.count("Woken") == 1
    woken = next(event for event, _ in trace.steps if isinstance(event, Woken))
    assert woken.at == 102.0


def test_nothing_comes_before_started() -> None:
    """A keeper says hello late. An agent without a nonce can neither read nor say anything."""
    workers = FakeWorkers()
    started = workers.news.pop()
    ports, trace = faked(workers)
    loop = Loop(Agent(spec()), ports, [trace])
    assert not loop.turn()
    assert trace.kinds == []
    assert isinstance(ports.requests, Requests)
    ports.requests.waiting.append(signal.SIGTERM)
    workers.news.append(started)
    assert loop.turn()
    assert trace.kinds == ["Started", "StopRequested"]


def test_a_node_is_told_to_leave_before_its_keeper_is_ready() -> None:
    """A keeper may hang for a minute, and Ctrl-C must end the agent all the same. There is no worker to stop."""
    workers = FakeWorkers()
    workers.news.clear()
    ports, trace = faked(workers)
    assert isinstance(ports.requests, Requests)
    ports.requests.waiting.append(signal.SIGINT)
    result = run(Loop(Agent(spec()), ports, [trace]))
    assert (result.state, result.why) == (WorkerState.STOPPED, SignalReceived(signal.SIGINT))
    assert trace.kinds == ["StopRequested"]


def test_the_end_is_the_end() -> None:
    """What comes after the result is for nobody: no step, and no observer is told."""
    ports, trace = faked(FakeWorkers([WorkerExit(0)]))
    loop = Loop(Agent(spec()), ports, [trace])
    run(loop)
    told = len(trace.steps)
    loop.feed(StopRequested(ports.clock.now(), signal.SIGTERM))
    assert len(trace.steps) == told


def test_a_fold_is_reported_for_every_read() -> None:
    """The link counts: it knows by it how much is worth waiting for, and which fold to publish."""
    ports, trace = faked(FakeWorkers([WorkerExit(0)]))
    folds: list[Job] = []
    ports.link.folded = folds.append  # type: ignore[method-assign]  # replaced for this test
    agent = played(ports, trace)
    assert len(folds) == trace.kinds.count("EntriesRead")
    assert folds[-1] == agent.job


# ---- observers ----


def test_an_observer_that_raises_stops_no_command_and_no_other_observer() -> None:
    """It is a bug, and comes to light; workers that were to be stopped are stopped all the same."""
    workers = FakeWorkers([WorkerExit(0)])
    ports, trace = faked(workers)

    def broken(before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if any(isinstance(command, StartWorkers) for command in commands):
            raise KeyError("planted")

    loop = Loop(Agent(spec()), ports, [broken, trace])
    with pytest.raises(KeyError, match="planted"):
        run(loop)
    assert [type(command) for command in workers.told] == [StartWorkers]
    assert any(isinstance(command, StartWorkers) for command in trace.steps[-1][1])
    assert run(loop).state is WorkerState.SUCCEEDED, "the loop itself is sound, and may go on"


def test_what_came_together_with_the_event_of_a_broken_observer_is_not_lost() -> None:
    """Two events in one turn: the second may be the end of the workers, and no port tells it again."""
    workers = FakeWorkers([])
    ports, trace = faked(workers)

    def broken(before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if isinstance(event, WorkersStarted):
            raise KeyError("planted")

    loop = Loop(Agent(spec()), ports, [trace, broken])
    while not workers.told:
        loop.turn()
    workers.news.append(lambda now: WorkersExited(now, 0, (WorkerExit(0),)))
    with pytest.raises(KeyError, match="planted"):
        loop.turn()
    assert trace.kinds[-1] == "WorkersStarted"
    assert loop.turn()
    assert "WorkersExited" in trace.kinds
    assert run(loop).state is WorkerState.SUCCEEDED


def test_all_errors_of_observers_come_to_light() -> None:
    """The second bug is no less a bug."""
    ports, _ = faked(FakeWorkers())

    def broken(*_: object) -> None:
        raise KeyError("planted")

    loop = Loop(Agent(spec()), ports, [broken, broken])
    with pytest.raises(ExceptionGroup) as raised:
        loop.turn()
    assert [type(error) for error in raised.value.exceptions] == [KeyError, KeyError]
