"""Signals that the clock waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from reknit.adapters.runtime.clock import SystemClock
from reknit.app.cli.signals import Signals


@pytest.mark.alone
def test_a_signal_ends_the_wait_and_is_taken_once(clock: SystemClock) -> None:
    """SIGTERM must be acted on at once, wherever it is delivered."""
    signals = Signals(clock, [signal.SIGTERM, signal.SIGUSR1])
    try:
        assert signals.taken() == []
        threading.Timer(
            0.02, os.kill, (os.getpid(), signal.SIGTERM)
        ).start()  # before or during the wait: both are right
        clock.wait(None)
        assert signals.taken() == [signal.SIGTERM]
        assert signals.taken() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        clock.wait(None)
        assert sorted(signals.taken()) == sorted([signal.SIGUSR1, signal.SIGTERM])
    finally:
        signals.close()


def test_a_child_that_dies_ends_the_wait(clock: SystemClock) -> None:
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
    signals = Signals(SystemClock(), [signal.SIGTERM, signal.SIGINT])
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    signals.close()
    signals.close()
    assert {s: signal.getsignal(s) for s in before} == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.alone
def test_sigterm_is_taken_although_it_was_ignored_and_blocked() -> None:
    """Some programs start their children so, by mistake. A scheduler would wait in vain for the end of the job."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    clock = SystemClock()
    try:
        signals = Signals(clock, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        clock.wait(clock.now() + 10)
        assert signals.taken() == [signal.SIGTERM]
        signals.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= {signal.SIGTERM, signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, before)
        clock.close()


@pytest.mark.alone
def test_an_ignored_signal_stays_ignored() -> None:
    """`nohup reknit run …` must survive the hang-up that it was started against."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals(SystemClock(), [signal.SIGHUP, signal.SIGKILL, 12345])
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.taken() == []
        signals.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_waiting_for_ever_uses_no_processor_time() -> None:
    """An agent that is idle must cost nothing beside the training."""
    script = """
import os, resource, signal, sys, time
from reknit.adapters.runtime.clock import SystemClock
from reknit.app.cli.signals import Signals
clock = SystemClock()
signals = Signals(clock, [signal.SIGTERM])
print("ready", flush=True)
before, begin, used = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.monotonic(), time.process_time()
while not signals.taken():
    clock.wait(None)
share = (time.process_time() - used) / (time.monotonic() - begin)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, share)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # not a guess: the longer the better, any length is right
        process.terminate()
        switches, share = process.stdout.readline().split()
        assert int(switches) <= 5, "voluntary context switches, one per wake-up"
        assert float(share) < 0.5, "a wait that returns at once makes no switch, and takes a whole processor"
