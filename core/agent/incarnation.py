"""What a read of the journal means for this agent: as which incarnation it speaks, in which epoch, on which terms.

1. At the first read the agent takes the incarnation one above the highest that the journal shows of its id. If it has
   begun anew in another journal, its number is also above its own before.
2. An agent that reads that its node is gone takes a new number at once, and joins when its workers are gone. The old
   incarnation is gone for ever. So a `Lost` of it that is still on its way, or is said again, does no harm.
3. An agent that was live and reads another nonce in its place ends: two agents have one id, and the newer keeps it. An
   agent that was not live takes a higher number.
"""

from __future__ import annotations

from attrs import evolve

from reknit.core.job.entries import Joined, Node
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import Life
from reknit.core.job.job import Closed, Job, Running, Unopened, Verdict
from reknit.core.job.reasons import Refusal

from .agent import Agent, Contact, Ending, NodeWorkers, Silence, Stage, Stopping, Timer, caused
from .contact import is_unproven
from .events import EntriesRead
from .reasons import AgentEnd, AlreadyFinished, JournalRefused, Replaced, TermsDiffer
from .sayings import owed
from .silence import spare_s
from .states import WorkerState
from .terms import differences


def read(agent: Agent, event: EntriesRead) -> Agent:
    """Take in a fresh read of the journal: fold the whole batch, then see where this agent stands in it."""
    if event.life != agent.life:
        if agent.workers.alive and (event.is_anew or event.life.journal != agent.life.journal):
            why = "another journal has taken the place of the one in which this node's workers were started"
            return _unable(agent, JournalRefused(Refusal.LEFT_BEHIND, why))
        agent = _in_life(agent, event.life, is_anew=event.is_anew)
    job, me = fold_all(agent.job if event.base is None else event.base, event.entries), agent.me
    stage, since, silence = agent.stage, agent.since, agent.silence
    if stage is Stage.STARTING:
        # An agent that has begun anew never speaks as the incarnation that it was.
        known = max(job.highest_incarnation(me.id), me.incarnation if agent.births else -1)
        me, stage = Node(me.id, known + 1), Stage.READING
        # The wait for the first read may be longer than that for a store which was lost. It is over.
        since = {timer: running for timer, running in since.items() if timer is not Timer.OUTAGE}
    contact, silent = agent.contact, agent.since.get(Timer.OUTAGE)
    if silent is not None and contact.acked_at is None:  # else the next read of the counters shows it
        spares_until = agent.at + spare_s(agent, agent.at - silent[1])
        silence = evolve(silence, spares_until=max(silence.spares_until or agent.at, spares_until))
    unread = agent.unread
    if unread:
        # A skipped entry of this agent may have had no effect. The agent says it again, and reads it back then.
        unread = {e: at for e, at in unread.items() if e not in event.entries}
    agent = evolve(
        agent,
        job=job,
        me=me,
        stage=stage,
        unread=unread,
        contact=evolve(contact, read_at=agent.at, outage=None, answers=False),
        silence=silence,
        since=since,
    )
    agent = _after_gap(_with_outcome(_taking_part(agent)))
    return _identified(agent)


def _in_life(agent: Agent, life: Life, *, is_anew: bool) -> Agent:
    """The store has lost the journal, and this agent goes on in another life of it, or begins anew.

    What it has said in the life before is lost, or done. Nor does what it has heard there count: a node may have no
    counter here yet. The port that it has offered must not be offered again. The round may have been sealed with it in
    the life before, and workers of other nodes may still dial it.
    """
    if agent.life == Life():
        return evolve(agent, life=life)  # the first read
    if is_anew or life.journal != agent.life.journal:
        agent = _begun_anew(agent)
    offered = None if agent.offered is None else (agent.offered[0], -1)
    silence = evolve(agent.silence, heard={})
    return evolve(agent, life=life, offered=offered, said={}, unread={}, silence=silence)


def _begun_anew(agent: Agent) -> Agent:
    """The journal that is there does not hold what this agent has read. The agent has no workers. What it was and said
    there does not count, nor what its workers did there."""
    before, workers = agent.epochs_before, NodeWorkers(state=agent.workers.state)
    if not agent.is_working:  # its result names them
        workers = evolve(workers, exits=agent.workers.exits, assignment=agent.workers.assignment)
    if agent.epoch is not None:
        before = {**before, agent.life.journal: agent.epoch}
    return evolve(
        agent,
        births=agent.births + 1,
        job=Job(),
        stage=Stage.STARTING,
        since={},
        epoch=None,
        epochs_before=before,
        is_renewed=False,
        workers=workers,
        contact=Contact(acked_at=agent.contact.acked_at),  # an outage still excuses the others
        silence=Silence(spares_until=agent.silence.spares_until),
    )


def after_private_loss(agent: Agent) -> Agent:
    """Take a new incarnation if this node's workers are gone for a reason that the journal does not show."""
    job, workers = agent.job, agent.workers
    if workers.alive or workers.state is not WorkerState.STOPPED or not agent.is_working:
        return agent
    same_round = isinstance(job.phase, Running) and (workers.epoch, workers.round) == (job.epoch, job.round)
    return _renewed(agent) if same_round and workers.node == agent.me else agent


