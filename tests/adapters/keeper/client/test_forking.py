"""Functions as workers under fork: they have what the program had, and nothing of the keeper."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.keeper.client import forking
from reknit.adapters.keeper.client.function_workers import Function, FunctionError
from reknit.adapters.keeper.output.console import LAST_WORDS_S
from reknit.adapters.keeper.protocol.wire import variables
from reknit.core.agent.events import Started
from reknit.core.agent.worker_words import WorkersExited, WorkersStarted
from tests.support import called
from tests.support.alone import run_alone
from tests.support.calling import begin, call
from tests.support.keepers import Kept, wait_gone
from tests.support.leaks import nothing_left
from tests.support.processes import drive, drive_exits, failures
from tests.support.waiting import is_alive, until

Keep = Callable[..., Kept]


@pytest.fixture
def kept(keep: Keep) -> Kept:
    return keep("unused", start_method="fork")


def test_closures_memory_and_open_files_are_the_programs(kept: Kept, tmp_path: Path) -> None:
    """The reason to choose fork."""
    local = {"seen": "by the closure", "lock": threading.Lock()}
    path = str(tmp_path / "of the host")
    with open(path, "w") as file:
        found = call(kept, lambda: (local["seen"], file.write("written"), file.flush(), called.open_files()))
    assert found[:2] == ("by the closure", 7)
    assert path in found[3]
    assert Path(path).read_text() == "written"
    assert "seen" in local


def test_every_start_sees_the_memory_of_its_moment(kept: Kept) -> None:
    """As with torch: a restart is a new fork."""
    value = ["first"]
    assert call(kept, lambda: value[0]) == "first"
    kept.stop()
    value[0] = "second"
    assert call(kept, lambda: value[0], round_=1) == "second"
    assert kept.stop(round_=1).port != 0


def test_each_worker_has_its_environment_streams_and_files(kept: Kept, tmp_path: Path) -> None:
    """The variables are written in the worker and nowhere else."""
    both = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}
    assert call(kept, called.speak, "one", "two", **both) is None
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("one\n", "two\n")
    kept.stop()
    env = variables({"RANK": "5", "ONLY_HERE": "x"})
    assert call(kept, lambda: (os.environ["RANK"], os.getenv("ONLY_HERE")), round_=1, env=env) == ("5", "x")
    assert "ONLY_HERE" not in os.environ


def test_a_forked_worker_has_nothing_of_the_keeper(kept: Kept) -> None:
    """A stream that it holds open would hide the death of the agent. A signal that it ignores could not end it."""
    found: dict[int, str] = {}

    def look() -> Any:
        return called.descriptors(), called.told_by_the_system(""), gc.isenabled(), gc.get_freeze_count()

    before = set(called.descriptors().values())
    frozen = gc.get_freeze_count()
    found, (ignored, handled, group, _), collects, freeze_count = call(kept, look)
    ours = {signal.SIGPIPE, signal.SIGXFSZ}  # what Python itself ignores
    assert set(ignored) <= ours | {signal.SIGTTOU}
    assert handled == [signal.SIGINT]
    assert (group, collects) == (0, gc.isenabled())
    assert freeze_count <= frozen, "Python 3.12 begins with some"
    new = {path.split(":[")[0] for fd, path in found.items() if fd > 2 and path not in before}
    assert new <= {"/memfd:reknit (deleted)", "pipe", "/dev/null", "anon_inode"}, found
    sockets = {path for path in found.values() if path.startswith("socket")} - before
    assert not sockets
    assert sum(path.startswith("/memfd:reknit") for path in found.values()) == 1


def test_a_worker_is_a_process_of_multiprocessing(kept: Kept) -> None:
    """And its queues work, although nothing is pickled."""
    queue = multiprocessing.get_context("fork").SimpleQueue()
    assert call(kept, called.identity) == ("rank 10", False, True, "fork", True)
    kept.stop()
    call(kept, lambda: queue.put("through"), round_=1)
    assert queue.get() == "through"
    queue.close()


def test_what_was_said_is_written_before_workers_are_forked(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about a start comes before the workers' output. Here no keeper writes both in order."""
    waited: list[tuple[float, int]] = []
    monkeypatch.setattr(kept.keeper, "_has_said", lambda wait_s: waited.append((wait_s, kept.pid)) or True)
    call(kept, called.give)
    assert waited == [(LAST_WORDS_S, 0)], "with which patience, and by which keeper"


