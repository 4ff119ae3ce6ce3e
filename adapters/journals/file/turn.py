"""Taking turns between the processes of several hosts: a lock on a file that they share.

    line 1   the process that had the lock last, for people
    line 2   a note that each holder leaves for the next one

1. The lock is a POSIX lock (`lockf`), because that kind works on NFS. The system lets go of the lock when the process
   that holds it dies. A process that hangs keeps the lock. So other processes wait for a limited time. Then they report
   who holds it. On this host the kernel knows the process. On another host only the file's first line can tell.
2. The file may be removed or replaced while processes wait for it. A process that gets the lock of a file without a
   name does not have its turn. It tries again with the file that has the name now. So if a process hangs, the operator
   can remove the file, and the others go on. If the hung process goes on later, two processes have their turn at once.
   What is written in a turn must bear that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import threading
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job.reasons import Refusal

from .folder import PRIVATE, opened, there

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
REST_S = 0.002
"""Seconds that a process waits after its turn before it takes the next one. Without this pause the others might never
find the lock free, because there is no queue."""
_BUSY = {errno.EAGAIN, errno.EACCES}
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.005, 0.0005
"""Seconds between two tries. The longer a process has waited, the shorter its pauses are."""
_NAME_SIZE, _NOTE_SIZE = 80, 240
_FLOCK = "hhqqi"
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""

_had_it_at = float("-inf")
_ONE_THREAD = threading.Lock()
"""A POSIX lock does not keep the threads of a process apart, and is lost when any thread closes the file. So only one
thread of this process has such a file open at a time."""


class Turn:
    """Used in a `with` statement.

    Entering it raises `Unavailable` if the lock is not free in time, `Refused` if the file system has no locks, and
    `OSError`."""

    def __init__(self, path: str, timeout_s: float, mode: int = PRIVATE) -> None:
        """`path`: a file that is used for nothing else. It is made with `mode` if it is missing."""
        self._path = path
        self._timeout_s = timeout_s
        self._mode = mode
        self._fd = -1
        self.note = b""
        """What the last holder has left. Empty: nothing."""

    def __enter__(self) -> Self:
        give_up = monotonic() + self._timeout_s
        if not _ONE_THREAD.acquire(timeout=self._timeout_s):
            raise Unavailable(f"{self._path}: waited {self._timeout_s:g} s for another thread of this process")
        try:
            sleep(max(0.0, min(REST_S, _had_it_at + REST_S - monotonic())))
            self._wait(give_up)
            self.note = os.pread(self._fd, _NOTE_SIZE, _NAME_SIZE).strip()
            name = f"{os.uname().nodename[: _NAME_SIZE - 20]} pid {os.getpid()}"
            self._write(name.ljust(_NAME_SIZE - 1) + "\n", 0)
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _had_it_at
        _had_it_at = monotonic()
        self._let_go()

    def leave(self, note: bytes) -> None:
        """Leave a note of one line for the next holder. May fail silently: then the note before stays."""
        self._write(note.decode().ljust(_NOTE_SIZE - 1) + "\n", _NAME_SIZE)

    def _wait(self, give_up: float) -> None:
        while not self._is_taken():
            left_s = give_up - monotonic()
            if left_s < 0:
                raise Unavailable(f"{self._path}: waited {self._timeout_s:g} s for the lock; {self._holder()}")
            sleep(max(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S * min(1.0, left_s / self._timeout_s)))

    def _is_taken(self) -> bool:
        if self._fd < 0:
            self._fd = opened(self._path, os.O_RDWR, self._mode)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in _NO_LOCKS:
                why = f"{self._path}: this file system cannot lock files: {e.strerror}"
                raise Refused(Refusal.SETUP, why) from None
            if e.errno not in _BUSY:
                raise
            return False
        if self._has_its_name():
            return True
        os.close(self._fd)
        self._fd = -1
        return False

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        """Who has the lock, in words."""
        if self._fd < 0:
            return "the file is replaced again and again"
        last = os.pread(self._fd, _NAME_SIZE, 0).decode(errors="replace").strip() or "an unknown process"
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        except (OSError, struct.error):
            return f"{last} had it last"
        if kind == fcntl.F_UNLCK or sys.platform != "linux":
            return f"{last} had it last"
        if pid <= 0:
            return f"a process on another host or in another container holds it; {last} had it last, says the file"
        shared = " as a reader" if kind == fcntl.F_RDLCK else ""
        return f"process {pid} of this host ({_name_of(pid)}) holds it{shared}"

    def _write(self, text: str, at: int) -> None:
        try:
            os.pwrite(self._fd, text.encode(), at)
        except OSError:
            pass  # the disk is full. The turn goes on without name and note

    def _let_go(self) -> None:
        try:
            if self._fd >= 0:
                os.close(self._fd)  # this lets go of the lock as well
        finally:
            self._fd = -1
            _ONE_THREAD.release()


def note_in(path: str) -> bytes:
    """The note that the last holder has left in the file. Empty: there is none, or a thread of this process has the
    file open, and closing it here would let go of that thread's lock."""
    if not _ONE_THREAD.acquire(blocking=False):
        return b""
    try:
        fd = there(path, os.O_RDONLY)
        try:
            return os.pread(fd, _NOTE_SIZE, _NAME_SIZE).strip()
        finally:
            os.close(fd)
    except OSError:
        return b""
    finally:
        _ONE_THREAD.release()


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
