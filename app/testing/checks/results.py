"""S5 on each agent's own result: state, reason, values and failures, asked of the journal and of the world."""

from __future__ import annotations

from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand
from reknit.core.agent.commands import Result
from reknit.core.agent.events import StopRequested
from reknit.core.agent.reasons import (
    AlreadyFinished,
    CannotStop,
    JournalRefused,
    Replaced,
    SignalReceived,
    StoreLost,
    TermsDiffer,
)
from reknit.core.agent.states import WorkerState
from reknit.core.job.entries import Joined
from reknit.core.job.job import Outcome, Verdict
from reknit.core.job.memory import abridged

STATES = {
    Verdict.SUCCEEDED: WorkerState.SUCCEEDED,
    Verdict.FAILED: WorkerState.FAILED,
    Verdict.ABORTED: WorkerState.STOPPED,
}


def is_true(world: CheckedWorld, proc: CheckedProc, result: Result) -> None:
    """The agent reports the truth, as far as its journal showed it."""
    name, why, state = proc.name, result.why, result.state
    outcome = _outcome(world, proc)
    request = proc.agent.causes.request
    if isinstance(why, SignalReceived):
        demand(request is not None and why.signal == request.signal, "S5", f"{name} was not told to leave by {why}")
        if request is None:
            return
        demand(state is WorkerState.STOPPED, "S5", f"{name} was told to leave, and reports {state}")
        demand(not result.failures and not result.return_values, "S5", f"{name} reports more than that it was told")
        is_only = sum(isinstance(traced.event, StopRequested) for traced in proc.trace) == 1  # not a repetition
        is_late = is_only and proc.learned_at is not None and proc.told_at > proc.learned_at
        demand(not is_late, "S5", f"{name} reports its request, and it had read the end of the job before")
        group = proc.group
        has_ended = outcome is not None and group is not None and group.is_over and group.gone_at is None
        demand(not has_ended, "S5", f"{name} reports its request, and its workers had ended by themselves")
        return
    if outcome is not None:
        _is_outcome(proc, result, outcome)
        return
    demand(not result.return_values, "S5", f"{name} reports values of a job that has not succeeded")
    demand(not result.failures, "S5", f"{name} reports failures of a job that has not failed")
    expected = {AlreadyFinished: WorkerState.SUCCEEDED, CannotStop: WorkerState.UNHEALTHY}
    demand(state is expected.get(type(why), WorkerState.FAILED), "S5", f"{name} reports {state} for {why}")
    job = world.read_by(proc)
    if isinstance(why, AlreadyFinished):
        ok = job.outcome is not None and job.outcome.verdict is Verdict.SUCCEEDED
        demand(ok, "S5", f"{name} takes a job for finished that is not")
    elif isinstance(why, CannotStop):
        stuck = proc.stuck_pids
        demand(stuck and set(why.pids) == stuck, "S5", f"{name} names the stuck processes {why.pids}, not {stuck}")
    elif isinstance(why, Replaced):
        others = {e.node for e in world.journal if isinstance(e, Joined) and e.nonce != proc.agent.nonce}
        demand(why.by in others, "S5", f"{name} says that {why.by} has replaced it, which no agent is")
    elif isinstance(why, StoreLost):
        limit = proc.spec.store_timeout_s if proc.cursor else proc.spec.terms.join_timeout_s
        # Its entries may have been late before its beats were unheard.
        has_waited = proc.bore_s >= limit - 1e-6 or proc.was_full
        demand(has_waited, "outage", f"{name} bore an outage for {proc.bore_s:.1f} s")
    else:
        demand(isinstance(why, JournalRefused | TermsDiffer), "S5", f"{name} ends with {why}")


def _is_outcome(proc: CheckedProc, result: Result, outcome: Outcome) -> None:
    name = proc.name
    demand(result.why == outcome.why, "S5", f"{name} reports {result.why}, and the job ended with {outcome.why}")
    state = STATES[outcome.verdict]
    demand(result.state is state, "S5", f"{name} reports {result.state} of a job that has {outcome.verdict.value}")
    failures = {f.rank: f for report in outcome.failures for f in report.failures}
    demand(dict(result.failures) == failures, "S5", f"{name} reports other failures than the journal")
    own = proc.group.command.assignment.workers if proc.group is not None else ()
    values = {w.rank: None for w in own} if outcome.verdict is Verdict.SUCCEEDED else {}
    demand(dict(result.return_values) == values, "S5", f"{name} reports values {result.return_values}, not {values}")


def _outcome(world: CheckedWorld, proc: CheckedProc) -> Outcome | None:
    """How the agent's epoch ended, if the entries that it was given show that. Of an epoch before the last one, the job
    remembers only the failure that is blamed (rule 4)."""
    epoch, job = proc.agent.epoch, world.read_by(proc)
    if epoch is None or (job.epoch == epoch and job.outcome is None):
        return None
    outcome = world.outcomes.get(epoch) or job.outcome_of(epoch)  # the store may have lost it since
    return outcome if outcome is None or job.epoch - epoch <= 1 else abridged(outcome)
