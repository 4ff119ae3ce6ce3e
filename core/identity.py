"""Which incarnation this agent speaks as.

1. The first read of the journal decides: one more than the highest ever seen of this node.
2. An agent that sees itself counted out comes back as a new incarnation, once its workers are gone. The old one is
   gone for ever, so a `Lost` of it that is still on its way, or said again, harms nobody.
3. An agent that was in, and sees another nonce in its place, ends: two agents have one id, and the newer has it.
"""

from __future__ import annotations

from .agent import Agent, Pulse, Timer
from .entries import Node
from .events import EntriesRead
from .fold import fold_all
from .job import Closed, Running, Unopened, Verdict
from .reasons import AlreadyFinished, Replaced, TermsDiffer
from .states import WorkerState
from .values import evolve
from .wanted import owed
from .watching import spared_until


def read(agent: Agent, event: EntriesRead) -> Agent:
    """Take in a fresh read of the journal: fold the whole batch, then see where this agent stands in it."""
    job, me = fold_all(agent.job if event.base is None else event.base, event.entries), agent.me
    if not agent.was_read:
        me = Node(me.id, job.highest_incarnation(me.id) + 1)
    # Patience with a store that is silent counts from the last time that it was read.
    since = {key: at for key, at in agent.since.items() if key[0] is not Timer.OUTAGE}
    pulse, silent_since = agent.pulse, agent.since.get((Timer.OUTAGE, 0))
    if silent_since is not None and pulse.acked_at is None:  # else the next read of the counters shows it
        pulse = evolve(pulse, spares_until=spared_until(agent, agent.at - silent_since))
    agent = evolve(agent, job=job, me=me, was_read=True, outage=None, since=since, pulse=pulse)
    agent = _after_gap(_taking_part(agent))
    return _identified(agent)


def after_private_loss(agent: Agent) -> Agent:
    """Come back as another if this node's workers are gone for a reason that the journal does not show."""
    job, workers = agent.job, agent.workers
    if workers.alive or workers.state is not WorkerState.STOPPED or agent.leaving is not None or agent.end is not None:
        return agent
    same_round = isinstance(job.phase, Running) and (workers.epoch, workers.round) == (job.epoch, job.round)
    return _renewed(agent) if same_round and workers.node == agent.me else agent


def _taking_part(agent: Agent) -> Agent:
    """Accept the terms, once; or find that there is nothing to take part in."""
    job = agent.job
    if agent.epoch is not None or isinstance(job.phase, Unopened):
        return agent
    if isinstance(job.phase, Closed):
        if job.phase.outcome.verdict is Verdict.SUCCEEDED:
            return evolve(agent, end=AlreadyFinished())
        return agent  # the next epoch is opened, by this agent or another
    differences = _differences(agent)
    if differences:
        return evolve(agent, end=TermsDiffer(differences))
    return evolve(agent, epoch=job.epoch)


def _differences(agent: Agent) -> tuple[tuple[str, str, str], ...]:
    theirs, ours = agent.job.terms, agent.spec.terms
    if theirs == ours:
        return ()
    from attrs import fields  # slow to import, and needed here alone

    pairs = [
        (a.name, getattr(there, a.name), getattr(here, a.name))
        for there, here in ((theirs, ours), (theirs.restarts, ours.restarts))
        for a in fields(type(there))
        if a.name != "restarts"
    ]
    return tuple((name, str(a), str(b)) for name, a, b in pairs if a != b)


def _identified(agent: Agent) -> Agent:
    job, me = agent.job, agent.me
    known = job.live.get(me.id)
    if known is not None and known.node == me and known.nonce == agent.nonce:
        return agent if agent.was_live else evolve(agent, was_live=True)
    if _is_over(agent):
        # It may stay for others' sake (the journal's host), and must neither speak nor beat for a second agent that has
        # taken this incarnation meanwhile: a is counted out, told to leave and serves; another a joins as a.1.
        return _renewed(agent) if known is not None and known.node == me else agent
    if known is not None and known.node.incarnation >= me.incarnation:
        if agent.was_live:
            return evolve(agent, end=Replaced(known.node))
        return _renewed(agent)
    return _renewed(agent) if job.is_gone(me) else agent


def _after_gap(agent: Agent) -> Agent:
    """The read that ends a gap in this node's beats.

    Without workers it comes back as another: a `Lost` of it may be on its way, and must not meet workers that it has
    started meanwhile. With workers it stays: an outage of the store is nobody's failure, and if it was counted out
    the journal says so.
    """
    pulse = agent.pulse
    if not pulse.gap or pulse.proven_at is None or agent.at - pulse.proven_at > agent.job.terms.silence_s:
        return agent
    agent = evolve(agent, pulse=evolve(pulse, gap=False))
    if agent.workers.alive or _is_over(agent) or agent.job.is_expected(agent.me) or owed(agent) is not None:
        return agent  # expected: as the same it still has to come back, and its failure counts as its own
    return _renewed(agent)


def _is_over(agent: Agent) -> bool:
    """This agent is on its way out: to be gone in the journal is its wish."""
    return agent.is_departing or agent.end is not None


def _renewed(agent: Agent) -> Agent:
    # A `Joined` of this agent that is still on its way may be higher than what the journal shows.
    own = agent.me.incarnation + agent.joined
    me = Node(agent.me.id, max(agent.job.highest_incarnation(agent.me.id) + 1, own))
    pulse = Pulse(spares_until=agent.pulse.spares_until)
    return evolve(agent, me=me, was_live=False, joined=False, is_renewed=True, said={}, pulse=pulse)
