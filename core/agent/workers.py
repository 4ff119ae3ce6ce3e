"""What this node's workers should do. Whether they should run is derived from the agent's state at every step.

1. Workers are started only for a sealed round that this incarnation is a member of, and once per round.
2. The next round's workers start only after `WorkersStopped`.
3. Once workers are being stopped, the reason stays, and the grace can only get shorter. If several reasons come in one
   step, the first in `_why_stop` is given.
4. A failure stops the other workers at once, unless it looks like the echo of a failure that is still to come. If no
   restart is left, the others may end by themselves before the signal (`AWAIT_EXITS_S`).
"""

from __future__ import annotations

from attrs import evolve

from reknit.core.job.job import Running
from reknit.core.job.ranks import assign
from reknit.core.job.reasons import AllSucceeded, Refusal, WorkerFailed
from reknit.core.job.restart import are_echoes, blaming, is_last, root_cause_of, suggests_hang
from reknit.core.job.workers import WorkerFailure

from .agent import Agent, NodeWorkers, Timer, caused
from .commands import SIGKILL, SIGTERM, Command, StopWorkers
from .contact import is_fenced, is_fresh
from .reasons import CutOff, DeclaredLost, JournalRefused, StopReason
from .states import WorkerState
from .timers import is_due
from .worker_words import MOST_AWAITED, PortReserved, StartWorkers, WorkersExited, WorkersStarted, WorkersStopped

QUICK_S = 1.0
"""In seconds. A failure counts as quick if the workers failed earlier than this after their start, or before all of
them ran."""
AWAIT_EXITS_S = 1.0
"""`StopWorkers.await_exits_s` after a failure for which no restart is left, or the grace if that is shorter. Workers
that fail at the same time end one after another: with torch imported, a Python takes 0.2 s of a processor for its
end."""


def started(agent: Agent, event: WorkersStarted) -> Agent:
    workers = agent.workers
    if event.round != workers.round:
        return agent
    if event.assignment is not None:
        # Taken even if workers have ended already: the result names them by these ranks.
        workers = evolve(workers, assignment=event.assignment)
    if workers.state is WorkerState.INIT:
        workers = evolve(workers, state=WorkerState.HEALTHY, up_at=agent.at)
    return evolve(agent, workers=workers)


def exited(agent: Agent, event: WorkersExited) -> Agent:
    """Note workers that ended by themselves, before a stop or during it. The adapter does not report workers that it
    ended itself."""
    workers = agent.workers
    if event.round != workers.round or not workers.alive:
        return agent
    # A worker ends once. If an adapter says more, a failure counts, and the first of several.
    failed = {rank: e for rank, e in workers.exits.items() if e.failure is not None}
    exits = dict(workers.exits) | {e.local_rank: e for e in event.exits} | failed
    quick = agent.quick
    if any(e.failure for e in exits.values()):
        state = WorkerState.FAILED
        if workers.state is not WorkerState.FAILED:
            quick = 0 if have_lasted(workers, agent.at) else quick + 1
    elif len(exits) == agent.spec.local_world_size:
        state = WorkerState.SUCCEEDED
    else:
        state = workers.state
    agent = evolve(agent, workers=evolve(workers, exits=exits, state=state), quick=quick)
    if any(e.failure is not None and asks_somebody(e.failure) for e in event.exits):
        # Another try would ask again.
        return evolve(agent, max_restarts=agent.restart_count)
    return agent


_ASKS = ("bdb.BdbQuit", "BdbQuit", "EOFError: EOF when reading a line")
"""How the exceptions begin of a worker in a debugger that was quit, and of one that reads from a closed stdin."""


def asks_somebody(failure: WorkerFailure) -> bool:
    """The worker has failed because it has asked somebody, for example by `breakpoint()`, and there was nobody, or
    because this person has quit the debugger. Such a worker is not started again."""
    return failure.message.startswith(_ASKS)


def stopped(agent: Agent, event: WorkersStopped) -> Agent:
    workers = agent.workers
    if event.round != workers.round or not workers.alive:
        return agent
    state = workers.state
    if event.stuck:
        state = WorkerState.UNHEALTHY
    elif state not in (WorkerState.FAILED, WorkerState.SUCCEEDED):
        state = WorkerState.STOPPED
    quick = 0 if state is not WorkerState.FAILED and have_lasted(workers, agent.at) else agent.quick
    workers = evolve(workers, alive=False, stopping=None, kill_at=None, state=state)
    agent = evolve(agent, workers=workers, port=event.port, offered=None, quick=quick)
    return caused(agent, evolve(agent.causes, stuck=event.stuck)) if event.stuck else agent


def reserved(agent: Agent, event: PortReserved) -> Agent:
    if agent.workers.alive or agent.port is not None:
        return agent  # a late answer: this node has got another port since it asked
    return evolve(agent, port=event.port, offered=None)


def have_lasted(workers: NodeWorkers, now: float) -> bool:
    """The workers have run for `QUICK_S`. They have not if some could not be started."""
    return workers.up_at is not None and now - workers.up_at >= QUICK_S


def failures(workers: NodeWorkers) -> tuple[WorkerFailure, ...]:
    return tuple(e.failure for _, e in sorted(workers.exits.items()) if e.failure is not None)


