"""The shells around a loop: in this thread, in a thread of its own, and in an asyncio event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from reknit.adapters.journals.in_memory import MemoryJournal, MemoryLink
from reknit.adapters.link import ThreadedLink
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.loop import Loop, Ports
from reknit.adapters.runtime.ports import Link
from reknit.adapters.runtime.shells import LoopThread, Wishes, run, run_async
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import SIGTERM, Command, Result, StopWorkers
from reknit.core.agent.events import Event, Started
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import StartWorkers, WorkerExit, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.entries import NodeId, RestartPolicy, Terms
from tests.support.interrupts import interrupted
from tests.support.waiting import PATIENCE_S, descriptors, until


class Staff:
    """Workers that live until they are told to end, by the agent or (from any thread) by a test."""

    def __init__(self, clock: SystemClock, nonce: str) -> None:
        self._clock = clock
        self._news: list[Callable[[float], Event]] = [lambda now: Started(now, nonce, 4000)]
        self.round: int | None = None
        self.is_running = threading.Event()
        self.wakes_at: float | None = None

    def start(self, command: StartWorkers) -> None:
        self.round = command.round
        self._tell(lambda now: WorkersStarted(now, command.round))
        self.is_running.set()

    def stop(self, command: StopWorkers) -> None:
        self._tell(lambda now: WorkersStopped(now, command.round, 4001))

    def renew_port(self) -> None: ...

    def succeed(self) -> None:
        round_ = self.round
        assert round_ is not None
        self._tell(lambda now: WorkersExited(now, round_, (WorkerExit(0),)))

    def _tell(self, make: Callable[[float], Event]) -> None:
        self._news.append(make)
        self._clock.wake()

    def events(self, now: float) -> list[Event]:
        found = []
        while self._news:
            found.append(self._news.pop(0)(now))
        return found

    def close(self) -> None: ...


class Node:
    """An agent with its loop."""

    def __init__(self, name: str, nodes: int = 1, journal: MemoryJournal | None = None) -> None:
        self.clock = SystemClock()
        self.staff = Staff(self.clock, name)
        self.wishes = Wishes(self.clock)
        self.link: Link = (
            MemoryLink(MemoryJournal(), self.clock) if journal is None else ThreadedLink(journal, self.clock, name)
        )
        terms = Terms(min_nodes=nodes, max_nodes=nodes, restarts=RestartPolicy(max_restarts=0))
        spec = Spec(NodeId(name), "127.0.0.1", terms, shares_journal=journal is not None)
        self.seen: list[Event] = []
        self.loop = Loop(Agent(spec), Ports(self.clock, self.link, self.staff, self.wishes), [self._see])

    def _see(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.link.close()
        self.clock.close()


Make = Callable[..., Node]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes nodes. When they are closed, no descriptor and no thread is left of them."""
    made: list[Node] = []
    threads, files = set(threading.enumerate()), descriptors()

    def make(*args: Any) -> Node:
        made.append(Node(*args))
        return made[-1]

    yield make
    for node in made:
        node.close()
    assert not set(threading.enumerate()) - threads
    assert not descriptors() - files


