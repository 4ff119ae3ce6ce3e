"""Every step of an agent as a line of JSON, and the way back: what an agent has done can be done again, step by step.

    {"agent":{…}}                            the agent before the first step
    {"event":{…},"commands":[{…},…]}         one step

1. `step` is pure, so the events of a trace make the same agents and commands again, on any machine.
2. A line is complete or it is the last one: an agent that was killed may leave a torn line, which is left out.
3. A trace holds everything that the agent has read, the last lines of failed workers included. Settings that the core
   does not know, such as the secret of the rendezvous, are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.agent.step import step
from reknit.core.text.codec import CodecError, decode, dumps


class Trace:
    """An observer of one loop. It writes as many lines as the loop makes steps, and one before them."""

    def __init__(self, write: Callable[[str], object]) -> None:
        """`write`: takes one line with its line break. What it raises is raised by the loop, after the step."""
        self._write = write
        self._has_begun = False

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._write(f'{{"agent":{dumps(before)}}}\n')
        self._write(f'{{"event":{dumps(event)},"commands":{dumps(tuple(commands))}}}\n')


@frozen
class Replayed:
    """One step of a trace, made again."""

    before: Agent
    event: Event
    after: Agent
    commands: tuple[Command, ...]
    written: str
    """The commands as they stand in the trace, as JSON."""

    @property
    def is_same(self) -> bool:
        """The commands are what they were, byte for byte. If not, this is another version of reknit, or a bug."""
        return dumps(self.commands) == self.written


def replay(lines: Iterable[str]) -> Iterator[Replayed]:
    """Make the steps of a trace again. `lines`: with their line breaks. Raises `CodecError` for what is no trace."""
    agent: Agent | None = None
    for line in lines:
        if not line.endswith("\n"):
            return
        data = _parsed(line)
        if agent is None:
            agent = decode(_item(data, "agent"), Agent)
            continue
        event: Event = decode(_item(data, "event"), Event)
        made = step(agent, event)
        written = json.dumps(_item(data, "commands"), ensure_ascii=True, separators=(",", ":"))
        yield Replayed(agent, event, made.agent, made.commands, written)
        agent = made.agent


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError as e:
        raise CodecError(f"not a line of a trace: {e}") from None


def _item(data: object, name: str) -> object:
    if not isinstance(data, dict) or name not in data:
        raise CodecError(f"a line of a trace without {name}: {data!r:.80}")
    return data[name]
