"""From the results of a worker group to facts for the core, and from the core's result to that of `run()`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from reknit.adapters.keeper.errors import explain, write_document
from reknit.core.agent import reasons as own
from reknit.core.agent.commands import Result
from reknit.core.agent.states import WorkerState as CoreState
from reknit.core.job import reasons
from reknit.core.job.entries import WorkerFailure
from reknit.core.job.restart import root_cause_of
from reknit.core.text.describe import reason_text

from ...multiprocessing.errors import ProcessFailure
from .group import RunResult, WorkerGroup, WorkerState

_TORCHS_ERRORS = "torch.distributed.elastic.rendezvous.api"
_NO_EXIT_CODE = 1
"""The exit code of a failure that has none: the agent has found its workers unhealthy, and no worker has ended."""
BAD = (WorkerState.FAILED, WorkerState.UNHEALTHY)


class RendezvousFailed(RuntimeError):
    """The nodes of the job could not meet, or cannot go on together. The text says why.

    If torch's module of rendezvous errors is loaded, torch's error is raised in its place.
    """


def failures_of(result: RunResult, group: WorkerGroup) -> tuple[WorkerFailure, ...]:
    """The failures in `result` as the core has them, in the order of their local ranks. At least one."""
    local_ranks = {worker.global_rank: worker.local_rank for worker in group.workers}
    found = [
        _worker_failure(local_ranks.get(rank, failure.local_rank), rank, failure)
        for rank, failure in result.failures.items()
    ]
    if not found:
        rank = group.workers[0].global_rank if group.workers else 0
        text = f"the agent has found its workers {WorkerState(result.state).value}"
        found = [WorkerFailure(0, rank, _NO_EXIT_CODE, message=text)]
    return tuple(sorted(found, key=lambda failure: failure.local_rank))


def _worker_failure(local_rank: int, rank: int, failure: ProcessFailure) -> WorkerFailure:
    message, traceback = explain(failure.error_file, ())
    if not message and isinstance(failure.message, dict):  # from the worker's stderr
        message, traceback = _texts(failure.message)
    elif not message and failure.message != ProcessFailure(local_rank, failure.pid, failure.exitcode, "").message:
        message = str(failure.message)  # a text that was not made up from the exit code
    return WorkerFailure(
        local_rank=local_rank,
        rank=rank,
        exitcode=failure.exitcode,
        pid=failure.pid,
        message=message,
        traceback=traceback,
    )


def _texts(message: dict[str, Any]) -> tuple[str, str]:
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(message.get("message") or ""), str(stack or "")


def process_failure(failure: WorkerFailure) -> ProcessFailure:
    """A failure of the job, perhaps of a worker of another node, as this API shows it."""
    made = ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, error_file="")
    if failure.message or failure.traceback or failure.stderr:
        extra = {"py_callstack": failure.traceback or "\n".join(failure.stderr), "timestamp": str(int(time.time()))}
        made.message = {"message": failure.message, "extraInfo": extra}
        made.error_file_data = {"message": made.message}
    return made


def run_result(ended: Result, last: RunResult | None) -> RunResult:
    """What `run()` returns.

    `ended`: how the agent has ended. `last`: the last result of the subclass in the last round. None: there was none.
    Raises an error if the job has ended for a reason that is no worker's.
    """
    if last is not None and last.state == WorkerState.SUCCEEDED and ended.state is not CoreState.FAILED:
        return last
    if last is not None and last.state in BAD and ended.state is not CoreState.SUCCEEDED:
        return _failed(last, ended)
    if ended.state is CoreState.SUCCEEDED:
        return RunResult(WorkerState.SUCCEEDED)
    if ended.state is CoreState.STOPPED:
        return RunResult(WorkerState.STOPPED)
    if ended.failures:
        root = _root_of(ended)
        return RunResult(WorkerState.FAILED, failures={root.rank: process_failure(root)})
    raise _error(ended)


def _failed(last: RunResult, ended: Result) -> RunResult:
    if last.state == WorkerState.FAILED and last.failures:
        return last
    # A failure must have a cause that can be shown, and must be told from a success.
    root = _root_of(ended) if ended.failures else None
    failures = last.failures or ({root.rank: process_failure(root)} if root is not None else {})
    return RunResult(WorkerState.FAILED, dict(last.return_values), failures)


def _root_of(ended: Result) -> WorkerFailure:
    if isinstance(ended.why, reasons.BudgetSpent):
        return ended.why.root.failure
    return root_cause_of(tuple(ended.failures.values()))


def _error(ended: Result) -> Exception:
    match ended.why:
        case reasons.TooFewNodes():
            name = "RendezvousTimeoutError"
        case own.StoreLost() | own.JournalRefused():
            name = "RendezvousConnectionError"
        case own.TermsDiffer() | own.Replaced():
            name = "RendezvousStateError"
        case _:
            name = "RendezvousClosedError"
    # Whoever catches torch's error has loaded its module.
    kind: type[Exception] = getattr(sys.modules.get(_TORCHS_ERRORS), name, RendezvousFailed)
    return kind(reason_text(ended.why))


def is_graceful_exit(error: BaseException) -> bool:
    """A handler of torch needs this node no more. That is no failure."""
    return isinstance(error, getattr(sys.modules.get(_TORCHS_ERRORS), "RendezvousGracefulExitError", ()))


def leave_error_file(result: RunResult) -> None:
    """Hand the root cause on to the program that runs this agent, in the file that TORCHELASTIC_ERROR_FILE names."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not result.failures or result.state != WorkerState.FAILED:
        return
    failure = min(result.failures.values(), key=lambda failure: failure.timestamp)
    message = failure.message
    if not isinstance(message, dict):
        message = {"message": str(message), "extraInfo": {"py_callstack": "", "timestamp": str(failure.timestamp)}}
    if failure.exitcode:
        message = {**message, "errorCode": failure.exitcode}
    write_document(path, {**failure.error_file_data, "message": message})
