"""Taking turns between the processes of several hosts: a lock on a file that they share.

The lock is a POSIX lock (`lockf`), because that kind works on NFS. The system lets go of the lock when the process that
holds it dies. A process that hangs keeps the lock. So other processes wait for a limited time. Then they report the
process that had the lock last.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from time import monotonic, sleep
from types import TracebackType

from reknit.adapters.ports import Refused, Unavailable
from reknit.core.job.reasons import Refusal

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_REST_S = 0.002
"""Seconds that a process waits after its turn before it takes the next one. Without this pause the others might never
find the lock free, because there is no queue."""
_BUSY = {errno.EAGAIN, errno.EACCES}
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.005, 0.0005
"""Seconds between two tries. The longer a process has waited, the shorter its pauses are."""
_NAME_SIZE = 80

_had_it_at = float("-inf")
_ONE_THREAD = threading.Lock()
"""A POSIX lock does not keep the threads of a process apart, and is lost when any thread closes the file. So only one
thread of this process has such a file open at a time."""


class Turn:
    """Used in a `with` statement.

    Entering it raises `Unavailable` if the lock is not free in time, `Refused` if the file system has no locks, and
    `OSError`."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """`path`: a file that is used for nothing else. Its content names the process that had the lock last."""
        self._path = path
        self._timeout_s = timeout_s
        self._fd = -1

    def __enter__(self) -> None:
        give_up = monotonic() + self._timeout_s
        if not _ONE_THREAD.acquire(timeout=self._timeout_s):
            raise Unavailable(f"{self._path}: waited {self._timeout_s:g} s for another thread of this process")
        try:
            sleep(max(0.0, min(_REST_S, _had_it_at + _REST_S - monotonic())))
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._wait(give_up)
        except BaseException:
            self._let_go()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _had_it_at
        _had_it_at = monotonic()
        self._let_go()

    def _wait(self, give_up: float) -> None:
        while not self._is_taken():
            left_s = give_up - monotonic()
            if left_s < 0:
                holder = os.pread(self._fd, _NAME_SIZE, 0).decode(errors="replace").strip() or "an unknown process"
                raise Unavailable(f"{self._path}: waited {self._timeout_s:g} s for the lock; {holder} had it last")
            sleep(max(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S * min(1.0, left_s / self._timeout_s)))
        name = f"{os.uname().nodename[: _NAME_SIZE - 20]} pid {os.getpid()}"
        try:
            os.pwrite(self._fd, name.ljust(_NAME_SIZE).encode(), 0)
        except OSError:
            pass  # the disk is full. Only people read the name, so the turn goes on

    def _is_taken(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in _NO_LOCKS:
                why = f"{self._path}: this file system cannot lock files: {e.strerror}"
                raise Refused(Refusal.SETUP, why) from None
            if e.errno not in _BUSY:
                raise
            return False
        return True

    def _let_go(self) -> None:
        try:
            if self._fd >= 0:
                os.close(self._fd)  # this lets go of the lock as well
        finally:
            self._fd = -1
            _ONE_THREAD.release()
