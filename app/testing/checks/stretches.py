"""Quiet stretches, computed and played: `quiet.after_beats` is what `step` makes of the beats, one by one."""

from __future__ import annotations

from math import isinf

from reknit.app.testing.violation import demand
from reknit.core.agent import quiet
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Counters, EntriesRead, Woken
from reknit.core.agent.step import step
from reknit.core.agent.timers import next_wake
from reknit.core.job.entries import Node

from .shifted import shifted

MOST = 30
"""Cycles that are played one by one, if the stretch is longer."""


def are_computed(name: str, agent: Agent) -> bool:
    """Demands of an agent that is quiet that it does nothing but beat until it says, comes to where the formula says,
    bit for bit, and wakes for the end of the stretch. False: it is not quiet."""
    agent = shifted(agent, 0.0)  # sums of times on the grid are exact
    until = quiet.quiet_until(agent)
    if until is None:
        return False
    wakes_at = min(until, (agent.contact.beat_at or 0.0) + agent.job.terms.beat_s)
    demand(next_wake(agent) == wakes_at, "quiet", f"{name} is quiet until {until}, and wakes at {next_wake(agent)}")
    n = MOST if isinf(until) else min(MOST, quiet.beats_before(agent, until))
    counts = {node: heard.count for node, heard in agent.silence.heard.items()}
    played = agent
    for number in range(n):
        played, commands = cycle(played, counts)
        beat = Beat(agent.me, agent.contact.sent + number + 1, played.silence.watch)
        demand(commands == [beat], "quiet", f"{name} is quiet until {until}, and at {played.at}: {commands}")
    demand(quiet.after_beats(agent, n, counts) == played, "quiet", f"{n} beats of {name} are not what is computed")
    return True


def cycle(agent: Agent, counts: dict[Node, int]) -> tuple[Agent, list[Command]]:
    """What a beat brings: the agent after it, and all that it wants done. `counts`: the counters before it. Those that
    are watched move."""
    at = (agent.contact.beat_at or 0.0) + agent.job.terms.beat_s
    woken = step(agent, Woken(at))
    for node in next((command.watch for command in woken.commands if isinstance(command, Beat)), ()):
        counts[node] = counts.get(node, 0) + 1
    counted = step(woken.agent, Counters(at, {**counts, agent.me: woken.agent.contact.sent}))
    told = step(counted.agent, EntriesRead(at, (), life=agent.life))
    return told.agent, [*woken.commands, *counted.commands, *told.commands]
