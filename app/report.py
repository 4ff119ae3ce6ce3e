"""What people read: one line per decision while the job runs, and a report when it has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from reknit.adapters.keeper.common.run_folder import working_folder
from reknit.core.agent import reasons as own
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command, Result
from reknit.core.agent.events import Event
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import WorkersStopped
from reknit.core.agent.workers import asks_somebody
from reknit.core.job import reasons
from reknit.core.job.job import Running
from reknit.core.job.restart import is_echo
from reknit.core.job.workers import NoProgress, WorkerFailure

USAGE, BUG, LIMIT = 2, 70, 71
HUNG = 124
"""The status of timeout(1) for a command that it has ended because its time was over."""
_CANNOT_STOP, _NO_STORE, _CONFIGURATION, _REPLACED, _TOO_FEW = 71, 74, 78, 76, 75
_REFUSED = {
    reasons.Refusal.OTHER_JOB: 73,
    reasons.Refusal.SECRET: 77,
    reasons.Refusal.IDENTITY: 72,
    reasons.Refusal.LEFT_BEHIND: 72,
    reasons.Refusal.FORMAT: 65,
    reasons.Refusal.SETUP: 69,
}


Say = Callable[[str], None]
PREFIX = "reknit: "


class Reporter:
    """An observer that shows the agent's decisions. With `verbose`, it shows every event and command as well.
    `names_options`: as for `final_lines`."""

    def __init__(self, say: Say, *, verbose: bool, names_options: bool = True) -> None:
        self._say = say
        self._verbose = verbose
        self._names_options = names_options
        self._told: reasons.WorkerFailed | None = None

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        # Imported here, because a command that ends before it has an agent does not need it.
        from reknit.core.text.describe import decisions, failure_told, killed_text
        from reknit.core.text.doing import command_text, event_text

        if self._verbose:
            self._say(f"{PREFIX}<< {event_text(event)}")
            for command in commands:
                self._say(f"{PREFIX}>> {command_text(command)}")
        if isinstance(event, WorkersStopped) and event.killed:
            self._say(PREFIX + killed_text(event))
        why = after.causes.unable
        if isinstance(why, own.TermsDiffer) and before.causes.unable is None and after.result is None:
            # The host of the store stays for the other nodes. Its last lines, which tell this again, come much later.
            self._say(PREFIX + _outside_text(why, names_options=self._names_options))
        told = failure_told(before, after, commands) or self._told
        for line in decisions(before, after, commands, told):
            self._say(PREFIX + line)
        begins = isinstance(after.job.phase, Running) and after.job.round != before.job.round
        self._told = None if begins else told


def write(fd: int, text: str) -> None:
    """Write to a stream of this process. No error if nobody reads it."""
    try:
        os.write(fd, text.encode(errors="backslashreplace"))
    except OSError:
        pass


def exit_status(result: Result) -> int:
    """The exit status of `reknit run`: see docs/exit-status.md. Numbers from 64 on have their names in sysexits.h."""
    match result.why:
        case reasons.AllSucceeded() | own.AlreadyFinished():
            return 0
        case reasons.BudgetSpent(_, root):
            return HUNG if root.failure.cause is not None else _status_of(root.failure)
        case own.SignalReceived(signal):
            return 128 + signal
        case own.CannotStop():
            return _CANNOT_STOP
        case own.StoreLost():
            return _NO_STORE
        case own.JournalRefused(refusal, _):
            return _REFUSED[refusal]
        case own.TermsDiffer():
            return _CONFIGURATION
        case own.Replaced():
            return _REPLACED
        case reasons.TooFewNodes():
            return _TOO_FEW
        case reasons.Unstable() | reasons.AbortedByOperator() | reasons.LongOver():
            return 1
        case _:
            assert_never(result.why)


_ORIGINS = {
    HUNG: "a worker hung, and reknit has ended it",
    65: "the job's journal was written by another version of reknit",
    69: "the job's journal cannot be used as asked",
    BUG: "a bug in reknit",
    71: "reknit could not end processes: they survive SIGKILL",
    72: "the store holds another journal than before, or one that was changed",
    73: "the endpoint serves another job",
    _NO_STORE: "reknit could not reach or use the job's store",
    _TOO_FEW: "too few nodes joined in time",
    _REPLACED: "another agent has this node's id",
    77: "wrong secret",
    _CONFIGURATION: "the job runs on other terms than this node",
}
"""The meaning of each status that reknit itself chooses and that a worker might choose as well."""


def origin(result: Result) -> str | None:
    """A line that says whether a worker or reknit has chosen the exit status. None: no line is needed, because the
    status cannot be taken for the other. See docs/exit-status.md."""
    status = exit_status(result)
    if not isinstance(result.why, reasons.BudgetSpent):
        return own_origin(status) if status in _ORIGINS else None
    failure = result.why.root.failure
    if failure.cause is not None:
        return own_origin(status)
    if status not in _ORIGINS and status != USAGE:
        return None
    if not failure.is_of_worker:
        return f"exit status {status}: reknit could not run the worker of rank {failure.rank}"
    return f"exit status {status}: from the worker of rank {failure.rank}"


def own_origin(status: int) -> str:
    """The last line of an agent that ends with a status of reknit's own."""
    return f"exit status {status}: {_ORIGINS[status]}"


