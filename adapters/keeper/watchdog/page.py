"""The memory in which workers say that they make progress (`progress.py`), as the keeper sees it.

1. On Linux it is a file without a name. Workers open it by way of a descriptor of the keeper,
   `/proc/<keeper>/fd/<number>`. So nothing is left behind, whichever process dies. Elsewhere it is a file in the folder
   of this run.
2. The keeper writes the pid of each worker beside its progress. So whoever may look into the keeper can see which
   workers there are and how far they are (`seen`), for example `reknit status`.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from .progress import BETWEEN, FOR_EVER, MAGIC, NO_STEP, RECORD, SLOT, VARIABLE

_NAME = "reknit-progress"
_PID = struct.Struct("@q")
"""The pid of a worker, behind its record."""


class Seen(NamedTuple):
    """A worker as its page shows it."""

    pid: int
    """0: it is not known."""
    at: float | None
    """When it has reported progress last, on the system's monotonic clock, in seconds. None: it has not.
    Infinite: it will report no more, because it only waits for the other workers to end."""
    step: int | None
    """The step of that progress. None: it has named none."""


class Page:
    """One record for each worker of a round. Raises `OSError` if there is no descriptor or no room."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: where the file is made on a system without files that have no name. Empty: the host's folder for
        temporary files."""
        self._file = ""
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # A worker that could make the file shorter would kill the others at their next call.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            from tempfile import mkstemp

            self._fd, self._file = mkstemp(prefix="reknit_progress_", dir=folder or None)
            self._path = self._file
        os.write(self._fd, MAGIC)

    def variables(self, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """What this worker needs in its environment besides `env`. To be called before the worker starts. Raises
        `OSError`."""
        end = SLOT * (local_rank + 2)
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)
        # This agent may itself be a worker, whose own agent waits for progress as well.
        return {VARIABLE: BETWEEN.join([f"{self._path}:{local_rank}", *filter(None, [env.get(VARIABLE)])])}

    def started(self, local_rank: int, pid: int) -> None:
        """This worker was started."""
        os.pwrite(self._fd, _PID.pack(pid), SLOT * (local_rank + 1) + RECORD.size)

    def read(self, local_rank: int) -> tuple[int, int | None]:
        """The time in nanoseconds and the step that the worker has written last. A worker that has written nothing has
        the time 0. A worker that only waits for others has the time `FOR_EVER`. The worker may write anything there,
        so nothing is certain of either number."""
        data = os.pread(self._fd, RECORD.size, SLOT * (local_rank + 1))
        if len(data) < RECORD.size:
            return 0, None  # a worker has made the file shorter
        at, step = RECORD.unpack(data)
        return at, step if at and step != NO_STEP else None

    def close(self) -> None:
        """May be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._file:
            try:
                os.unlink(self._file)
            except FileNotFoundError:
                pass  # somebody has tidied up
            self._file = ""


def seen(keeper: int) -> dict[int, Seen]:
    """The workers of this keeper, by local rank. Empty: none runs, or this user may not look into the keeper, or the
    system has no /proc."""
    try:
        fds = [f"/proc/{keeper}/fd/{number}" for number in os.listdir(f"/proc/{keeper}/fd")]
    except OSError:
        return {}
    for path in fds:
        try:
            if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                with open(path, "rb") as file:
                    return _records(file.read())
        except OSError:
            pass  # it was closed just now
    return {}


def _records(page: bytes) -> dict[int, Seen]:
    found = {}
    for local_rank, at in enumerate(range(SLOT, len(page) - SLOT + 1, SLOT)):
        when, step = RECORD.unpack_from(page, at)
        (pid,) = _PID.unpack_from(page, at + RECORD.size)
        last = inf if when == FOR_EVER else when / 1e9 if when > 0 else None
        found[local_rank] = Seen(pid, last, None if last is None or step == NO_STEP else step)
    return found
