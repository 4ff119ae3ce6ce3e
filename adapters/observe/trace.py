"""Every step of an agent as a line of JSON. `trace_reader` is the way back.

    {"about":{…}}                                        whose trace this is (`trace_folder`); may be missing
    {"agent":{…}}                                        the agent before the next step
    {"time":1764147612.1,"event":{…},"commands":[{…},…]} one step, and when it was made, in seconds since 1970
    {"time":…,"event":…,"commands":…,"now":{…}}          the same, after which the agent does something else

1. `step` is pure, so the events of a trace make the same agents and commands again, on any machine.
2. A line is complete or it is the last one: an agent that was killed may leave a torn line, which is left out.
3. A line with an agent may come again. The steps between it and the line before are not in the trace: nothing was
   decided in them (`"quiet":true`), or they were lost. Or nothing is missing, and the agent is the one that the steps
   before have made.
4. A trace holds everything that the agent has read, the last lines of failed workers included. Settings that the core
   does not know, such as the secret of the rendezvous, are not in it.
5. `now` (`doing.Situation`) can be found by making the steps again. It is written so that a reader who only wants to
   know what was done need not do that.
6. A field that is missing has its default. So a trace of an older version can be read, as long as the core still has
   what the trace names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.text.codec import dumps
from reknit.core.text.doing import situation


def agent_line(agent: Agent, *, is_quiet: bool = False) -> str:
    """`is_quiet`: nothing was decided since the line before."""
    quiet = ',"quiet":true' if is_quiet else ""
    return f'{{"agent":{dumps(agent)}{quiet}}}\n'


def step_line(at: float, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> str:
    """`at`: in seconds since 1970."""
    now = situation(after)
    changed = "" if now == situation(before) and before.nonce else f',"now":{dumps(now)}'
    return f'{{"time":{at:.3f},"event":{dumps(event)},"commands":{dumps(tuple(commands))}{changed}}}\n'


class Trace:
    """An observer of one loop. It writes as many lines as the loop makes steps, and one before them."""

    def __init__(self, write: Callable[[str], object], now: Callable[[], float] = time.time) -> None:
        """`write`: takes one line with its line break. What it raises is raised by the loop, after the step. `now`:
        the time in seconds since 1970."""
        self._write = write
        self._now = now
        self._has_begun = False

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._write(agent_line(before))
        self._write(step_line(self._now(), before, event, after, commands))