def _status_of(failure: WorkerFailure) -> int:
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


_OUTSIDE = own.TermsDiffer, own.JournalRefused, own.Replaced
"""Why an agent cannot take part in the job, or can do so no longer."""


def final_lines(
    result: Result,
    restarts: int,
    *,
    ran_s: float | None = None,
    is_alone: bool = True,
    names_options: bool = True,
    terminal: int | None = None,
    shown: int = 0,
    trace: str = "",
) -> Iterator[str]:
    """The last lines: how the run has ended, in one line or in a report, and for `reknit run` then `origin`.

    `restarts`: number of restarts of the job (`Job.restarts`). `ran_s`: seconds for which this agent has run. None:
    they are not told. `is_alone`: no other node can go on with the job.
    `names_options`: the reader has called `reknit run`. False: the reader's program has made the settings, and chooses
    its exit status itself.
    `terminal`: the local rank of the worker that has the terminal. None: no worker has it. `shown`: the number of
    workers of the job, if all their lines were shown. 0: this is not known. `trace`: the folder with the trace of this
    agent. Empty: there is none.
    """
    yield from _ending(result, restarts, ran_s, is_alone=is_alone, names_options=names_options, shown=shown)
    if isinstance(result.why, reasons.BudgetSpent):
        yield from _advice(result.why.root.failure, names_options=names_options, terminal=terminal)
    if trace and result.state is not WorkerState.SUCCEEDED and not isinstance(result.why, _OUTSIDE):
        yield f"the whole story: reknit explain {_typed(trace)}"
    if names_options and (line := origin(result)):  # the program that called chooses its own
        yield line


def _advice(failure: WorkerFailure, *, names_options: bool, terminal: int | None) -> Iterator[str]:
    """What to do about a failure of this kind."""
    if asks_somebody(failure) and failure.local_rank != terminal:
        alone = "run one worker on a terminal without --tee, --redirects, --warm and --hang-after"
        how = f"{alone}, or give --stdin={failure.local_rank}" if names_options else "use reknit run --stdin=RANK"
        yield f"this worker waited for input (breakpoint(), input()), and has no terminal: {how}"
    if isinstance(failure.cause, NoProgress) and failure.cause.since_start:
        longer = "--start-timeout" if names_options else "start_timeout_s"
        slow = f"a slow start needs a longer {longer}"
        yield f"this worker has never called reknit.progress(): does the script call it? If so, {slow}"
    if _lacks_socket(failure):
        yield "this worker could not make the socket for its flight recorder; what to do: docs/watchdog.md#recorder"


def _lacks_socket(failure: WorkerFailure) -> bool:
    """torch could not make the socket whose path reknit gives to it (`RecorderSockets`)."""
    return "Error binding to " in failure.message and "/reknit_scratch_torch_" in failure.message


def _typed(folder: str) -> str:
    """The absolute path as one would type it in a shell."""
    here = working_folder()
    shorter = folder.removeprefix(f"{here}/") if here else folder
    path = folder if shorter.startswith("-") else shorter
    # As shlex.quote. At a limit of the machine nothing can be imported here any more.
    return path if all(c.isalnum() or c in "/._-+" for c in path) else "'" + path.replace("'", "'\"'\"'") + "'"