def _taking_part(agent: Agent) -> Agent:
    """Accept the terms, once; or find that there is nothing to take part in."""
    job = agent.job
    if agent.epoch is not None or agent.causes.unable is not None or isinstance(job.phase, Unopened):
        return agent
    epoch = agent.epochs_before.get(agent.life.journal)
    if epoch is not None and epoch <= job.epoch:  # the epoch may have ended here without this agent
        return evolve(agent, epoch=epoch, stage=Stage.OUTSIDE)
    if isinstance(job.phase, Closed):
        if job.phase.outcome.verdict is Verdict.SUCCEEDED:
            return _unable(agent, AlreadyFinished())
        return agent  # the next epoch is opened, by this agent or another
    if found := differences(agent.spec.terms, job.terms):
        opener = next((joined.node for joined in job.live.values() if joined.nonce == job.journal), None)
        return _unable(agent, TermsDiffer(found, opener))
    return evolve(agent, epoch=job.epoch, stage=Stage.OUTSIDE)


def _with_outcome(agent: Agent) -> Agent:
    """Note how this agent's epoch of the job has ended. If it waits for the others already, it begins to wait anew."""
    if agent.epoch is None or agent.causes.outcome is not None:
        return agent
    outcome = agent.job.outcome_of(agent.epoch)
    if outcome is None:
        return agent
    return evolve(agent, lifecycle=Ending(evolve(agent.causes, outcome=outcome), Stopping()))


def _unable(agent: Agent, why: AgentEnd) -> Agent:
    return caused(agent, evolve(agent.causes, unable=why))


def _identified(agent: Agent) -> Agent:
    job, me = agent.job, agent.me
    known = job.live.get(me.id)
    if known is not None and known.node == me and known.nonce == agent.speaker:
        agent = agent if agent.was_live else evolve(agent, stage=Stage.LIVE)
        return _renewed(agent) if agent.is_working and _lacks_its_port(agent, known) else agent
    if not agent.is_working:
        # The host of the store may stay for its guests. It must neither speak nor beat for a second agent that has
        # taken this incarnation: (1) a is declared lost. (2) It is told to leave, and serves as a.1, which has not
        # joined. (3) A second agent with the id a joins as a.1.
        return _renewed(agent) if known is not None and known.node == me else agent
    if known is not None and known.node.incarnation >= me.incarnation:
        if agent.was_live:
            return _unable(agent, Replaced(known.node))
        return _renewed(agent)
    return _renewed(agent) if job.is_gone(me) else agent


def _lacks_its_port(agent: Agent, joined: Joined) -> bool:
    """This node has given up the port with which it has joined. It is a standby, or waits for the seal, or is a member
    of a sealed round and has started no workers in it.

    (1) b has read the seal of a round with d, and its workers dial the port of d. (2) The store is lost. d has not read
    the seal, founds the journal again, and offers another port. (3) The store is lost again. b founds the journal from
    what it has read, which holds all that d has read. Without a loss: a `Joined` for round 1 lands when d already
    wants to join round 2, for which it has reserved another port."""
    job, workers = agent.job, agent.workers
    if isinstance(job.phase, Unopened | Closed) or job.is_expected(agent.me) or agent.me in job.succeeded:
        return False
    has_started = (workers.node, workers.epoch, workers.round) == (agent.me, job.epoch, job.round)
    return not has_started and not workers.alive and joined.port != agent.port


def _after_gap(agent: Agent) -> Agent:
    """The read that ends a gap in this node's beats.

    An agent without workers takes a new incarnation: a `Lost` of the old one may be on its way, and must not meet
    workers that were started meanwhile. An agent with workers stays the same: an outage of the store is nobody's
    failure, and if the others have declared this node lost, the journal says so.
    """
    if not agent.contact.gap or is_unproven(agent):
        return agent
    agent = evolve(agent, contact=evolve(agent.contact, gap=False))
    if agent.workers.alive or not agent.is_working or agent.job.is_expected(agent.me) or owed(agent) is not None:
        return agent  # an expected node comes back as the same incarnation, so that its failure counts as its own
    return _renewed(agent)


def _renewed(agent: Agent) -> Agent:
    # A `Joined` of this agent that is still on its way may have a higher incarnation than the journal shows.
    own = agent.me.incarnation + agent.has_joined
    me = Node(agent.me.id, max(agent.job.highest_incarnation(agent.me.id) + 1, own))
    contact = evolve(agent.contact, beat_at=None, asked_at=None, proven_at=None, sent=0, count=0, gap=False)
    silence = evolve(agent.silence, watch=())
    stage = Stage.READING if agent.epoch is None else Stage.OUTSIDE
    return evolve(agent, me=me, stage=stage, is_renewed=True, said={}, unread={}, contact=contact, silence=silence)
