"""How far the workers of this host are, as whoever may look into their keeper can see it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

from attrs import frozen

from reknit.adapters.host.children import stat_of
from reknit.adapters.keeper.watchdog.page import seen


@frozen
class Progress:
    pid: int
    """0: it is not known."""
    step: int | None
    """The step that the worker has named last. None: it has named none."""
    ago_s: float | None
    """Seconds since it has reported progress. None: it never has."""
    is_waiting: bool = False
    """It has returned, and waits for the other workers."""
    is_stopped: bool = False
    """Somebody has stopped its process, for example by SIGSTOP or a debugger."""


def progress_of(keeper: int) -> dict[int, Progress]:
    """By local rank, the workers of this keeper (`page.seen`)."""
    now = time.monotonic()
    found = {}
    for local_rank, one in seen(keeper).items() if keeper else ():
        is_waiting = one.at is not None and isinf(one.at)
        ago_s = None if one.at is None or is_waiting else max(0.0, now - one.at)
        found[local_rank] = Progress(one.pid, one.step, ago_s, is_waiting, is_stopped(one.pid))
    return found


def is_stopped(pid: int) -> bool:
    """Somebody has stopped this process. False where nobody knows."""
    try:
        return pid > 0 and stat_of(str(pid))[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False  # it has just ended, or there is no /proc


def with_progress(workers: Sequence[dict[str, Any]], progress: Mapping[int, Progress]) -> list[dict[str, Any]]:
    """What `picture.workers_picture` tells, with the progress of each worker."""
    none = Progress(0, None, None)
    told = []
    for worker in workers:
        one = progress.get(worker["local_rank"], none)
        ago_s = None if one.ago_s is None else round(one.ago_s, 3)
        own = {"pid": one.pid or None, "step": one.step, "progress_s": ago_s}
        told.append({**worker, **own, "waiting": one.is_waiting, "stopped": one.is_stopped})
    return told
