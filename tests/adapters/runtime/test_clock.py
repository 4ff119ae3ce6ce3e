"""The clock: it does not wake up without a reason, and every thread can wake it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from reknit.adapters.runtime.clock import Poller, SystemClock
from tests.support.waiting import descriptors


@pytest.fixture(params=["epoll", "poll"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SystemClock]:
    """Both ways of waiting: Linux has epoll, macOS has poll."""
    if request.param == "poll":
        monkeypatch.setattr(sys, "platform", "darwin")
    clock = SystemClock()
    yield clock
    clock.close()


def test_now_is_monotonic_time(clock: SystemClock) -> None:
    """Deadlines of the core are compared with it."""
    assert time.monotonic() <= clock.now() <= time.monotonic()


def test_wait_never_returns_a_moment_too_early(clock: SystemClock) -> None:
    """Returning half a millisecond early, again and again, is a busy wait before every deadline."""
    for delay in (0.0, 0.0003, 0.0011, 0.0205):
        until = clock.now() + delay
        clock.wait(until)
        assert clock.now() >= until


def test_a_deadline_that_has_passed_does_not_wait(clock: SystemClock) -> None:
    """A late agent must catch up, not sleep for ever (a negative timeout means that)."""
    clock.wait(clock.now() - 100.0)
    clock.wait(0.0)


def test_wait_ends_for_a_readable_descriptor(clock: SystemClock) -> None:
    """That is how a worker's death is seen at once."""
    read_end, write_end = os.pipe()
    clock.watch(read_end)
    threading.Timer(0.02, os.write, (write_end, b"!")).start()  # before or during the wait: both are right
    clock.wait(None)
    assert select.select([read_end], [], [], 0)[0] == [read_end]
    clock.unwatch(read_end)
    os.close(read_end)
    os.close(write_end)


def test_unwatch_is_forgiving(clock: SystemClock) -> None:
    """Cleaning up twice, or after somebody closed the descriptor, happens on crash paths."""
    read_end, write_end = os.pipe()
    clock.watch(read_end)
    clock.unwatch(read_end)
    clock.unwatch(read_end)
    os.close(read_end)
    clock.unwatch(read_end)
    os.close(write_end)


def test_an_infinite_deadline_is_none(clock: SystemClock) -> None:
    """`inf` must neither overflow nor return at once."""
    read_end, write_end = os.pipe()
    clock.watch(read_end)
    threading.Timer(0.02, os.write, (write_end, b"!")).start()  # before or during the wait: both are right
    clock.wait(float("inf"))
    assert os.read(read_end, 1) == b"!"
    clock.unwatch(read_end)
    os.close(read_end)
    os.close(write_end)


def test_any_thread_ends_the_wait(clock: SystemClock) -> None:
    """The link's threads have news, and the loop sleeps without a deadline."""
    for _ in range(3):
        waker = threading.Timer(0.02, clock.wake)  # before or during the wait: both are right
        waker.start()
        clock.wait(None)
        waker.join()


def test_a_wake_before_the_wait_is_not_lost_and_counts_once(clock: SystemClock) -> None:
    """The news may come between the last look and the sleep. Old news must not make every later wait a spin."""
    for _ in range(100_000):  # more than a pipe holds
        clock.wake()
    clock.wait(None)
    until = clock.now() + 0.02
    clock.wait(until)
    assert clock.now() >= until


def test_a_handler_may_wake_the_clock_while_its_own_thread_does(clock: SystemClock) -> None:
    """Python runs handlers between any two instructions, those inside `wake` among them: no deadlock."""
    before = signal.signal(signal.SIGALRM, lambda *_: clock.wake())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(20_000):
            clock.wake()
            clock.wait(0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_clock_that_is_closed_leaves_no_descriptor_and_writes_to_none() -> None:
    """A thread that ends late wakes a closed clock, whose numbers may be another file's by then."""
    before = descriptors()
    clock = SystemClock()
    opened = {int(entry.split()[0]) for entry in descriptors() - before}
    assert len(opened) >= 3
    clock.close()
    clock.close()
    assert not descriptors() - before
    files = []
    try:
        while opened - {fd for pair in files for fd in pair}:
            files.append(os.pipe())
        clock.wake()
        for read_end, _ in files:
            assert select.select([read_end], [], [], 0)[0] == []
    finally:
        for pair in files:
            for fd in pair:
                os.close(fd)


def test_closing_while_others_wake_harms_nobody() -> None:
    """Threads of a link that could not be joined in time go on waking."""
    for _ in range(50):
        clock = SystemClock()
        is_over = threading.Event()

        def go_on(clock: SystemClock = clock, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                clock.wake()

        waker = threading.Thread(target=go_on)
        waker.start()
        clock.wait(0.0)
        clock.close()
        is_over.set()
        waker.join()


def test_another_event_loop_can_wait_for_its_descriptor() -> None:
    """A host that never blocks waits for everything in its own loop: wake-ups, and the descriptors that are watched."""
    clock = SystemClock()
    read_end, write_end = os.pipe()
    clock.watch(read_end)

    def is_ready() -> bool:
        return bool(select.select([clock.fileno()], [], [], 0)[0])

    assert not is_ready()
    clock.wake()
    assert is_ready()
    clock.wait(0.0)
    assert not is_ready()
    os.write(write_end, b"!")
    assert is_ready()
    clock.unwatch(read_end)
    assert not is_ready()
    os.close(read_end)
    os.close(write_end)
    clock.close()


def test_without_epoll_there_is_no_descriptor_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asyncio shell needs one; the blocking shell in a thread does without."""
    monkeypatch.setattr(sys, "platform", "darwin")
    clock = SystemClock()
    with pytest.raises(OSError, match="no epoll"):
        clock.fileno()
    clock.close()


def test_a_closed_pidfd_is_not_reported() -> None:
    """A stale event of epoll: a copy of the descriptor lives on elsewhere."""
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
