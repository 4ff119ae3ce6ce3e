"""Short forms of values for transcripts: one line each, without nonces, ports and times.

Transcripts do not use the sentences of `describe`, so that a better sentence changes no transcript.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from reknit.core.agent import commands, events, worker_words
from reknit.core.agent import reasons as own
from reknit.core.job import entries, reasons
from reknit.core.job.job import Closed, Gathering, Job, Running, Unopened
from reknit.core.job.workers import WorkerFailure


def short_event(event: events.Event) -> str:
    match event:
        case events.Started():
            return "started"
        case events.EntriesRead():
            return "read " + ("; ".join(map(short_entry, event.entries)) or "nothing new")
        case events.Counters():
            return "beat acknowledged"
        case events.JournalFailed():
            return f"store unreachable: {event.why}" + (f" ({event.refusal.value})" if event.refusal else "")
        case worker_words.WorkersStarted():
            ranks = event.assignment.workers if event.assignment is not None else ()
            other = f" as rank {_list(w.rank for w in ranks)}" if ranks else ""
            return f"workers run r{event.round}{other}"
        case worker_words.WorkersExited():
            ends = (f"{e.local_rank}:{_failure(e.failure) if e.failure else 'ok'}" for e in event.exits)
            return f"workers exited r{event.round} {' '.join(ends)}"
        case worker_words.WorkersStopped():
            stuck = f", stuck: {_list(event.stuck)}" if event.stuck else ""
            return f"workers gone r{event.round}{stuck}"
        case worker_words.PortReserved():
            return "port reserved"
        case events.StopRequested():
            return f"asked to leave, signal {event.signal}"
        case events.Woken():
            return "woken"
        case _:
            assert_never(event)


def short_command(command: commands.Command) -> str:
    match command:
        case commands.Append():
            return f"say {short_entry(command.entry)}"
        case worker_words.StartWorkers():
            a = command.assignment
            ranks = [w.rank for w in a.workers]
            span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
            restarts = f", restart {a.restart_count}/{a.max_restarts}" if a.restart_count else ""
            node = f"node {a.group_rank}/{a.group_world_size}"
            return f"start r{command.round} rank {span}/{a.world_size}, {node} at {a.master_addr}{restarts}"
        case commands.StopWorkers():
            how = f"signal {command.signal} grace {command.grace_s:g}s"
            return f"stop r{command.round} {how}: {short_reason(command.why)}"
        case worker_words.ReservePort():
            return "reserve a port"
        case commands.Beat():
            return f"beat, watch {_list(command.watch) or 'nobody'}"
        case commands.Finish():
            r = command.result
            failed = f", failed ranks {_list(sorted(r.failures))}" if r.failures else ""
            values = f", values of ranks {_list(sorted(r.return_values))}" if r.return_values else ""
            return f"finish {r.state.value}: {short_reason(r.why)}{values}{failed}"
        case _:
            assert_never(command)


def short_entry(entry: entries.Entry) -> str:  # noqa: C901  # a dispatcher: one arm per entry
    match entry:
        case entries.Opened():
            epoch = f" e{entry.epoch}" if entry.epoch else ""
            return f"opened {entry.terms.min_nodes}:{entry.terms.max_nodes}{epoch}"
        case entries.Joined():
            return f"joined {entry.node} r{entry.round}"
        case entries.LastCall():
            return f"last call r{entry.round}"
        case entries.Admit():
            return f"admit r{entry.round}"
        case entries.Steady():
            return f"steady r{entry.round}"
        case entries.GaveUp():
            return f"gave up r{entry.round}"
        case entries.Failed():
            return f"failed {entry.node} r{entry.round} {' '.join(map(_failure, entry.failures))}"
        case entries.Succeeded():
            return f"succeeded {entry.node} r{entry.round}"
        case entries.Lost():
            return f"lost {entry.node} by {entry.by}"
        case entries.Leaving():
            return f"leaving {entry.node}"
        case entries.Left():
            return f"left {entry.node}" + (f" stuck {_list(entry.stuck)}" if entry.stuck else "")
        case entries.Aborted():
            return f"aborted: {entry.why}"
        case entries.Filler():
            return "filler"
        case _:
            assert_never(entry)


def short_reason(reason: own.Reason) -> str:  # noqa: C901  # a dispatcher: one arm per reason
    match reason:
        case reasons.WorkerFailed():
            return f"worker failed on {reason.node}: {_failure(reason.failure)}"
        case reasons.NodeGone():
            return f"{reason.node} {reason.how.value}" + (f" by {reason.by}" if reason.by else "")
        case reasons.NodesAdmitted():
            return f"{_list(reason.nodes)} admitted"
        case reasons.BudgetSpent():
            return f"budget of {reason.max_restarts} spent; {short_reason(reason.root)}"
        case reasons.Unstable():
            return f"more than {reason.max_unspent} unspent rounds"
        case reasons.TooFewNodes():
            return f"too few nodes, {reason.have} of {reason.need}"
        case reasons.LongOver():
            return f"epoch {reason.epoch} is long over"
        case reasons.AbortedByOperator():
            return f"aborted: {reason.why}"
        case reasons.AllSucceeded():
            return "all succeeded"
        case own.SignalReceived():
            return f"signal {reason.signal}"
        case own.Replaced():
            return f"replaced by {reason.by}"
        case own.DeclaredLost():
            return "declared lost"
        case own.CutOff():
            return f"cut off for {reason.seconds:g}s"
        case own.StoreLost():
            return f"store lost: {reason.why}"
        case own.TermsDiffer():
            return "terms differ: " + ", ".join(f"{n} {theirs} not {ours}" for n, theirs, ours in reason.differences)
        case own.AlreadyFinished():
            return "already finished"
        case own.CannotStop():
            return f"cannot stop {_list(reason.pids)}"
        case _:
            assert_never(reason)


def short_job(job: Job) -> list[str]:
    """The job in a few lines. Empty fields are not shown."""
    lines = [_phase(job)]
    lines += [f"why: {short_reason(job.why)}"] if job.why else []
    lines += [f"members: {_list(m.node for m in job.members)}"] if job.members else []
    standbys = [j.node for j in job.live.values() if j.node not in job.member_nodes]
    for name, nodes in (
        ("others: ", standbys),
        ("succeeded: ", sorted(job.succeeded)),
        ("leaving: ", sorted(job.leaving)),
        ("gone: ", [entries.Node(k, v) for k, v in sorted(job.gone.items())]),
    ):
        lines += [name + _list(nodes)] if nodes else []
    return [*lines, f"spent {job.spent}/{job.terms.restarts.max_restarts}, unspent {job.unspent}"]


def _phase(job: Job) -> str:
    epoch = f" of epoch {job.epoch}" if job.epoch else ""
    match job.phase:
        case Unopened():
            return "unopened"
        case Gathering() as phase:
            expected = f", expecting {_list(sorted(phase.expected))}" if phase.expected else ""
            marks = [name for name in ("excuse", "judged", "short") if getattr(phase, name)]
            return f"gathering r{phase.round}{epoch}{expected}" + (f" ({', '.join(marks)})" if marks else "")
        case Running():
            return f"running r{job.round}{epoch}"
        case Closed() as phase:
            return f"closed{epoch} in r{job.round}: {phase.outcome.verdict.value}, {short_reason(phase.outcome.why)}"


def _failure(failure: WorkerFailure) -> str:
    message = f" '{failure.message}'" if failure.message else ""
    return f"rank {failure.rank} exit {failure.exitcode}{message}"


def _list(items: Iterable[object]) -> str:
    return " ".join(map(str, items))