def why_failed(workers: NodeWorkers) -> WorkerFailed:
    """The failure that is blamed for the end of these workers, which have failed."""
    if workers.node is None:
        raise AssertionError("workers have failed, but no node has started them")
    failed = failures(workers)
    return blaming(workers.node, root_cause_of(failed), failed)


def is_held(agent: Agent) -> bool:
    """All failures so far look like echoes, and their cause may still show itself. Until then this node does not act on
    them.

    The cause can be a worker that is still alive, on this node or on another. With DDP: (1) rank 1 raises, and ends by
    way of `destroy_process_group`. (2) Rank 0 sees its connection reset. (3) Rank 0 ends before rank 1.
    """
    workers = agent.workers
    if not workers.alive or workers.stopping is not None:
        return False  # the workers are gone or are being stopped, so there is nothing to hold back
    if len(workers.exits) == agent.spec.local_world_size and len(agent.job.members) == 1:
        return False  # no worker is left that could be the cause
    return are_echoes(failures(workers)) and not is_due(agent, Timer.ECHO)


def drive_workers(agent: Agent) -> tuple[Agent, list[Command]]:
    """Bring the workers closer to what they should do, by at most one command."""
    if agent.workers.alive:
        return _stop(agent)
    if _should_start(agent):
        return _start(agent)
    return agent, []


def _should_start(agent: Agent) -> bool:
    job, workers = agent.job, agent.workers
    return (
        isinstance(job.phase, Running)
        and job.epoch == agent.epoch
        and agent.me in job.member_nodes
        and agent.me not in job.succeeded
        and (workers.node, workers.epoch, workers.round) != (agent.me, job.epoch, job.round)
        and agent.is_working
        and is_fresh(agent)
    )


def _start(agent: Agent) -> tuple[Agent, list[Command]]:
    job = agent.job
    assignment = assign(
        job.members,
        agent.me,
        round=job.round,
        restart_count=job.spent,
        max_restarts=job.terms.restarts.max_restarts,
    )
    workers = NodeWorkers(node=agent.me, epoch=job.epoch, round=job.round, alive=True, assignment=assignment)
    # The port is in use from now on. `WorkersStopped` brings a fresh one.
    return evolve(agent, workers=workers, port=None), [StartWorkers(job.round, assignment)]


def _stop(agent: Agent) -> tuple[Agent, list[Command]]:
    workers, request = agent.workers, agent.causes.request
    why = workers.stopping or _why_stop(agent)
    if why is None:
        return agent, []
    if _must_be_gone(agent, why):
        signal, kill_at = SIGKILL, agent.at
    elif request is not None:
        signal, kill_at = request.signal, request.kill_at
    elif workers.kill_at is None:
        signal, kill_at = SIGTERM, agent.at + agent.spec.grace_s
    else:
        return agent, []
    if workers.kill_at is not None and kill_at >= workers.kill_at:
        return agent, []  # the workers are being stopped already, and another reason can only shorten the time
    failure = why.failure if isinstance(why, WorkerFailed) else None
    hangs = failure is not None and suggests_hang(failure)
    grace_s = max(0.0, kill_at - agent.at)
    await_exits_s = min(AWAIT_EXITS_S, grace_s) if failure is not None and _can_wait(agent, signal) else 0.0
    workers = evolve(workers, stopping=why, kill_at=kill_at + MOST_AWAITED * await_exits_s)
    command = StopWorkers(workers.round, signal, grace_s, why, hangs, await_exits_s)
    return evolve(agent, workers=workers), [command]


def _can_wait(agent: Agent, signal: int) -> bool:
    """The stop that follows a failure has time for workers that are about to end: no restart waits for it, and nobody
    hurries."""
    if agent.workers.stopping is not None or agent.causes.request is not None or signal == SIGKILL:
        return False
    bears_none = agent.max_restarts is not None and not agent.restarts_left
    return is_last(agent.job, agent.workers.round) or (bears_none and len(agent.job.live) == 1)


def _must_be_gone(agent: Agent, why: StopReason) -> bool:
    """The workers get no grace. With a fence, the other nodes may start the next round before a grace is over. And if
    the store has lost this node's round, they do not know of its workers, and do not wait for them."""
    unable = agent.causes.unable
    if isinstance(unable, JournalRefused) and unable.refusal is Refusal.LEFT_BEHIND:
        return True
    counted_out = isinstance(why, DeclaredLost) and agent.job.terms.fence_s is not None
    return counted_out or is_fenced(agent)


def _why_stop(agent: Agent) -> StopReason | None:
    """Why the workers must be stopped. None: they should run on."""
    job, workers, causes = agent.job, agent.workers, agent.causes
    if workers.node is None:
        raise AssertionError("workers are alive, but no node has started them")
    if causes.unable is not None:
        return causes.unable
    if workers.state is WorkerState.FAILED and not is_held(agent):
        return why_failed(workers)
    if workers.state is WorkerState.SUCCEEDED:
        return AllSucceeded()  # the workers are gone, but processes that they have started may live
    if causes.why_leaving is not None:
        return causes.why_leaving
    if causes.outcome is not None:
        return causes.outcome.why
    if job.is_gone(workers.node):
        return DeclaredLost()
    if is_fenced(agent):
        return CutOff(job.terms.fence_s or 0.0)
    if not isinstance(job.phase, Running) or job.round != workers.round:
        return job.why
    return None
