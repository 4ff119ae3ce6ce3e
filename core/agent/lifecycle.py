"""How this agent's life ends: what makes it end, what it does until then, and with what result.

    Working -> Ending(causes, Stopping -> Parting <-> Serving) -> Done

1. A *cause* makes the agent end. Further causes may be added. None is taken back, but a refusal of the journal
   takes the place of another reason why the agent is `unable`. `result_of` alone ranks them.

   | cause | it is set when | by |
   |---|---|---|
   | `request` | somebody wants this node to leave | `asked_to_stop` |
   | `budget` | this node bears no further failure | `out_of_restarts` |
   | `unable` | the store is lost or refuses this agent | `out_of_patience`, `journal_failed` |
   | `unable` | the journal shows that this agent has no part in the job | `incarnation` |
   | `outcome` | the journal shows that the job has ended | `incarnation` |
   | `stuck` | processes of this node survive SIGKILL | `workers.stopped` |

2. An agent that ends starts no workers any more. It is done only when no worker of it is left.
3. An agent that says goodbye stays until the journal shows it, so that nobody waits for this node. It waits for at most
   `Spec.store_timeout_s`. An agent that is unable, or in an outage, ends without.
4. How the job ended is known from the journal, or not at all. Once it is known, losing the journal does not change the
   result.

The journal ends with the process that hosts its store. Its guests are the other nodes that are live in that journal.

5. A host serves while it has guests: when the job has ended, when this node was told to leave, or when it cannot stop
   its workers. If the job goes on, it says goodbye first, so that the others regroup. If the job has ended, it says
   goodbye last.
6. A host that has no part in the job serves likewise: its terms differ, or another agent took its node id.
7. It serves until the guests have left or are dead, or until it is told to stop after its workers were gone. A request
   that comes while its workers are being stopped only shortens their grace. After the end of the job it serves for at
   most `Spec.store_timeout_s`. It also ends when the store fails. A host that has no part in the job ends at any
   request. If its terms differ, the end of the job is not its own, and no such limit holds.
8. A host that was told to end by SIGKILL ends without a goodbye.
"""

from __future__ import annotations

from attrs import evolve

from reknit.core.job import restart
from reknit.core.job.job import Outcome, Verdict
from reknit.core.job.reasons import BudgetSpent, Refusal
from reknit.core.job.restart import Sequel

from .agent import Agent, Causes, Done, Ending, Parting, Serving, Stopping, StopRequest, Timer, caused
from .commands import SIGKILL, Command, Finish, Result
from .contact import has_guests
from .events import JournalFailed, StopRequested
from .reasons import AlreadyFinished, CannotStop, JournalRefused, Replaced, StoreLost, TermsDiffer
from .sayings import farewell, is_abandoning, owed
from .silence import are_guests_dead
from .states import WorkerState
from .timers import is_due, waits_until
from .workers import failures, is_held, why_failed

UNSAID = "this node gets no answers, or its entries do not appear in the journal"
"""Why an agent ends for want of the store if no call has failed."""
REPEAT_S = 0.5
"""The same signal again within this many seconds is the same request: schedulers signal an agent and its parent."""
HURRY_S = 5.0
"""Seconds that a second request leaves of a longer grace. A third leaves nothing."""


# ---- what makes the agent end ----------------------------------------------------------------------------------------


def asked_to_stop(agent: Agent, event: StopRequested) -> Agent:
    """Each further request shortens the grace. None makes it longer. SIGKILL stands for no grace at all."""
    causes, before = agent.causes, agent.causes.request
    if before is not None and event.signal == before.latest and agent.at - before.at < REPEAT_S:
        return agent
    had = before.count if before is not None else int(causes.budget is not None)  # whoever asks then is impatient
    count = had + 1
    if event.signal == SIGKILL or count > 2:
        grace_s = 0.0
    else:
        grace_s = agent.spec.grace_s if count == 1 else min(HURRY_S, agent.spec.grace_s)
    kill_at = agent.at + grace_s
    if before is None:
        is_late = causes.outcome is not None
        request = StopRequest(event.signal, event.signal, agent.at, kill_at, count, is_late)
    else:
        kill_at = min(before.kill_at, kill_at)
        request = evolve(before, latest=event.signal, at=agent.at, kill_at=kill_at, count=count)
    return caused(agent, evolve(causes, request=request))


def journal_failed(agent: Agent, event: JournalFailed) -> Agent:
    # A job that has ended needs no journal. But workers of an agent that was left behind have no grace: the others may
    # not know of the end, and start the next round (rule 16 of the protocol).
    causes = agent.causes
    has_to_act = causes.outcome is None or (event.refusal is Refusal.LEFT_BEHIND and agent.workers.alive)
    if event.refusal is not None and has_to_act:
        return caused(agent, evolve(causes, unable=JournalRefused(event.refusal, event.why)))
    return evolve(agent, contact=evolve(agent.contact, outage=event.why, answers=event.answers))