def test_several_workers_share_one_group_of_nothing(kept: Kept) -> None:
    """Each has its own value and its own process group, and a stop ends all."""
    begin(kept, *(Function(called.give, (i,)) for i in range(3)), Function(called.pause))
    kept.drive(WorkersStarted)
    kept.drive_until(lambda: kept.keeper.values(0) == {0: 0, 1: 1, 2: 2})
    pids = kept.keeper.pids(0).values()
    assert len({os.getpgid(pid) for pid in pids}) == 4
    kept.stop()
    wait_gone([*pids])


def test_a_signal_is_not_lost_on_a_worker_that_was_forked_just_now(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper ignores SIGTERM. A worker that did so as well would run on for its whole grace."""
    held, released = os.pipe()
    forget = forking.Forks._forget_keeper

    def forget_late(self: forking.Forks, given_back: Any) -> None:
        os.read(held, 1)
        forget(self, given_back)

    monkeypatch.setattr(forking.Forks, "_forget_keeper", forget_late)
    begin(kept, Function(called.give))
    drive(kept.keeper, kept.clock, WorkersStarted)
    (pid,) = kept.keeper.pids(0).values()
    os.kill(pid, signal.SIGTERM)
    os.write(released, b"!")
    (failure,) = failures(drive_exits(kept.keeper, kept.clock, 1))
    assert failure.exitcode == -signal.SIGTERM
    os.close(held)
    os.close(released)


def test_an_exit_status_is_that_of_the_function(kept: Kept) -> None:
    """The code of the host must not run on in the worker: no handler at exit, no test that goes on."""
    assert call(kept, called.leave, 3).exitcode == 3


def test_a_pipe_of_the_program_ends_with_its_workers(kept: Kept) -> None:
    """The keeper is a fork as well. If it held the pipe open, the program would wait for ever."""
    read_end, write_end = os.pipe()
    begin(kept, Function(lambda: os.write(write_end, b"all")))
    kept.drive(WorkersStarted)
    os.close(write_end)
    kept.drive_until(lambda: any(isinstance(event, WorkersExited) for event in kept.seen))
    assert failures(kept.seen) == []
    with open(read_end, "rb") as file:
        assert file.read() == b"all"


def test_what_was_printed_before_is_printed_once(tmp_path: Path) -> None:
    """Text in a buffer is copied by a fork."""
    script = """
        import sys, tempfile
        from pathlib import Path
        from tests.support import called
        from tests.support.calling import call
        from tests.support.keepers import Kept
        print("once")
        kept = Kept(Path(tempfile.mkdtemp()), "unused", start_method="fork")
        print(call(kept, lambda: 7))
        kept.close()
    """
    assert run_alone(script) == "once\n7\n"


def test_a_host_with_threads_and_an_event_loop(keep: Keep, tmp_path: Path) -> None:
    """A notebook: the fork comes from one of its threads, while others run and an event loop waits."""
    stop = threading.Event()
    others = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in others:
        thread.start()

    async def in_a_loop() -> Any:
        kept = keep("unused", start_method="fork")
        return call(kept, lambda: (threading.active_count(), asyncio.run(_seven())))

    async def main() -> Any:
        return await asyncio.to_thread(lambda: asyncio.run(in_a_loop()))

    try:
        assert asyncio.run(main()) == (1, 7)
        assert asyncio.run(in_a_loop()) == (1, 7)
    finally:
        stop.set()
        for thread in others:
            thread.join()


async def _seven() -> int:
    await asyncio.sleep(0)  # not a guess: only one turn of the loop
    return 7


def test_what_the_program_has_dropped_is_not_collected_in_the_keeper(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper would open something under the number of a file that is closed then. Later it would close this number
    as one of the program's."""
    look, host = forking.descriptors, os.getpid()

    def look_and_collect() -> set[int]:
        found = look()
        if os.getpid() != host:
            gc.collect()
        return found

    monkeypatch.setattr(forking, "descriptors", look_and_collect)
    gc.collect()
    gc.disable()
    try:
        pollers: list[Any] = [select.epoll() for _ in range(20)]
        pollers.append(pollers)
        del pollers
        begin(kept, *[Function(lambda: (os.write(2, b"said\n"), os._exit(3)))] * 12)
        found = failures(drive_exits(kept.keeper, kept.clock, 12))  # type: ignore[arg-type]
        assert [failure.stderr for failure in found] == [("said",)] * 12
    finally:
        gc.enable()


def test_the_end_of_the_thread_that_forked_ends_nothing(kept: Kept) -> None:
    """A signal at the death of the parent would come now."""
    thread = threading.Thread(target=begin, args=(kept, Function(called.pause)))
    thread.start()
    thread.join()
    kept.drive(WorkersStarted)
    (pid,) = kept.keeper.pids(0).values()
    until(lambda: not thread.is_alive())
    assert not kept.keeper.events(kept.clock.now())
    assert is_alive(pid)
    assert kept.stop().stuck == ()


@pytest.mark.parametrize("who", ["keeper", "host"])
def test_whoever_is_killed_no_forked_worker_is_left(tmp_path: Path, who: str) -> None:
    """The guard pipe and the keeper's watch hold for forked workers as well."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from reknit.adapters.keeper.client.function_workers import Function
        from reknit.core.agent.worker_words import WorkersStarted
        from tests.support import called
        from tests.support.calling import begin
        from tests.support.keepers import Kept
        kept = Kept(Path(sys.argv[1]), "unused", start_method="fork")
        begin(kept, Function(called.pause), Function(called.pause))
        kept.drive(WorkersStarted)
        pids = [kept.pid, *kept.keeper.pids(0).values()]
        print(*pids, flush=True)
        os.kill(kept.pid if sys.argv[2] == "keeper" else os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "keeper":
            from tests.support.keepers import wait_gone
            wait_gone(pids[1:])
            kept.close()
    """
    import subprocess

    from tests.support.alone import ENV, ROOT, command

    done = subprocess.run(command(script, str(tmp_path), who), capture_output=True, text=True, env=ENV, cwd=ROOT)
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 3, done.stderr
    wait_gone(pids)


def test_a_killed_keeper_is_replaced_and_the_next_start_forks_again(kept: Kept) -> None:
    """Its workers fail, and the program goes on."""
    begin(kept, Function(called.pause))
    kept.drive(WorkersStarted)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    kept.stop()
    value = "still here"
    assert call(kept, lambda: value, round_=1) == "still here"


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under spawn."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nothing_left():
        kept = Kept(tmp_path, "unused", start_method="fork")
        begin(kept, Function(lambda: 1), Function(called.fail, ("plain",)), Function(called.pause))
        kept.drive(WorkersExited)
        kept.close()
    with nothing_left():
        Kept(tmp_path, "unused", start_method="fork").close()


def test_it_is_started_before_anything_is_forked(kept: Kept) -> None:
    """The loop is told so at once. The port is reserved by this process, because there is no keeper yet."""
    (event,) = kept.drive(Started)
    assert isinstance(event, Started)
    assert event.port != 0
    assert kept.pid == 0


def test_a_generator_function_is_refused(kept: Kept) -> None:
    """As under spawn, although nothing is pickled."""
    with pytest.raises(FunctionError, match="a call of it runs nothing"):
        begin(kept, Function(called.generate))


def test_a_daemonic_process_may_be_the_host(tmp_path: Path) -> None:
    """As under spawn."""
    script = """
        import multiprocessing, sys
        from pathlib import Path
        from tests.support import called
        from tests.support.calling import call
        from tests.support.keepers import Kept
        def host(folder):
            kept = Kept(Path(folder), "unused", start_method="fork")
            print(call(kept, lambda: multiprocessing.current_process().daemon), flush=True)
            kept.close()
        process = multiprocessing.get_context("fork").Process(target=host, args=(sys.argv[1],), daemon=True)
        process.start()
        process.join()
    """
    assert run_alone(script, str(tmp_path)) == "False\n"
