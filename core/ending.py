"""When the agent is done, and with what result.

1. An agent has finished only when no worker of it is left.
2. It lingers until the journal shows its farewell, so that nobody waits for it. The journal's host lingers until
   nobody else lives, even if it was told to leave; a second time it is obeyed at once.
3. How the job ended is known from the fold, or not at all: once it is closed, losing the journal changes nothing.
"""

from __future__ import annotations

from .agent import Agent, Timer
from .commands import Command, Finish, Result
from .deadlines import is_due
from .job import Outcome, Verdict
from .reasons import AlreadyFinished, CannotStop, SignalReceived
from .states import WorkerState
from .values import evolve
from .wanted import farewell, is_abandoning, is_serving, owed


def drive_end(agent: Agent) -> tuple[Agent, list[Command]]:
    if agent.workers.alive or (agent.end is not None and agent.outage is None and is_serving(agent)):
        return agent, []
    result = _result(agent)
    if result is None or not (agent.end is not None or _has_said_farewell(agent)):
        return agent, []
    return evolve(agent, result=result), [Finish(result)]


def _has_said_farewell(agent: Agent) -> bool:
    """Nothing is owed any more, or nobody can be told."""
    if agent.outage is not None or is_abandoning(agent):
        return True
    serves = is_serving(agent)
    if is_due(agent, Timer.LINGER):
        return not serves or agent.outcome is not None  # before the close the others may go on for days
    if serves:
        return False
    if agent.leaving is not None and agent.outcome is not None:
        return True  # told to leave while it only waited for the others
    return farewell(agent) is None and owed(agent) is None


def _result(agent: Agent) -> Result | None:
    """The result if the agent could end now."""
    outcome = agent.outcome
    if agent.leaving is not None and (outcome is None or agent.workers.state is WorkerState.STOPPED):
        return Result(WorkerState.STOPPED, SignalReceived(agent.leaving.signal))
    if outcome is not None:
        return _of_outcome(agent, outcome)
    if agent.end is not None:
        state = WorkerState.SUCCEEDED if isinstance(agent.end, AlreadyFinished) else WorkerState.FAILED
        return Result(state, agent.end)
    if agent.workers.stuck:
        return Result(WorkerState.UNHEALTHY, CannotStop(agent.workers.stuck))
    return None


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
