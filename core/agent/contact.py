"""This agent's contact with the store: when it beats, what proves that the others hear it, and what is late.

1. Each agent counts its beats, and sets its node's counter to its count. It reads its own counter together with the
   counters of the nodes that it watches (`silence`). The agent decides when to beat, and no thread. So an agent that
   hangs falls silent.
2. The count grows only while this node takes part. Beats may land while nothing else works: the node hears no answers,
   its reads hang, its entries vanish, or its workers cannot be stopped. The others would wait for such a node for ever.
   So its own agent holds its count back, and the others notice (`takes_part`).
3. A gap in an agent's own beats may be as long as the silence limit. Then the other nodes may have declared this node
   lost. In a gap the agent starts no worker, and says nothing new. It repeats entries that are late. The gap ends when
   a new count is acknowledged and then the journal is read.
4. A limit holds from its time on (`at >= limit`). `lasting_thresholds` and `pulse_thresholds` list these times, so that
   the agent wakes then.
"""

from __future__ import annotations

from attrs import evolve

from reknit.core.job.job import Job

from .agent import Agent
from .commands import Beat, Command
from .silence import watched

LATE, LATE_S = 3, 3.0
"""A read or an entry is late after `LATE` silence limits and `LATE_S` seconds. An agent says an entry again within this
time. A read that waits for news returns after one second, and a journal may hold few entries back for 1.5 s."""
TURN_S = 0.02
"""Seconds that each live node adds to this time. All of them may say an entry at once, and a journal in a file takes
one after another."""
FOREVER = float("inf")
"""A time that never comes."""


# ---- beats -----------------------------------------------------------------------------------------------------------


def is_beating(agent: Agent) -> bool:
    """A node beats as soon as it has said `Joined`. The other nodes may read the `Joined` before this node does.

    A returning node beats before it joins, so that the others can hear it. Without this rule, with max_nodes=1:
    1. a runs, b is a standby.
    2. b's beats stop arriving while its reads still work.
    3. a declares b lost.
    4. b reads that and joins as a new incarnation. Steps 3 and 4 repeat for ever.

    The host of the store beats for another reason: see `must_hear_guests`.
    """
    if not agent.spec.shares_journal:
        return False
    return agent.has_joined or agent.is_renewed or must_hear_guests(agent)


def must_hear_guests(agent: Agent) -> bool:
    """Whether the host of the store beats although it takes no part in the job, or does not any more.

    The answers to its beats show whether its guests are still alive. A host that can take no part may get guests yet.
    """
    if not agent.spec.hosts_journal:
        return False
    return agent.causes.unable is not None or (agent.causes.is_departing and has_guests(agent))


def has_guests(agent: Agent) -> bool:
    """This agent hosts the journal, and other nodes are live in it."""
    return agent.spec.hosts_journal and len(agent.job.live) > agent.job.is_live(agent.me)


def drive_beats(agent: Agent) -> tuple[Agent, list[Command]]:
    """Beat if a beat is due."""
    if agent.at < _beat_at(agent) or not is_beating(agent):
        return agent, []
    contact = evolve(agent.contact, beat_at=agent.at)
    if takes_part(agent):
        contact = evolve(contact, sent=contact.sent + 1, asked_at=agent.at)
    silence = evolve(agent.silence, watch=watched(agent.job, agent.me))
    return evolve(agent, contact=contact, silence=silence), [Beat(agent.me, contact.sent, silence.watch)]


def takes_part(agent: Agent) -> bool:
    """The count of this node's beats may grow. It may not if

    1. the beat with this count was not acknowledged,
    2. or nothing was read for too long,
    3. or an entry that it wants said was not read back for too long, whatever the fold makes of the entry,
    4. or its workers should have been gone for long, because their keeper hangs.

    The third condition holds only for a node that is live in the journal, because nobody waits for another one. When a
    thousand nodes join at once, an entry `Joined` may wait for its turn.
    """
    if agent.contact.count != agent.contact.sent or is_read_late(agent) or is_stop_late(agent):
        return False
    return not (is_entry_late(agent) and agent.job.is_live(agent.me))


# ---- what is late ----------------------------------------------------------------------------------------------------


def late_s(job: Job) -> float:
    """Seconds after which a read or an entry is late."""
    return LATE * job.terms.silence_s + LATE_S + TURN_S * len(job.live)


def is_read_late(agent: Agent) -> bool:
    """Nothing was read for long."""
    return agent.at >= _read_late_at(agent)


def is_entry_late(agent: Agent) -> bool:
    """An entry that this node wants said has not been read back for long."""
    return agent.at >= _entry_late_at(agent)


def is_stop_late(agent: Agent) -> bool:
    """The workers should have been gone for long. The keeper hangs, and not the store."""
    return agent.at >= _stop_late_at(agent)


