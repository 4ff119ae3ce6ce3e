"""Workers that are stopped: said at once, and not too often."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from reknit.adapters.keeper.common.spawn import Leader
from reknit.adapters.keeper.output.streams import WorkerStreams
from reknit.adapters.keeper.process.pauses import Pauses
from reknit.adapters.runtime.clock import SystemClock
from tests.support.waiting import until


class Stopped:
    """A process, and what is said of it."""

    def __init__(self, clock: SystemClock) -> None:
        self.said: list[str] = []
        # A group of its own: in a group without a parent, as that of a job in the background may be, the kernel lets
        # nobody be stopped by a terminal's signal.
        self.process = subprocess.Popen(["sleep", "1000000"], process_group=0)
        pid = self.process.pid
        self.leader = Leader(pid, clock, local_rank=0, rank=3, streams=WorkerStreams(), error_file="")
        self.pauses = Pauses(lambda line: self.said.append(line.replace(str(pid), "PID")))

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)
        if signum == signal.SIGCONT:
            until(lambda: self.state != "T", "the process to go on")
        else:
            until(lambda: self.state == "T", "the process to stop")

    @property
    def state(self) -> str:
        with open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def look(self, now: float) -> list[str]:
        self.pauses.look([self.leader], now)
        said, self.said = self.said, []
        return said


@pytest.fixture
def one(clock: SystemClock) -> Iterator[Stopped]:
    made = Stopped(clock)
    yield made
    made.process.kill()
    made.process.wait()
    made.leader.reap()


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN])
def test_a_stop_and_its_end_are_said(one: Stopped, signum: signal.Signals) -> None:
    """With the signal, which tells where it came from."""
    assert one.look(1.0) == []
    one.send(signum)
    assert one.look(2.0) == [f"reknit: rank 3 (pid PID) was stopped by {signum.name}"]
    assert one.look(3.0) == []
    one.send(signal.SIGCONT)
    assert one.look(4.0) == ["reknit: rank 3 (pid PID) was continued"]
    assert one.pauses.wakes_at is None


def test_a_stop_that_is_over_is_not_said(one: Stopped) -> None:
    """A debugger, for example, stops a process for a moment."""
    one.send(signal.SIGSTOP)
    one.send(signal.SIGCONT)
    assert one.look(1.0) == []
    assert one.pauses.wakes_at is None


def test_a_storm_of_stops_gets_few_lines(one: Stopped) -> None:
    """The pause between two lines doubles. The last state is said in any case, when the pause is over."""
    lines = []
    for second in range(40):
        one.send(signal.SIGSTOP if second % 2 == 0 else signal.SIGCONT)
        lines += [second] * len(one.look(float(second)))
    assert lines == [0, 1, 4, 9, 18, 35]
    one.send(signal.SIGSTOP)
    assert one.look(40.0) == []
    assert one.pauses.wakes_at is not None
    assert len(one.look(one.pauses.wakes_at)) in (0, 1)


def test_a_dead_worker_owes_no_line(one: Stopped) -> None:
    """Its exit says more. The clock must not be woken for it."""
    one.send(signal.SIGSTOP)
    one.look(1.0)
    one.send(signal.SIGCONT)
    assert one.look(1.5) == []
    assert one.pauses.wakes_at == 2.0
    one.process.kill()
    one.leader.exitcode = -9
    assert one.look(1.6) == []
    assert one.pauses.wakes_at is None


def test_the_end_of_a_worker_is_left_for_others(one: Stopped) -> None:
    """Only stops are taken here."""
    os.kill(one.process.pid, signal.SIGKILL)
    until(lambda: one.state == "Z", "the end of the process")
    assert one.look(1.0) == []
    assert one.leader.look()
    assert one.leader.exitcode == -signal.SIGKILL
