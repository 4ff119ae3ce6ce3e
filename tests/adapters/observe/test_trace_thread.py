"""A trace in a folder that may be slow: the agent does not wait for it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from reknit.adapters.observe.trace_folder import Parts
from reknit.adapters.observe.trace_thread import WAIT_S, PartsThread
from tests.support.leaks import nothing_left
from tests.support.waiting import PATIENCE_S, until


class Slow(Parts):
    """Files on a disk that takes nothing until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(partial(str, folder))
        self.goes_on = threading.Event()
        self.error: OSError | None = None

    def write(self, text: str, *, begins: bool, must_wait: bool = True) -> bool:
        assert self.goes_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().write(text, begins=begins)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    made = Slow(tmp_path)
    yield made
    made.goes_on.set()


def test_a_disk_that_is_fast_has_the_line_at_once(tmp_path: Path) -> None:
    """As without the thread. Nothing is left of it."""
    with nothing_left(tmp_path / "none"):
        files = PartsThread(Parts(partial(str, tmp_path)))
        assert files.write("one\n", begins=True, must_wait=True)
        assert (tmp_path / "000000.jsonl").read_text() == "one\n"
        files.close()


def test_a_slow_disk_holds_up_once(slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent waits for the first line and no further one. When the disk is back, nothing is missing."""
    files, waits = PartsThread(slow), []
    wait_for = threading.Condition.wait_for

    def counted(self: threading.Condition, predicate: object, timeout: float | None = None) -> bool:
        if timeout == WAIT_S:
            waits.append(timeout)
        return wait_for(self, predicate, timeout)  # type: ignore[arg-type]  # whatever is asked is passed on

    monkeypatch.setattr(threading.Condition, "wait_for", counted)
    for number in range(5):
        assert files.write(f"{number}\n", begins=number == 0, must_wait=True)
    assert len(waits) == 1
    slow.goes_on.set()
    files.close()
    assert (tmp_path / "000000.jsonl").read_text() == "0\n1\n2\n3\n4\n"


def test_what_is_too_much_is_lost_and_told(slow: Slow) -> None:
    """The memory of an agent is bounded. The trace then says that steps are missing."""
    files = PartsThread(slow, most=10)
    assert files.write("12345678\n", begins=True, must_wait=False)
    assert not files.write("12345678\n", begins=False, must_wait=False)
    slow.goes_on.set()
    files.close()


def test_an_error_of_the_disk_is_raised_by_the_next_line(slow: Slow) -> None:
    """So the operator learns of it."""
    slow.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    slow.goes_on.set()
    files = PartsThread(slow)
    files.write("one\n", begins=True, must_wait=True)

    def fails() -> bool:
        try:
            files.write("two\n", begins=False, must_wait=False)
        except OSError as error:
            return error.errno == errno.ENOSPC
        return False

    until(fails, "the error")
    files.close()


def test_a_disk_that_hangs_does_not_hold_up_the_end(slow: Slow, tmp_path: Path) -> None:
    """The job has ended, and so does its agent. What waits is written if the disk comes back before that."""
    files, file = PartsThread(slow), tmp_path / "000000.jsonl"
    files.write("one\n", begins=True, must_wait=False)
    files.close()
    assert not file.exists()
    slow.goes_on.set()
    until(lambda: file.exists() and file.read_text() == "one\n", "the line")
    files.close()
