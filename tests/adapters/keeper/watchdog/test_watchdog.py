"""Workers that are hung: each is ended, whatever it does, and its exit says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from reknit.adapters.keeper.watchdog import thread_stacks as stacks
from reknit.adapters.keeper.watchdog.watchdog import KILL_AFTER_S, Hung
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.worker_words import WorkersExited, WorkersStopped
from reknit.core.job.workers import TimerExpired
from tests.support.alone import run_alone
from tests.support.processes import Make, ToldWatchdog, drive, failures, start, stop, stopped
from tests.support.waiting import is_alive, read_pids, until

CAUSE = TimerExpired("step")


def test_an_expired_worker_is_a_failed_worker(make: Make, clock: SystemClock) -> None:
    """The exit carries the cause, and the usual restart policy decides. The other workers run on until then."""
    watchdog = ToldWatchdog(clock)
    workers = make("sleep", "1000000", watchdog=watchdog)
    start(workers, 2)
    workers.events(clock.now())
    watchdog.find(CAUSE, 1)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.local_rank, failure.exitcode, failure.cause) == (1, -signal.SIGABRT, CAUSE)
    assert is_alive(workers.pids[0])
    stop(workers, 0)
    assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()
    assert watchdog.wakes_at is None


def test_workers_that_hang_together_are_reported_together(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """One ignores the signal, and gets SIGKILL a second later. The other one, which is dead, waits for it."""
    watchdog = ToldWatchdog(clock)
    script = f"[ $LOCAL_RANK = 0 ] && trap '' ABRT; echo $$ >> {tmp_path}/pids; while :; do sleep 0.1; done"
    workers = make("sh", "-c", script, watchdog=watchdog)
    start(workers, 3)
    read_pids(tmp_path / "pids", 3)
    watchdog.find(CAUSE, 0, 1)
    found = failures(drive(workers, clock, WorkersExited))
    assert {f.local_rank: (f.exitcode, f.cause) for f in found} == {
        0: (-signal.SIGKILL, CAUSE),
        1: (-signal.SIGABRT, CAUSE),
    }


def test_a_worker_that_is_stopped_ends_all_the_same(make: Make, clock: SystemClock) -> None:
    """SIGABRT must be able to reach it, because its stacks are written then."""
    watchdog = ToldWatchdog(clock)
    workers = make("sleep", "1000000", watchdog=watchdog)
    start(workers)
    os.kill(workers.pids[0], signal.SIGSTOP)
    watchdog.find(CAUSE, 0)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.exitcode == -signal.SIGABRT


def test_a_worker_that_ends_by_itself_was_not_hung(make: Make, clock: SystemClock) -> None:
    """It has ended just before the signal was sent, so what it did counts."""
    watchdog = ToldWatchdog(clock)
    workers = make("sh", "-c", "exit 3", watchdog=watchdog)
    start(workers)
    pid = workers.pids[0]
    until(lambda: not is_alive(pid), "the end of the worker")
    watchdog.find(CAUSE, 0)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.exitcode, failure.cause) == (3, None)


def test_an_end_with_0_because_of_the_signal_is_a_failure(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Its work is not done, and the other workers wait for it."""
    watchdog = ToldWatchdog(clock)
    script = f"trap 'exit 0' TERM; echo $$ >> {tmp_path}/pids; while :; do sleep 0.1; done"
    workers = make("sh", "-c", script, watchdog=watchdog)
    start(workers)
    read_pids(tmp_path / "pids", 1)
    watchdog.find(CAUSE, 0, signum=signal.SIGTERM)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.exitcode, failure.cause) == (-signal.SIGTERM, CAUSE)


def test_a_worker_that_ends_by_itself_at_that_moment_has_its_own_failure(
    make: Make, clock: SystemClock, tmp_path: Path
) -> None:
    """A time limit of torch may run out while this worker is looked at. Then the signal is not why it has ended."""
    watchdog = ToldWatchdog(clock)
    script = f"trap 'exit 5' ABRT; echo $$ >> {tmp_path}/pids; while :; do sleep 0.1; done"
    workers = make("sh", "-c", script, watchdog=watchdog)
    start(workers)
    read_pids(tmp_path / "pids", 1)
    watchdog.find(CAUSE, 0)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.exitcode, failure.cause) == (5, None)


