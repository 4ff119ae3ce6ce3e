"""Time, and the one place where the agent sleeps.

The loop waits in `Clock.wait` for watched descriptors, for signals (`Signals` turns them into a readable pipe) and for
its deadline. There is no periodic tick: with nothing to do it sleeps for ever.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from math import ceil

TYPE_CHECKING = False  # as in core/values
if TYPE_CHECKING:
    from typing import Any

_LONGEST_WAIT_S = 86_400.0
"""Waking up early is allowed; the system call's own limit is 24 days."""


class Poller:
    """Descriptors to be read: epoll, or poll where there is none. Level-triggered."""

    def __init__(self) -> None:
        self._epoll: Any = select.epoll() if sys.platform == "linux" else None
        self._poll: Any = self._epoll or select.poll()
        self._readable = select.EPOLLIN if sys.platform == "linux" else select.POLLIN

    def add(self, fd: int) -> None:
        self._poll.register(fd, self._readable)

    def remove(self, fd: int) -> None:
        """To be called *before* the descriptor is closed: a child that has just been spawned may hold a copy, and
        epoll would go on reporting it, under a number that somebody else may have by then."""
        try:
            self._poll.unregister(fd)
        except (KeyError, OSError):
            pass  # not watched, or closed already

    def ready(self, timeout_s: float | None) -> list[int]:
        # Rounded up: rounded down, the last millisecond before a deadline would be a busy wait.
        timeout_ms = None if timeout_s is None else ceil(max(0.0, timeout_s) * 1000)
        if self._epoll is not None and timeout_ms is not None:
            return [fd for fd, _ in self._epoll.poll(timeout_ms / 1000)]
        return [fd for fd, _ in self._poll.poll(timeout_ms)]

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


class Clock:
    """The monotonic clock, and waiting on it."""

    def __init__(self) -> None:
        self._poller = Poller()

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float | None) -> None:
        """Sleep until a watched descriptor is readable, a signal came, or `until`. May return early.

        A descriptor at its end stays readable: whoever sees the end must unwatch it, or waiting becomes spinning.
        """
        timeout_s = None
        if until is not None and until != float("inf"):
            timeout_s = min(until - time.monotonic(), _LONGEST_WAIT_S)
        self._poller.ready(timeout_s)

    def watch(self, fd: int) -> None:
        self._poller.add(fd)

    def unwatch(self, fd: int) -> None:
        self._poller.remove(fd)

    def close(self) -> None:
        self._poller.close()


class Signals:
    """Signals as something that `Clock.wait` wakes up for, to be taken when the loop gets there.

    To be made in the main thread. A signal that is ignored when we start stays ignored (nohup), one that cannot be
    caught is left out. SIGCHLD wakes the clock, too, and is not handed out.
    """

    def __init__(self, clock: Clock, signals: Iterable[int]) -> None:
        self._clock = clock
        self._handed_out = frozenset(signals) - {signal.SIGCHLD}
        self._before: dict[int, Any] = {}
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        clock.watch(self._read_end)
        for signum in sorted(self._handed_out):
            self._install(signum)
        # Even if it is ignored: that would lose the workers' exit codes.
        self._install(signal.SIGCHLD, ignored_too=True)

    def _install(self, signum: int, *, ignored_too: bool = False) -> None:
        try:
            if ignored_too or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, _nothing)
        except (OSError, ValueError):
            pass  # SIGKILL, SIGSTOP, or no signal at all

    def taken(self) -> list[int]:
        """The signals that came since the last call, in order, each once: like the system, which does not count
        pending ones either."""
        came: dict[int, None] = {}
        while data := _read(self._read_end):
            for signum in data:
                if signum in self._handed_out and signum in self._before:
                    came[signum] = None
        return list(came)

    def close(self) -> None:
        """Restore what was before."""
        if self._read_end < 0:
            return
        for signum, handler in self._before.items():
            # None: a handler that was not installed from Python. It cannot be given back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._clock.unwatch(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)
        self._read_end = -1


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _nothing(signum: int, frame: object) -> None:
    """A Python handler must exist for the wake-up descriptor to be written."""
