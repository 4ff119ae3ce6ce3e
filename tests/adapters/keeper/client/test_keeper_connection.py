"""The agent's end of one running keeper: how its end is seen, and what is left after letting go of it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from reknit.adapters.keeper.client.keeper_connection import KeeperConnection
from reknit.adapters.keeper.protocol.stream import StreamEnded
from reknit.adapters.keeper.remote.command import by_command
from reknit.adapters.runtime.clock import SystemClock
from tests.support.interrupts import interrupted
from tests.support.waiting import PATIENCE_S, descriptors, until


def test_how_a_keeper_ended_is_known_and_nothing_is_left(clock: SystemClock) -> None:
    """The operator wants to know whether the memory killer was at work."""
    before = descriptors()
    line = KeeperConnection(clock, lambda: by_command(["sleep", "1000"]))
    os.kill(line.pid, signal.SIGKILL)

    def is_over() -> bool:
        clock.wait(clock.now() + 1)
        try:
            return bool(line.listen(0.0))
        except StreamEnded:
            return True

    until(is_over)
    assert line.end() == "killed by SIGKILL"
    assert descriptors() <= before


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_keeper_that_lives_is_killed(clock: SystemClock, is_stopped: bool) -> None:
    """One that hangs or talks nonsense cannot be asked to end."""
    line = KeeperConnection(clock, lambda: by_command(["sleep", "1000"]))
    if is_stopped:
        os.kill(line.pid, signal.SIGSTOP)
    assert line.end() == ""
    assert not psutil.pid_exists(line.pid)


def test_a_keeper_that_was_stopped_ends_by_itself(clock: SystemClock) -> None:
    """It may have been stopped before it could ask the kernel to continue it, or stand behind a command. Otherwise it
    costs the whole deadline, and is killed before it has ended its workers."""
    line = KeeperConnection(clock, lambda: by_command(["sh", "-c", "read -r message"]))
    os.kill(line.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(line.pid).status() == psutil.STATUS_STOPPED)
    assert line.shut_down(PATIENCE_S)


def test_a_keeper_that_does_not_end_in_time_has_ended_nothing(clock: SystemClock) -> None:
    """What it leaves must be found by its mark, so the caller must know that it was killed."""
    line = KeeperConnection(clock, lambda: by_command(["sleep", "1000"]))
    assert not line.shut_down(0.01)


@pytest.mark.alone
def test_an_interrupted_end_leaves_nothing(clock: SystemClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a program closes its agent. Nobody else has the keeper any more."""
    monkeypatch.setattr("reknit.adapters.keeper.client.keeper_connection.END_S", 0.01)
    before = descriptors()
    line = KeeperConnection(clock, lambda: by_command(["sleep", "1000"]))
    interrupted(lambda: line.shut_down(PATIENCE_S))
    assert not psutil.pid_exists(line.pid)
    assert descriptors() <= before
