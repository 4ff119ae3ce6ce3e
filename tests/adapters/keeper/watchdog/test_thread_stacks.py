"""What a hung worker is doing, seen from outside: by py-spy, by its own faulthandler, or by the kernel alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.watchdog.activity import Frame, Kernel, ThreadStack
from reknit.adapters.keeper.watchdog.thread_stacks import (
    Dump,
    _memory_file,
    kernel_of,
    py_spy_for,
    pythons_of,
    split_dump,
    stacks_text,
)
from reknit.adapters.runtime.clock import SystemClock
from tests.support.leaks import nothing_left
from tests.support.waiting import until

needs_py_spy = pytest.mark.skipif(not py_spy_for(os.getpid()), reason="py-spy is not installed")
SLEEPER = "import time\ndef waits():\n    print(flush=True)\n    time.sleep(1e6)\nwaits()"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that sleeps in a function."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: kernel_of(process.pid).state == "S", "the process to sleep")
        yield process
        process.kill()


def dumped(pid: int, clock: SystemClock, py_spy: str) -> tuple[ThreadStack, ...]:
    guard = Guard()
    dump = Dump(py_spy, pid, clock, guard)
    while not dump.is_over():
        clock.wait(clock.now() + 60)
    dump.close()
    guard.close()
    return dump.threads


@needs_py_spy
@pytest.mark.parametrize("is_stopped", [False, True])
def test_py_spy_shows_the_stacks(sleeper: subprocess.Popen[bytes], clock: SystemClock, is_stopped: bool) -> None:
    """Also of a process that was stopped. Nothing is left of py-spy."""
    if is_stopped:
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: kernel_of(sleeper.pid).state == "T")
    with nothing_left():
        (thread,) = dumped(sleeper.pid, clock, py_spy_for(sleeper.pid))
    assert thread.frames == (Frame("waits", "<string>", 4), Frame("<module>", "<string>", 5))
    assert (thread.is_main, thread.is_busy, thread.has_gil) == (True, False, False)
    title, _, stack = stacks_text([thread]).partition("\n")
    assert title.startswith(f"Thread {sleeper.pid} (idle)")
    assert stack == "    waits (<string>:4)\n    <module> (<string>:5)"
    assert kernel_of(sleeper.pid).is_stopped is is_stopped


@pytest.mark.parametrize("program", ["true", "cat"])
def test_a_py_spy_that_shows_nothing(clock: SystemClock, program: str) -> None:
    """It was not allowed to look, or the process is no Python."""
    assert dumped(os.getpid(), clock, shutil.which(program) or "") == ()


def test_a_py_spy_that_hangs(clock: SystemClock, tmp_path: Path) -> None:
    """It is killed when its time is over."""
    slow = tmp_path / "py-spy"
    slow.write_text(f"#!/bin/sh\necho [\n: > {tmp_path}/begun\nexec sleep 1000000\n")
    slow.chmod(0o755)
    guard = Guard()
    with nothing_left():
        dump = Dump(str(slow), os.getpid(), clock, guard)
        until(lambda: not dump.is_over() and (tmp_path / "begun").exists(), "its start")
        dump.close()
        dump.close()
    assert dump.threads == ()
    guard.close()


def test_a_py_spy_that_cannot_be_started(clock: SystemClock, tmp_path: Path) -> None:
    """Nothing is left open."""
    guard = Guard()
    with nothing_left(), pytest.raises(OSError, match="No such file"):
        Dump(str(tmp_path / "none"), os.getpid(), clock, guard)
    guard.close()


def test_py_spy_is_found_beside_the_workers_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may have an environment of its own. PATH is the last place."""
    (tmp_path / "bin").mkdir()
    beside, in_path = tmp_path / "bin" / "py-spy", tmp_path / "py-spy"
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with subprocess.Popen([python, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert py_spy_for(process.pid) == ""
        for file in (in_path, beside):
            file.write_text("#!/bin/sh\n")
            file.chmod(0o755)
            assert py_spy_for(process.pid) == str(file)
        process.kill()
    assert py_spy_for(2**22) == str(in_path)


def test_the_memory_of_a_process_that_the_kernel_does_not_let_run_is_not_read(tmp_path: Path) -> None:
    """The keeper might wait for ever. A process is in state D while its new child has not executed a program yet."""
    os.mkfifo(tmp_path / "fifo")
    script = (
        "import os; os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'fifo', 0, 0)])"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path) as process:
        until(lambda: kernel_of(process.pid).state == "D", "state D")
        assert _memory_file(process.pid, "cmdline") == b""
        assert pythons_of(process.pid) == [process.pid]
        assert kernel_of(process.pid).remark.startswith("the kernel does not let it run")
        assert kernel_of(process.pid).description.startswith("state D")
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
    assert _memory_file(os.getpid(), "cmdline")


def test_the_pythons_of_a_launcher() -> None:
    """A worker may be a shell script that starts Python."""
    script = f'{sys.executable} -c "$1"; true'
    with subprocess.Popen(["sh", "-c", script, "sh", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = pythons_of(process.pid)
        assert child != process.pid
        assert pythons_of(child) == [child]
        os.kill(child, signal.SIGKILL)
    assert pythons_of(process.pid) == []


def test_what_the_kernel_says(sleeper: subprocess.Popen[bytes]) -> None:
    """For a worker that is no Python, or that nobody may look into."""
    assert kernel_of(sleeper.pid).description.startswith("state S")
    assert kernel_of(2**22) == Kernel()


def test_the_stacks_of_faulthandler() -> None:
    """They are the worker's last words, and its lines before them stay its last lines. The main thread comes last."""
    script = """
import faulthandler, os, sys, threading, time
faulthandler.enable()
def other():
    time.sleep(1e6)
threading.Thread(target=other, daemon=True).start()
def main():
    print("last", file=sys.stderr, flush=True)
    os.abort()
main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    threads, before = split_dump(ended.stderr.splitlines())
    assert before == ("last",)
    assert [thread.is_main for thread in threads] == [False, True]
    assert threads[0].frames[0] == Frame("other", "<string>", 5)
    assert threads[1].frames == (Frame("main", "<string>", 9), Frame("<module>", "<string>", 10))
    assert stacks_text(threads).splitlines()[-1] == "    <module> (<string>:10)"
    assert split_dump(("a", "b")) == ((), ("a", "b"))
