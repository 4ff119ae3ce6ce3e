"""`reknit.progress`: how a worker says that it makes progress.

1. The keeper gives each worker a place in memory that both share (`keeper/page.py`). A call writes the time and the
   step there. It never waits, and no other process has to read anything.
2. Without an agent nobody sees the call.
3. A child that the worker has forked or started counts for the worker, for example a child of a DataLoader.
4. A worker may itself be an agent with workers. Then a call of these counts for both: it writes to several pages.

This module is imported by training scripts. So it imports almost nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
from time import monotonic_ns

VARIABLE = "REKNIT_PROGRESS"
"""Names the file of the page and the number of the worker's record in it: `<path>:<number>`. There may be several such
places, with `BETWEEN` in between."""
BETWEEN = "\n"
MAGIC = b"reknit progress 1\n"
"""The first bytes of a page."""
SLOT = 64
"""Bytes between two records. Each processor that writes has a cache line of its own. The first slot holds `MAGIC`."""
RECORD = struct.Struct("@qq")
"""Time on the system's monotonic clock in nanoseconds, and step. In this form each number is written at once, so that
nobody reads half of it."""
NO_STEP = -(2**63)
FOR_EVER = 2**63 - 1
"""The time of a worker that will report no more progress, and is not hung."""
_write = RECORD.pack_into

_records: tuple[memoryview, ...] = ()
"""Where `progress` writes. Empty: this process has not looked for it yet."""


def progress(step: int | None = None) -> None:
    """Say that this worker makes progress. reknit ends a worker that has not said so for too long (`--hang-after`).

    `step`: the number of the training step, for messages. None: there is none. Any whole number below 2**63 is allowed.
    Raises `ValueError` for anything else.

    Takes less than a microsecond, never waits, and may be called by any thread. A call in a child process of the worker
    counts for the worker. Without an agent, or if the agent does not watch its workers, nobody sees the call.
    """
    now = monotonic_ns()
    try:
        for record in _records or _found():
            _write(record, 0, now, NO_STEP if step is None else step)
    except struct.error:
        raise ValueError(f"step must be a whole number below 2**63, or None, not {step!r:.100}") from None


def rest() -> None:
    """Say that this worker only waits for others from now on, so that its own agent expects no more progress."""
    own = _shared(os.environ.get(VARIABLE, "").split(BETWEEN)[0])
    if own is not None:
        _write(own, 0, FOR_EVER, NO_STEP)


def _found() -> tuple[memoryview, ...]:
    global _records
    places = os.environ.get(VARIABLE, "").split(BETWEEN)
    found = tuple(record for record in map(_shared, places) if record is not None)
    _records = found or (memoryview(bytearray(RECORD.size)),)  # the latter is read by nobody
    return _records


def _shared(place: str) -> memoryview | None:
    """The record of this worker in the page of a keeper. None: there is no page, or it cannot be opened."""
    path, _, number = place.rpartition(":")
    if not path:
        return None
    try:
        at = SLOT * (int(number) + 1)
        fd = os.open(path, os.O_RDWR)
        try:
            page = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None  # for example a process that has outlived its keeper
    if page[: len(MAGIC)] != MAGIC or not 0 < at <= len(page) - SLOT:
        return None  # another process has the keeper's number by now
    return memoryview(page)[at : at + RECORD.size]


def _forget() -> None:
    """In a forked child: it may be a new worker, with a record of its own."""
    global _records
    _records = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
