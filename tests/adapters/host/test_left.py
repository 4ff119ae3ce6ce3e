"""What killed agents of jobs with several nodes have left on this host.

tests/adapters/host/test_lock_alone.py has those of jobs with one node. Real locks of real processes, which are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reknit.adapters.host.children import stat_of
from reknit.adapters.host.left import end_left
from reknit.adapters.host.lock import Taken, take
from tests.support.alone import ENV, ROOT, command
from tests.support.places import move
from tests.support.waiting import is_alive, until

AGENT = """
    import subprocess, sys
    from reknit.adapters.host.lock import remember, take
    from reknit.adapters.host.record import identified
    from reknit.adapters.host.orphans import MARK
    lock = take("j", "place", "n")
    if sys.argv[1]:
        lock.note(sys.argv[1])
    argv, env = [sys.executable, "-c", "import signal; signal.pause()"], {MARK: lock.mark + "/workers"}
    worker = subprocess.Popen(argv, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    remember(lock.mark, (identified(worker.pid),))
    print(worker.pid, flush=True)
    input()
"""
DAY_S = 86400


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the locks is this test's own."""
    return move(monkeypatch, tmp_path)


@contextmanager
def agent(note: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An agent of the job j with its worker."""
    argv = command(AGENT, note)
    with subprocess.Popen(argv, env=ENV, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            yield process, worker
        finally:
            process.kill()
            if is_alive(worker):
                os.kill(worker, signal.SIGKILL)


def test_any_start_ends_what_was_left_and_removes_the_file(folder: Path) -> None:
    """Otherwise each killed job would leave a file for ever, and workers until somebody runs the same job again."""
    with agent() as (process, worker):
        assert end_left() == (0, ())
        assert is_alive(worker), "its agent lives"
        process.kill()
        process.wait()
        assert end_left() == (1, ())
        assert not is_alive(worker)
        assert os.listdir(folder) == []


def test_a_note_stays_for_a_day(folder: Path) -> None:
    """The next agent of this job and node needs it, and comes later than an agent of another job."""
    with agent("hosts the store") as (process, worker):
        process.kill()
        process.wait()
        assert end_left() == (1, ())
        assert not is_alive(worker)
    assert end_left() == (0, ())
    lock = take("j", "place", "n")
    assert lock.left_note == "hosts the store"
    lock.abandon()  # as if it were killed
    (file,) = folder.iterdir()
    os.utime(file, (0, 0))
    assert end_left() == (0, ())  # this process, which the file names, lives. But it has let go of the lock
    assert list(folder.iterdir()) == [file]
    os.utime(file, (0, 0))
    assert end_left() == (0, ())
    assert list(folder.iterdir()) == []


def test_files_of_other_containers_are_left_for_a_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes cannot be seen from here. The next agent there ends them."""
    with agent() as (process, worker):
        process.kill()
        process.wait()
        monkeypatch.setattr("reknit.adapters.host.place.pid_namespace", lambda: 7)
        assert end_left() == (0, ())
        assert is_alive(worker)
        (file,) = folder.iterdir()
        os.utime(file, (0, 0))
        assert end_left() == (0, ())
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("who", ["take", "end_left"])
def test_a_start_waits_while_another_one_ends_processes(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that it starts would carry the mark of those that are ended. A start of another job must not find the
    GPUs in use."""
    begun, may_go_on = threading.Event(), threading.Event()
    from reknit.adapters.host import orphans

    ends = orphans.end_marked

    def end_slowly(*args: object, **settings: object) -> object:
        begun.set()
        may_go_on.wait()
        return ends(*args, **settings)

    monkeypatch.setattr(orphans, "end_marked", end_slowly)
    with agent() as (process, worker):
        process.kill()
        process.wait()
        slow = threading.Thread(target=end_left)
        slow.start()
        begun.wait()
        done = list[object]()
        start = (lambda: take("j", "place", "n")) if who == "take" else end_left
        waiting = threading.Thread(target=lambda: done.append(start()))
        waiting.start()
        until(lambda: stat_of(f"{os.getpid()}/task/{waiting.native_id}")[0] == b"S", "the start to wait")
        assert not done
        may_go_on.set()
        slow.join()
        waiting.join()
        assert not is_alive(worker)
        (result,) = done
        if who == "take":
            with pytest.raises(Taken):
                take("j", "place", "n")
            result.release()
        else:
            assert result == (0, ())
