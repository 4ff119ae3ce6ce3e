"""What agents read and say, as the text that real journals and tools carry.

Whatever the codec or the snapshot loses, the agents and the fold do not get. So every check of a history looks at them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import evolve

from reknit.adapters.runtime import ports
from reknit.core.agent.commands import Command
from reknit.core.agent.events import EntriesRead, Event
from reknit.core.text import codec, snapshot

from .violation import demand


class TextLink:
    """A link whose events go through `read`."""

    def __init__(self, link: ports.Link) -> None:
        self._link = link
        self.append, self.beat, self.folded, self.close = link.append, link.beat, link.folded, link.close

    def events(self, now: float) -> list[Event]:
        return [read(event) for event in self._link.events(now)]


def read(made: Event) -> Event:
    """The event, read from its text. A fold in it was frozen and thawed."""
    base = None
    if isinstance(made, EntriesRead) and made.base is not None:
        base = snapshot.thaw(json.loads(snapshot.freeze(made.base)))
        made = evolve(made, base=None)
    text = codec.dumps(made)
    found: Event = codec.loads(text, Event)
    demand(codec.dumps(found) == text, "S9", f"another text of {made}")
    return evolve(found, base=base) if isinstance(found, EntriesRead) and base is not None else found


def same_commands(commands: Sequence[Command]) -> None:
    """Each command is equal to what its text says."""
    for command in commands:
        demand(codec.loads(codec.dumps(command), Command) == command, "S9", f"the text of {command} says another")
