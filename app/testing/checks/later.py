"""The same agent, job or event a thousand rounds later. Rounds, epochs and beats are only counted: all goes on alike.

Python keeps the numbers up to 256 once. So code that compares them by `is` is right for a while, and wrong then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, cast

from attrs import evolve, fields, has

from reknit.app.testing.violation import demand
from reknit.core.agent.agent import Agent, Contact, Heard, Spec, Timer
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Counters, EntriesRead, Event
from reknit.core.agent.lifecycle import sequel
from reknit.core.agent.step import step
from reknit.core.job.entries import Node, Opened, Terms
from reknit.core.job.job import Job, Unopened
from reknit.core.job.workers import WorkerFailure, WorkerRanks

AGES = 1001
"""Odd, so that an even round becomes an odd one."""
OF_A_ROUND = {Timer.LAST_CALL, Timer.GIVE_UP, Timer.ADMIT, Timer.STEADY, Timer.BACKOFF, Timer.ECHO}
"""Timers whose number is a round."""
COUNTED = {Contact: ("sent", "count"), Heard: ("count",), Beat: ("count",)}
"""The counts of beats."""


PLAIN = str | int | float | None | Enum | Node | Spec | Terms | WorkerFailure | WorkerRanks
"""Values without a round. There are many of them."""


def later(value: Any) -> Any:
    """The same value with all rounds, epochs and counts of beats greater by `AGES`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Agent):
        return _agent(value)
    cls: Any = type(value)
    if has(cls):
        counted = ("round", "epoch", *COUNTED.get(cls, ()))
        changed = {name: later(getattr(value, name)) for name in _names(cls)}
        return cls(**{k: v + AGES if k in counted and v is not None else v for k, v in changed.items()})
    if isinstance(value, Mapping):
        return {later(key): later(item) for key, item in value.items()}
    return type(value)(map(later, value)) if isinstance(value, tuple | frozenset) else value


@cache
def _names(cls: Hashable) -> tuple[str, ...]:
    return tuple(a.name for a in fields(cast(Any, cls)))


def _agent(agent: Agent) -> Agent:
    made = {name: later(getattr(agent, name)) for name in _names(Agent)}
    if agent.epoch is not None:
        made["epoch"] = agent.epoch + AGES
    if agent.offered is not None and agent.offered[1] >= 0:  # -1: in another life of the journal
        made["offered"] = agent.offered[0], agent.offered[1] + AGES
    made["since"] = {timer: (n + AGES * (timer in OF_A_ROUND), at) for timer, (n, at) in agent.since.items()}
    return Agent(**made)


def _event(event: Event, agent: Agent) -> Event:
    """A counter that is missing stands for 0."""
    if isinstance(event, Counters):
        nodes = {*event.counts, *agent.silence.watch, *agent.silence.heard, agent.me}
        return evolve(event, counts={node: event.counts.get(node, 0) + AGES for node in nodes})
    made: Event = later(event)
    return made


def goes_on_alike(name: str, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
    """The step, made a thousand rounds later, is the same."""
    if isinstance(event, EntriesRead):
        is_new = event.base is not None and _is_new(event.base)
        if is_new or any(isinstance(entry, Opened) for entry in event.entries):
            return  # an epoch begins with round 0
    if _is_new(before.job) or after.contact.sent < before.contact.sent or after.me != before.me:
        return  # and an incarnation with count 0
    made = step(later(before), _event(event, before))
    demand(made.commands == later(tuple(commands)), "S9", f"{name} does something else a thousand rounds later: {made}")
    demand(made.agent == later(after), "S9", f"{name} is another a thousand rounds later")
    demand(sequel(made.agent) is sequel(after), "sequel", f"{name} foresees something else a thousand rounds later")


def _is_new(job: Job) -> bool:
    return isinstance(job.phase, Unopened)
