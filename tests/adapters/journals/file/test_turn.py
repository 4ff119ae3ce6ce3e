"""A lock between processes and threads, any of which may die or hang."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from reknit.adapters.journals.file.turn import Turn
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job.reasons import Refusal
from tests.support.alone import ENV, ROOT, command
from tests.support.waiting import PATIENCE_S

HOLDER = """
import sys
from reknit.adapters.journals.file.turn import Turn
with Turn(sys.argv[1], 5.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command(HOLDER, str(path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_who_waits_in_vain_says_for_whom(tmp_path: Path) -> None:
    """One hung node stops all others: its operator must learn which."""
    with holder(tmp_path / "lock") as process:
        with pytest.raises(
            Unavailable, match=rf"waited 0.1 s for the lock; process {process.pid} of this host \(python.*\) holds it$"
        ):
            Turn(str(tmp_path / "lock"), 0.1).__enter__()
        process.send_signal(signal.SIGKILL)


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    """Nodes die in the middle of a word."""
    with holder(tmp_path / "lock") as process:
        process.kill()
    with Turn(str(tmp_path / "lock"), PATIENCE_S):
        pass


def test_another_process_gets_it_when_it_is_let_go(tmp_path: Path) -> None:
    """Also if the first ends with an exception."""
    path = tmp_path / "lock"
    with pytest.raises(KeyError), Turn(str(path), PATIENCE_S):
        raise KeyError
    with holder(path) as process:
        process.communicate("")
    with Turn(str(path), PATIENCE_S):
        pass


def test_threads_of_a_process_take_turns_too(tmp_path: Path) -> None:
    """A POSIX lock alone would let them all in."""
    path, inside, most = str(tmp_path / "lock"), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with Turn(path, PATIENCE_S):
                inside += 1
                most = max(most, inside)
                os.sched_yield()
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_thread_that_hangs_inside_holds_the_others_up_for_a_limited_time(tmp_path: Path) -> None:
    """A write to a dead file server may never return."""
    late = Turn(str(tmp_path / "other"), 0.05)
    with Turn(str(tmp_path / "lock"), PATIENCE_S), pytest.raises(Unavailable, match=r"0\.05 s for another thread"):
        late.__enter__()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without `flock`, some FUSE: two writers would write over each other. Waiting does not help."""

    def lockf(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(Refused, match="cannot lock files") as refused:
        Turn(str(tmp_path / "lock"), PATIENCE_S).__enter__()
    assert refused.value.refusal is Refusal.SETUP
    monkeypatch.undo()
    with Turn(str(tmp_path / "lock"), PATIENCE_S):
        pass


GREEDY = """
import sys
from reknit.adapters.journals.file.turn import Turn
while True:
    with Turn(sys.argv[1], 60.0):
        print("x" * 50, file=sys.stderr, flush=True)
        sum(range(50_000))
"""


def test_nobody_starves_between_those_who_take_it_without_a_break(tmp_path: Path) -> None:
    """A failing job's nodes all have much to say, and each must get a word in."""
    path = tmp_path / "lock"
    with ExitStack() as stack:
        for _ in range(3):
            process = stack.enter_context(
                subprocess.Popen(command(GREEDY, str(path)), stderr=subprocess.PIPE, env=ENV, cwd=ROOT)
            )
            stack.callback(process.kill)
            assert process.stderr is not None
            assert process.stderr.readline()
            threading.Thread(target=process.stderr.read, daemon=True).start()
        for _ in range(20):
            with Turn(str(path), PATIENCE_S):
                pass
