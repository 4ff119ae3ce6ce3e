"""Which entries this agent wants in the journal. They are derived from its state at every step.

1. An entry is wanted until the journal shows its effect. If the journal does not show it within `Spec.resay_s` seconds,
   the agent says the entry again. So a lost append costs time, and never the job.
2. Where the order of entries matters, the agent says one and waits until it has read it. It must have read its own
   `Failed` or `Succeeded` before it says the next `Joined`.
3. `Joined` promises that no worker runs on this host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from reknit.core.job.entries import (
    Admit,
    Entry,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    Opened,
    Steady,
)
from reknit.core.job.job import Closed, Job, Running

from .agent import Agent, Stage, Timer
from .alive import is_entry_late
from .commands import Append, Command
from .hosting import is_abandoning
from .situation import Situation
from .watching import is_fresh, is_silent
from .workers import ReservePort


def drive_sayings(agent: Agent, now: Situation, accused: tuple[Lost, ...]) -> tuple[Agent, list[Command]]:
    """Say each wanted entry that was not said within the last `Spec.resay_s` seconds."""
    is_gap = agent.pulse.gap
    if not agent.was_read or (is_gap and not is_entry_late(agent)):
        return agent, []
    # A `Lost` is wanted only in the step of a read of the counters. The agent remembers a `Lost` that it has said
    # until the next such step, so that it is not said too often.
    recent = agent.at - agent.spec.resay_s
    said: dict[Entry, float] = {e: at for e, at in agent.said.items() if isinstance(e, Lost) and at > recent}
    new: list[Entry] = []
    offered, is_used = agent.offered, False
    for entry in (*_wanted(agent, now), *accused):
        if is_gap and entry not in agent.unread:
            continue  # what has vanished on its way is said again, because it holds the gap open. Nothing else is said
        if isinstance(entry, Joined):
            # A port that was offered for one round must not be offered for another: (1) a and b join round 0. (2) The
            # round is sealed, and ends. (3) a reads all that at once and starts no worker. (4) The workers of b connect
            # to the port of a. The store of round 1 must not answer there.
            is_used = offered not in (None, (entry.node, entry.round))
            if is_used:
                continue
            offered = entry.node, entry.round
        at = agent.said.get(entry)
        if at is None or agent.at >= at + agent.spec.resay_s:
            at = agent.at
            new.append(entry)
        said[entry] = at
    commands: list[Command] = [Append(entry) for entry in new]
    if is_used:
        agent = evolve(agent, port=None)
        commands.append(ReservePort())
    unread = _unread(agent, said, new)
    if said == agent.said and unread == agent.unread:
        return agent, commands
    stage = agent.stage
    if stage is Stage.OUTSIDE and any(isinstance(e, Joined) for e in said):
        stage = Stage.JOINING
    return evolve(agent, said=said, unread=unread, stage=stage, offered=offered), commands


def _unread(agent: Agent, said: Mapping[Entry, float], new: Sequence[Entry]) -> Mapping[Entry, float]:
    """The entries that are still wanted, and were not read back since this agent said them first.

    A node that is not live may want to join one round after the other, and the job goes on without it. If none of these
    entries is read back, they count as one that is late.
    """
    joins = [at for e, at in agent.unread.items() if isinstance(e, Joined)]
    joins_again = any(isinstance(e, Joined) for e in new)

    def is_wanted(entry: Entry) -> bool:
        if isinstance(entry, Joined) and entry not in said:
            return not joins_again and not agent.job.is_live(entry.node)
        # `said` may have forgotten a `Lost` that was said in vain.
        return entry in said or (isinstance(entry, Lost) and is_silent(agent, entry.node))

    def since(entry: Entry) -> float:
        return agent.unread.get(entry, min(joins, default=agent.at) if isinstance(entry, Joined) else agent.at)

    return {e: since(e) for e in (*agent.unread, *new) if is_wanted(e)}


def farewell(agent: Agent, now: Situation) -> Left | None:
    """This node's goodbye. None: it owes none. After a goodbye the others neither wait for this node nor watch it."""
    job, me = agent.job, agent.me
    if agent.workers.alive or job.is_gone(me) or not agent.has_joined or is_abandoning(agent):
        return None
    if isinstance(job.phase, Closed):
        # The fold now ignores a `Joined` that is still on its way. So a node that is not live owes no goodbye.
        if not job.is_live(me) or now.is_serving:
            return None
    return Left(me, agent.workers.stuck, seen=_seen(job, me))


def _wanted(agent: Agent, now: Situation) -> Iterator[Entry]:
    job = agent.job
    if agent.end is not None:
        return
    if agent.is_departing:
        yield from _goodbye(agent, now)
        return
    if Timer.OPEN in now.due:
        yield Opened(agent.spec.terms, agent.speaker)
    elif Timer.REOPEN in now.due:
        yield Opened(agent.spec.terms, agent.speaker, epoch=job.epoch + 1)
    if agent.epoch is None or agent.epoch != job.epoch:
        return
    if now.owed is not None:
        yield now.owed
    else:
        yield from _joining(agent, now)
    if agent.was_live and now.due:
        yield from _announcements(agent, now)


def _goodbye(agent: Agent, now: Situation) -> Iterator[Entry]:
    job, me = agent.job, agent.me
    if is_abandoning(agent):
        return
    if now.owed is not None:
        yield now.owed  # the report comes before the goodbye: afterwards the fold would ignore it
    if agent.leaving is not None and agent.outcome is None and job.is_live(me) and me not in job.leaving:
        yield Leaving(me)
    last = farewell(agent, now)
    if last is not None and now.owed is None:
        yield last


def _joining(agent: Agent, now: Situation) -> Iterator[Joined]:
    job, me = agent.job, agent.me
    if agent.workers.alive or agent.port is None or job.is_gone(me):
        return
    if agent.is_renewed and not job.is_live(me) and not is_fresh(agent):
        return  # a node that reads, and whose beats do not arrive, would be declared lost and join again, for ever
    if job.is_expected(me):
        if Timer.BACKOFF not in now.due:
            return
    elif job.is_live(me):
        return
    spec = agent.spec
    yield Joined(
        node=me,
        nonce=agent.speaker,
        round=job.round + isinstance(job.phase, Running),
        address=spec.address,
        port=agent.port,
        role=spec.role,
        local_world_size=spec.local_world_size,
        rank_hint=spec.rank_hint,
        seen=_seen(job, me),
    )


def _seen(job: Job, me: Node) -> int:
    """What a new incarnation says of the others of its id. Nobody asks an incarnation that the journal shows."""
    return -1 if job.is_live(me) else job.highest_incarnation(me.id)


def _announcements(agent: Agent, now: Situation) -> Iterator[Entry]:
    """One entry for each deadline of the job that has passed on this agent's clock."""
    job, round = agent.job, agent.job.round
    if Timer.LAST_CALL in now.due:
        yield LastCall(round, job.epoch)
    if Timer.GIVE_UP in now.due:
        yield GaveUp(round, job.epoch)
    if Timer.ADMIT in now.due:
        yield Admit(round + 1, job.epoch)
    if Timer.STEADY in now.due:
        yield Steady(round, job.epoch)
