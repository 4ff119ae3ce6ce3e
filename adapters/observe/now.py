"""What the agents of this host do now, from outside: their traces, and the pages of their workers.

Nothing is asked of an agent, so one that hangs is shown as well, as it was in its last step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from attrs import frozen

from reknit.adapters.keeper.watchdog.page import seen
from reknit.core.agent.agent import Agent
from reknit.core.text.doing import situation

from .progress_seen import Progress, progress_of
from .trace_reader import Replayed, Resumed
from .traces import Owner, StoredTrace, of_this_host, steps_of


@frozen
class Now:
    """An agent that runs."""

    about: Owner
    path: str
    """The folder of its trace."""
    agent: Agent
    """The agent after the last step that is in its trace. What is missing are beats."""
    for_s: float
    """How long it has done what it does. Seconds."""
    progress: Mapping[int, Progress]
    """Its workers, by local rank. Empty: none runs."""


def of_live(jobs: Collection[str] = ()) -> Iterator[Now]:
    """The agents of this user that run on this host. `jobs`: only those of these jobs. Empty: all."""
    for trace in of_this_host():
        if trace.about is not None and trace.is_live and (not jobs or trace.about.job in jobs):
            if (now := _now(trace, trace.about)) is not None:
                yield now


def _now(trace: StoredTrace, about: Owner) -> Now | None:
    """None: the agent has made no step yet."""
    agent, since = None, about.began
    for made in steps_of(trace.latest):
        if isinstance(made, Replayed):
            if agent is None or situation(made.after) != situation(agent):
                since = made.time
            agent = made.after
        elif isinstance(made, Resumed):
            agent = made.agent
    if agent is None:
        return None
    return Now(about, trace.path, agent, max(0.0, time.time() - since), progress_of(keeper_of(about.agent.pid)))


def keeper_of(agent: int) -> int:
    """The pid of the keeper of this agent. 0: it has none now, or none whose workers run."""
    import psutil

    try:
        children = psutil.Process(agent).children()
    except psutil.Error:
        return 0
    return next((child.pid for child in children if seen(child.pid)), 0)
