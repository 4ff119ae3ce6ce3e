"""This agent's contact with the store: when it beats, what proves that the others hear it, and what is late.

1. Each agent counts its beats, and sets its node's counter to its count. It reads its own counter together with the
   counters of the nodes that it watches (`silence`). `step` decides when to beat. So an agent that hangs falls silent.
   A thread that beats by itself would go on beating for it.
2. The count grows only while this node takes part. Beats may land while nothing else works: the node hears no answers,
   its reads hang, its entries vanish, or its workers cannot be stopped. The others would wait for such a node for ever.
   So its own agent holds its count back, and the others notice (`takes_part`).
3. A gap in an agent's own beats may be longer than the silence limit. Then the other nodes may have declared this node
   lost. The agent says nothing and starts no worker until it has read the journal.
4. Each limit is a time on the agent's clock, and is passed when that time is reached. `thresholds` lists them, so that
   the agent wakes in time.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from reknit.core.job.job import Job

from .agent import Agent
from .commands import Beat, Command
from .silence import watched

LATE, LATE_S = 3, 3.0
"""A read or an entry is late after so many silence limits and seconds. An agent says an entry again within this time. A
read that waits for news returns after one second, and a journal may hold few entries back for 1.5 s."""
TURN_S = 0.02
"""Seconds that each live node adds to this time. All of them may say an entry at once, and a journal in a file takes
one after another."""


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
    has_reason = agent.has_joined or agent.is_renewed or must_hear_guests(agent)
    return has_reason and agent.spec.shares_journal and agent.result is None


def must_hear_guests(agent: Agent) -> bool:
    """The host goes on beating, although it takes no part in the job, or does not any more.

    The answers to its beats show whether its guests are still alive.
    """
    if not agent.spec.hosts_journal:
        return False
    return agent.causes.cut is not None or (agent.causes.is_departing and has_guests(agent))


def has_guests(agent: Agent) -> bool:
    """This agent hosts the journal, and other nodes are live in it."""
    return agent.spec.hosts_journal and len(agent.job.live) > agent.job.is_live(agent.me)


def beat_at(agent: Agent) -> float | None:
    """When the next beat is due. None: at once."""
    at = agent.contact.beat_at
    return None if at is None else at + agent.job.terms.beat_s


def drive_beats(agent: Agent) -> tuple[Agent, list[Command]]:
    """Beat if a beat is due."""
    if not is_beating(agent) or not _is_reached(agent, beat_at(agent), never=True):
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
    return _is_reached(agent, _read_late_at(agent))


def is_entry_late(agent: Agent) -> bool:
    """An entry that this node wants said has not been read back for long."""
    return _is_reached(agent, _entry_late_at(agent))


def is_stop_late(agent: Agent) -> bool:
    """The workers should have been gone for long. The keeper hangs, and not the store."""
    return _is_reached(agent, _stop_late_at(agent))


def _read_late_at(agent: Agent) -> float | None:
    read_at = agent.contact.read_at
    return None if read_at is None else read_at + late_s(agent.job)


def _entry_late_at(agent: Agent) -> float | None:
    return min(agent.unread.values()) + late_s(agent.job) if agent.unread else None


def _stop_late_at(agent: Agent) -> float | None:
    kill_at = agent.workers.kill_at
    return None if kill_at is None else kill_at + agent.spec.stop_s


# ---- who may count on this node --------------------------------------------------------------------------------------


def is_fresh(agent: Agent) -> bool:
    """The other nodes cannot have declared this node lost, and it need not kill its workers because of `fence_s`.

    The fence matters for workers that are about to start. Without this rule: (1) a is cut off between two rounds for
    longer than `fence_s`. (2) a reaches the store again, and the next round is sealed with a before its next beat.
    (3) a starts workers in this step and kills them in the next.
    """
    if not is_beating(agent):
        return True
    if agent.contact.gap or is_unproven(agent):
        return False
    return not _is_reached(agent, _fence_falls_at(agent))


def is_unproven(agent: Agent) -> bool:
    """Nothing proves that the others have heard this node within the silence limit.

    The time at which the beat was sent counts, and not the arrival of its answer. An agent that was suspended may find
    an old answer when it runs again.
    """
    return _is_reached(agent, _unproven_at(agent), never=True)


def _unproven_at(agent: Agent) -> float | None:
    proven_at = agent.contact.proven_at
    return None if proven_at is None else proven_at + agent.job.terms.silence_s


def is_fenced(agent: Agent) -> bool:
    """This node must kill its workers, because no beat of it was acknowledged for `Terms.fence_s`."""
    return _is_reached(agent, fence_at(agent))


def fence_at(agent: Agent) -> float | None:
    """When this node must kill its workers if no beat is acknowledged before. None: it need not."""
    return _fence_falls_at(agent) if is_beating(agent) and agent.workers.alive else None


def _fence_falls_at(agent: Agent) -> float | None:
    """`Terms.fence_s` after the send time of the newest acknowledged beat. Its answer may have been on the way for
    longer than the fence, so the arrival of the answer does not count."""
    fence_s, proven_at = agent.job.terms.fence_s, agent.contact.proven_at
    return None if fence_s is None or proven_at is None else proven_at + fence_s


def noticed_gap(agent: Agent) -> Agent:
    """Set `Contact.gap` if no new count of this node was acknowledged for longer than the silence limit.

    Every step does so before it takes in its event. An answer that comes late must not hide the gap.
    """
    contact = agent.contact
    if contact.gap or contact.proven_at is None or not is_beating(agent) or not is_unproven(agent):
        return agent
    return evolve(agent, contact=evolve(contact, gap=True))


# ---- outages ---------------------------------------------------------------------------------------------------------


def is_out(agent: Agent) -> bool:
    """This agent is without the store, also if no adapter reports an outage: a call into a hung file system does not
    return."""
    return agent.contact.outage is not None or not agent.was_read or _is_unanswered(agent)


def _is_unanswered(agent: Agent) -> bool:
    """A round trip of some kind fails: what this node beats, says or asks to read comes to nothing.

    A keeper that hangs is another matter. Then the count stands still although the store answers.
    """
    if agent.spec.shares_journal and is_entry_late(agent):
        return True
    if not is_beating(agent):
        return False
    is_unheard = _is_reached(agent, _unheard_at(agent), never=True)
    return is_read_late(agent) or (is_unheard and not is_stop_late(agent))


def _unheard_at(agent: Agent) -> float | None:
    acked_at = agent.contact.acked_at
    return None if acked_at is None else acked_at + agent.job.terms.silence_s


def thresholds(agent: Agent) -> Iterator[float | None]:
    """The times at which something about the contact changes if no event comes before. They may be past."""
    if agent.spec.shares_journal:
        yield _entry_late_at(agent)
    if is_beating(agent):
        yield beat_at(agent)
        yield _read_late_at(agent)
        yield _stop_late_at(agent)
        yield _unproven_at(agent)
        yield _unheard_at(agent)
        yield fence_at(agent)


def _is_reached(agent: Agent, at: float | None, *, never: bool = False) -> bool:
    """That time has come. `never`: the answer if there is no such time."""
    return never if at is None else agent.at >= at
