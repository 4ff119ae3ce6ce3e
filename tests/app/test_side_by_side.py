"""Work in several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from reknit.app.limits import limit_text
from reknit.app.side_by_side import side_by_side
from tests.support.waiting import is_alive, until


def pid_of(number: int, other: int) -> tuple[int, int]:
    """Work that tells where it was done. The number 3 ends its process."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number + other, os.getpid()


def refuses(number: int) -> int:
    raise KeyError(number)


def test_results_come_in_order_and_from_other_processes() -> None:
    """One thing alone is done here."""
    with side_by_side(pid_of, range(20, 30), range(10), processes=2) as found:
        results = list(found)
    assert [number for number, _ in results] == list(range(20, 40, 2))
    assert os.getpid() not in {pid for _, pid in results}
    for processes, things in ((1, [1, 2]), (2, [1])):
        with side_by_side(pid_of, things, things, processes=processes) as found:
            assert list(found) == [(2 * number, os.getpid()) for number in things]


def test_an_error_of_the_work_is_raised() -> None:
    """As by `map`."""
    with pytest.raises(KeyError), side_by_side(refuses, [1, 2], processes=2) as found:
        list(found)


def test_a_process_that_is_killed_is_a_limit_of_the_machine() -> None:
    """The kernel kills processes when memory runs out. That is no bug, and nobody waits for the result."""
    with (
        pytest.raises(OSError, match="killed") as raised,
        side_by_side(pid_of, range(5), range(5), processes=2) as found,
    ):
        list(found)
    assert (limit_text(raised.value) or "").startswith("a process of this command was killed, perhaps because")


def test_no_process_outlives_the_one_that_asks(tmp_path: Path) -> None:
    """It is killed, and the processes that play its runs end."""
    words = [sys.executable, "-m", "reknit", "simulate", "nodes=200", "days=300", "--runs=2", "--processes=2"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children = until(lambda: psutil.Process(process.pid).children(recursive=True))
        process.kill()
    until(lambda: not any(is_alive(child.pid) for child in children), "the end of the processes")
