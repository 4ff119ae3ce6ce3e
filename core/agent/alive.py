"""Whether this node takes part in the job. If it does not, its count of beats stands still, and the others notice.

Beats may land while nothing else works: the node hears no answers, its reads hang, its entries vanish, or its workers
cannot be stopped. The others would wait for such a node for ever. So its own agent holds its count back if

1. the beat with this count was not acknowledged,
2. or nothing was read for too long,
3. or an entry that it wants said was not read back for too long, whatever the fold makes of the entry,
4. or its workers should have been gone for long, because their keeper hangs.

The third condition holds only for a node that is live in the journal, because nobody waits for another one. When a
thousand nodes join at once, an entry `Joined` may wait for its turn.
"""

from __future__ import annotations

from reknit.core.job.job import Job

from .agent import Agent

LATE, LATE_S = 3, 3.0
"""A read or an entry is late after so many silence limits and seconds. An agent says an entry again within this time. A
read that waits for news returns after one second, and a journal may hold few entries back for 1.5 s."""
TURN_S = 0.02
"""Seconds that each live node adds to this time. All of them may say an entry at once, and a journal in a file takes
one after another."""


def late_s(job: Job) -> float:
    """Seconds after which a read or an entry is late."""
    return LATE * job.terms.silence_s + LATE_S + TURN_S * len(job.live)


def takes_part(agent: Agent) -> bool:
    """The count of this node's beats may grow."""
    if agent.pulse.count != agent.pulse.sent or is_read_late(agent) or is_stop_late(agent):
        return False
    return not (is_entry_late(agent) and agent.job.is_live(agent.me))


def is_read_late(agent: Agent) -> bool:
    read_at = agent.pulse.read_at
    return read_at is not None and agent.at - read_at > late_s(agent.job)


def is_entry_late(agent: Agent) -> bool:
    """An entry that this node wants said has not been read back for long."""
    return bool(agent.unread) and agent.at - min(agent.unread.values()) > late_s(agent.job)


def is_stop_late(agent: Agent) -> bool:
    workers = agent.workers
    return workers.alive and workers.kill_at is not None and agent.at > workers.kill_at + agent.spec.stop_s
