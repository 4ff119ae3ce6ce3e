"""Silence: how a node is found to be lost without comparing two clocks.

1. An agent watches the counters of other nodes (`contact` says when they grow). A *fresh read* is a read of the
   counters in which this node's own counter has moved. The silence of a watched node grows only from one fresh read to
   the next. It starts at 0 for each incarnation. So an agent that reads old values, or an outage of the store, makes no
   node appear lost.
2. An agent that was cut off from the store forgives each node a part of its silence (`spare_s`). After an outage of the
   store, one node may reach the store again some seconds before another.
3. `Lost` is said first at the time of a fresh read. If it was not read back in time, it is said again at any read,
   unless the counter of the accused has moved. While this node waits for that entry, it holds its own count back, so no
   read is fresh.
4. The ring holds all live nodes, in every phase. A ring of the members alone would not do: they may all be dead, and
   there are none while the first round is gathered.
5. While a round is gathered, two nodes watch a whole row of expected nodes. If each node watched only its two
   neighbours, it would take k/2 silence limits to find k dead nodes in a row.
"""

from __future__ import annotations

from attrs import evolve

from reknit.core.job.entries import Node
from reknit.core.job.job import Gathering, Job
from reknit.core.job.ring import NEIGHBOURS, after

from .agent import Agent, Heard
from .events import Counters

EXPECTED = 64
"""Upper bound on the expected nodes that one node watches while a round is gathered. With it, two nodes detect the loss
of a rack of 64 neighbours within one silence limit. Most nodes watch two."""
RETURN_S = 12.0
"""Upper bound, in seconds, on the time that a link needs to find out that the store is back. In that time two calls of
5 s each can fail, with a pause between them."""

DEAD = 3
"""A guest that was silent for this many silence limits is dead. By then any other node has called it lost."""


def watched(job: Job, me: Node) -> tuple[Node, ...]:
    """The nodes that `me` watches: the next two live nodes in the ring.

    While a round is gathered, a node that is not expected watches further: up to the next two nodes that are not
    expected either. So two such nodes watch each expected node, of up to `EXPECTED` in a row.
    """
    phase = job.phase
    if not isinstance(phase, Gathering) or not phase.expected or me in phase.expected:
        return tuple(after(job.ring, me, job.seats, NEIGHBOURS))
    near: list[Node] = []
    back = 0
    for node in after(job.ring, me, job.seats, NEIGHBOURS + EXPECTED):
        near.append(node)
        back += node not in phase.expected
        if back == NEIGHBOURS:
            break
    return tuple(near)


def heard(agent: Agent, event: Counters) -> Agent:
    """Note the counters that were read. Another read than a fresh one makes no silence longer."""
    contact, count = agent.contact, event.counts.get(agent.me, 0)
    if not contact.count < count <= contact.sent:
        return _with_signs_of_life(agent, event)
    # While this agent pauses, it cannot see the beats of others. So no read adds more to a silence than the time of two
    # beats.
    apart_s = 0.0 if contact.acked_at is None else agent.at - contact.acked_at
    elapsed_s, spared_s, silence = min(apart_s, pause_from_s(agent)), spare_s(agent, apart_s), agent.silence
    spares_until = max(silence.spares_until or agent.at, agent.at + spared_s)
    news: dict[Node, Heard] = {}
    for node in silence.watch:
        now, before = event.counts.get(node, 0), silence.heard.get(node)
        if before is None:
            news[node] = Heard(now, 0.0, spares_until - agent.at)
        elif now != before.count:
            news[node] = Heard(now, 0.0, spared_s)  # it may have beaten before the pause, and not since
        else:
            # The longest pause counts, and not the sum of all. Otherwise a node that dies would never be noticed while
            # the store pauses again and again.
            news[node] = Heard(now, before.silent_s + elapsed_s, max(before.spared_s, spared_s))
    return evolve(
        agent,
        contact=evolve(contact, count=count, acked_at=agent.at, proven_at=contact.asked_at),
        silence=evolve(silence, heard=news, heard_at=agent.at, spares_until=spares_until),
    )


def _with_signs_of_life(agent: Agent, event: Counters) -> Agent:
    """A read that is not fresh may be old. But a counter that has grown since the last fresh read is a sign of life.
    One that was set back is none (rule 6)."""
    heard, acked_at = agent.silence.heard, agent.contact.acked_at
    # The next fresh read will add the whole time since the last one to the silence. The node was not silent until now.
    passed_s = 0.0 if acked_at is None else min(agent.at - acked_at, pause_from_s(agent))
    moved = {n: Heard(event.counts[n], -passed_s) for n, h in heard.items() if event.counts.get(n, 0) > h.count}
    return evolve(agent, silence=evolve(agent.silence, heard={**heard, **moved}, heard_at=agent.at))


def spare_s(agent: Agent, apart_s: float) -> float:
    """How many seconds of silence this agent forgives each node once, after it had no fresh read for `apart_s` seconds.

    It forgives nothing after a usual time. A longer one may have been an outage of the store, from which others return
    later: (1) The store hangs for 7 s. (2) The call of a returns. (3) The call of b times out, and b tries again after
    a pause. (4) The members of etcd elect another leader, and this call times out as well. So the other nodes may need
    twice as long, and then two beats to be heard.
    """
    most_s = pause_from_s(agent)
    return min(2 * apart_s, RETURN_S) + most_s if apart_s > most_s else 0.0


def pause_from_s(agent: Agent) -> float:
    """A longer time without a fresh read, or without a step, is a pause. Seconds. One fresh read adds at most this to a
    silence."""
    return 2 * agent.job.terms.beat_s


def is_silent(agent: Agent, node: Node) -> bool:
    """This agent has reason to declare the node lost. A node that is gone itself declares none."""
    heard, job = agent.silence.heard.get(node), agent.job
    if heard is None or not (job.is_live(agent.me) and job.is_live(node)):
        return False
    return heard.silent_s >= job.terms.silence_s + heard.spared_s


def are_guests_dead(agent: Agent) -> bool:
    """Every watched guest of this host of the store has been silent for `DEAD` silence limits.

    The last live nodes can die without an entry `Lost`: no other node is left to say it. A host that has said goodbye
    may not say it. A guest that has just joined was not heard yet, and lives.
    """
    job, heard = agent.job, agent.silence.heard
    if any(node not in heard for node in after(job.ring, agent.me, job.seats, NEIGHBOURS)):
        return False
    silences = [h.silent_s - h.spared_s for node, h in heard.items() if job.is_live(node)]
    return bool(silences) and min(silences) >= DEAD * job.terms.silence_s