# ---- who may count on this node --------------------------------------------------------------------------------------


def is_fresh(agent: Agent) -> bool:
    """The other nodes cannot have declared this node lost, and it need not kill its workers because of `fence_s`.

    The fence matters for workers that are about to start. Without this rule: (1) a is cut off between two rounds for
    longer than `fence_s`. (2) a reaches the store again, and the next round is sealed with a before its next beat.
    (3) a starts workers in this step and kills them in the next.
    """
    if not is_beating(agent):
        return True
    return not agent.contact.gap and not is_unproven(agent) and agent.at < _fence_falls_at(agent)


def is_unproven(agent: Agent) -> bool:
    """Nothing proves that the others have heard this node within the silence limit.

    The time at which the beat was sent counts, and not the arrival of its answer. An agent that was suspended may find
    an old answer when it runs again.
    """
    return agent.at >= _unproven_at(agent)


def is_fenced(agent: Agent) -> bool:
    """This node must kill its workers, because no beat of it was acknowledged for `Terms.fence_s`."""
    at = fence_at(agent)
    return at is not None and agent.at >= at


def fence_at(agent: Agent) -> float | None:
    """When this node must kill its workers if no beat is acknowledged before. None: it need not."""
    if agent.job.terms.fence_s is None or not agent.workers.alive or not is_beating(agent):
        return None
    at = _fence_falls_at(agent)
    return None if at == FOREVER else at


def noticed_gap(agent: Agent) -> Agent:
    """Set `Contact.gap` if no new count of this node was acknowledged for the silence limit.

    Every step does so before it takes in its event. An answer that comes late must not hide the gap.
    """
    contact = agent.contact
    if contact.gap or contact.proven_at is None or not is_unproven(agent) or not is_beating(agent):
        return agent
    return evolve(agent, contact=evolve(contact, gap=True))


# ---- outages ---------------------------------------------------------------------------------------------------------


def is_out(agent: Agent) -> bool:
    """This agent is without the store: it has not read yet, an adapter reports an outage, or some kind of round trip
    had no answer for too long. A call into a hung file system does not return, so no adapter reports it.

    A keeper that hangs is another matter. Then the count stands still although the store answers.
    """
    if agent.contact.outage is not None or not agent.was_read:
        return True
    if agent.spec.shares_journal and is_entry_late(agent):
        return True
    if not is_beating(agent):
        return False
    return is_read_late(agent) or (agent.at >= _unheard_at(agent) and not is_stop_late(agent))


# ---- all these times -------------------------------------------------------------------------------------------------


def lasting_thresholds(agent: Agent) -> list[float]:
    """The times at which something about the contact changes, however often this agent beats. They may be past."""
    if not agent.spec.shares_journal:
        return []
    return [_entry_late_at(agent), _stop_late_at(agent)] if is_beating(agent) else [_entry_late_at(agent)]


def pulse_thresholds(agent: Agent) -> list[float]:
    """The time of the next beat, and the times at which something about the contact changes unless a beat is answered
    and the journal is read before. They may be past."""
    if not is_beating(agent):
        return []
    return [
        _beat_at(agent),
        _read_late_at(agent),
        _unproven_at(agent),
        _unheard_at(agent),
        _fence_falls_at(agent),
    ]


def _beat_at(agent: Agent) -> float:
    return _after(agent.contact.beat_at, agent.job.terms.beat_s, if_none=-FOREVER)


def _read_late_at(agent: Agent) -> float:
    return _after(agent.contact.read_at, late_s(agent.job))


def _entry_late_at(agent: Agent) -> float:
    return min(agent.unread.values()) + late_s(agent.job) if agent.unread else FOREVER


def _stop_late_at(agent: Agent) -> float:
    return _after(agent.workers.kill_at, agent.spec.stop_s)


def _unproven_at(agent: Agent) -> float:
    return _after(agent.contact.proven_at, agent.job.terms.silence_s, if_none=-FOREVER)


def _unheard_at(agent: Agent) -> float:
    return _after(agent.contact.acked_at, agent.job.terms.silence_s, if_none=-FOREVER)


def _fence_falls_at(agent: Agent) -> float:
    """`Terms.fence_s` after the send time of the newest acknowledged beat. Its answer may have been on the way for
    longer than the fence, so the arrival of the answer does not count."""
    fence_s = agent.job.terms.fence_s
    return FOREVER if fence_s is None else _after(agent.contact.proven_at, fence_s)


def _after(since: float | None, for_s: float, *, if_none: float = FOREVER) -> float:
    """So long after that moment. `if_none`: the answer if there was no such moment."""
    return if_none if since is None else since + for_s
