"""The same agent or event at another time. No clock has a zero that means anything: all goes on alike.

A field that holds a time is called `at`, `since`, or ends with `_at` or `_until`. One that holds a duration ends with
`_s`. `test_laws.py` asks whether every number of an agent with a fraction is named so.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isinf
from typing import Any

from attrs import evolve, fields, has

from reknit.core.agent.agent import Agent

GRID_S = 2.0**-20
"""Times are multiples of this. So a shift by a power of two rounds nothing, and no decision hangs on the last bit."""
UNMOVED = {"spec", "job", "life", "assignment", "exits", "result", "outcome", "heard"}
"""Fields that hold no times, and may be large."""


def is_time(name: str) -> bool:
    """A field with this name holds a time, if it holds a number."""
    return name in ("at", "since") or name.endswith(("_at", "_until"))


def shifted(value: Any, by_s: float) -> Any:
    """The same agent, or event, with all its times on the grid and later by so many seconds."""
    moved = {a.name: _moved(a.name, getattr(value, a.name), by_s) for a in fields(type(value)) if a.name not in UNMOVED}
    made = evolve(value, **moved)
    if isinstance(value, Agent):
        since = {timer: (round_, _later(at, by_s)) for timer, (round_, at) in value.since.items()}
        said, unread = ({e: _later(at, by_s) for e, at in m.items()} for m in (value.said, value.unread))
        made = evolve(made, since=since, said=said, unread=unread)
    return made


def _moved(name: str, item: Any, by_s: float) -> Any:
    if isinstance(item, float) and is_time(name):
        return _later(item, by_s)
    return shifted(item, by_s) if has(type(item)) and not isinstance(item, Mapping) else item


def _later(at: float, by_s: float) -> float:
    return at if isinf(at) else round(at / GRID_S) * GRID_S + by_s
