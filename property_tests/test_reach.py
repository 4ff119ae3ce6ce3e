"""What can happen does happen: a green suite is not an empty one.

`find` searches for a history with the property, read off a world that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from reknit.core.commands import StartWorkers
from reknit.core.entries import Admit, Failed, GaveUp, LastCall, Leaving, Left, Lost
from reknit.core.job import Verdict
from reknit.core.reasons import (
    AlreadyFinished,
    BudgetSpent,
    CannotStop,
    CutOff,
    DeclaredLost,
    Reason,
    Replaced,
    SignalReceived,
    StoreLost,
    TooFewNodes,
    Unstable,
)

from .conftest import SEED
from .play import play
from .script import Script
from .weather import scripts
from .world import World


def _started(world: World) -> list[tuple[str, int, int]]:
    """(agent, round, group world size) of every start of workers, in order."""
    return [
        (who, c.round, c.assignment.group_world_size)
        for _, who, _, commands in world.story
        for c in commands
        if isinstance(c, StartWorkers)
    ]


def _stopped_for(world: World, why: type) -> bool:
    return any(isinstance(getattr(c, "why", None), why) for _, _, _, commands in world.story for c in commands)


def _ended_with(world: World, why: type[Reason]) -> bool:
    return any(p.agent.result is not None and isinstance(p.agent.result.why, why) for p in world.procs)


def _closed_by(world: World, why: type[Reason]) -> bool:
    job = world.jobs[-1]
    outcomes = [*job.past, *([job.outcome] if job.outcome else [])]
    return any(isinstance(o.why, why) for o in outcomes)


def _said(world: World, kind: type) -> bool:
    return any(isinstance(e, kind) for e in world.journal)


def _has_succeeded(world: World) -> bool:
    outcome = world.jobs[-1].outcome
    return outcome is not None and outcome.verdict is Verdict.SUCCEEDED


def _grew(world: World) -> bool:
    sizes = {round: size for _, round, size in _started(world)}
    return any(sizes.get(r) == 2 and sizes.get(r + 1) == 3 for r in sizes)


def _replaced(world: World) -> bool:
    """A round has a member that was a standby, in the place of one that is lost."""
    rounds = [{m.node.id for m in members} for members in world.sealed.values()]
    return _said(world, Lost) and any(len(a) == len(b) and a != b for a, b in pairwise(rounds))


def _came_back(world: World) -> bool:
    """A suspended agent was counted out, stopped its workers, and has a place again."""
    return _stopped_for(world, DeclaredLost) and any(
        p.was_suspended and p.agent.me.incarnation > 0 and p.agent.me in world.jobs[-1].member_nodes
        for p in world.procs
    )


GOALS: dict[str, Callable[[World], object]] = {
    "success": _has_succeeded,
    "restart then success": lambda w: w.jobs[-1].spent and _has_succeeded(w),
    "two restarts": lambda w: w.jobs[-1].spent >= 2,
    "budget spent": lambda w: _closed_by(w, BudgetSpent),
    "grows from two to three": _grew,
    "standby takes over": _replaced,
    "node lost and back as another": lambda w: any(m.node.incarnation for ms in w.sealed.values() for m in ms),
    "a leaver leaves": lambda w: _said(w, Leaving) and _said(w, Left) and _ended_with(w, SignalReceived),
    "new epoch": lambda w: w.jobs[-1].epoch == 1 and _has_succeeded(w),
    "suspended agent comes back": _came_back,
    "two agents, one id": lambda w: _ended_with(w, Replaced),
    "last call": lambda w: _said(w, LastCall),
    "admission": lambda w: _said(w, Admit),
    "given up": lambda w: _said(w, GaveUp) and _closed_by(w, TooFewNodes),
    "too unstable": lambda w: _closed_by(w, Unstable),
    "fenced": lambda w: _stopped_for(w, CutOff),
    "store lost": lambda w: _ended_with(w, StoreLost),
    "stuck workers": lambda w: _ended_with(w, CannotStop),
    "latecomer": lambda w: _ended_with(w, AlreadyFinished),
    "several failures, one restart": lambda w: (
        w.jobs[-1].spent == 1 and sum(isinstance(e, Failed) for e in w.journal) > 1
    ),
}


@pytest.mark.parametrize("goal", GOALS)
def test_it_happens(goal: str) -> None:
    """Some history gets there. Not shrunk: that it exists is enough, and `find` prints the rest."""

    def reaches(script: Script) -> bool:
        return bool(GOALS[goal](play(script)))

    find(
        scripts(),
        reaches,
        random=Random(SEED),
        settings=settings(
            max_examples=4000,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
