"""When a node may be accused, and how soon a dead one is noticed when nothing else is wrong (L2)."""

from __future__ import annotations

from functools import partial

from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand
from reknit.core.agent.agent import Agent
from reknit.core.agent.events import Counters, Event
from reknit.core.job.entries import Lost, Node
from reknit.core.job.job import Closed, Job

CALM = (
    "wait",
    "settle",
    "start",
    "crash",
    "fail",
    "freeze",
    "succeed",
    "part",
    "slow",
    "stop",
    "interrupt",
    "twin",
    "finish",
)
"""Moves after which the next dead node is noticed as soon as ever."""


def may_accuse(proc: CheckedProc, before: Agent, event: Event, lost: Lost) -> None:
    """A node is accused in the step of a fresh read. If this agent has said an entry long ago in vain, it repeats any
    accusation that has vanished, in the step of any read. In this step the late entry may become one that it wants no
    more: (1) Its `Lost` of two nodes have vanished, one long ago. (2) It reads that this one lives."""
    agent = proc.agent
    late_s = agent.at - min([*before.unread.values(), *agent.unread.values()], default=agent.at)
    is_repeated = agent.unread.get(lost, agent.at) < agent.at and late_s > 3 * agent.job.terms.silence_s
    ok = isinstance(event, Counters) and (agent.contact.acked_at == agent.at or is_repeated)
    demand(ok, "silence", f"{proc.name} accuses {lost.node} without a fresh read")


def is_noticed(world: CheckedWorld, dead: CheckedProc) -> None:
    """Ask, when a node in the ring has just died, whether it is lost in time. A quiet world is asked only."""
    if world.was_troubled or world.setup.weather & {"lose", "lag"} or world.setup.host:
        return
    job, node = world.jobs[-1], dead.agent.me
    if not job.is_live(node) or isinstance(job.phase, Closed):
        return
    demand(node in job.ring, "L2", f"nobody watches {node}, which is live")
    terms, slowest = world.setup.terms, min(world.setup.rates) / 100
    limit_s = (terms.silence_s + 2 * terms.beat_s) / slowest + terms.beat_s / slowest + 1.0
    world.after(limit_s, partial(_ask, world, node, job, limit_s))


def _ask(world: CheckedWorld, node: Node, before: Job, limit_s: float) -> None:
    job = world.jobs[-1]
    if world.was_troubled or job.ring != before.ring or job.epoch != before.epoch or isinstance(job.phase, Closed):
        return  # whoever watches now may have begun to watch only later
    place = job.ring.index(node)
    watchers = {job.ring[(place - back) % len(job.ring)] for back in (1, 2)} - {node}
    seen = [p.name for p in world.procs if p.agent.me in watchers and p.up and p.agent.causes.outcome is None]
    demand(not seen, "L2", f"{' and '.join(seen)} has not noticed in {limit_s:.1f} s that {node} is dead")
