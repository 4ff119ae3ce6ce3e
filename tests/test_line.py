"""The agent's end of one running keeper: how its end is seen, and what is left after letting go of it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from reknit.adapters.clock import Clock
from reknit.adapters.keeper.line import Line
from reknit.adapters.keeper.start import by_command
from reknit.adapters.keeper.wire import Ended
from tests.waiting import descriptors, until


def test_how_a_keeper_ended_is_known_and_nothing_is_left(clock: Clock) -> None:
    """The operator wants to know whether the memory killer was at work."""
    before = descriptors()
    line = Line(clock, lambda: by_command(["sleep", "1000"]))
    os.kill(line.pid, signal.SIGKILL)

    def is_over() -> bool:
        clock.wait(clock.now() + 1)
        try:
            return bool(line.listen(0.0))
        except Ended:
            return True

    until(is_over)
    assert line.end() == "killed by SIGKILL"
    assert descriptors() <= before


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_keeper_that_lives_is_killed(clock: Clock, is_stopped: bool) -> None:
    """One that hangs or talks nonsense cannot be asked to end."""
    line = Line(clock, lambda: by_command(["sleep", "1000"]))
    if is_stopped:
        os.kill(line.pid, signal.SIGSTOP)
    assert line.end() == ""
    assert not psutil.pid_exists(line.pid)
