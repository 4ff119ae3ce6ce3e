"""What must hold when one agent has ended, and when all have."""

from __future__ import annotations

from reknit.adapters.simulated.workers import HANGS
from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand
from reknit.core.agent import timers
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import SIGKILL
from reknit.core.agent.events import StopRequested
from reknit.core.agent.reasons import JournalRefused, Replaced, StoreLost, TermsDiffer
from reknit.core.agent.silence import DEAD
from reknit.core.agent.step import step
from reknit.core.agent.worker_words import WorkersStopped
from reknit.core.job.entries import Node
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import Life
from reknit.core.job.job import Closed, Job, Outcome, Verdict
from reknit.core.job.memory import abridged
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.restart import ECHOES
from reknit.core.job.workers import NoProgress

from .lasting import is_faulty


def host_ends(world: CheckedWorld, proc: CheckedProc) -> None:
    """Rule 12: the journal's host leaves last. Those that took part have seen the end."""
    if proc.agent.contact.outage is not None or isinstance(proc.agent.causes.unable, JournalRefused | StoreLost):
        return  # it has no journal any more
    if (proc.agent.causes.request is not None or proc.agent.causes.unable is not None) and not is_serving(world, proc):
        return  # it does as it is told, or must
    for other in world.procs:
        quiet_s, terms = world.now - world.moved.get(other.agent.me, -1e9), other.spec.terms
        # By what it has read, and by its own clock: a beat may have come since.
        quiet_s = proc.felt(max(quiet_s, proc.quiet.get(other.agent.me, 0.0)))
        if other is proc or not other.up or not other.agent.was_live or quiet_s > DEAD * terms.silence_s - terms.beat_s:
            continue
        if proc.agent.epoch != other.agent.epoch or world.jobs[-1].is_gone(other.agent.me):
            continue
        if is_faulty(world, other):
            continue  # it may never learn how the job has ended
        if proc.was_suspended and not proc.agent.job.is_live(other.agent.me):
            continue  # who came while it was suspended, it has not read yet
        demand(other.agent.causes.outcome is not None, "host", f"{proc.name} takes the journal away from {other.name}")


def is_serving(world: CheckedWorld, proc: CheckedProc) -> bool:
    """The journal's host must leave the job, and the others still live by it.

    It was told to before the end of the job, and not again since its workers are gone. Or it cannot stop its workers,
    or has no part in the job.
    """
    request, is_out = proc.agent.causes.request, isinstance(proc.agent.causes.unable, Replaced | TermsDiffer)
    if not proc.spec.hosts_journal or (request is None and not proc.agent.causes.stuck and not is_out):
        return False
    if request is not None and (is_out or request.latest == SIGKILL):
        return False
    told = [traced.event.at for traced in proc.trace if isinstance(traced.event, StopRequested)]
    gone = [traced.event.at for traced in proc.trace if isinstance(traced.event, WorkersStopped)]
    # A request that comes while workers are being stopped is about the workers.
    began = gone if proc.agent.causes.stuck else gone + told[:1]
    if request is not None and not proc.agent.workers.alive and request.at > max(began):
        return False
    if request is not None and proc.learned_at is not None and proc.told_at >= proc.learned_at:
        return False
    return any(p.up and p is not proc for p in world.procs)


def replays(world: CheckedWorld, proc: CheckedProc) -> None:
    """S9: the same events make the same states and commands."""
    agent = Agent(proc.spec)
    for traced in proc.trace:
        made = step(agent, traced.event)
        demand(made.commands == traced.commands, "S9", f"{proc.name} replayed does something else at {traced.at}")
        demand(repr(made.commands) == repr(traced.commands), "S9", f"{proc.name} replayed prints something else")
        agent = made.agent
        demand(timers.next_wake(agent) == traced.wakes_at, "S9", f"{proc.name} replayed sleeps longer or shorter")
    demand(agent == proc.agent and repr(agent) == repr(proc.agent), "S9", f"{proc.name} replayed is another")
    begin = next(origin.position for origin, _, jobs in world.lives.values() if jobs is world.jobs)
    again = fold_all(world.jobs[begin], world.journal[begin:])
    demand(again == world.jobs[-1], "S9", "the journal replayed is another job")


def agree(world: CheckedWorld) -> None:
    """S5: all agents that saw an epoch's end in one life of the journal report the same."""
    ends: dict[tuple[Life, int], Outcome] = {}
    for proc in world.procs:
        agent = proc.agent
        if agent.epoch is not None and agent.causes.outcome is not None:
            first = ends.setdefault((agent.life, agent.epoch), agent.causes.outcome)
            told = agent.causes.outcome
            same = told in (first, abridged(first)) or first == abridged(told)  # as told epochs later
            demand(same, "S5", f"{proc.name} saw another end of epoch {agent.epoch}")


def nodes_alive(world: CheckedWorld) -> set[Node]:
    return {p.agent.me for p in world.procs if p.up}


def closed(world: CheckedWorld, job: Job, before: Job) -> None:
    """S5, S6."""
    outcome = job.outcome
    if outcome is None:
        return
    if isinstance(before.phase, Closed):
        demand(before.epoch != job.epoch or before.phase == job.phase, "S6", "closed is for ever")
        return
    world.outcomes[job.epoch] = outcome
    if outcome.verdict is Verdict.SUCCEEDED:
        here = world.origin and world.origin.life
        last = max(round for life, epoch, round in world.sealed if (life, epoch) == (here, job.epoch))
        done = {
            g.node: g
            for g in world.groups
            if g.key == (job.epoch, last) and len(g.exited) == len(g.command.assignment.workers)
        }
        for member in job.member_nodes:
            demand(member in done, "S5", f"success, though {member} has not")
    if isinstance(outcome.why, BudgetSpent):
        texts = [w.message for f in outcome.failures for w in f.failures]
        own = [t for t in texts if not any(e in t.lower() for e in ECHOES)]
        root = outcome.why.root.failure
        demand(not own or root.message in own, "S5", "an echo is blamed")
        if isinstance(root.cause, NoProgress):
            causes = [w.cause for f in outcome.failures for w in f.failures if isinstance(w.cause, NoProgress)]
            outside = [cause for cause in causes if cause.activity == HANGS]
            least = min(cause.step or 0 for cause in outside or causes)
            ok = root.cause.step == least and (not outside or root.cause in outside)
            demand(ok, "S5", "a worker is blamed that waits for another")
        earned = {g.key for g in world.blows if g.epoch == job.epoch}
        ok = world.setup.fence or len(earned) > outcome.why.max_restarts
        demand(ok, "S4", f"the budget of {outcome.why.max_restarts} was spent on {len(earned)} failures")