def out_of_patience(agent: Agent) -> Agent:
    """An outage that has lasted too long ends this agent. The job may go on: other nodes may reach the journal."""
    causes, contact = agent.causes, agent.contact
    if causes.unable is not None or causes.outcome is not None or not is_due(agent, Timer.OUTAGE):
        return agent
    return caused(agent, evolve(causes, unable=StoreLost(contact.outage or UNSAID, contact.answers)))


def out_of_restarts(agent: Agent) -> Agent:
    """This node's workers have failed, and it bears no further failure, though the job may. So the node leaves."""
    workers, limit = agent.workers, agent.max_restarts
    if limit is None or not workers.alive or workers.state is not WorkerState.FAILED or is_held(agent):
        return agent
    if agent.restarts_left or not agent.is_working:
        return agent
    if agent.job.terms.restarts.max_restarts <= limit:
        return agent  # this is the job's own limit: its failures may be excused (rule 2 of the protocol)
    return caused(agent, evolve(agent.causes, budget=BudgetSpent(limit, why_failed(workers))))


# ---- what it does until it is done -----------------------------------------------------------------------------------


def advanced(agent: Agent) -> Agent:
    """The agent in the phase of its end that follows from its causes and its workers."""
    lifecycle = agent.lifecycle
    if not isinstance(lifecycle, Ending) or agent.workers.alive:
        return agent
    before, causes = lifecycle.phase, lifecycle.causes
    since = agent.at if isinstance(before, Stopping) else before.since
    phase = Serving(since) if _must_serve(agent, causes, since) else Parting(since)
    return agent if phase == before else evolve(agent, lifecycle=Ending(causes, phase))


def _must_serve(agent: Agent, causes: Causes, since: float) -> bool:
    """`since`: when the agent began to do nothing else."""
    request, is_out_of_the_job = causes.request, isinstance(causes.unable, Replaced | TermsDiffer)
    if not has_guests(agent) or (causes.unable is not None and not is_out_of_the_job):
        return False
    if request is not None and (is_out_of_the_job or request.latest == SIGKILL or request.at > since):
        return False
    return not are_guests_dead(agent)


def drive_end(agent: Agent) -> tuple[Agent, list[Command]]:
    """End the agent if it need not stay."""
    lifecycle = agent.lifecycle
    if not isinstance(lifecycle, Ending) or not _need_not_stay(agent, lifecycle.causes):
        return agent, []
    result = result_of(agent, lifecycle.causes)
    return evolve(agent, lifecycle=Done(lifecycle.causes, result)), [Finish(result)]


def _need_not_stay(agent: Agent, causes: Causes) -> bool:
    """No worker is left, and this agent owes nothing any more, or it can tell nobody."""
    if agent.workers.alive:
        return False
    if agent.contact.outage is not None or is_abandoning(agent):
        return True
    if agent.at >= waits_until(agent):
        return True
    if causes.unable is not None:
        return not agent.is_serving or is_due(agent, Timer.OUTAGE)
    if agent.is_serving:
        return False
    if causes.why_leaving is not None and causes.outcome is not None:
        return True  # it was told to leave while it only waited for the other nodes
    return farewell(agent) is None and owed(agent) is None


# ---- with what result ------------------------------------------------------------------------------------------------


def result_of(agent: Agent, causes: Causes) -> Result:
    """The result of an agent that ends for these causes. Of several the first counts:

    1. This node has left, since it bore no further failure, or since it was asked. It did so before it knew of the end
       of the job, or has stopped workers that would have run on.
    2. The end of the job.
    3. Why this agent can take no part.
    4. Processes that survive SIGKILL.
    """
    request, outcome, why = causes.request, causes.outcome, causes.why_leaving
    was_stopped = request is not None and not request.is_late and agent.workers.state is WorkerState.STOPPED
    if why is not None and (outcome is None or was_stopped):
        if isinstance(why, BudgetSpent):
            return Result(WorkerState.FAILED, why, failures={f.rank: f for f in failures(agent.workers)})
        return Result(WorkerState.STOPPED, why)
    if outcome is not None:
        return _of_outcome(agent, outcome)
    if causes.unable is not None:
        state = WorkerState.SUCCEEDED if isinstance(causes.unable, AlreadyFinished) else WorkerState.FAILED
        return Result(state, causes.unable)
    return Result(WorkerState.UNHEALTHY, CannotStop(causes.stuck))


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


def sequel(agent: Agent) -> Sequel:
    """What follows for this node if its workers are stopped before they have succeeded, as far as this agent knows."""
    return restart.sequel(agent.job, agent.workers.round) if agent.is_working else Sequel.END
