"""What people read: a line per decision while the job runs, and a report they can act on when it failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from reknit.core import reasons
from reknit.core.agent import Agent
from reknit.core.commands import Command, Result
from reknit.core.entries import WorkerFailure
from reknit.core.events import Event
from reknit.core.restart import is_echo
from reknit.core.states import WorkerState
from reknit.core.values import assert_never

USAGE, BUG = 2, 70
_CANNOT_STOP, _NO_STORE, _CONFIGURATION, _REPLACED, _TOO_FEW = 71, 74, 78, 76, 75
_REFUSED = {
    reasons.Refusal.OTHER_JOB: 73,
    reasons.Refusal.SECRET: 77,
    reasons.Refusal.IDENTITY: 72,
    reasons.Refusal.FORMAT: 65,
    reasons.Refusal.SETUP: 69,
}


Say = Callable[[str], None]
PREFIX = "reknit: "


def say(line: str) -> None:
    """One line on stderr, in one write, while there are no workers. That nobody reads it is no reason to fail."""
    try:
        os.write(2, f"{PREFIX}{line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


class Reporter:
    """Observes the steps of the agent. Says its decisions; with `verbose`, every event and command."""

    def __init__(self, say: Say, *, verbose: bool) -> None:
        self._say = say
        self._verbose = verbose

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        # Imported when the first workers have been spawned: text is no reason for them to wait.
        from reknit.core.describe import command_text, decisions

        if self._verbose:
            self._say(f"{PREFIX}{event.at:.3f} << {event!r:.200}")
            for command in commands:
                self._say(f"{PREFIX}{event.at:.3f} >> {command_text(command)}")
        for line in decisions(before, after, commands):
            self._say(PREFIX + line)


def exit_status(result: Result) -> int:
    """0; the first failing worker's code, 128+n for a signal; or what kept the job from its end (sysexits)."""
    match result.why:
        case reasons.AllSucceeded() | reasons.AlreadyFinished():
            return 0
        case reasons.BudgetSpent(_, root):
            return _status_of(root.failure)
        case reasons.SignalReceived(signal):
            return 128 + signal
        case reasons.CannotStop():
            return _CANNOT_STOP
        case reasons.StoreLost() | reasons.CutOff():
            return _NO_STORE
        case reasons.JournalRefused(refusal, _):
            return _REFUSED[refusal]
        case reasons.TermsDiffer():
            return _CONFIGURATION
        case reasons.Replaced():
            return _REPLACED
        case reasons.TooFewNodes():
            return _TOO_FEW
        case (
            reasons.WorkerFailed()
            | reasons.NodeGone()
            | reasons.NodesAdmitted()
            | reasons.Unstable()
            | reasons.AbortedByOperator()
            | reasons.DeclaredLost()
        ):
            return 1
        case _:
            assert_never(result.why)


def _status_of(failure: WorkerFailure) -> int:
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def final_lines(result: Result, restarts: int, *, is_alone: bool = True) -> Iterator[str]:
    """The end of the run, in one line or in a report. `is_alone`: no other node can go on with the job."""
    from reknit.core.describe import budget_text, failure_text, reason_text

    if isinstance(result.why, reasons.AlreadyFinished):
        yield "the job had succeeded before this node came: nothing was run"
        return
    if isinstance(result.why, reasons.TermsDiffer):
        yield f"this node cannot take part: {_terms_text(result.why)}"
        return
    if isinstance(result.why, reasons.JournalRefused | reasons.Replaced):
        yield f"this node cannot take part: {reason_text(result.why)}"
        return
    if isinstance(result.why, reasons.StoreLost):
        yield f"this node has given up: {reason_text(result.why)}"
        return
    if isinstance(result.why, reasons.SignalReceived) and not is_alone:
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
    yield f"the job {word}: {budget_text(result.why.max_restarts)}"
    yield from _details(root.failure, str(root.node))
    for failure in result.failures.values():
        if failure != root.failure:
            yield f"  likewise {failure_text(failure)}"


_TERMS = {
    "min_nodes": "--nnodes, the least",
    "max_nodes": "--nnodes, the most",
    "max_restarts": "--max-restarts",
    "admission": "--admission",
    "fence_s": "--fence-after",
    "join_timeout_s": "join_timeout",
    "last_call_s": "last_call_timeout",
    "settle_s": "settle",
    "beat_s": "heartbeat (its beat)",
    "silence_s": "heartbeat (its silence)",
}
"""What users call the terms."""


def _terms_text(why: reasons.TermsDiffer) -> str:
    listed = "; ".join(
        f"{_TERMS.get(name, name)}: {theirs} there, {ours} here" for name, theirs, ours in why.differences
    )
    return f"the job runs on other terms: {listed}"


def _details(failure: WorkerFailure, node: str) -> Iterator[str]:
    from reknit.core.describe import how_text

    pid = f", pid {failure.pid}" if failure.pid else ""  # it may not have been started at all
    where = f"node {node}, local rank {failure.local_rank}{pid}"
    yield f"  rank {failure.rank} failed first ({where}): {how_text(failure)}"
    if is_echo(failure):
        yield "  this looks like the consequence of another worker's end"
    if failure.traceback:
        yield "  its traceback:"
        yield from (f"    {line}" for line in failure.traceback.splitlines())
    elif "\n" in failure.message:
        yield from (f"    {line}" for line in failure.message.splitlines())
    if failure.stderr and not _says(failure.stderr, failure.traceback):
        yield "  its last lines on stderr:"
        yield from (f"    {line}" for line in failure.stderr)
    if failure.log:
        yield f"  its output: {failure.log}"


def _says(lines: Sequence[str], traceback: str) -> bool:
    """Whether the traceback already shows these lines."""
    return bool(traceback) and all(_without_rank(line).strip() in traceback for line in lines[-3:])


def _without_rank(line: str) -> str:
    """torch puts `[rank3]: ` before each line of a traceback."""
    return line.partition("]: ")[2] if line.startswith("[rank") else line
