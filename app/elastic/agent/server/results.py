"""From the results of a worker group to facts for the core, and from the core's result to that of `run()`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from reknit.adapters.keeper.failures.error_files import explain, write_document
from reknit.core.agent import reasons as own
from reknit.core.agent.commands import Result
from reknit.core.agent.states import WorkerState as CoreState
from reknit.core.job import reasons
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.describe import how_text, reason_text
from reknit.elastic.multiprocessing.errors import ProcessFailure

from .group import RunResult, WorkerGroup, WorkerState

_TORCHS_ERRORS = "torch.distributed.elastic.rendezvous.api"
_NO_EXIT_CODE = 1
"""The exit code of a failure that has none: the agent has found its workers unhealthy, and no worker has ended."""
BAD = (WorkerState.FAILED, WorkerState.UNHEALTHY)
_OF_THE_WORKERS = (
    (CoreState.SUCCEEDED, WorkerState.SUCCEEDED),
    (CoreState.STOPPED, WorkerState.SUCCEEDED),
    (CoreState.FAILED, WorkerState.FAILED),
    (CoreState.STOPPED, WorkerState.FAILED),
)
"""How the job and how the workers of this node have ended. Then `run()` returns the result of the workers."""
_WITHOUT_WORKERS = {CoreState.SUCCEEDED: WorkerState.SUCCEEDED, CoreState.STOPPED: WorkerState.STOPPED}
"""How the job has ended, and the state that `run()` returns if it has no result of the workers."""
_ERRORS: dict[type[object], str] = {
    reasons.TooFewNodes: "RendezvousTimeoutError",
    own.StoreLost: "RendezvousConnectionError",
    own.JournalRefused: "RendezvousConnectionError",
    own.TermsDiffer: "RendezvousStateError",
    own.Replaced: "RendezvousStateError",
}
"""Why the agent has ended, and torch's name for that. For all other reasons: RendezvousClosedError."""


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
        message=message if failure.cause is None else "",  # the cause says the same
        traceback=traceback,
        cause=failure.cause,
    )


def _texts(message: dict[str, Any]) -> tuple[str, str]:
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(message.get("message") or ""), str(stack or "")


def process_failure(failure: WorkerFailure) -> ProcessFailure:
    """A failure of the job, perhaps of a worker of another node, as this API shows it."""
    made = ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, error_file="")
    made.cause = failure.cause
    message = failure.message if failure.cause is None else how_text(failure)
    if message or failure.traceback or failure.stderr:
        extra = {"py_callstack": failure.traceback or "\n".join(failure.stderr), "timestamp": str(int(time.time()))}
        made.message = {"message": message, "extraInfo": extra}
        made.error_file_data = {"message": made.message}
    return made


def raw_error(failure: ProcessFailure) -> str:
    """What an event holds of a failure: the worker's error file, as JSON. Without such a file, it is what the agent has
    found out."""
    data = failure.error_file_data
    if data.get("message") == "<NONE>":
        data = {**data, "message": failure.message}
    return json.dumps(data)


def failed_result(result: RunResult, failures: tuple[WorkerFailure, ...]) -> RunResult:
    """What `run()` returns if it ends with `result`, which says that workers are FAILED or UNHEALTHY.

    torch knows one state for the end of a run that has failed, and its callers ask `failures` for the cause. A result
    that has both is returned as it is. `failures`: those of `failures_of`.
    """
    if result.state == WorkerState.FAILED and result.failures:
        return result
    shown = dict(result.failures) or {failure.rank: process_failure(failure) for failure in failures}
    return RunResult(WorkerState.FAILED, dict(result.return_values), shown)


def run_result(ended: Result | None, last: RunResult | None) -> RunResult:
    """What `run()` returns. Raises an error if the job has failed, and no worker has.

    `ended`: how the agent has ended, as the core says. None: the core has not said so in time (`AgentRun.result`).
    `last`: how the workers of this node have ended in their last round. None: they have not ended by themselves.

    The tables translate and judge nothing. torch's result is about the workers of one node, and the core's about the
    job. `last` is what the core was told of these workers, in torch's words and with their values.
    """
    job = CoreState.STOPPED if ended is None else ended.state
    if last is not None and (job, last.state) in _OF_THE_WORKERS:
        return last
    if ended is None or job in _WITHOUT_WORKERS:
        return RunResult(_WITHOUT_WORKERS[job])
    if ended.root is None:
        # Whoever catches torch's error has loaded its module.
        name = _ERRORS.get(type(ended.why), "RendezvousClosedError")
        kind: type[Exception] = getattr(sys.modules.get(_TORCHS_ERRORS), name, RendezvousFailed)
        raise kind(reason_text(ended.why))
    return RunResult(WorkerState.FAILED, failures={ended.root.rank: process_failure(ended.root)})


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
