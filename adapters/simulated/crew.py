"""A crew of the fleet: alike agents, one of which steps for all. What waits for one of them can be renamed for
another."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from reknit.adapters.link.machine import LinkState, Saying
from reknit.adapters.link.messages import Call, CallFailed, Read, SendBeat, SendEntry
from reknit.core.agent.agent import Agent
from reknit.core.agent.alike import Own, as_other, entry_as_other, event_as_other
from reknit.core.agent.commands import Beat
from reknit.core.agent.events import Event
from reknit.core.agent.silence import watched
from reknit.core.agent.timers import next_wake
from reknit.core.job.entries import Entry, NodeId
from reknit.core.job.job import Job


@frozen
class Arrival:
    """A call of the link arrives at the store."""

    call: Call


@frozen
class Reply:
    """The answer to a call arrives at the node."""

    call: Call


@frozen
class HeldBack:
    """A read has been held back for long enough, although few entries are there."""

    call: Read


Coming = Event | Arrival | Reply | HeldBack | CallFailed
"""What will happen to a crew. The time of an event is set when it happens."""


@define(eq=False)
class Crew:
    """Alike agents. A crew of one is one agent."""

    agent: Agent
    """The agent that steps for all. It may lag behind by beats of a quiet stretch."""
    link: LinkState
    """Its link."""
    owns: dict[NodeId, Own]
    """What each of the agents has of its own, by node."""
    asked: Job
    """The job as they had folded it when they beat last. From it follows whose counters each has asked for."""
    coming: list[tuple[float, int, Coming]] = field(factory=list)
    """What will happen to all of them: when, the order of what happens at one time, and what. The latest first."""
    parked: Read | None = None
    """The read that waits at the store for news."""
    quiet_until: float | None = None
    """Until then the agent only beats. None: its beats are played one by one."""
    hears_silence: bool = False
    """A node that it watches does not beat."""
    is_cut: bool = False
    """It cannot reach the store."""
    is_suspended: bool = False
    """It stands still. What happens to it meanwhile happens when it goes on."""
    wakes_at: float | None = None
    """When the fleet looks at it next. None: never."""
    seeks: bool = False
    """It will soon look for another crew that is alike."""
    is_over: bool = False
    """Its agents have ended, or are in another crew."""
    _wakes: tuple[Agent, float | None] | None = None
    """An agent, and when it must be woken."""

    def next_wake(self) -> float | None:
        """When its agent must be woken (`timers.next_wake`). Computed once for each agent: most of what happens to a
        crew happens to its link."""
        if self._wakes is None or self._wakes[0] is not self.agent:
            self._wakes = self.agent, next_wake(self.agent)
        return self._wakes[1]

    @property
    def name(self) -> NodeId:
        return self.agent.spec.node_id

    @property
    def position(self) -> int:
        return self.link.reading.position


def link_as_other(crew: Crew, own: Own) -> LinkState:
    """The link of another agent of the crew."""
    link, agent = crew.link, crew.agent
    if own.me == agent.me:
        return link

    def entry(said: Entry) -> Entry:
        return entry_as_other(said, agent, own)

    saying, beating = link.saying, link.beating
    if saying.queue or saying.underway:
        saying = Saying(
            queue=tuple(_say(say, link, agent, own) for say in saying.queue),
            underway=frozenset(map(entry, saying.underway)),
            taken=frozenset(map(entry, saying.taken)),
            tokens=saying.tokens,
            call=None if saying.call is None else _say(saying.call, link, agent, own),
            failures=saying.failures,
        )
    if beating.wanted is not None or beating.call is not None:
        beating = beating._replace(
            wanted=None if beating.wanted is None else _beat(beating.wanted, crew, own),
            call=None if beating.call is None else beating.call._replace(beat=_beat(beating.call.beat, crew, own)),
        )
    return link._replace(nonce=own.nonce, saying=saying, beating=beating)


def coming_as_other(coming: Coming, crew: Crew, own: Own) -> Coming:
    """What will happen to another agent of the crew."""
    match coming:
        case Arrival(SendEntry() as say):
            return Arrival(_say(say, crew.link, crew.agent, own))
        case Reply(SendEntry() as say):
            return Reply(_say(say, crew.link, crew.agent, own))
        case Arrival(SendBeat() as beat):
            return Arrival(beat._replace(beat=_beat(beat.beat, crew, own)))
        case Reply(SendBeat() as beat):
            return Reply(beat._replace(beat=_beat(beat.beat, crew, own)))
        case Arrival() | Reply() | HeldBack() | CallFailed():
            return coming
        case _:
            return event_as_other(coming, crew.agent, own)


def are_links_alike(a: LinkState, b: LinkState) -> bool:
    """Two links that have nothing under way but a read."""
    for link in (a, b):
        if link.saying.queue or link.beating.call is not None or link.beating.wanted is not None or link.is_ended:
            return False
    mine, other = a.reading, b.reading
    return (
        mine.position == other.position
        and mine.enough_at - mine.told == other.enough_at - other.told
        and mine.life == other.life
        and mine.is_owed == other.is_owed
        and a.beating.has_beaten == b.beating.has_beaten
        and len(a.saying.underway) == len(b.saying.underway)
    )


def part(crew: Crew, ids: Sequence[NodeId]) -> Crew:
    """Another crew with these agents of the crew. It keeps none of them."""
    own = crew.owns[ids[0]]
    other = evolve(
        crew,
        agent=as_other(crew.agent, own),
        link=link_as_other(crew, own),
        owns={node_id: crew.owns[node_id] for node_id in ids},
        coming=[(at, number, coming_as_other(what, crew, own)) for at, number, what in crew.coming],
        wakes_at=None,
        seeks=False,
    )
    for node_id in ids:
        del crew.owns[node_id]
    return other


def _say(say: SendEntry, link: LinkState, agent: Agent, own: Own) -> SendEntry:
    token = own.nonce + say.token.removeprefix(link.nonce)
    return say._replace(token=token, entry=entry_as_other(say.entry, agent, own))


def _beat(beat: Beat, crew: Crew, own: Own) -> Beat:
    return evolve(beat, node=own.me, watch=beat.watch and watched(crew.asked, own.me))
