"""The memory in which workers say that they make progress (`progress.py`), as the keeper sees it.

On Linux it is a file without a name. Workers open it by way of the keeper's descriptor, `/proc/<keeper>/fd/<number>`.
So nothing is left behind, whichever process dies. Elsewhere it is a file in the folder of this run.
"""

from __future__ import annotations

import fcntl
import os

from .progress import MAGIC, NO_STEP, RECORD, SLOT, VARIABLE


class Page:
    """One record for each worker of a round. Raises `OSError` if there is no descriptor or no room."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: where the file is made on a system without files that have no name. Empty: the host's folder for
        temporary files."""
        self._file = ""
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("reknit-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # A worker that could make the file shorter would kill the others at their next call.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            from tempfile import mkstemp

            self._fd, self._file = mkstemp(prefix="reknit_progress_", dir=folder or None)
            self._path = self._file
        os.write(self._fd, MAGIC)

    def variables(self, local_rank: int) -> dict[str, str]:
        """What this worker needs in its environment. To be called before the worker starts."""
        end = SLOT * (local_rank + 2)
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)
        return {VARIABLE: f"{self._path}:{local_rank}"}

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
