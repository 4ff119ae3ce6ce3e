"""Alike agents step alike: what one agent decides in the name of another is what the other would decide."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, fields
from hypothesis import given, settings

from reknit.core.agent.agent import Agent
from reknit.core.agent.alike import (
    OWN,
    PULSE,
    Own,
    as_other,
    can_share,
    command_as_other,
    event_as_other,
    own_of,
    standing,
    without_pulse,
)
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Counters, EntriesRead, Event
from reknit.core.agent.step import step
from reknit.core.agent.timers import STAGGERED
from reknit.core.job.entries import Node
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job

from .conftest import PROFILE
from .play import play
from .script import Script, parse
from .weather import scripts
from .world import World

KINDS = {
    "spec": "own",
    "at": "pulse",
    "nonce": "own",
    "births": "shared",
    "me": "own",
    "port": "own",
    "offered": "own",
    "life": "shared",
    "job": "shared",
    "stage": "shared",
    "epoch": "shared",
    "epochs_before": "shared",
    "is_renewed": "shared",
    "workers": "own",
    "lifecycle": "own",
    "quick": "shared",
    "max_restarts": "shared",
    "contact": "pulse",
    "silence": "pulse",
    "said": "own",
    "unread": "own",
    "since": "shared",
}
"""What each field of an agent is. Whoever adds a field decides it here, and in core/agent/alike.py: an own field is
renamed by `as_other`, the pulse is what a beat changes, and a shared field is equal for alike agents."""


def test_every_field_is_classified() -> None:
    """A field that nobody has thought of would be shared by agents for which it differs."""
    assert [field.name for field in fields(Agent)] == list(KINDS)
    assert {name for name, kind in KINDS.items() if kind == "own"} == OWN
    assert {name for name, kind in KINDS.items() if kind == "pulse"} == PULSE


def others(world: World, agent: Agent, event: Event) -> Iterator[Own]:
    """What agents have of their own that stand in the job as this one does, before and after the event."""
    before, after = agent.job, job_after(agent, event)
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
        if is_untouched and alike_in(before, agent.me, own.me) and alike_in(after, agent.me, own.me):
            yield own


def alike_in(job: Job, a: Node, b: Node) -> bool:
    return standing(job, a) == standing(job, b) and job.highest_incarnation(a.id) == job.highest_incarnation(b.id)


def job_after(agent: Agent, event: Event) -> Job:
    if not isinstance(event, EntriesRead) or event.life != agent.life:
        return agent.job
    return fold_all(agent.job if event.base is None else event.base, tuple(event.entries))


def are_renamed(agent: Agent, event: Event, own: Own) -> bool:
    """Whether the step in the other's name is the other's own. False: the states cannot be renamed."""
    made = step(agent, event)
    if not (can_share(agent) and can_share(made.agent)) or isinstance(event, Counters):
        return False  # what one hears of its neighbours is the pulse
    if any(getattr(entry, "node", None) in (agent.me, own.me) for entry in getattr(event, "entries", ())):
        return False  # something of their own
    mine = step(as_other(agent, own), event_as_other(event, agent, own))
    shift = made.agent.me.incarnation - agent.me.incarnation
    then = evolve(own, me=Node(own.me.id, own.me.incarnation + shift))
    assert without_pulse(mine.agent) == without_pulse(as_other(made.agent, then))
    assert [unwatched(c) for c in mine.commands] == [
        unwatched(command_as_other(c, made.agent, then)) for c in made.commands
    ]
    return True


def unwatched(command: Command) -> Command:
    return evolve(command, watch=()) if isinstance(command, Beat) else command


def asked(script: Script, every: int = 1) -> int:
    """Asks at every step of every agent, or at each of so many. Returns how many steps were renamed."""
    world, count = play(script, is_ending=False), 0
    for proc in world.procs:
        agent = Agent(proc.spec)
        for number, traced in enumerate(proc.trace):
            for own in others(world, agent, traced.event) if number % every == 0 else ():
                count += are_renamed(agent, traced.event, own)
                break
            agent = step(agent, traced.event).agent
    return count


@settings(max_examples={"quick": 3, "change": 6}.get(PROFILE, 30))  # each of them has thousands of steps
@given(scripts())
def test_alike_agents_step_alike(script: Script) -> None:
    """Eight nodes, of which all but the first four can be alike. Whatever happens."""
    asked(
        evolve(script, setup=evolve(script.setup, nodes=8, formed=8, max=8, sizes=(2,), graces=(7,), roles="t")),
        every=7,
    )


def test_most_steps_of_a_calm_job_are_renamed() -> None:
    """Otherwise the law would say nothing. With failures of workers, of which each names its own ranks."""
    text = f"setup nodes=8 formed=8 min=6 max=8 budget=9\nfail {'abcdefgh'[STAGGERED]}\nwait 25\nfreeze b\nwait 25"
    assert asked(parse(text)) > 100
