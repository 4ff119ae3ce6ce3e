"""Finding and ending descendants: real processes, under a test process that becomes a subreaper."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from reknit.adapters.host import children
from tests.support.alone import STUBBORN, run_alone
from tests.support.waiting import is_alive, read_pids, until


def test_children_lists_exactly_the_direct_children_dead_ones_included() -> None:
    """Strays are found by this list: one that is missing would outlive the job."""
    before = set(children.children())
    sleeper = subprocess.Popen(["sleep", "600"])
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
    assert set(children.children()) - before == {sleeper.pid, dead}
    os.waitpid(dead, 0)
    sleeper.kill()
    sleeper.wait()
    assert set(children.children()) == before


def test_children_falls_back_without_the_children_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without CONFIG_PROC_CHILDREN, and gVisor, have no such files."""
    before = set(children.children())
    sleeper = subprocess.Popen(["sleep", "600"])
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
    open_ = os.open

    def without(path: str, flags: int) -> int:
        if path.endswith("/children"):
            raise FileNotFoundError(path)
        return open_(path, flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", without)
        found = set(children.children())
    assert found - before == {sleeper.pid, dead}
    os.waitpid(dead, 0)
    sleeper.kill()
    sleeper.wait()


def test_children_are_known_without_the_list_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no /proc: psutil asks its kernel, and daemons are found there, too."""

    def missing(path: str) -> list[str]:
        raise FileNotFoundError(path)

    sleeper = subprocess.Popen(["sleep", "600"])
    with monkeypatch.context() as patched:
        patched.setattr(children, "os", Mock(wraps=os, listdir=missing))
        assert sleeper.pid in children.children()
    sleeper.kill()
    sleeper.wait()


def test_sweep_ends_what_hides(tmp_path: Path) -> None:
    """A grandchild that double-forked, has its own session and ignores signals is still found and killed."""
    pids = tmp_path / "pids"
    out = run_alone(
        """
        import subprocess, sys
        from reknit.adapters.host.children import become_subreaper, children, sweep
        from tests.support.waiting import read_pids
        assert become_subreaper()
        for _ in range(3):
            subprocess.Popen([sys.executable, *sys.argv[1:], "ignore", "grandchild"])
        read_pids(sys.argv[2], 6)
        assert sweep(60.0) == ()
        assert children() == []
        print("swept")
        """,
        STUBBORN,
        str(pids),
    )
    assert out == "swept\n"
    assert not any(map(is_alive, read_pids(pids, 6)))


def test_sweep_without_children_returns_at_once() -> None:
    """Every round and every run ends with a sweep: with nothing to do it must cost nothing."""
    assert (
        run_alone("from reknit.adapters.host.children import *; print(sweep(0.0), sweep_counting(0.0))")
        == "() (0, ())\n"
    )


def test_sweep_reports_what_would_not_die() -> None:
    """An unkillable process must be named and must not hold the agent for ever."""
    out = run_alone(
        """
        import os, subprocess
        from reknit.adapters.host import children
        child = subprocess.Popen(["sleep", "600"])
        children.signal_process = lambda pid, signum: None  # as if SIGKILL did nothing
        print(children.sweep(0.05) == (child.pid,))
        child.kill(); child.wait()
        """
    )
    assert out == "True\n"


def test_signals_to_the_dead_are_harmless() -> None:
    """Between a look and a signal anything may die."""
    pid = os.posix_spawn("/bin/true", ["true"], {}, setpgroup=0)
    os.waitpid(pid, 0)
    children.signal_process(pid, signal.SIGTERM)
    children.signal_group(pid, signal.SIGTERM)


def test_the_name_of_a_program_may_hold_anything(tmp_path: Path) -> None:
    """In the file it stands between brackets, before the state."""
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    sleeper = subprocess.Popen([str(odd), "600"])
    until(lambda: children.stat_of(str(sleeper.pid))[0] == b"S")
    assert children.stat_of(str(sleeper.pid))[1] == str(os.getpid()).encode()
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(OSError, match="No such"):
        children.stat_of(str(sleeper.pid))


def test_reap_is_bounded() -> None:
    """What cannot be killed must not hold `close`."""
    sleeper = subprocess.Popen(["sleep", "600"])
    children.reap([sleeper.pid], 0.01)
    assert sleeper.poll() is None
    sleeper.kill()
    until(lambda: not is_alive(sleeper.pid))
    children.reap([sleeper.pid], 60.0)
    with pytest.raises(ChildProcessError):
        os.waitpid(sleeper.pid, os.WNOHANG)
    sleeper.returncode = -9  # Popen cannot know
