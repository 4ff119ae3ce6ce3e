"""Agents that a program runs itself, in threads and event loops: the program loses nothing and finds nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reknit import CannotStart, Meeting, Prevented, RestartPolicy, Settings, Terms
from reknit.adapters.keeper.client import start as keeper_start
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.threads import Thread
from reknit.app.python import session
from reknit.core import Result
from reknit.core.agent import workers as agent_workers
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event, Started
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import StartWorkers, WorkerExit, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.reasons import BudgetSpent
from reknit.runtime import Session, run, run_async, start
from tests.support.alone import run_alone
from tests.support.interrupts import interrupted, interrupted_after, is_interrupted_at
from tests.support.leaks import children, nothing_left
from tests.support.stores import free_port, needs_torch
from tests.support.waiting import PATIENCE_S, read_pids

TRUE = Settings(command=("true",))


def python(script: str, **settings: Any) -> Settings:
    return Settings(command=(sys.executable, "-c", textwrap.dedent(script)), **settings)


def waiting(folder: Path, **settings: Any) -> Settings:
    """Workers that write their pids and wait."""
    return python(
        f"import os, signal; open({str(folder / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()",
        **settings,
    )


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    run(TRUE)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads, descriptors, children, handlers, the environment, and the folder for temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    first()
    with nothing_left(scratch):
        yield


def test_a_job_that_succeeds() -> None:
    """The first thing that anybody tries."""
    result = run(Settings(command=("true",), local_world_size=3))
    assert result.state is WorkerState.SUCCEEDED
    assert sorted(result.return_values) == [0, 1, 2]


def test_a_job_that_fails_is_a_result() -> None:
    """A program decides what to do about it: nothing is raised, nothing exits."""
    lines: list[str] = []
    result = run(python("raise SystemExit(3)", terms=Terms(restarts=RestartPolicy(max_restarts=1))), say=lines.append)
    assert result.state is WorkerState.FAILED
    assert isinstance(result.why, BudgetSpent)
    assert result.why.root.failure.exitcode == 3
    assert any("restart 1 of 1" in line for line in lines)


def test_the_keeper_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exception with one line, in the thread that asked."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(CannotStart, match="No such file or directory"):
        run(TRUE)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The keeper finds it out; the program is told."""
    (tmp_path / "file").touch()
    with pytest.raises(CannotStart, match="file"):
        run(Settings(command=("true",), log_dir=str(tmp_path / "file")))


def test_a_program_asks_its_node_to_leave(tmp_path: Path) -> None:
    """From any thread, and with the signal of its choice."""
    with start(waiting(tmp_path)) as running:
        read_pids(tmp_path / "pids", 1)
        running.leave(signal.SIGINT)
        result = running.join(PATIENCE_S)
    assert result is not None
    assert result.state is WorkerState.STOPPED
    assert result.why == SignalReceived(signal.SIGINT)


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    """A notebook's cell is interrupted: `with` leaves no worker."""
    with start(waiting(tmp_path, local_world_size=2)) as running:
        pids = read_pids(tmp_path / "pids", 2)
        assert running.join(0.0) is None
    assert not children().keys() & set(pids)


def test_in_an_event_loop() -> None:
    """Three agents and a heartbeat in one thread: nobody waits for anybody."""

    async def main() -> tuple[list[Result], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)  # not a guess: gives the others one turn of the event loop

        beating = asyncio.create_task(beat())
        results = await asyncio.gather(*(run_async(Settings(command=("true",))) for _ in range(3)))
        beating.cancel()
        return results, beats

    results, beats = asyncio.run(main())
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 3
    assert beats > 100


def test_a_cancelled_coroutine_leaves_no_worker(tmp_path: Path) -> None:
    """A web server that shuts down cancels its tasks."""

    async def main() -> None:
        task = asyncio.create_task(run_async(waiting(tmp_path)))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not children()


def test_an_unrelated_child_keeps_its_status() -> None:
    """The program's own children are none of reknit's business, before, while and after an agent runs."""
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has asked how
    run(Settings(command=("true",), local_world_size=2))
    assert other.wait(PATIENCE_S) == 7


@pytest.mark.slow
def test_thirty_agents_one_after_another() -> None:
    """A service that lives for months: what each leaves would add up."""
    for _ in range(30):
        assert run(TRUE).state is WorkerState.SUCCEEDED


@pytest.mark.slow
def test_twenty_agents_at_once() -> None:
    """Each has its keeper, its thread and its clock, and closes its own only."""
    running = [start(TRUE) for _ in range(20)]
    results = [each.join(PATIENCE_S) for each in running]
    for each in running:
        each.close()
        each.close()
    assert [result.state for result in results if result] == [WorkerState.SUCCEEDED] * 20


