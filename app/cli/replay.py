"""`reknit replay`: whether this version of reknit decides as the agents have decided whose traces are given."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence

from reknit.adapters.observe.trace_reader import Replayed
from reknit.adapters.observe.traces import StoredTrace, steps_of
from reknit.app.report import write
from reknit.core.agent.commands import Command
from reknit.core.text.codec import CodecError, decode, dumps
from reknit.core.text.doing import command_text, event_text

from .arguments import Parsed, Table
from .looking import HELP, UNREADABLE, WORDS, by_part, found, main, readable, show, words_of

_DIFFERENT = 1
TABLE = Table(
    "reknit replay",
    (HELP,),
    "reknit replay [DIR…]",
    "Make every step of the given traces again, and compare what is decided now with what was decided then. One line"
    " for each agent. The first step that differs is shown.",
    WORDS
    + " The exit status is 0 if everything is the same, 1 if something differs, and 65 if a trace cannot be read.",
    mixes=True,
)


def replay(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _replayed)


def _replayed(parsed: Parsed) -> int:
    statuses = [0]
    for traces in found(words_of(parsed)).values():
        for trace in traces:
            troubles: list[str] = []
            show(_compared(trace, troubles, statuses))
            for line in troubles:
                write(2, f"{line}\n")
    return max(statuses)


def _compared(trace: StoredTrace, troubles: list[str], statuses: list[int]) -> Iterator[str]:
    """Lines about one agent. Adds the exit status."""
    node = "an agent" if trace.about is None else f"node {trace.about.node}"
    count = 0
    for made in readable(trace, by_part(trace, steps_of), troubles):
        if not isinstance(made, Replayed):
            continue
        count += 1
        if not made.is_same:
            statuses.append(_DIFFERENT)
            yield f"{node}: step {count} differs ({trace.path})"
            yield from _difference(made)
            return
    if not count:
        statuses.append(UNREADABLE)
        yield f"{node}: no step can be read ({trace.path})"
        return
    is_readable = not any("cannot be read" in line for line in troubles)
    statuses.append(0 if is_readable else UNREADABLE)
    yield f"{node}: {count} steps, all decided alike ({trace.path})"


def _difference(made: Replayed) -> Iterator[str]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.time))
    yield f"  {at}  {event_text(made.event)}"
    try:
        then = [command_text(command) for command in decode(made.written, tuple[Command, ...])]
    except CodecError:
        then = [f"{made.written!r:.500}"]
    now = [command_text(command) for command in made.commands]
    if then == now:  # they differ in something that the sentences leave out
        then, now = [json.dumps(made.written)], [dumps(made.commands)]
    yield f"  then: {'; '.join(then) or 'nothing'}"
    yield f"  now:  {'; '.join(now) or 'nothing'}"
