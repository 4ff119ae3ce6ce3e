"""Beats and silence: how a node is found to be lost without comparing two clocks.

1. Every node raises its own counter from its step loop, and reads it back with those it watches. A hung agent falls
   silent; a thread would keep beating for it.
2. A peer's silence grows only over reads in which this node's own counter had moved, and starts anew per incarnation.
   So a stale reader, or an outage of the store, accuses nobody.
   Whoever was cut off itself spares the others for a while: an outage of all ends for one node after the other.
3. `Lost` is said only in the step of such a read.
4. The ring goes over all live nodes in every phase: members may all be dead, and while the first round gathers there
   are none. While gathering a hole of those expected is watched as a whole, or k dead in a row were found two by two.
5. After a gap in its own beats longer than the silence limit an agent may have been counted out. It says and starts
   nothing until it has read the journal.
"""

from __future__ import annotations

from collections.abc import Iterator

from .agent import Agent
from .commands import Beat, Command
from .entries import Lost, Node
from .events import Counters
from .job import Gathering, Job
from .ring import after
from .values import evolve

NEIGHBOURS = 2
"""Nodes that each watches: the cost per node stays constant."""
EXPECTED = 64
"""And at most so many of those expected, the next ones in the ring: a rack that dies at once is found at once. Only the
first who are back, and those next to a hole, ever watch so many."""
DEAD = 3
"""Silence limits after which nobody will call the silent lost any more."""
RETURN_S = 12.0
"""A link may need this long to find out that the store is back: two calls of 5 s that got lost, and a pause."""


def is_beating(agent: Agent) -> bool:
    """From the moment when it has said `Joined`: the others may have read that before it does.

    One that comes back shows first that it can be heard: max_nodes=1, a runs, b waits and is cut off, and joins for
    ever. And the journal's host that serves on must know whether anybody lives by it.
    """
    serves_on = agent.end is not None and agent.spec.hosts_journal
    return agent.spec.shares_journal and agent.result is None and (agent.joined or agent.is_renewed or serves_on)


def is_fresh(agent: Agent) -> bool:
    """This node has not been silent to the others for so long that they may have counted it out.

    Nor so long that its fence would kill in the next step what is started in this one: a is cut off between two rounds
    for longer than `fence_s`, mended, and sealed in before its next beat.
    """
    if not is_beating(agent):
        return True
    # Counted from when the beat was sent: an agent that was suspended finds an old answer waiting.
    proven_at = agent.pulse.proven_at
    if proven_at is None or agent.pulse.gap or agent.at - proven_at > agent.job.terms.silence_s:
        return False
    fence = _fence_falls_at(agent)
    return fence is None or agent.at < fence


def is_fenced(agent: Agent) -> bool:
    at = fence_at(agent)
    return at is not None and agent.at >= at


def fence_at(agent: Agent) -> float | None:
    """When this node must kill its workers for want of an acknowledged beat."""
    return _fence_falls_at(agent) if is_beating(agent) and agent.workers.alive else None


def _fence_falls_at(agent: Agent) -> float | None:
    """Counted from when the acknowledged beat was sent: its answer may have been on the way for as long as a fence."""
    fence_s, proven_at = agent.job.terms.fence_s, agent.pulse.proven_at
    return None if fence_s is None or proven_at is None else proven_at + fence_s


def watched(job: Job, me: Node) -> tuple[Node, ...]:
    """Whom `me` watches: the next two live nodes in the ring; and once back from the last round all before the next two
    that are back as well, so that two, and not all, watch each of those expected."""
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
    """Take in a read of the counters."""
    pulse, count = agent.pulse, event.counts.get(agent.me)
    if count is None or count <= pulse.count:
        return agent  # not a fresh read: nothing is known about anybody
    # A pause of this agent is not the silence of another: no read counts for more than two beats. And if it was an
    # outage of all, others may need as long again: two nodes, the store hangs for 7 s, a's call returns, b's times out.
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
    beat = evolve(pulse, count=count, acked_at=agent.at, asked_at=None, proven_at=proven_at)
    return evolve(agent, pulse=evolve(beat, heard=news, spares_until=spares_until))


def spared_until(agent: Agent, apart_s: float) -> float:
    """Whoever was cut off for so long may have met an outage of all, from which the others take as long to return."""
    return max(agent.pulse.spares_until or agent.at, agent.at + min(apart_s, RETURN_S))


def accusations(agent: Agent) -> Iterator[Lost]:
    """Whom to call lost, in the step of a fresh read. The gone accuse nobody."""
    if not agent.job.is_live(agent.me):
        return
    for node, (_, silent_s) in agent.pulse.heard.items():
        if silent_s >= agent.job.terms.silence_s and agent.job.is_live(node):
            yield Lost(node, agent.me)


def are_guests_dead(agent: Agent) -> bool:
    """The last nodes alive die unnoticed: nobody is left who could say so, and one that has said goodbye may not."""
    silences = [silent_s for node, (_, silent_s) in agent.pulse.heard.items() if agent.job.is_live(node)]
    return bool(silences) and min(silences) >= DEAD * agent.job.terms.silence_s


def drive_beats(agent: Agent) -> tuple[Agent, list[Command]]:
    """Beat if it is time."""
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
    """Mark a gap in this node's own beats, as soon as any event shows it."""
    pulse = agent.pulse
    if pulse.gap or pulse.proven_at is None or not is_beating(agent):
        return agent
    if agent.at - pulse.proven_at <= agent.job.terms.silence_s:
        return agent
    return evolve(agent, pulse=evolve(pulse, gap=True))
