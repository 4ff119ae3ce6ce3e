"""Agents of jobs with one node: what killed ones have left is ended by whichever agent starts next."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reknit.adapters.host import lock as hostlock
from reknit.adapters.host.left import end_left
from reknit.adapters.host.lock import remember, take_alone
from tests.support.alone import ENV, ROOT, command
from tests.support.locks import known, worker
from tests.support.places import move
from tests.support.waiting import is_alive


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's locks are."""
    return move(monkeypatch, tmp_path)


@contextmanager
def agent_alone(nonce: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a job with one node until it is killed."""
    code = f"""
import signal
import stat
from reknit.adapters.host.lock import take_alone
lock = take_alone({nonce!r})
print(lock.mark, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{nonce}\n"
        try:
            yield process
        finally:
            process.kill()


def killed_alone(*nonces: str) -> None:
    for nonce in nonces:
        with agent_alone(nonce):
            pass


def test_what_any_killed_agent_of_one_node_left_is_ended(folder: Path) -> None:
    """No later agent has its name, so whichever starts next looks for it. An agent that lives keeps its workers."""
    killed_alone("dead-1", "dead-2")
    with agent_alone("alive"), worker("dead-1") as one, worker("dead-2") as two, worker("alive") as other:
        assert end_left() == (2, ())
        assert [is_alive(pid) for pid in (one, two, other)] == [False, False, True]
        (left,) = os.listdir(folder)
        assert left.endswith("-alive")
        assert end_left() == (0, ())


def test_an_agent_of_one_node_that_ends_leaves_no_file(folder: Path) -> None:
    """A file that stays would make the next start read the process table."""
    lock = take_alone("n")
    assert lock is not None
    lock.release()
    lock.release()
    assert os.listdir(folder) == []


def test_a_file_of_an_agent_that_was_killed_while_it_made_it_is_removed(folder: Path) -> None:
    """Such a file names no lock yet, so no process can carry its mark. A file that is new may still get its name."""
    lock = take_alone("mine")
    old, new = folder / "new-0123", folder / "new-4567"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    end_left()
    assert not old.exists()
    assert new.exists()
    assert lock is not None
    lock.release()


def test_two_agents_that_start_together_both_wait_for_the_end(folder: Path) -> None:
    """Neither may take the other for the owner of what it looks at, and start its workers beside an old one."""
    killed_alone("dead")
    looking = os.open(next(folder.iterdir()), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # the other agent is just looking
    with worker("dead") as pid:
        assert end_left() == (1, ())
        assert not is_alive(pid)
    os.close(looking)


def test_a_container_leaves_the_processes_of_another_to_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share /tmp. An agent that cannot see the processes must not remove what tells of them."""
    killed_alone("dead", "long dead")
    (old,) = folder.glob("*long dead")
    os.utime(old, (0, 0))
    with worker("dead") as pid, agent_alone("alive"):
        with monkeypatch.context() as patched:
            patched.setattr(hostlock, "pid_namespace", lambda: 1)
            (alive,) = folder.glob("*alive")
            os.utime(alive, (0, 0))
            assert end_left() == (0, ())
            assert is_alive(pid)
            assert not old.exists(), "nobody is there who would clear it"
            assert alive.exists()
        assert end_left() == (1, ())
    end_left()
    assert os.listdir(folder) == []


def test_what_an_agent_of_one_node_has_written_down_is_ended() -> None:
    """As for a job with several nodes."""
    lock = take_alone("mine")
    assert lock is not None
    with worker("") as pid, worker("") as other:
        remember("mine", (known(pid),))
        remember("another", (known(other),))
        remember("mine/nonce", (known(pid),))
        lock.abandon()
        assert end_left() == (1, ())
        assert [is_alive(pid), is_alive(other)] == [False, True]


def test_what_survives_is_named_and_tried_again(folder: Path) -> None:
    """A process that hangs in the kernel is not worth a job that does not start."""
    killed_alone("dead")
    with worker("dead") as pid:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(signal, "pidfd_send_signal", lambda *_: None)
            assert end_left(0.05) == (0, (pid,))
        assert end_left() == (1, ())


def test_a_job_of_one_node_needs_no_lock(folder: Path) -> None:
    """A full disk, or a folder that others can enter: the job runs all the same."""
    folder.mkdir()
    folder.chmod(0o1777)
    assert take_alone("n") is None
    assert end_left() == (0, ())


def test_the_process_table_is_not_read_in_vain() -> None:
    """psutil takes milliseconds that the first worker would wait for."""
    script = """
        import sys
        from reknit.adapters.host.left import end_left
        from reknit.adapters.host.lock import take_alone
        lock = take_alone("n")
        end_left()
        lock.release()
        print([name for name in ("psutil", "hashlib", "json", "reknit.adapters.host.orphans") if name in sys.modules])
    """
    assert subprocess.check_output(command(script), env=ENV, cwd=ROOT) == b"[]\n"
