"""Why a worker of this keeper failed, from all that is known when it has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.adapters.host import memory_kills
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure

from .error_files import explain, shorten_stacks

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Leader
    from reknit.adapters.keeper.watchdog.watchdog import Hung

_CANNOT_FLUSH = 120
"""The exit status of a Python that could not write its last output."""
_LAST_LINES = 20
"""Number of a worker's last lines that the report of its failure holds."""


def failure_of(leader: Leader, lines: Sequence[str], hung: Hung | None = None) -> WorkerFailure | None:
    """How this worker failed. None: it has ended with status 0, by itself.

    `lines`: the end of its stderr. `hung`: set if reknit has ended it because it was hung.
    """
    exitcode = leader.exitcode or 0
    if hung is None and exitcode == 0:
        return None
    # A worker that was killed by a signal did not die of an exception that it has printed. (A shell whose command was
    # killed by signal n ends with 128 + n.)
    has_raised = hung is None and 0 < exitcode < 128
    message, traceback = explain(leader.error_file, lines if has_raised else ())
    cause = None
    if hung is not None:
        message, traceback, lines, cause = _of_hung(hung, message, lines)
        # A worker that has ended with 0 because of the signal has failed all the same: its work is not done.
        exitcode = exitcode or -(signal.SIGKILL if leader.exitcode is None else hung.signum)
    return WorkerFailure(
        local_rank=leader.local_rank,
        rank=leader.rank,
        exitcode=exitcode,
        pid=leader.pid if leader.exitcode is not None else 0,
        message=message,
        traceback=traceback,
        stderr=tuple(lines[-_LAST_LINES:]),
        log=next((os.path.dirname(path) for path in leader.streams.files.values()), ""),
        cause=cause,
    )


def unread(failure: WorkerFailure) -> WorkerFailure:
    """The failure of a worker whose stdout had no reader any more, if it has failed because of that."""
    said = "\n".join((failure.message, *failure.stderr[-5:]))
    if failure.exitcode in (-signal.SIGPIPE, 128 + signal.SIGPIPE, _CANNOT_FLUSH) or "BrokenPipeError" in said:
        return evolve(failure, message="nobody reads its stdout any more", traceback="", stderr=())
    return failure


def killed(failure: WorkerFailure, kills_before: int | None) -> WorkerFailure:
    """The failure of a worker that was ended by a SIGKILL of others. The message says whether the kernel has killed
    processes for lack of memory since the worker was started.

    `kills_before`: how many processes the kernel had killed for lack of memory when the worker was started. None: this
    is not known."""
    if failure.exitcode != -signal.SIGKILL or failure.message or kills_before is None:
        return failure
    kills = memory_kills.count()
    if kills is None or kills == kills_before:
        return evolve(failure, message="but not by the kernel for lack of memory")
    used = memory_kills.usage_text()
    return evolve(failure, message=f"probably by the kernel for lack of memory{f' ({used})' if used else ''}")


def _of_hung(
    hung: Hung, message: str, lines: Sequence[str]
) -> tuple[str, str, Sequence[str], NoProgress | TimerExpired]:
    """Message, stacks, last lines and cause of a worker that was hung. `message`: from its error file."""
    from reknit.adapters.keeper.watchdog.activity import Kernel, activity_of
    from reknit.adapters.keeper.watchdog.thread_stacks import split_dump, stacks_text

    kernel = hung.kernel or Kernel()
    dumped, before = split_dump(lines)
    threads = hung.threads or dumped
    survives = "it survives SIGKILL" if hung.leader.exitcode is None else ""
    cause, remark = hung.cause, kernel.remark
    if isinstance(cause, NoProgress):
        cause = evolve(cause, activity=evolve(activity_of(threads, kernel), collective=hung.collective))
        remark = "" if kernel.is_stopped else remark  # the activity says it
    message = ", ".join(text for text in (survives, remark) if text) or message
    stacks = shorten_stacks(stacks_text(threads) or kernel.description)
    return message, stacks, before, cause