def test_a_stop_reports_the_hung_workers_that_are_dead(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """They were held back for another one, which the stop ends."""
    watchdog = ToldWatchdog(clock)
    script = f"[ $LOCAL_RANK = 0 ] && trap '' ABRT TERM; echo $$ >> {tmp_path}/pids; while :; do sleep 0.1; done"
    workers = make("sh", "-c", script, watchdog=watchdog)
    start(workers, 2)
    read_pids(tmp_path / "pids", 2)
    watchdog.find(CAUSE, 0, 1)
    workers.events(clock.now())
    until(lambda: not is_alive(workers.pids[1]), "the end of the second worker")
    stop(workers, 0)
    assert [f.local_rank for f in failures(drive(workers, clock, WorkersStopped))] == [1]


def test_a_stop_waits_until_hung_workers_were_ended(make: Make, clock: SystemClock) -> None:
    """Another node has found its worker hung first. The stacks of this one may tell why."""
    watchdog = ToldWatchdog(clock)
    workers = make("sleep", "1000000", watchdog=watchdog)
    start(workers, 2)
    workers.events(clock.now())
    watchdog.find(CAUSE, 1)
    stop(workers)
    found = drive(workers, clock, WorkersStopped)
    (failure,) = failures(found)
    assert (failure.local_rank, failure.exitcode, failure.cause) == (1, -signal.SIGABRT, CAUSE)
    assert [type(event) for event in found] == [WorkersExited, WorkersStopped]
    assert workers.exitcodes == (0, {0: -signal.SIGTERM, 1: -signal.SIGABRT})


def test_a_worker_that_survives_sigkill_is_reported(
    make: Make, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a worker hangs in a call of the kernel. The stop of the round then says that it is stuck."""
    watchdog = ToldWatchdog(clock)
    workers = make("sleep", "1000000", watchdog=watchdog)
    start(workers)
    (leader,) = watchdog.leaders
    send = leader.signal
    monkeypatch.setattr(leader, "signal", lambda signum: None)
    monkeypatch.setattr("reknit.adapters.keeper.watchdog.watchdog.signal_process", lambda pid, signum: None)
    watchdog.find(CAUSE, 0)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.exitcode, failure.cause, failure.message) == (-signal.SIGKILL, CAUSE, "it survives SIGKILL")
    assert not failure.is_of_worker
    send(signal.SIGKILL)


def test_a_second_expiry_changes_nothing(make: Make, clock: SystemClock) -> None:
    """Two sources may find the same worker hung."""
    watchdog = ToldWatchdog(clock)
    workers = make("sleep", "1000000", watchdog=watchdog)
    start(workers)
    watchdog.find(CAUSE, 0)
    watchdog.find(CAUSE, 0, signum=signal.SIGTERM)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.exitcode == -signal.SIGABRT
    watchdog.find(CAUSE, 0)
    assert failures(workers.events(clock.now())) == []


def test_a_slow_look_at_one_worker_does_not_hold_up_the_end_of_another(
    make: Make, clock: SystemClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ignores its signal gets SIGKILL in time, while py-spy looks into one that was found hung later. And
    the clock is never asked to wake up at a time that is over."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 1000000\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "py_spy_for", lambda pid: str(slow))
    watchdog = ToldWatchdog(clock)
    script = f"[ $LOCAL_RANK = 0 ] && trap '' ABRT; echo $$ >> {tmp_path}/pids; while :; do sleep 0.1; done"
    workers = make("sh", "-c", script, watchdog=watchdog)
    start(workers, 2)
    read_pids(tmp_path / "pids", 2)
    watchdog.find(CAUSE, 0)
    workers.events(now := clock.now())
    monkeypatch.setattr(stacks, "pythons_of", lambda pid: [pid])
    watchdog.find(CAUSE, 1)
    workers.events(now)
    assert watchdog.children
    assert workers.wakes_at == now + KILL_AFTER_S
    workers.events(now + KILL_AFTER_S)
    assert workers.wakes_at is not None
    assert workers.wakes_at > now + KILL_AFTER_S
    until(lambda: not is_alive(workers.pids[0]), "SIGKILL")
    assert is_alive(workers.pids[1])


def test_nothing_is_imported_for_a_job_that_does_not_watch() -> None:
    """The first worker would wait for it."""
    script = """
        import sys
        import reknit.adapters.keeper.process.keeper
        unwanted = (".watchdog", ".hangs", ".page", ".thread_stacks")
        print(*sorted(name for name in sys.modules if name.endswith(unwanted)))
    """
    assert run_alone(script) == "\n"


def test_what_is_due_when(make: Make, clock: SystemClock) -> None:
    """The keeper sleeps until then."""
    watchdog = ToldWatchdog(clock)
    start(make("sleep", "1000000", watchdog=watchdog))
    hung = Hung(watchdog.leaders[0], CAUSE, signal.SIGWINCH)
    assert hung.wakes_at == 0
    hung.press(10.0)
    assert hung.wakes_at == 11
    hung.press(10.9)
    assert (hung.wakes_at, hung.killed_at) == (11, None)
    hung.press(11.0)
    assert (hung.wakes_at, hung.is_over) == (12, False)
    hung.press(12.0)
    assert (hung.wakes_at, hung.is_over) == (None, True)
