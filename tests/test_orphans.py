"""Ending processes by the mark in their environment: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from reknit.adapters.orphans import MARK, end_marked, end_marked_counting
from tests.alone import ENV, run_alone
from tests.leaks import marked
from tests.waiting import PATIENCE_S, descriptors, is_alive


@contextmanager
def process(mark: str, name: str = MARK) -> Iterator[int]:
    """A process with that mark that ignores SIGTERM."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, name: mark}, stdout=subprocess.PIPE, start_new_session=True
    ) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == b"up\n"
        try:
            yield made.pid
        finally:
            made.kill()


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> str:
    """A mark of this test's own."""
    return f"{request.node.name}/{os.getpid()}"


def test_all_with_the_mark_end_and_no_others(mark: str) -> None:
    """A job beside this one on the host is none of our business."""
    with process(mark) as one, process(mark) as two, process(mark + "x") as other, process(mark, "OTHER") as elsewhere:
        assert end_marked(mark, PATIENCE_S) == 2
        assert [is_alive(pid) for pid in (one, two, other, elsewhere)] == [False, False, True, True]
        assert end_marked(mark, PATIENCE_S, name="OTHER") == 1
        assert not is_alive(elsewhere)
    assert end_marked(mark, PATIENCE_S) == 0


def test_the_spared_live(mark: str) -> None:
    """Whoever ends a keeper's workers may have started new ones under the same mark."""
    with process(mark) as one, process(mark) as spared:
        assert end_marked(mark, PATIENCE_S, [spared]) == 1
        assert (is_alive(one), is_alive(spared)) == (False, True)


def test_what_forks_while_it_is_killed_is_ended_too(mark: str) -> None:
    """A worker may be starting its own workers when it is found."""
    # The sleep is the pace at which the processes double. Without it they would fill the host's process table.
    code = "import os, time\nwhile True:\n    if os.fork() == 0: os.setsid()\n    os.write(1, b'x'); time.sleep(0.05)"
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", code]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE) as forking:
        assert forking.stdout is not None
        assert forking.stdout.read(8) == b"x" * 8
        assert end_marked(mark, PATIENCE_S) >= 2
    assert not marked(f"{MARK}={mark}")


def test_this_process_and_its_ancestors_live() -> None:
    """A keeper that is started inside a worker's shell must end neither the shell nor itself."""
    inner = "from reknit.adapters.orphans import end_marked; print(end_marked('m', 60.0))"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True); print('lives')"
    done = subprocess.run([sys.executable, "-c", outer], env={**ENV, MARK: "m"}, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "lives"], done.stderr


def test_what_does_not_die_is_named_in_time(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded: a process that hangs in the kernel must not hold the agent for ever."""
    with process(mark) as pid, monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", lambda *_: None)
        assert end_marked_counting(mark, 0.05) == (0, (pid,))


def test_without_pidfds_psutil_watches_over_the_number(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has none."""
    monkeypatch.delattr(os, "pidfd_open")
    with process(mark) as pid:
        assert end_marked(mark, PATIENCE_S) == 1
        assert not is_alive(pid)


def test_processes_that_vanish_or_must_not_be_read_are_passed_over(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the list and the look anything may end, and a host has other users."""
    read = psutil.Process.environ
    errors = iter([psutil.AccessDenied(), psutil.NoSuchProcess(1), psutil.ZombieProcess(1), ProcessLookupError()])

    def environ(self: psutil.Process) -> dict[str, str]:
        if self.pid != pid and (error := next(errors, None)):
            raise error
        return dict(read(self))

    before = descriptors()
    with process(mark) as pid, process("a" + mark), process("b" + mark), process("c" + mark), process("d" + mark):
        monkeypatch.setattr(psutil.Process, "environ", environ)
        assert end_marked(mark, PATIENCE_S) == 1
    assert not descriptors() - before


def test_a_process_whose_program_is_just_being_replaced_is_found(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows an empty environment for a moment: a worker that is just starting would outlive its agent."""
    read, seen = psutil.Process.environ, set[int]()

    def environ(self: psutil.Process) -> dict[str, str]:
        if self.pid in seen:
            return dict(read(self))
        seen.add(self.pid)
        return {}

    before = descriptors()
    with process(mark) as pid, process(mark + "x") as other:
        monkeypatch.setattr(psutil.Process, "environ", environ)
        assert end_marked(mark, PATIENCE_S) == 1
        assert (is_alive(pid), is_alive(other)) == (False, True)
    assert not descriptors() - before


def test_nothing_is_loaded_for_it_before_it_is_needed() -> None:
    """psutil takes milliseconds that the first worker would wait for."""
    script = """
        import sys
        import reknit.adapters.hostlock, reknit.adapters.children
        reknit.adapters.children.become_subreaper()
        reknit.adapters.children.sweep(0.0)
        print("psutil" in sys.modules)
    """
    assert run_alone(script) == "False\n"
