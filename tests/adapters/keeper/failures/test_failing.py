"""What is told of a worker that has failed, depending on how it has ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from attrs import evolve

from reknit.adapters.keeper.common.spawn import Leader
from reknit.adapters.keeper.failures.failing import failure_of, unread
from reknit.adapters.keeper.output.streams import WorkerStreams
from reknit.adapters.keeper.watchdog.activity import Frame, ThreadStack
from reknit.adapters.keeper.watchdog.watchdog import Hung
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.job.workers import UNSEEN, Activity, NoProgress, Stance

RAISED = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: no"]


@pytest.fixture
def leader(clock: SystemClock) -> Leader:
    """A worker of which only the exit code matters."""
    return Leader(2**22, clock, local_rank=1, rank=3, streams=WorkerStreams(), error_file="")


def test_an_end_with_0_is_no_failure(leader: Leader) -> None:
    """Whatever it has printed."""
    leader.exitcode = 0
    assert failure_of(leader, RAISED) is None


@pytest.mark.parametrize(
    ("exitcode", "message"), [(1, "ValueError: no"), (-signal.SIGKILL, ""), (128 + signal.SIGKILL, "")]
)
def test_an_exception_explains_an_exit_but_no_signal(leader: Leader, exitcode: int, message: str) -> None:
    """A worker that was killed did not die of what it has printed."""
    leader.exitcode = exitcode
    failure = failure_of(leader, RAISED)
    assert failure is not None
    assert (failure.exitcode, failure.message, failure.cause) == (exitcode, message, None)
    assert failure.stderr == tuple(RAISED)


@pytest.mark.parametrize("exitcode", [-signal.SIGPIPE, 120, 1])
def test_a_worker_whose_stdout_nobody_reads(leader: Leader, exitcode: int) -> None:
    """The report says that, and shows no traceback of a program that has done nothing wrong."""
    leader.exitcode = exitcode
    failure = failure_of(leader, ["Traceback (most recent call last):", "BrokenPipeError: [Errno 32] Broken pipe"])
    assert failure is not None
    assert unread(failure) == evolve(failure, message="nobody reads its stdout any more", traceback="", stderr=())


def test_a_failure_of_another_kind_is_told_also_if_nobody_reads(leader: Leader) -> None:
    """It has happened before the worker could notice."""
    leader.exitcode = 1
    failure = failure_of(leader, RAISED)
    assert failure is not None
    assert unread(failure) == failure


def test_a_hung_worker_has_its_stacks_and_not_an_older_traceback(leader: Leader, tmp_path: Path) -> None:
    """The traceback on its stderr is of an exception that it has survived."""
    leader.exitcode = -signal.SIGABRT
    hung = Hung(leader, NoProgress(3), signal.SIGABRT)
    failure = failure_of(leader, RAISED, hung)
    assert failure is not None
    assert (failure.traceback, failure.cause) == ("", NoProgress(3, activity=UNSEEN))
    hung.threads = (ThreadStack((Frame("load", "/x/data.py", 41),), "Thread 1", True),)
    failure = failure_of(leader, RAISED, hung)
    assert failure is not None
    assert failure.traceback == "Thread 1\n    load (data.py:41)"
    assert failure.cause == NoProgress(3, activity=Activity(Stance.UNKNOWN, "load", "data.py:41"))
