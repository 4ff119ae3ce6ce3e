"""Time, and the one place where the agent sleeps.

A shell waits in `SystemClock.wait` for watched descriptors, for `wake`, and for the loop's next deadline. There is no
periodic tick. An agent that has nothing to do sleeps until something happens.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_LONGEST_WAIT_S = 86_400.0
"""The longest single wait, in seconds. Waking up early is allowed. The limit of the system call is 24 days."""


def is_readable(fd: int, wait_s: float = 0.0) -> bool:
    """Wait up to `wait_s` seconds. True if there is something to read, the end of the stream, or, for a pidfd, the end
    of the process."""
    return _is_ready(fd, select.POLLIN, wait_s)


def is_writable(fd: int, wait_s: float) -> bool:
    """Wait up to `wait_s` seconds. True if something can be written, or nothing can be written any more. A socket that
    connects has then connected or failed."""
    return _is_ready(fd, select.POLLOUT, wait_s)


def _is_ready(fd: int, what: int, wait_s: float) -> bool:
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(fd, what)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


class Poller:
    """Waits for descriptors, with epoll or, on a system without it, with poll. A descriptor is reported as long as it
    is ready (level-triggered)."""

    def __init__(self) -> None:
        self._epoll: Any = select.epoll() if sys.platform == "linux" else None
        self._poll: Any = self._epoll or select.poll()
        self._readable = select.EPOLLIN if sys.platform == "linux" else select.POLLIN

    def add(self, fd: int) -> None:
        self._poll.register(fd, self._readable)

    def add_writable(self, fd: int) -> None:
        """Wait until something can be written. A descriptor can be watched for reading or for writing. To watch it for
        both, duplicate it."""
        self._poll.register(fd, select.EPOLLOUT if sys.platform == "linux" else select.POLLOUT)

    def remove(self, fd: int) -> None:
        """To be called *before* the descriptor is closed. A child that was just started may hold a copy of it. epoll
        would then go on reporting the copy, under a number that may belong to another descriptor by then."""
        try:
            self._poll.unregister(fd)
        except (KeyError, OSError):
            pass  # the descriptor is not watched, or is closed already

    def ready(self, timeout_s: float | None) -> list[int]:
        # Rounded up. If it were rounded down, the last millisecond before a deadline would be a busy wait.
        timeout_ms = None if timeout_s is None else ceil(max(0.0, timeout_s) * 1000)
        if self._epoll is not None and timeout_ms is not None:
            return [fd for fd, _ in self._epoll.poll(timeout_ms / 1000)]
        return [fd for fd, _ in self._poll.poll(timeout_ms)]

    def fileno(self) -> int:
        """The descriptor of epoll. Raises `OSError` on a system without epoll."""
        if self._epoll is None:
            raise OSError("this system has no epoll: there is no one descriptor to wait for")
        fd: int = self._epoll.fileno()
        return fd

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


class SystemClock:
    """The monotonic clock, and waiting. Any thread may call `wake`. Only one thread may call the rest."""

    def __init__(self) -> None:
        self._poller = Poller()
        # Reentrant, because a signal handler may call `wake` while the same thread is in `wake`.
        self._lock = threading.RLock()
        self._is_woken = False
        """A byte of `wake` is in the pipe. There is never more than one."""
        self._is_closed = False
        self._read_end, self._write_end = os.pipe()
        # A host program without stdio may have given these numbers to a stranger's output: never wait for room.
        os.set_blocking(self._write_end, False)
        self._poller.add(self._read_end)

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float | None) -> None:
        """Sleep until a watched descriptor is ready, `wake` is called, or `until` has come. May return early.

        A descriptor at the end of its stream stays readable. The reader that finds the end must unwatch the descriptor.
        Otherwise `wait` returns at once from then on.
        """
        timeout_s = None
        if until is not None and until != float("inf"):
            timeout_s = min(until - time.monotonic(), _LONGEST_WAIT_S)
        if self._read_end in self._poller.ready(timeout_s):
            os.read(self._read_end, 1)
            # Without the lock: `wake` holds it while it writes, and this thread would be woken only to wait for it. A
            # `wake` between these two lines writes nothing, and need not: this wait ends now.
            self._is_woken = False

    def wake(self) -> None:
        """End the present wait, or else the next one. Any thread may call this, even after `close`."""
        with self._lock:
            # The lock keeps `close` from closing the descriptor between this test and the write.
            if self._is_woken or self._is_closed:
                return
            self._is_woken = True
            try:
                os.write(self._write_end, b".")
            except BlockingIOError:
                pass  # full of a stranger's output, which wakes as well

    def fileno(self) -> int:
        """A descriptor for another event loop. It is readable when something other than a deadline would end `wait`.

        Raises `OSError` on a system without epoll. There, call `wait` in a thread of its own.
        """
        return self._poller.fileno()

    def watch(self, fd: int) -> None:
        self._poller.add(fd)

    def watch_writable(self, fd: int) -> None:
        """Wake when something can be written to this descriptor. It must not be watched for reading."""
        self._poller.add_writable(fd)

    def unwatch(self, fd: int) -> None:
        self._poller.remove(fd)

    def close(self) -> None:
        """Close all descriptors. No thread may be in `wait`. May be repeated."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._poller.remove(self._read_end)
            os.close(self._read_end)
            os.close(self._write_end)
        self._poller.close()
