"""Beats and silence: how a node is found to be lost without comparing two clocks.

1. Each agent counts its beats, and sets its node's counter to its count. It reads its own counter together with the
   counters of the nodes that it watches. `step` decides when to beat. So an agent that hangs falls silent. A thread
   that beats by itself would go on beating for it.
2. A *fresh read* is a read of the counters in which this node's own counter has moved. The silence of a watched node
   grows only from one fresh read to the next. It starts at 0 for each incarnation. So an agent that reads old values,
   or an outage of the store, makes no node appear lost.
3. An agent that was cut off from the store counts no silence for a while. After an outage of the store, one node may
   reach the store again some seconds before another.
4. `Lost` is said only in the step of a fresh read. A `Lost` that has vanished on its way is said again at any read,
   unless the counter of the accused has moved. No read is fresh while this node holds its count back for that `Lost`.
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
from reknit.core.job.ring import NEIGHBOURS, after

from .agent import Agent, Heard
from .alive import is_entry_late, is_read_late, is_stop_late, takes_part
from .commands import Beat, Command
from .events import Counters
from .hosting import must_hear_guests

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
    """Note the counters that were read. Another read than a fresh one makes no silence longer."""
    pulse, count = agent.pulse, event.counts.get(agent.me, 0)
    if not pulse.count < count <= pulse.sent:
        return _with_signs_of_life(agent, event)
    # While this agent pauses, it cannot see the beats of others. So no read adds more to a silence than the time of two
    # beats.
    apart = 0.0 if pulse.acked_at is None else agent.at - pulse.acked_at
    elapsed, spare, spares_until = (
        min(apart, pause_from_s(agent)),
        spare_s(agent, apart),
        pulse.spares_until or agent.at,
    )
    spares_until = max(spares_until, agent.at + spare)
    news: dict[Node, Heard] = {}
    for node in pulse.watch:
        now, before = event.counts.get(node, 0), pulse.heard.get(node)
        if before is None:
            news[node] = Heard(now, 0.0, spares_until - agent.at)
        elif now != before.count:
            news[node] = Heard(now, 0.0, spare)  # it may have beaten before the pause, and not since
        else:
            # The longest pause counts, and not the sum of all. Otherwise a node that dies would never be noticed while
            # the store pauses again and again.
            news[node] = Heard(now, before.silent_s + elapsed, max(before.spared_s, spare))
    pulse = evolve(
        pulse, count=count, acked_at=agent.at, proven_at=pulse.asked_at, heard=news, spares_until=spares_until
    )
    return evolve(agent, pulse=pulse)


def _with_signs_of_life(agent: Agent, event: Counters) -> Agent:
    """A read that is not fresh may be old. But a counter that has grown since the last fresh read is a sign of life.
    One that was set back is none (rule 6)."""
    heard, acked_at = agent.pulse.heard, agent.pulse.acked_at
    # The next fresh read will add the whole time since the last one to the silence. The node was not silent until now.
    passed = 0.0 if acked_at is None else min(agent.at - acked_at, pause_from_s(agent))
    moved = {n: Heard(event.counts[n], -passed) for n, h in heard.items() if event.counts.get(n, 0) > h.count}
    return evolve(agent, pulse=evolve(agent.pulse, heard={**heard, **moved})) if moved else agent


def spare_s(agent: Agent, apart_s: float) -> float:
    """How many seconds of silence this agent forgives each node once, after it had no fresh read for `apart_s` seconds.

    It forgives nothing after a usual time. A longer one may have been an outage of the store, from which others return
    later: (1) The store hangs for 7 s. (2) The call of a returns. (3) The call of b times out, and b tries again after
    a pause. So the other nodes may need as long again, and then two beats to be heard.
    """
    most_s = pause_from_s(agent)
    return min(apart_s, RETURN_S) + most_s if apart_s > most_s else 0.0


def pause_from_s(agent: Agent) -> float:
    """A longer time without a fresh read, or without a step, is a pause. Seconds. One fresh read adds at most this to a
    silence."""
    return 2 * agent.job.terms.beat_s


def accusations(agent: Agent) -> Iterator[Lost]:
    """A `Lost` for each node to declare lost in the step of a fresh read."""
    return (Lost(node, agent.me) for node in agent.pulse.heard if is_silent(agent, node))


def is_silent(agent: Agent, node: Node) -> bool:
    """This agent has reason to declare the node lost. A node that is gone itself declares none."""
    heard, job = agent.pulse.heard.get(node), agent.job
    if heard is None or not (job.is_live(agent.me) and job.is_live(node)):
        return False
    return heard.silent_s >= job.terms.silence_s + heard.spared_s


def repetitions(agent: Agent) -> Iterator[Lost]:
    """The accusations that have vanished on their way. Nothing that was read since speaks against them.

    Without them a `Lost` that nobody says again would stay late, and this node would never take part again.
    """
    if is_entry_late(agent):
        yield from (lost for lost in accusations(agent) if lost in agent.unread)


def drive_beats(agent: Agent) -> tuple[Agent, list[Command]]:
    """Beat if a beat is due."""
    if not is_beating(agent):
        return agent, []
    at = beat_at(agent)
    if at is not None and agent.at < at:
        return agent, []
    pulse = evolve(agent.pulse, beat_at=agent.at, watch=watched(agent.job, agent.me))
    if takes_part(agent):
        pulse = evolve(pulse, sent=pulse.sent + 1, asked_at=agent.at)
    return evolve(agent, pulse=pulse), [Beat(agent.me, pulse.sent, pulse.watch)]


def beat_at(agent: Agent) -> float | None:
    """When the next beat is due. None: at once."""
    if not is_beating(agent) or agent.pulse.beat_at is None:
        return None
    return agent.pulse.beat_at + agent.job.terms.beat_s


def is_unanswered(agent: Agent) -> bool:
    """A round trip of some kind fails: what this node beats, says or asks to read comes to nothing.

    A keeper that hangs is another matter. Then the count stands still although the store answers.
    """
    if agent.spec.shares_journal and is_entry_late(agent):
        return True
    if not is_beating(agent):
        return False
    acked_at = agent.pulse.acked_at
    is_unheard = acked_at is None or agent.at - acked_at > agent.job.terms.silence_s
    return is_read_late(agent) or (is_unheard and not is_stop_late(agent))


def noticed_gap(agent: Agent) -> Agent:
    """Set `Pulse.gap` if no new count of this node was acknowledged for longer than the silence limit.

    Every step checks this, so that any event shows the gap.
    """
    pulse = agent.pulse
    if pulse.gap or pulse.proven_at is None or not is_beating(agent):
        return agent
    if agent.at - pulse.proven_at <= agent.job.terms.silence_s:
        return agent
    return evolve(agent, pulse=evolve(pulse, gap=True))
