"""Beats and silence: how a node is found to be lost without comparing two clocks.

1. Each agent raises its node's counter, and reads it together with the counters of the nodes that it watches. `step`
   decides when to beat. So an agent that hangs falls silent. A thread that beats by itself would go on beating for it.
2. A *fresh read* is a read of the counters in which this node's own counter has moved. The silence of a watched node
   grows only from one fresh read to the next. It starts at 0 for each incarnation. So an agent that reads old values,
   or an outage of the store, makes no node appear lost.
3. An agent that was cut off from the store counts no silence for a while. After an outage of the store, one node may
   reach the store again some seconds before another.
4. `Lost` is said only in the step of a fresh read.
5. The ring holds all live nodes, in every phase. A ring of the members alone would not do: they may all be dead, and
   there are none while the first round is gathered.
6. While a round is gathered, two nodes watch a whole row of expected nodes. If each node watched only its two
   neighbours, it would take k/2 silence limits to find k dead nodes in a row.
7. A gap in an agent's own beats may be longer than the silence limit. Then the other nodes may have declared this node
   lost. The agent says nothing and starts no worker until it has read the journal.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from reknit.core.job.entries import Lost, Node
from reknit.core.job.job import Gathering, Job
from reknit.core.job.ring import after

from .agent import Agent
from .commands import Beat, Command
from .events import Counters
from .hosting import must_hear_guests

NEIGHBOURS = 2
"""How many nodes each node watches. It is constant, so a beat costs the same in a job of any size."""
EXPECTED = 64
"""Upper bound on the expected nodes that one node watches while a round is gathered. With it, two nodes detect the loss
of a rack of 64 neighbours within one silence limit. Most nodes watch two."""
RETURN_S = 12.0
"""Upper bound, in seconds, on the time that a link needs to find out that the store is back. In that time two calls of
5 s each can fail, with a pause between them."""


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


def is_fresh(agent: Agent) -> bool:
    """The other nodes cannot have declared this node lost, and it need not kill its workers because of `fence_s`.

    The fence matters for workers that are about to start. Without this rule: (1) a is cut off between two rounds for
    longer than `fence_s`. (2) a reaches the store again, and the next round is sealed with a before its next beat.
    (3) a starts workers in this step and kills them in the next.
    """
    if not is_beating(agent):
        return True
    # The time at which the beat was sent counts, and not the arrival of its answer. An agent that was suspended may
    # find an old answer when it runs again.
    proven_at = agent.pulse.proven_at
    if proven_at is None or agent.pulse.gap or agent.at - proven_at > agent.job.terms.silence_s:
        return False
    fence = _fence_falls_at(agent)
    return fence is None or agent.at < fence


def is_fenced(agent: Agent) -> bool:
    at = fence_at(agent)
    return at is not None and agent.at >= at


def fence_at(agent: Agent) -> float | None:
    """When this node must kill its workers if no beat is acknowledged before. None: it need not."""
    return _fence_falls_at(agent) if is_beating(agent) and agent.workers.alive else None


def _fence_falls_at(agent: Agent) -> float | None:
    """`Terms.fence_s` after the send time of the newest acknowledged beat. Its answer may have been on the way for
    longer than the fence, so the arrival of the answer does not count."""
    fence_s, proven_at = agent.job.terms.fence_s, agent.pulse.proven_at
    return None if fence_s is None or proven_at is None else proven_at + fence_s


def watched(job: Job, me: Node) -> tuple[Node, ...]:
    """The nodes that `me` watches: the next two live nodes in the ring.

    While a round is gathered, a node that is back from the last round watches further: up to the next two nodes that
    are back as well. So exactly two nodes that are back watch each expected node.
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
    """Note the counters that were read. Only a fresh read changes anything."""
    pulse, count = agent.pulse, event.counts.get(agent.me)
    if count is None or count <= pulse.count:
        return agent  # not a fresh read: it tells nothing about any node
    # While this agent pauses, it cannot see the beats of others. So no read adds more to a silence than the time of two
    # beats. The pause may have been an outage of the store, from which others return later: (1) The store hangs for
    # 7 s. (2) The call of a returns. (3) The call of b times out, and b tries again after a pause.
    apart, most = 0.0 if pulse.acked_at is None else agent.at - pulse.acked_at, 2 * agent.job.terms.beat_s
    spares = pulse.spares_until is not None and agent.at < pulse.spares_until
    elapsed = 0.0 if spares else min(apart, most)
    spares_until = spared_until(agent, apart) if apart > most else pulse.spares_until
    news: dict[Node, tuple[int, float]] = {}
    for node in pulse.watch:
        now = event.counts.get(node, 0)
        before, silent_s = pulse.heard.get(node, (-1, 0.0))
        news[node] = (now, silent_s + elapsed if now == before else 0.0)
    proven_at = agent.at if pulse.asked_at is None else pulse.asked_at
    pulse = evolve(
        pulse,
        count=count,
        acked_at=agent.at,
        asked_at=None,
        proven_at=proven_at,
        heard=news,
        spares_until=spares_until,
    )
    return evolve(agent, pulse=pulse)


def spared_until(agent: Agent, apart_s: float) -> float:
    """Time before which this agent counts no silence, after it was cut off from the store for `apart_s` seconds.

    The cause may have been an outage of the store. Then the other nodes may need as long again to return.
    """
    return max(agent.pulse.spares_until or agent.at, agent.at + min(apart_s, RETURN_S))


def accusations(agent: Agent) -> Iterator[Lost]:
    """A `Lost` for each node to declare lost in the step of a fresh read. A node that is gone itself declares none."""
    if not agent.job.is_live(agent.me):
        return
    for node, (_, silent_s) in agent.pulse.heard.items():
        if silent_s >= agent.job.terms.silence_s and agent.job.is_live(node):
            yield Lost(node, agent.me)


def drive_beats(agent: Agent) -> tuple[Agent, list[Command]]:
    """Beat if a beat is due."""
    if not is_beating(agent):
        return agent, []
    at = beat_at(agent)
    if at is not None and agent.at < at:
        return agent, []
    watch = watched(agent.job, agent.me)
    asked_at = agent.at if agent.pulse.asked_at is None else agent.pulse.asked_at
    pulse = evolve(agent.pulse, beat_at=agent.at, asked_at=asked_at, watch=watch)
    return evolve(agent, pulse=pulse), [Beat(agent.me, watch)]


def beat_at(agent: Agent) -> float | None:
    """When the next beat is due. None: at once."""
    if not is_beating(agent) or agent.pulse.beat_at is None:
        return None
    return agent.pulse.beat_at + agent.job.terms.beat_s


def noticed_gap(agent: Agent) -> Agent:
    """Set `Pulse.gap` if no beat of this node was acknowledged for longer than the silence limit.

    Every step checks this, so that any event shows the gap.
    """
    pulse = agent.pulse
    if pulse.gap or pulse.proven_at is None or not is_beating(agent):
        return agent
    if agent.at - pulse.proven_at <= agent.job.terms.silence_s:
        return agent
    return evolve(agent, pulse=evolve(pulse, gap=True))