def test_two_nodes_of_one_job_in_one_program(tmp_path: Path) -> None:
    """A test of somebody's training loop: a job of two nodes without a second machine."""
    meeting = Meeting("file", folder=str(tmp_path / "journal"))
    terms = Terms(min_nodes=2, max_nodes=2, last_call_s=0.1)

    def node(name: str) -> Settings:
        return Settings(command=("true",), terms=terms, meeting=meeting, run_id="two", node_id=name)

    nodes = [start(node(name)) for name in ("a", "b")]
    try:
        results = [each.join(PATIENCE_S) for each in nodes]
    finally:
        for each in nodes:
            each.close()
    assert [result.state for result in results if result] == [WorkerState.SUCCEEDED] * 2


IN_TURN = """
    import os, pathlib, time
    folder, rank = pathlib.Path({folder!r}), int(os.environ["RANK"])
    (folder / f"{{rank}}.new").write_text(str(os.getpid()))
    (folder / f"{{rank}}.new").rename(folder / str(rank))
    while not all((folder / str(each)).exists() for each in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.001)
    if rank:
        while not (folder / ("stops " + {name!r})).exists():
            time.sleep(0.001)
        stat = pathlib.Path(f"/proc/{{(folder / str(rank - 1)).read_text()}}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
    os._exit(rank + 3)
"""
"""Workers that all run, and then fail one after another. Each has seen that the one before it is dead, and that its
node stops its workers."""


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_who_fail_at_the_same_time_are_named(nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mistake on all ranks. None is stopped before it has ended, on no node."""
    monkeypatch.setattr(agent_workers, "AWAIT_EXITS_S", PATIENCE_S)  # no machine is so slow
    meeting = Meeting("file", folder=str(tmp_path / "journal"))

    def node(name: str) -> Session:
        def see(before: object, event: object, after: object, commands: Sequence[object]) -> None:
            if any(isinstance(command, StopWorkers) for command in commands):
                (tmp_path / f"stops {name}").touch()

        settings = python(
            IN_TURN.format(folder=str(tmp_path), name=name),
            node_id=name,
            local_world_size=4 // nodes,
            terms=Terms(nodes, nodes, RestartPolicy(max_restarts=0)),
            meeting=meeting,
            run_id="together",
        )
        return start(settings, observers=[see])

    with contextlib.ExitStack() as opened:
        agents = [opened.enter_context(contextlib.closing(node(name))) for name in "ab"[:nodes]]
        results = [agent.join(PATIENCE_S) for agent in agents]
    for result in results:
        assert result is not None
        assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: 3, 1: 4, 2: 5, 3: 6}


def test_from_a_thread_of_the_program() -> None:
    """Signals can be handled in the main thread only, so an agent must need none."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(run(TRUE)))
    thread.start()
    thread.join(PATIENCE_S)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED]


def test_the_environment_is_the_programs_to_choose(tmp_path: Path) -> None:
    """`os.environ` is read once, and not at all if the program gives another."""
    told = tmp_path / "told"
    script = f"import os; open({str(told)!r}, 'w').write(repr((os.environ.get('MINE'), os.environ.get('PATH'))))"
    run(python(script), environ={"MINE": "1", "PATH": os.defpath})
    assert told.read_text() == repr(("1", os.defpath))


# ---- what a program may do at any time ----


@pytest.mark.alone
@pytest.mark.slow
def test_a_forked_child_that_leaves_the_block_harms_nobody(tmp_path: Path) -> None:
    """`multiprocessing` by fork unwinds the stack in the child: the agent, its clock and its lock are the parent's."""
    meeting = Meeting("file", folder=str(tmp_path / "journal"))
    settings = waiting(tmp_path, meeting=meeting, run_id="forked", node_id="a")
    with start(settings) as running:
        read_pids(tmp_path / "pids", 1)
        child = os.fork()
        if child == 0:
            running.leave()
            running.close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(Prevented, match="another agent"):
            run(settings)
        running.leave()
        result = running.join(PATIENCE_S)
    assert result is not None
    assert result.why == SignalReceived(signal.SIGTERM)


def test_an_observer_that_ends_the_program_leaves_nothing() -> None:
    """SystemExit comes out of `join`, after everything was closed."""

    def observer(*step: object) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run(Settings(command=("sleep", "600")), observers=[observer])


def test_what_cannot_be_opened_leaves_nothing() -> None:
    """A wrong argument is found out after the keeper was started."""
    with pytest.raises(TypeError):
        start(TRUE, observers=None)  # type: ignore[arg-type]  # the wrong argument that is meant


def test_a_wrong_argument_is_named() -> None:
    """Before anything is opened."""
    with nothing_left(), pytest.raises(ValueError, match=r"^settings must be a Settings, not 'train\.py'"):
        run("train.py")  # type: ignore[arg-type]  # the wrong argument that is meant
    with nothing_left(), pytest.raises(ValueError, match=r"^say must be a function, or None, not 'x'"):
        start(TRUE, say="x")  # type: ignore[arg-type]  # the wrong argument that is meant


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the machine: one exception with one line."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CannotStart, match="can't start new thread"):
            start(TRUE)


