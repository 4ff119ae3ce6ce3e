"""The story of a world, for people: `time who << event`, and below it `>> command`."""

from __future__ import annotations

from enum import Enum
from typing import Any, cast

import attrs

from reknit.core.agent.commands import Beat
from reknit.core.agent.events import Counters, EntriesRead, Woken
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Node, Opened

from .checked_world import CheckedWorld


def tell(world: CheckedWorld) -> str:
    """What happened, without the beats and the looks that changed nothing."""
    lines: list[str] = []
    for at, who, event, commands in world.story:
        if event == "":
            lines.append(f"{at:7.2f} -- {who}")
            continue
        told = [c for c in commands if not isinstance(c, Beat)]
        idle = isinstance(event, Woken | Counters) or event == EntriesRead(getattr(event, "at", 0.0))
        if told or not idle:
            lines.append(f"{at:7.2f} {who} << {brief(event)}")
            lines += [f"{'':7} {who} >> {brief(command)}" for command in told]
    return "\n".join(lines)


def brief(value: object) -> str:
    """A value without its defaults, its time and what nobody wants to read."""
    match value:
        case Node():
            return str(value)
        case Enum():
            return str(value.value)
        case Opened():
            return f"Opened({value.journal} epoch {value.epoch})"
        case StartWorkers():
            made = value.assignment
            ranks = ",".join(str(w.rank) for w in made.workers)
            return f"StartWorkers(round {value.round}, ranks {ranks} of {made.world_size})"
        case tuple():
            return "[" + ", ".join(map(brief, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{brief(k)}: {brief(v)}" for k, v in value.items()) + "}"
    if not attrs.has(type(value)) or isinstance(value, type):
        return str(value)
    shown = [
        brief(getattr(value, a.name))
        for a in attrs.fields(cast(Any, type(value)))
        if a.name not in ("at", "address", "port", "pid", "nonce", "life") and getattr(value, a.name) != a.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
