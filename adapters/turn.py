"""Taking turns between the processes of several hosts: a lock on a file that they share.

A POSIX lock (`lockf`), because that is the one that works on NFS. The system lets go of it when its process dies; a
process that hangs keeps it, so whoever waits does so for a limited time, and then says for whom.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import os
from time import monotonic, sleep
from types import TracebackType

from reknit.core.reasons import Refusal

from .ports import Refused, Unavailable

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_REST_S = 0.002
"""Who has just had its turn lets the others have a look: there is no queue, and for want of a moment in which the lock
is free they would starve."""
_BUSY = {errno.EAGAIN, errno.EACCES}
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.005, 0.0005
"""Between two tries: the longer one has waited, the more often it looks."""
_NAME_SIZE = 80

_had_it_at = float("-inf")
_ONE_THREAD = _thread.allocate_lock()
"""A POSIX lock does not keep the threads of a process apart, and is lost when any of them closes the file. So only one
thread of this process has such a file open at a time."""


class Turn:
    """For a `with`. Raises `Unavailable` if it is not this one's turn in time, `Refused` if there are no locks to be
    had, and `OSError`."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """`path`: a file that is used for nothing else. It names who had the lock last."""
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
                holder = os.pread(self._fd, _NAME_SIZE, 0).decode(errors="replace").strip() or "nobody known"
                raise Unavailable(f"{self._path}: waited {self._timeout_s:g} s for the lock; {holder} had it last")
            sleep(max(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S * min(1.0, left_s / self._timeout_s)))
        name = f"{os.uname().nodename[: _NAME_SIZE - 20]} pid {os.getpid()}"
        try:
            os.pwrite(self._fd, name.ljust(_NAME_SIZE).encode(), 0)
        except OSError:
            pass  # a full disk: the name is for people only

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
                os.close(self._fd)  # and with it the lock
        finally:
            self._fd = -1
            _ONE_THREAD.release()
