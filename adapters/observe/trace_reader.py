"""Reading a trace (`trace.py`): what an agent has done, done again step by step, or only looked at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from attrs import frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import EntriesRead, Event, StopRequested
from reknit.core.agent.reasons import RunEnd
from reknit.core.agent.step import step
from reknit.core.agent.worker_words import WorkersExited, WorkersStopped
from reknit.core.job.entries import Lost
from reknit.core.text.codec import CodecError, decode, dumps
from reknit.core.text.doing import Situation
from reknit.core.text.story import Told


@frozen
class Resumed:
    """A trace begins with this agent, or goes on with it."""

    agent: Agent
    has_lost: bool = False
    """Steps are missing before it in which something may have been decided."""


@frozen
class Replayed:
    """One step of a trace, made again."""

    before: Agent
    event: Event
    after: Agent
    commands: tuple[Command, ...]
    written: object
    """The commands as they stand in the trace: parsed JSON."""
    time: float = 0.0
    """When the step was made, in seconds since 1970. 0: the trace does not say."""

    @property
    def is_same(self) -> bool:
        """The commands are what they were, byte for byte. If not, this is another version of reknit, or a bug."""
        return dumps(self.commands) == json.dumps(self.written, ensure_ascii=True, separators=(",", ":"))


def read(lines: Iterable[str]) -> Iterator[Resumed | Replayed]:
    """Make the steps of a trace again. `lines`: with their line breaks. Raises `CodecError` for what is no trace."""
    agent: Agent | None = None
    for line in lines:
        if not line.endswith("\n"):
            return
        data = parsed(line)
        if "about" in data:
            continue
        if agent is None or "agent" in data:
            found: Agent = decode(_item(data, "agent"), Agent)
            yield Resumed(found, agent is not None and not data.get("quiet") and found != agent)
            agent = found
            continue
        event: Event = decode(_item(data, "event"), Event)
        made = step(agent, event)
        yield Replayed(agent, event, made.agent, made.commands, _item(data, "commands"), _time(data))
        agent = made.agent


def replay(lines: Iterable[str]) -> Iterator[Replayed]:
    """The steps of a trace alone. Arguments and errors are those of `read`."""
    return (made for made in read(lines) if isinstance(made, Replayed))


def skim(lines: Iterable[str]) -> Iterator[Resumed | Told]:
    """What a trace tells of its steps, without making them again. That takes a fifth of the time. Arguments and errors
    are those of `read`."""
    has_begun = False
    for line in lines:
        if not line.endswith("\n"):
            return
        if line.startswith(_STEP) and not _tells(line):
            continue  # most lines tell that time has passed
        data = parsed(line)
        if "about" in data:
            continue
        if not has_begun or "agent" in data:
            agent: Agent = decode(_item(data, "agent"), Agent)
            yield Resumed(agent, has_begun and not data.get("quiet"))
            has_begun = True
            continue
        yield _told(data)


def _told(data: dict[str, Any]) -> Told:
    event, said, now = _item(data, "event"), _item(data, "commands"), data.get("now")
    commands = said if isinstance(said, list) else []
    entries = [each["entry"] for each in commands if _kind(each) == "Append"]
    ends = [each["result"]["why"] for each in commands if _kind(each) == "Finish"]
    return Told(
        _time(data),
        decode(event, _NEEDED) if _kind(event) in _KINDS else None,
        tuple(decode(entry, Lost) for entry in entries if _kind(entry) == "Lost"),
        None if now is None else decode(now, Situation),
        decode(ends[0], RunEnd) if ends else None,
    )


def _time(data: dict[str, Any]) -> float:
    at = data.get("time", 0.0)
    if not isinstance(at, int | float) or not 0.0 <= at < _NEVER:
        raise CodecError(f"no time: {at!r:.80}")
    return float(at)


_NEVER = 2.0**36
"""Seconds since 1970, about the year 4147: `time.localtime` takes it."""
_STEP = '{"time":'


def _tells(line: str) -> bool:
    """The line of a step tells what `skim` looks for. Written out, because a loop takes as long as all the rest."""
    return (
        '"entries":' in line
        or '"now":' in line
        or '"base":' in line
        or '"is_anew":' in line
        or '"Lost"' in line
        or '"StopRequested"' in line
        or '"killed":' in line
        or '"exits":' in line
    )


_NEEDED = EntriesRead | StopRequested | WorkersExited | WorkersStopped
_KINDS = frozenset(kind.__name__ for kind in get_args(_NEEDED))


def _kind(data: object) -> str:
    """The kind of this value. Empty: it has none."""
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else ""


def parsed(line: str) -> dict[str, Any]:
    """Raises `CodecError`."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise CodecError(f"not a line of a trace: {e}") from None
    if not isinstance(data, dict):
        raise CodecError(f"not a line of a trace: {data!r:.80}")
    return data


def _item(data: dict[str, Any], name: str) -> object:
    if name not in data:
        raise CodecError(f"a line of a trace without {name}: {data!r:.80}")
    return data[name]