def _ending(
    result: Result, restarts: int, ran_s: float | None, *, is_alone: bool, names_options: bool, shown: int
) -> Iterator[str]:
    from reknit.core.text.describe import hang_lines, others_text, reason_text, spent_text, time_text

    if isinstance(result.why, own.AlreadyFinished):
        advice = "; to run it again, give another --rdzv-id" if names_options else ""
        yield f"the job had succeeded before this node came: nothing was run{advice}"
        return
    if isinstance(result.why, _OUTSIDE):
        yield _outside_text(result.why, names_options=names_options)
        return
    if isinstance(result.why, own.StoreLost):
        yield f"this node has given up: {reason_text(result.why)}"
        return
    if isinstance(result.why, own.SignalReceived) and not is_alone:
        yield f"this node has left: {reason_text(result.why)}"
        return
    if result.state is WorkerState.SUCCEEDED:
        yield "the job succeeded" + (f" after {restarts} restart{'s' * (restarts != 1)}" if restarts else "")
        return
    word = {WorkerState.STOPPED: "stopped", WorkerState.UNHEALTHY: "ended here"}.get(result.state, "failed")
    if not isinstance(result.why, reasons.BudgetSpent):
        yield f"the job {word}: {reason_text(result.why)}"
        return
    root = result.why.root
    option = "--max-restarts" if names_options else "max_restarts"
    after = "" if ran_s is None else f"; it had run for {time_text(ran_s)}"
    yield f"the job {word}: {spent_text(result.why, option)}{after}"
    yield from _details(root.failure, str(root.node), shown)
    if lines := list(hang_lines(root)):
        yield "  where the workers stood that hung:"
        yield from (f"  {line}" for line in lines)
    others = [failure for failure in result.failures.values() if failure != root.failure]
    told = [("", failure) for failure in others if not lines or not isinstance(failure.cause, NoProgress)]
    yield from (f"  {line}" for line in others_text(told, root))


_TERMS = {
    "min_nodes": "--nnodes, the least",
    "max_nodes": "--nnodes, the most",
    "max_restarts": "--max-restarts",
    "renews": "--max-restarts=N/SECONDS",
    "steady_s": "--max-restarts=N/SECONDS, the seconds",
    "admission": "--admission",
    "fence_s": "--fence-after",
    "join_timeout_s": "--rdzv-conf=join_timeout",
    "last_call_s": "--rdzv-conf=last_call_timeout",
    "settle_s": "--rdzv-conf=settle",
    "beat_s": "--rdzv-conf=heartbeat (its beat)",
    "silence_s": "--rdzv-conf=heartbeat (its silence)",
}
"""By term: the option or the key of --rdzv-conf that sets it."""


def _outside_text(why: own.TermsDiffer | own.JournalRefused | own.Replaced, *, names_options: bool) -> str:
    from reknit.core.text.describe import reason_text, terms_text

    text = reason_text(why)
    if isinstance(why, own.TermsDiffer):
        text = terms_text(why, _TERMS if names_options else {}) + "; start it again with the job's values"
    return f"this node cannot take part: {text}"


def _details(failure: WorkerFailure, node: str, shown: int) -> Iterator[str]:
    from reknit.core.text.describe import how_text

    pid = f", pid {failure.pid}" if failure.is_of_worker else ""
    where = f"node {node}, local rank {failure.local_rank}{pid}"
    yield f"  rank {failure.rank} failed first ({where}): {how_text(failure)}"
    if is_echo(failure):
        yield "  this looks like the consequence of another worker's end"
    shown = 0 if failure.cause is not None else shown  # the stacks of a hang are written by nobody else
    # Lines of several workers may stand between each other. Then only lines with the rank can be told apart.
    mark = f"[rank{failure.rank}]:" if shown > 1 else ""
    has_shown = shown > 0 and _holds([line for line in failure.stderr if line.startswith(mark)], failure.traceback)
    if failure.traceback:
        if has_shown and mark:
            yield f"  its traceback stands above, in the last lines that begin with {mark.rstrip(':')}"
        elif not has_shown:
            yield "  its traceback:" if failure.cause is None else "  what it was doing, innermost call first:"
            yield from (f"    {line}" for line in failure.traceback.splitlines())
    elif "\n" in failure.message:
        yield from (f"    {line}" for line in failure.message.splitlines())
    has_shown = has_shown or shown == 1
    if failure.stderr and not has_shown and not _says(failure.stderr, failure.traceback or failure.message):
        yield "  its last lines of output:"
        yield from (f"    {line}" for line in failure.stderr)
    if failure.log:
        yield f"  its output: {failure.log}"


def _says(lines: Sequence[str], shown: str) -> bool:
    """Whether a traceback or message that is shown has the last of these lines already."""
    return bool(shown) and all(_plain(line).strip() in shown for line in lines[-3:])


def _holds(lines: Sequence[str], traceback: str) -> bool:
    """These last lines hold the traceback: its last call and its last line, and so all between."""
    wanted = [line.strip() for line in traceback.splitlines() if line.strip()]
    calls = [line for line in wanted if line.startswith("File ")]
    found = {_plain(line).strip() for line in lines}
    return bool(calls) and {calls[-1], wanted[-1]} <= found


def _plain(line: str) -> str:
    """The line without the prefix `[rank3]: `, which torch puts before each line of a traceback, or `reknit: `."""
    return line.partition("]: ")[2] if line.startswith("[rank") else line.removeprefix(PREFIX)
