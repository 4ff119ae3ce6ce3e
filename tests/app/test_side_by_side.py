"""Work in several processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from reknit.app.limits import limit_text
from reknit.app.side_by_side import side_by_side
from tests.support.leaks import children
from tests.support.waiting import PATIENCE_S, is_alive, until

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert children() == {}


def sum_of(number: int, other: int) -> tuple[int, int]:
    """Work that tells where it was done. The number 3 ends its process."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number + other, os.getpid()


def refuses(number: int) -> int:
    raise KeyError(number)


def counts(number: int, tell: Callable[[], None]) -> int:
    for _ in range(number):
        tell()
    return number


def test_results_come_in_order_and_from_other_processes() -> None:
    """They may be done in another order."""
    with side_by_side(sum_of, range(20, 30), range(10), processes=2) as found:
        results = list(found)
    assert [number for number, _ in results] == list(range(20, 40, 2))
    assert os.getpid() not in {pid for _, pid in results}


@pytest.mark.parametrize(("processes", "things"), [(1, [1, 2]), (2, [1]), (2, [])])
def test_what_needs_one_process_is_done_here(processes: int, things: list[int]) -> None:
    """A process takes time to begin, and its results to come."""
    with side_by_side(sum_of, things, things, processes=processes) as found:
        assert list(found) == [(2 * number, os.getpid()) for number in things]


@pytest.mark.parametrize("room", [0, 1])
def test_the_system_has_fewer_processes_to_give(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Those that there are do it all."""
    made: list[int] = []
    fork = os.fork

    def forked() -> int:
        if len(made) == room:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        made.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", forked)
    with side_by_side(sum_of, range(20, 30), range(10), processes=3) as found:
        results = list(found)
    assert [number for number, _ in results] == list(range(20, 40, 2))
    (pid,) = {pid for _, pid in results}
    assert (pid == os.getpid()) == (room == 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, so that the limit holds")
@pytest.mark.parametrize("limit", range(1, 7))
def test_a_limit_of_processes_and_threads(tmp_path: Path, limit: int) -> None:
    """Threads count as processes. Whatever can be started, the results come, and nothing is said."""
    program = f"""
        import multiprocessing.popen_fork, os, resource
        from reknit.app.side_by_side import side_by_side
        os.setgroups([]); os.setgid(65534); os.setuid(65524)
        resource.setrlimit(resource.RLIMIT_NPROC, ({limit}, {limit}))
        with side_by_side(divmod, range(8), [3] * 8, processes=4) as found:
            print(sum(rest for _, rest in found))
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("7\n", "")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_work_tells_how_far_it_is(processes: int) -> None:
    """A person who waits sees it."""
    told: list[int] = []
    with side_by_side(counts, [2, 3, 4], processes=processes, tell=lambda: told.append(1)) as found:
        assert list(found) == [2, 3, 4]
    assert len(told) == 9


def test_an_error_of_the_work_is_raised() -> None:
    """As by `map`. A note says where."""
    with pytest.raises(KeyError) as raised, side_by_side(refuses, [1, 2], processes=2) as found:
        list(found)
    assert "in refuses" in raised.value.__notes__[0]


def test_a_process_that_is_killed_is_a_limit_of_the_machine() -> None:
    """The kernel kills processes when memory runs out. That is no bug. Nobody waits for the others, which may ignore
    SIGTERM as this process does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    numbers = range(5)
    with pytest.raises(OSError, match="killed") as raised, side_by_side(sum_of, numbers, numbers, processes=2) as found:
        list(found)
    assert (limit_text(raised.value) or "").startswith("a process of this command was killed, perhaps because")


def test_no_process_outlives_the_one_that_asks(tmp_path: Path) -> None:
    """It is killed, and the processes that play its runs end."""
    words = [sys.executable, "-m", "reknit", "simulate", "nodes=200", "days=300", "--runs=2", "--processes=2"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children = until(lambda: psutil.Process(process.pid).children(recursive=True))
        process.kill()
    until(lambda: not any(is_alive(child.pid) for child in children), "the end of the processes")
