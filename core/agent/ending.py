"""When the agent is done, and with what result.

1. An agent has finished only when no worker of it is left.
2. An agent stays until the journal shows its goodbye, so that nobody waits for it. The host of the store stays longer:
   see `hosting`.
3. How the job ended is known from the fold, or not at all: once it is closed, losing the journal changes nothing.
4. An agent that has a result, whether or not it stays, starts no workers any more.
"""

from __future__ import annotations

from attrs import evolve

from reknit.core.job import restart
from reknit.core.job.job import Outcome, Verdict
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.restart import Sequel

from .agent import Agent, StopRequest, Timer
from .commands import Command, Finish, Result
from .hosting import is_abandoning
from .reasons import AlreadyFinished, CannotStop, SignalReceived
from .situation import Situation
from .states import WorkerState
from .wanted import farewell
from .working import failures


def drive_end(agent: Agent, now: Situation) -> tuple[Agent, list[Command]]:
    if agent.workers.alive or (agent.end is not None and agent.outage is None and now.is_serving):
        return agent, []
    result = _result(agent)
    if result is None or not (agent.end is not None or _has_said_farewell(agent, now)):
        return agent, []
    return evolve(agent, result=result), [Finish(result)]


def sequel(agent: Agent) -> Sequel:
    """What follows for this node if its workers are stopped before they have succeeded, as far as this agent knows."""
    if _result(agent) is not None:
        return Sequel.END
    return restart.sequel(agent.job, agent.workers.round)


def _has_said_farewell(agent: Agent, now: Situation) -> bool:
    """This agent need not stay: it owes nothing any more, or it can tell nobody."""
    if agent.outage is not None or is_abandoning(agent):
        return True
    if Timer.LINGER in now.due or Timer.PART in now.due:
        return not now.is_serving or agent.outcome is not None  # before the job is closed the others may go on for days
    if now.is_serving:
        return False
    if agent.leaving is not None and agent.outcome is not None:
        return True  # it was told to leave while it only waited for the other nodes
    return farewell(agent, now) is None and now.owed is None


def _result(agent: Agent) -> Result | None:
    """The result if the agent could end now."""
    outcome, request = agent.outcome, agent.leaving
    if request is not None and (
        outcome is None or (agent.workers.state is WorkerState.STOPPED and not request.is_late)
    ):
        return _of_request(agent, request)
    if outcome is not None:
        return _of_outcome(agent, outcome)
    if agent.end is not None:
        state = WorkerState.SUCCEEDED if isinstance(agent.end, AlreadyFinished) else WorkerState.FAILED
        return Result(state, agent.end)
    if agent.workers.stuck:
        return Result(WorkerState.UNHEALTHY, CannotStop(agent.workers.stuck))
    return None


def _of_request(agent: Agent, request: StopRequest) -> Result:
    """The node has left before the job ended."""
    match request.why:
        case SignalReceived():
            return Result(WorkerState.STOPPED, request.why)
        case BudgetSpent():
            return Result(WorkerState.FAILED, request.why, failures={f.rank: f for f in failures(agent.workers)})


def _of_outcome(agent: Agent, outcome: Outcome) -> Result:
    """All or nothing: the ranks' values if the job succeeded, the failures if it failed."""
    match outcome.verdict:
        case Verdict.SUCCEEDED:
            assignment = agent.workers.assignment
            ranks = () if assignment is None else assignment.workers
            return Result(WorkerState.SUCCEEDED, outcome.why, return_values={w.rank: None for w in ranks})
        case Verdict.FAILED:
            failures = {w.rank: w for f in outcome.failures for w in f.failures}
            return Result(WorkerState.FAILED, outcome.why, failures=failures)
        case Verdict.ABORTED:
            return Result(WorkerState.STOPPED, outcome.why)
