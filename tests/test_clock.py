"""Waiting without waking up for nothing, and signals as something to wait for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from reknit.adapters.clock import Clock, Poller, Signals


@pytest.fixture(params=["epoll", "poll"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Both ways of waiting: Linux has epoll, macOS has poll."""
    if request.param == "poll":
        monkeypatch.setattr(sys, "platform", "darwin")
    clock = Clock()
    yield clock
    clock.close()


def test_now_is_monotonic_time(clock: Clock) -> None:
    """Deadlines of the core are compared with it."""
    assert time.monotonic() <= clock.now() <= time.monotonic()


def test_wait_never_returns_a_moment_too_early(clock: Clock) -> None:
    """Returning half a millisecond early, again and again, is a busy wait before every deadline."""
    for delay in (0.0, 0.0003, 0.0011, 0.0205):
        until = clock.now() + delay
        clock.wait(until)
        assert clock.now() >= until


def test_a_deadline_that_has_passed_does_not_wait(clock: Clock) -> None:
    """A late agent must catch up, not sleep for ever (a negative timeout means that)."""
    clock.wait(clock.now() - 100.0)
    clock.wait(0.0)


def test_wait_ends_for_a_readable_descriptor(clock: Clock) -> None:
    """That is how a worker's death is seen at once."""
    read_end, write_end = os.pipe()
    clock.watch(read_end)
    threading.Timer(0.02, os.write, (write_end, b"!")).start()
    clock.wait(None)
    assert select.select([read_end], [], [], 0)[0] == [read_end]
    clock.unwatch(read_end)
    os.close(read_end)
    os.close(write_end)


def test_unwatch_is_forgiving(clock: Clock) -> None:
    """Cleaning up twice, or after somebody closed the descriptor, happens on crash paths."""
    read_end, write_end = os.pipe()
    clock.watch(read_end)
    clock.unwatch(read_end)
    clock.unwatch(read_end)
    os.close(read_end)
    clock.unwatch(read_end)
    os.close(write_end)


def test_an_infinite_deadline_is_none(clock: Clock) -> None:
    """`inf` must neither overflow nor return at once."""
    read_end, write_end = os.pipe()
    clock.watch(read_end)
    threading.Timer(0.02, os.write, (write_end, b"!")).start()
    clock.wait(float("inf"))
    assert os.read(read_end, 1) == b"!"
    clock.unwatch(read_end)
    os.close(read_end)
    os.close(write_end)


def test_a_signal_ends_the_wait_and_is_taken_once(clock: Clock) -> None:
    """SIGTERM must be acted on at once, wherever it is delivered."""
    signals = Signals(clock, [signal.SIGTERM, signal.SIGUSR1])
    try:
        assert signals.taken() == []
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM)).start()
        clock.wait(None)
        assert signals.taken() == [signal.SIGTERM]
        assert signals.taken() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        clock.wait(None)
        assert sorted(signals.taken()) == sorted([signal.SIGUSR1, signal.SIGTERM])
    finally:
        signals.close()


def test_a_child_that_dies_ends_the_wait(clock: Clock) -> None:
    """Without pidfds SIGCHLD is all there is; it is not a signal for the job."""
    signals = Signals(clock, [signal.SIGTERM])
    try:
        child = subprocess.Popen(["true"])
        clock.wait(None)
        assert signals.taken() == []
        child.wait()
    finally:
        signals.close()


def test_close_restores_handlers_and_wakeup() -> None:
    """An embedder gets its own signal handling back."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    signals = Signals(Clock(), [signal.SIGTERM, signal.SIGINT])
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    signals.close()
    signals.close()
    assert {s: signal.getsignal(s) for s in before} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_ignored_signal_stays_ignored() -> None:
    """`nohup reknit run …` must survive the hang-up that it was started against."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals(Clock(), [signal.SIGHUP, signal.SIGKILL, 12345])
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.taken() == []
        signals.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_waiting_for_ever_uses_no_processor_time() -> None:
    """An agent that is idle must cost nothing beside the training."""
    script = """
import os, resource, signal, sys
from reknit.adapters.clock import Clock, Signals
clock = Clock()
signals = Signals(clock, [signal.SIGTERM])
print("ready", flush=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
while not signals.taken():
    clock.wait(None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # not a guess: the longer the better, any length is right
        process.terminate()
        assert int(process.stdout.readline()) <= 5, "voluntary context switches, one per wake-up"


def test_a_closed_pidfd_is_not_reported() -> None:
    """The stale event that floors.md describes: a copy of the descriptor lives on elsewhere."""
    poller = Poller()
    read_end, write_end = os.pipe()
    copy = os.dup(read_end)
    poller.add(read_end)
    poller.remove(read_end)
    os.close(read_end)
    os.write(write_end, b"!")
    assert poller.ready(0.0) == []
    for fd in (copy, write_end):
        os.close(fd)
    poller.close()