def test_an_agent_is_started_once() -> None:
    """Two threads in one loop would make steps from one state."""
    with start(TRUE) as running:
        with pytest.raises(RuntimeError, match="once"):
            running.start()
        assert running.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="closed"):
        running.start()


def test_a_coroutine_that_is_cancelled_while_it_opens(tmp_path: Path) -> None:
    """`asyncio.wait_for` may lose patience before the store of a job is reached."""

    async def main() -> None:
        task = asyncio.create_task(run_async(Settings(command=("sleep", "600"))))
        await asyncio.sleep(0)  # not a guess: the task has begun, and cannot have opened anything
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_coroutine_whose_event_loop_ends_while_it_opens() -> None:
    """`asyncio.run` cancels every task at its end. What the task has begun in a thread must be closed all the same."""

    async def main() -> None:
        asyncio.create_task(run_async(Settings(command=("sleep", "600"))))  # noqa: RUF006  # `asyncio.run` cancels it
        await asyncio.sleep(0)  # not a guess: the task has begun, and cannot have opened anything

    asyncio.run(main())


def test_a_cancellation_that_is_repeated_is_one(tmp_path: Path) -> None:
    """Some libraries cancel a task in every turn of the event loop until it has ended. The workers have their grace."""
    saves = f"""
        import os, select, signal, sys
        def save(*_):
            select.select([], [], [], 2.5)  # longer than the pauses between two requests that count
            open({str(tmp_path / "saved")!r}, "w").close()
            sys.exit(1)
        signal.signal(signal.SIGTERM, save)
        open({str(tmp_path / "pids")!r}, "a").write(f"{{os.getpid()}}\\n")
        signal.pause()
    """

    async def main() -> None:
        task = asyncio.create_task(run_async(python(saves)))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (tmp_path / "saved").exists()
    assert not children()


def test_a_cancelled_host_does_not_stay_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cancels a task wants it to end. `reknit run` would serve the other node for as long as that runs."""
    needs_torch()
    monkeypatch.setattr(session, "_GOODBYE_S", 0.5)
    meeting = Meeting("c10d", endpoints=(("127.0.0.1", free_port()),))
    terms = Terms(1, 2, last_call_s=1.0)
    host, guest = (
        waiting(tmp_path, terms=terms, meeting=meeting, run_id="two", node_id=name, grace_s=1.0) for name in "ab"
    )

    async def main() -> None:
        first = asyncio.create_task(run_async(host))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        second = asyncio.create_task(run_async(guest))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 3)
        for task in (first, second):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert not children()


def test_a_coroutine_that_is_cancelled_twice(tmp_path: Path) -> None:
    """The second Ctrl-C comes while the first one is closing the agent."""

    async def main() -> None:
        task = asyncio.create_task(run_async(waiting(tmp_path)))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)  # not a guess: the task has got the first one, and is closing
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not children()


def test_a_program_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that takes another's place starts its workers where the first one did."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    script = f"import os, signal; open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()"
    terms = Terms(restarts=RestartPolicy(max_restarts=1))
    with start(python(script, terms=terms)) as running:
        (first,) = read_pids(tmp_path / "pids", 1)
        monkeypatch.chdir(tmp_path)
        os.kill(running.loop.ports.workers.pid, signal.SIGKILL)  # type: ignore[attr-defined]  # these workers are a `Keeper`
        second = read_pids(tmp_path / "pids", 2)[1]
        assert os.readlink(f"/proc/{second}/cwd") == str(tmp_path / "a")
    assert first != second


DAEMON = """
    import json, os, sys
    from pathlib import Path
    import psutil
    from reknit import Meeting, Settings, Terms
    from reknit.runtime import start
    from tests.support.waiting import until
    def standard(pid): return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)]
    shown, folder = os.dup(1), Path(sys.argv[1])
    for fd in range(3): os.close(fd)
    meeting = Meeting("file", folder=sys.argv[1] + "/journal") if sys.argv[2] == "several" else None
    settings = Settings(command=(sys.executable, "-c", sys.argv[3], sys.argv[1]), local_world_size=2, meeting=meeting,
                        terms=Terms(last_call_s=0.0), run_id="job")
    with start(settings) as running:
        until(lambda: all((folder / f"up{rank}").exists() for rank in range(2)))
        seen = standard(os.getpid()), standard(psutil.Process().children()[0].pid)
        for fd in (1, 2): os.write(fd, b"what a daemon prints")
        (folder / "go").touch()
        state = running.join(60.0).state.name
    os.write(shown, json.dumps([*seen, state]).encode())
