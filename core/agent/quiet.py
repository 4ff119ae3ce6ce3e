"""Quiet stretches: while nothing happens but beats, many beats can be computed at once.

A *cycle* is what a beat brings: `Woken` at the time of the beat, `Counters` in which this node's own counter and all
watched ones have moved, and a read of the journal that holds nothing new. All three have the same time.

1. `quiet_until` says whether an agent is quiet, and until when. Before that time a cycle makes it give one command, its
   `Beat`, and changes nothing but its pulse: the fields that `after_beats` sets.
2. `after_beats` is the agent after n cycles. It is the same as that of `step`, bit for bit, if the sums of times are
   exact, as those of multiples of 2^-20 s are. Otherwise the sum of n beats differs from n times a beat, by a
   millisecond in a month, and a beat may fall on the other side of a time that is so near.
3. Both know nothing that `timers` and `contact` do not know: a time with which the core compares `Agent.at` stands
   there.

A simulator needs this: months of a job are mostly beats (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from reknit.core.job.entries import Lost, Node

from .agent import Agent, Done, Heard, Silence, Timer
from .contact import FOREVER, is_beating, takes_part
from .silence import watched
from .timers import lasting_thresholds


def quiet_until(agent: Agent) -> float | None:
    """The time before which this agent decides nothing, as long as all that happens are cycles. Infinity: it waits for
    no time at all. None: it is not quiet, or it does not beat."""
    if not _is_quiet(agent):
        return None
    return min((at for at in lasting_thresholds(agent) if at > agent.at), default=FOREVER)


def _is_quiet(agent: Agent) -> bool:
    if isinstance(agent.lifecycle, Done) or not is_beating(agent) or Timer.OUTAGE in agent.since:
        return False
    contact, terms = agent.contact, agent.job.terms
    if contact.gap or contact.outage is not None or not takes_part(agent):
        return False
    is_complete = contact.read_at is not None and contact.acked_at is not None and contact.read_at >= contact.acked_at
    if not is_complete or not contact.count or contact.beat_at is None or contact.asked_at != contact.beat_at:
        return False  # the cycle before is not over, or its beat did not count
    if agent.at >= contact.beat_at + terms.beat_s:
        return False  # a beat is due at this very moment
    if terms.fence_s is not None and terms.fence_s <= terms.beat_s:
        return False  # this node is fenced between any two beats
    spares_until = agent.silence.spares_until
    if spares_until is not None and spares_until > contact.beat_at + terms.beat_s:
        return False  # a node that is watched from now on would be forgiven some silence
    # A `Lost` is said and repeated at the times of reads.
    return not any(isinstance(entry, Lost) for entry in (*agent.said, *agent.unread))


def beats_before(agent: Agent, until: float) -> int:
    """How many beats of a quiet agent come before this time, which is finite."""
    beat_at, beat_s = agent.contact.beat_at, agent.job.terms.beat_s
    if beat_at is None:
        return 0
    count = max(0, int((until - beat_at) / beat_s))
    while count and beat_at + count * beat_s >= until:
        count -= 1
    return count


def after_beats(agent: Agent, n: int, counts: Mapping[Node, int]) -> Agent:
    """A quiet agent after n cycles, all of which come before `quiet_until(agent)`.

    `counts`: the counters of the nodes that it watches, as they are at the last cycle. Each of them has moved in every
    cycle. Further nodes may be in it. Raises `KeyError` if a node is missing.
    """
    contact = agent.contact
    if not n or contact.beat_at is None:
        return agent
    at, sent = contact.beat_at + n * agent.job.terms.beat_s, contact.sent + n
    watch = watched(agent.job, agent.me)
    return evolve(
        agent,
        at=at,
        contact=evolve(
            contact,
            beat_at=at,
            asked_at=at,
            proven_at=at,
            acked_at=at,
            read_at=at,
            sent=sent,
            count=sent,
            answers=False,
        ),
        silence=Silence(watch, {node: Heard(counts[node]) for node in watch}, heard_at=at, spares_until=at),
    )
