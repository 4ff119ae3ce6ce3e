"""What this node's workers should do: derived from the state at every step, never remembered.

1. Workers run for the sealed round that this incarnation is a member of, once, and for nothing else.
2. The next round's workers start only after `WorkersStopped`.
3. When there are several reasons to stop, the first below is given.
4. A failure stops the others at once, unless it looks like the echo of one that is still to come.
"""

from __future__ import annotations

from .agent import Agent, Timer, Workers
from .commands import SIGKILL, SIGTERM, Command, StartWorkers, StopWorkers
from .deadlines import is_due
from .entries import WorkerFailure
from .events import PortReserved, WorkersExited, WorkersStarted, WorkersStopped
from .job import Running
from .ranks import assign
from .reasons import AllSucceeded, CutOff, DeclaredLost, Reason, SignalReceived, WorkerFailed
from .restart import are_echoes, root_cause_of
from .states import WorkerState
from .values import evolve
from .watching import is_fenced, is_fresh


def started(agent: Agent, event: WorkersStarted) -> Agent:
    workers = agent.workers
    if event.round != workers.round or workers.state is not WorkerState.INIT:
        return agent
    return evolve(agent, workers=evolve(workers, state=WorkerState.HEALTHY))


def exited(agent: Agent, event: WorkersExited) -> Agent:
    """Workers that ended by themselves, be it while the others were being stopped. The adapter leaves out the rest."""
    workers = agent.workers
    if event.round != workers.round or not workers.alive:
        return agent
    exits = dict(workers.exits) | {e.local_rank: e for e in event.exits}
    if any(e.failure for e in exits.values()):
        state = WorkerState.FAILED
    elif len(exits) == agent.spec.local_world_size:
        state = WorkerState.SUCCEEDED
    else:
        state = workers.state
    return evolve(agent, workers=evolve(workers, exits=exits, state=state))


def stopped(agent: Agent, event: WorkersStopped) -> Agent:
    workers = agent.workers
    if event.round != workers.round or not workers.alive:
        return agent
    state = workers.state
    if event.stuck:
        state = WorkerState.UNHEALTHY
    elif state not in (WorkerState.FAILED, WorkerState.SUCCEEDED):
        state = WorkerState.STOPPED
    workers = evolve(workers, alive=False, stopping=None, state=state, stuck=event.stuck)
    return evolve(agent, workers=workers, port=event.port, offered=None)


def reserved(agent: Agent, event: PortReserved) -> Agent:
    if agent.workers.alive or agent.port is not None:
        return agent  # it was asked for once, before this node had another
    return evolve(agent, port=event.port, offered=None)


def failures(workers: Workers) -> tuple[WorkerFailure, ...]:
    return tuple(e.failure for _, e in sorted(workers.exits.items()) if e.failure is not None)


def is_held(agent: Agent) -> bool:
    """Nothing is done about failures yet that all look like echoes, while a worker lives, here or on another node, that
    may be the cause.

    DDP, rank 1 raises and leaves through `destroy_process_group`: rank 0 sees its connection reset and is dead first.
    """
    workers = agent.workers
    if not workers.alive or workers.stopping is not None:
        return False  # their end is awaited anyway
    if len(workers.exits) == agent.spec.local_world_size and len(agent.job.members) == 1:
        return False  # nobody is left that could be the cause
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
        and agent.leaving is None
        and agent.end is None
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
    workers = Workers(node=agent.me, epoch=job.epoch, round=job.round, alive=True, assignment=assignment)
    # The port is in use from now on; `WorkersStopped` brings a fresh one.
    return evolve(agent, workers=workers, port=None), [StartWorkers(job.round, assignment)]


def _stop(agent: Agent) -> tuple[Agent, list[Command]]:
    workers, request = agent.workers, agent.leaving
    why = workers.stopping or _why_stop(agent)
    if why is None:
        return agent, []
    signal = request.signal if request is not None else SIGTERM
    kill_at = request.kill_at if request is not None else agent.at + agent.spec.grace_s
    if _must_be_gone(agent, why):
        signal, kill_at = SIGKILL, agent.at
    if workers.stopping is not None and kill_at >= workers.kill_at:
        return agent, []  # being stopped already; another reason can only shorten the grace
    workers = evolve(workers, stopping=why, kill_at=kill_at)
    command = StopWorkers(workers.round, signal, max(0.0, kill_at - agent.at), why)
    return evolve(agent, workers=workers), [command]


def _must_be_gone(agent: Agent, why: Reason) -> bool:
    """The others rely on the fence: they have started without this node, or will before a grace is over."""
    counted_out = isinstance(why, DeclaredLost) and agent.job.terms.fence_s is not None
    return counted_out or is_fenced(agent)


def _why_stop(agent: Agent) -> Reason | None:
    """Why workers that are alive must not be; None if they should run on."""
    job, workers = agent.job, agent.workers
    assert workers.node is not None, "workers are alive, so a node started them"
    if agent.end is not None:
        return agent.end
    if workers.state is WorkerState.FAILED and not is_held(agent):
        return WorkerFailed(workers.node, root_cause_of(failures(workers)))
    if workers.state is WorkerState.SUCCEEDED:
        return AllSucceeded()  # they are gone, but what they left behind may not be
    if agent.leaving is not None:
        return SignalReceived(agent.leaving.signal)
    if agent.outcome is not None:
        return agent.outcome.why
    if job.is_gone(workers.node):
        return DeclaredLost()
    if is_fenced(agent):
        return CutOff(job.terms.fence_s or 0.0)
    if not isinstance(job.phase, Running) or job.round != workers.round:
        return job.why
    return None
