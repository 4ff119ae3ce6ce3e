"""Alike agents step alike: the step of one, in the name of another, is the step of that one (`core/agent/alike.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand
from reknit.core.agent.agent import Agent
from reknit.core.agent.alike import (
    Own,
    as_other,
    but_pulse,
    can_share,
    command_as_other,
    event_as_other,
    own_of,
    standing,
)
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Counters, EntriesRead, Event
from reknit.core.agent.step import step
from reknit.core.job.entries import Node
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job


def is_asked(world: CheckedWorld, agent: Agent, event: Event) -> bool:
    """Ask it of one agent that stands in the job like this one. `agent`: before the event. False: there is none."""
    return any(_is_renamed(agent, event, own) for own in _others(world, agent, event))


def _others(world: CheckedWorld, agent: Agent, event: Event) -> Iterator[Own]:
    """What agents have of their own that stand in the job as this one does, before and after the event."""
    before, after = agent.job, _job_after(agent, event)
    for proc in world.procs:
        other, own = proc.agent, own_of(proc.agent)
        is_other = proc.up and other.me.id != agent.me.id and other.births == agent.births
        if not is_other or other.spec.local_world_size != agent.spec.local_world_size:
            continue
        own = evolve(own, me=Node(own.me.id, max(0, before.highest_incarnation(own.me.id))))
        known = before.live.get(own.me.id)
        spec = evolve(own.spec, node_id=agent.spec.node_id, address=agent.spec.address, rank_hint=agent.spec.rank_hint)
        if known is None or known.nonce != own.nonce or spec != agent.spec:
            continue
        own = evolve(own, port=known.port)
        is_untouched = all(after.live.get(n) == before.live.get(n) for n in (agent.me.id, own.me.id))
        if is_untouched and _stand_alike(before, agent.me, own.me) and _stand_alike(after, agent.me, own.me):
            yield own


def _stand_alike(job: Job, a: Node, b: Node) -> bool:
    return standing(job, a) == standing(job, b)


def _job_after(agent: Agent, event: Event) -> Job:
    if not isinstance(event, EntriesRead) or event.life != agent.life:
        return agent.job
    return fold_all(agent.job if event.base is None else event.base, tuple(event.entries))


def _is_renamed(agent: Agent, event: Event, own: Own) -> bool:
    """Whether the step in the other's name is the other's own. False: the states cannot be renamed."""
    made = step(agent, event)
    if not (can_share(agent) and can_share(made.agent)) or isinstance(event, Counters):
        return False  # what one hears of its neighbours is the pulse
    if any(getattr(entry, "node", None) in (agent.me, own.me) for entry in getattr(event, "entries", ())):
        return False  # something of their own
    mine = step(as_other(agent, own), event_as_other(event, agent, own))
    shift = made.agent.me.incarnation - agent.me.incarnation
    then = evolve(own, me=Node(own.me.id, own.me.incarnation + shift))
    text = f"{own.me} stands like {agent.me}, and after {event} it"
    is_same = but_pulse(mine.agent) == but_pulse(as_other(made.agent, then))
    demand(is_same, "alike", f"{text} is another")
    said, expected = (
        [_unwatched(c) for c in commands]
        for commands in (mine.commands, [command_as_other(c, made.agent, then) for c in made.commands])
    )
    demand(said == expected, "alike", f"{text} wants {said}, not {expected}")
    return True


def _unwatched(command: Command) -> Command:
    return evolve(command, watch=()) if isinstance(command, Beat) else command