"""


@pytest.mark.parametrize("nodes", ["one", "several"])
def test_a_daemon_has_nothing_of_reknit_in_the_place_of_its_stdout(tmp_path: Path, nodes: str) -> None:
    """It has closed 0 to 2. What it prints must not get into a pipe of reknit's, and its workers read and write none of
    reknit's streams."""
    worker = """
        import os, sys, time
        assert os.read(0, 1) == b""
        os.write(1, b"out"); os.write(2, b"err")
        open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
        while not os.path.exists(sys.argv[1] + "/go"): time.sleep(0.01)
    """
    shown = run_alone(DAEMON, str(tmp_path), nodes, textwrap.dedent(worker))
    null = [os.devnull] * 3
    assert json.loads(shown) == [null, null, "SUCCEEDED"]


# ---- a program that has workers of its own ----


def test_a_program_brings_the_port_of_its_workers() -> None:
    """The agent decides, and the program carries out. It is told of the agent's end."""
    ended = threading.Event()
    made: list[Staff] = []

    def workers(clock: SystemClock, nonce: str, mark: str) -> Staff:
        assert nonce in mark
        made.append(Staff(clock, nonce))
        return made[-1]

    running = Session(TRUE, say=lambda line: None, workers=workers, on_end=ended.set)
    running.start()
    assert ended.wait(PATIENCE_S)
    result = running.join(PATIENCE_S)
    assert result is not None
    assert result.state is WorkerState.SUCCEEDED
    assert not made[0].is_closed
    running.close()
    assert made[0].is_closed


class Staff:
    """Workers that succeed at once. Implements `ports.Workers`."""

    wakes_at = 0.0

    def __init__(self, clock: SystemClock, nonce: str) -> None:
        self.told: list[Event] = [Started(clock.now(), nonce, 1)]
        self.is_closed = False
        self.clock = clock

    def start(self, command: StartWorkers) -> None:
        now = self.clock.now()
        self.told += [WorkersStarted(now, command.round), WorkersExited(now, command.round, (WorkerExit(0),))]

    def stop(self, command: StopWorkers) -> None:
        self.told.append(WorkersStopped(self.clock.now(), command.round, 2))

    def renew_port(self) -> None:
        raise AssertionError("no round is over before it begins")

    def events(self, now: float) -> list[Event]:
        told, self.told = self.told, []
        return told

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.alone
def test_an_interrupted_close_can_be_repeated(tmp_path: Path) -> None:
    """Ctrl-C while it waits, for example for an object in the place of `sys.stdout` that takes nothing."""
    held, seen = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            seen.set()
            return super().write(text) if held.wait(PATIENCE_S) else 0

    with nothing_left(tmp_path):
        with contextlib.redirect_stdout(Slow()):
            running = Session(Settings(command=("echo", "line")))
        running.start()
        assert running.join(PATIENCE_S) is not None
        assert seen.wait(PATIENCE_S)
        interrupted(running.close)
        held.set()
        running.close()


@pytest.mark.alone
def test_a_close_that_was_interrupted_anywhere_can_be_repeated() -> None:
    """Ctrl-C may come between any two lines."""
    is_interrupted, line = True, 0
    while is_interrupted:
        running = start(TRUE)
        assert running.join(PATIENCE_S) is not None
        is_interrupted = is_interrupted_at(line, session.__file__, running.close)
        running.close()
        line += 1
    assert line > 10, "it has been interrupted in some lines"


def test_an_error_in_the_place_of_a_line_keeps_nothing_open() -> None:
    """A program's own `say` may raise when a handler of events is closed. The workers are ended all the same."""

    def say(line: str) -> None:
        if "torchelastic" in line:
            raise ValueError("not this line")

    with pytest.raises(ValueError, match="not this line"):
        run(Settings(command=("sleep", "600"), event_handler="console"), say=say)
    assert not children()


@pytest.mark.parametrize("name", ["agent", "reknit output"])
def test_an_interrupt_while_a_thread_begins_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits for the thread, so Ctrl-C may come there. Nobody could close the agent."""
    begin = Thread.start

    def interrupted_start(thread: Thread) -> None:
        begin(thread)
        if thread.name != "reknit call" and (thread.name == "reknit output") == (name == "reknit output"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        patched.setattr(Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            start(TRUE, say=lambda line: None)
    assert not children()


@pytest.mark.parametrize(("owner", "moment"), [(keeper_start, "spawned"), (Session, "_close_own")])
@pytest.mark.alone
def test_an_interrupt_while_an_agent_is_opened_or_closed_leaves_nothing(owner: Any, moment: str) -> None:
    """Ctrl-C, when a keeper was just started or was just ended. Nobody has the agent, so nobody could close it."""
    interrupted_after(owner, moment, lambda: run(TRUE))
    assert not children()