def in_time(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs it in an event loop of its own, in which nothing may take for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await coroutine

    asyncio.run(bounded())


async def until_async(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)  # not a guess: the interval of a poll, any length is right


# ---- in the calling thread ----


def test_it_runs_to_the_result(make: Make) -> None:
    """A wake-up from another thread brings the end of the workers; without it the loop would sleep for ever."""
    node = make("a")

    def end() -> None:
        assert node.staff.is_running.wait(PATIENCE_S)
        node.staff.succeed()

    helper = threading.Thread(target=end)
    helper.start()
    assert run(node.loop).state is WorkerState.SUCCEEDED
    helper.join()


# ---- a thread of its own ----


def test_a_thread_runs_it_and_join_gives_the_result(make: Make) -> None:
    """A notebook: the cell returns at once, and the node is asked to leave from there."""
    node = make("a")
    thread = LoopThread(node.loop)
    thread.start()
    assert node.staff.is_running.wait(PATIENCE_S)
    assert thread.join(0.01) is None, "it runs"
    node.wishes.ask()
    result = thread.join(PATIENCE_S)
    assert result is not None
    assert (result.state, result.why) == (WorkerState.STOPPED, SignalReceived(SIGTERM))


@pytest.mark.alone
def test_a_wait_that_was_interrupted_can_be_repeated(make: Make) -> None:
    """Ctrl-C. In Python 3.11 an interrupted `threading.Thread.join` takes a thread that runs for one that has ended.
    Whoever waits again, to close the ports, would close them under the loop."""

    node = make("a")
    thread = LoopThread(node.loop)
    thread.start()
    assert node.staff.is_running.wait(PATIENCE_S)
    interrupted(lambda: thread.join(PATIENCE_S))
    node.wishes.ask()
    assert thread.join(PATIENCE_S) is not None


def test_what_a_loop_raises_in_its_thread_is_raised_to_whoever_joins(make: Make) -> None:
    """A thread that dies unheard leaves a host that waits for ever."""
    node = make("a")

    def broken(now: float) -> list[Event]:
        raise KeyError("planted")

    node.staff.events = broken  # type: ignore[method-assign]  # replaced for this test
    thread = LoopThread(node.loop)
    thread.start()
    for _ in range(2):
        with pytest.raises(KeyError, match="planted"):
            thread.join(PATIENCE_S)


def test_agents_in_threads_meet_at_a_journal_in_memory(make: Make) -> None:
    """Several nodes in one process, each with its loop and its link: what an embedder's controller does."""
    journal = MemoryJournal()
    nodes = [make(name, 3, journal) for name in "abc"]
    threads = [LoopThread(node.loop) for node in nodes]
    for thread in threads:
        thread.start()
    for node in nodes:
        assert node.staff.is_running.wait(PATIENCE_S)
    for node in nodes:
        node.staff.succeed()
    assert [result and result.state for result in (t.join(PATIENCE_S) for t in threads)] == [WorkerState.SUCCEEDED] * 3


# ---- asyncio ----


def test_two_agents_in_one_event_loop(make: Make) -> None:
    """Neither blocks the other, though each waits for the other's entries."""
    journal = MemoryJournal()
    nodes = [make(name, 2, journal) for name in "ab"]

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            results = [tasks.create_task(run_async(node.loop)) for node in nodes]
            await until_async(lambda: all(node.staff.is_running.is_set() for node in nodes))
            for node in nodes:
                node.staff.succeed()
        assert [result.result().state for result in results] == [WorkerState.SUCCEEDED] * 2

    in_time(main())


def test_another_thread_wakes_the_coroutine(make: Make) -> None:
    """The loop sleeps without a deadline in an event loop that has nothing else to do."""
    node = make("a")

    def end() -> None:
        assert node.staff.is_running.wait(PATIENCE_S)
        node.staff.succeed()

    async def main() -> None:
        helper = threading.Thread(target=end)
        helper.start()
        assert (await run_async(node.loop)).state is WorkerState.SUCCEEDED
        helper.join()

    in_time(main())


def test_the_event_loop_is_never_blocked(make: Make) -> None:
    """An agent that waits for news gives its host every moment of it, and asks for none."""
    node = make("a")

    async def main() -> None:
        task = asyncio.create_task(run_async(node.loop))
        await until_async(node.staff.is_running.is_set)
        node.clock.wait = refused  # type: ignore[method-assign]  # replaced for this test
        seen = len(node.seen)
        for _ in range(100):
            await asyncio.sleep(0)  # not a guess: gives the others one turn of the event loop
        assert len(node.seen) - seen <= 2, "it was told of its start, and does not spin"
        node.clock.wait = real  # type: ignore[method-assign]  # replaced for this test
        node.wishes.ask()
        assert (await task).why == SignalReceived(SIGTERM)

    def refused(until: float | None) -> None:
        assert until is not None
        assert until <= node.clock.now(), "this would sleep"
        real(until)

    real = node.clock.wait
    in_time(main())


def test_deadlines_pass_in_an_event_loop(make: Make) -> None:
    """A beat is due every second, whether or not anything happens."""
    node = make("a", 2, MemoryJournal())

    async def main() -> None:
        task = asyncio.create_task(run_async(node.loop))
        await until_async(lambda: any(type(event).__name__ == "Woken" for event in node.seen))
        node.wishes.ask()
        await task

    in_time(main())


def test_a_cancelled_coroutine_leaves_no_reader_and_no_timer(make: Make) -> None:
    """The descriptor is closed next, and its number given away: a reader that is left would be told about a stranger.

    And the loop can be run on by any other shell.
    """
    node = make("a", 2, MemoryJournal())

    async def main() -> None:
        running = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_later = running.call_later

        def noted(*args: Any, **settings: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*args, **settings))
            return timers[-1]

        running.call_later = noted  # type: ignore[method-assign]  # replaced for this test
        task = asyncio.create_task(run_async(node.loop))
        await until_async(lambda: node.loop.wakes_at is not None and timers)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not running.remove_reader(node.clock.fileno()), "there is none"
        running.call_later = call_later  # type: ignore[method-assign]  # replaced for this test
        assert all(timer.cancelled() or timer.when() <= running.time() for timer in timers)

    in_time(main())
    node.wishes.ask()
    assert isinstance(run(node.loop), Result)


def test_a_bug_of_the_loop_is_raised_to_whoever_awaits(make: Make) -> None:
    """And leaves no reader behind either."""
    node = make("a")

    def broken(now: float) -> list[Event]:
        raise KeyError("planted")

    async def main() -> None:
        node.staff.events = broken  # type: ignore[method-assign]  # replaced for this test
        with pytest.raises(KeyError, match="planted"):
            await run_async(node.loop)
        assert not asyncio.get_running_loop().remove_reader(node.clock.fileno())

    in_time(main())


# ---- wishes ----


def test_wishes_come_once_and_in_order(make: Make) -> None:
    """The second shortens the grace of the first, so none may be lost or doubled."""
    node = make("a")
    node.wishes.ask()
    node.wishes.ask(9)
    assert node.wishes.taken() == [SIGTERM, 9]
    assert node.wishes.taken() == []
    node.clock.wait(None)


def test_the_threads_of_a_link_end_with_it() -> None:
    """Whatever they do: a read under way, nothing to say."""
    before = set(threading.enumerate())
    node = Node("a", 2, MemoryJournal())
    thread = LoopThread(node.loop)
    thread.start()
    until(lambda: node.seen)
    node.wishes.ask()
    thread.join(PATIENCE_S)
    node.close()
    assert not set(threading.enumerate()) - before
