"""The random histories reach what can happen: checks that never see a case prove nothing about it.

Histories are drawn until each goal was reached by one of them. A goal is read from a world that has ended. The profile
`quick` asks only for the goals that one history in thirty reaches. The others need about a thousand histories.
`.ci/run` asks for them in a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.play import play
from reknit.app.testing.script import Script
from reknit.app.testing.violation import Violation
from reknit.app.testing.weather import scripts
from reknit.core.agent.agent import StopRequest
from reknit.core.agent.commands import SIGKILL
from reknit.core.agent.events import EntriesRead, JournalFailed
from reknit.core.agent.reasons import (
    AlreadyFinished,
    CannotStop,
    CutOff,
    DeclaredLost,
    JournalRefused,
    Reason,
    Replaced,
    SignalReceived,
    StoreLost,
    TermsDiffer,
)
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Admit, Failed, GaveUp, LastCall, Leaving, Left, Lost, Opened, Succeeded
from reknit.core.job.job import Verdict
from reknit.core.job.reasons import AllSucceeded, BudgetSpent, NodeGone, TooFewNodes, Unstable, WorkerFailed

from .conftest import PROFILE, SEED


def _started(world: CheckedWorld) -> list[tuple[str, int, int]]:
    """(agent, round, group world size) of every start of workers, in order."""
    return [
        (who, c.round, c.assignment.group_world_size)
        for _, who, _, commands in world.story
        for c in commands
        if isinstance(c, StartWorkers)
    ]


def _stopped_for(world: CheckedWorld, why: type) -> bool:
    return any(isinstance(getattr(c, "why", None), why) for _, _, _, commands in world.story for c in commands)


def _ended_with(world: CheckedWorld, why: type[Reason]) -> bool:
    return any(p.agent.result is not None and isinstance(p.agent.result.why, why) for p in world.procs)


def _closed_by(world: CheckedWorld, why: type[Reason]) -> bool:
    job = world.jobs[-1]
    outcomes = [*job.past, *([job.outcome] if job.outcome else [])]
    return any(isinstance(o.why, why) for o in outcomes)


def _said(world: CheckedWorld, kind: type) -> bool:
    return any(isinstance(e, kind) for e in world.journal)


def _has_succeeded(world: CheckedWorld) -> bool:
    outcome = world.jobs[-1].outcome
    return outcome is not None and outcome.verdict is Verdict.SUCCEEDED


def _grew(world: CheckedWorld) -> bool:
    sizes = {round: size for _, round, size in _started(world)}
    return any(1 < sizes[r] < sizes.get(r + 1, 0) for r in sizes)


def _replaced(world: CheckedWorld) -> bool:
    """A round has a member that was a standby, in the place of one that is lost."""
    rounds = [{m.node.id for m in members} for members in world.sealed.values()]
    return _said(world, Lost) and any(len(a) == len(b) and a != b for a, b in pairwise(rounds))


def _came_back(world: CheckedWorld) -> bool:
    """A suspended agent was declared lost, stopped its workers, and has a place again."""
    return _stopped_for(world, DeclaredLost) and any(
        p.was_suspended and p.agent.me.incarnation > 0 and p.agent.me in world.jobs[-1].member_nodes
        for p in world.procs
    )


def _finisher_works_again(world: CheckedWorld) -> bool:
    done = {(e.node.id, e.round + 1) for e in world.journal if isinstance(e, Succeeded)}
    return any((g.node.id, g.command.round) in done for g in world.groups)


def _stragglers(world: CheckedWorld) -> bool:
    """A worker of the first epoch outlived the opening of the second."""
    opened = [at for at, who, e, _ in world.story if who == "journal" and isinstance(e, Opened) and e.epoch == 1]
    return any(g.epoch == 0 and g.gone_at is not None and g.gone_at > at for g in world.groups for at in opened)


def _is_excused(world: CheckedWorld) -> bool:
    """What looked like a failure was the echo of a node's going."""
    return any(
        isinstance(a.why, WorkerFailed) and isinstance(b.why, NodeGone) and a.round == b.round
        for a, b in pairwise(world.jobs)
    )


def _host(world: CheckedWorld) -> StopRequest | None:
    """What made the journal's host leave, if something did."""
    host = world.procs[0] if world.procs else None
    return host.agent.causes.request if host is not None and host.spec.hosts_journal and host.agent.result else None


def _serves_others(world: CheckedWorld) -> bool:
    """The journal's host has left, and the others start workers: they read its store."""
    if not world.setup.host or not world.procs:
        return False
    host = world.procs[0].id
    others = {p.name for p in world.procs if p.id != host}
    left = [at for at, _, e, _ in world.story if isinstance(e, Left) and e.node.id == host]
    starts = (
        at for at, who, _, commands in world.story for c in commands if isinstance(c, StartWorkers) and who in others
    )
    return bool(left) and any(at > left[0] for at in starts)


def _is_told_again(request: StopRequest | None) -> bool:
    return request is not None and (request.count > 1 or request.latest == SIGKILL)


def _bore(world: CheckedWorld, proc: CheckedProc) -> bool:
    """It heard of an outage, and its workers ran through."""
    failed = any(isinstance(t.event, JournalFailed) and t.at < (proc.learned_at or 0.0) for t in proc.trace)
    return failed and _ended_well(proc) and sum(g.node.id == proc.id for g in world.groups) == 1


def _ended_well(proc: CheckedProc) -> bool:
    return proc.agent.result is not None and isinstance(proc.agent.result.why, AllSucceeded)


GOALS: dict[str, Callable[[CheckedWorld], object]] = {
    "success": _has_succeeded,
    "restart then success": lambda w: w.jobs[-1].spent and _has_succeeded(w),
    "two restarts": lambda w: w.jobs[-1].spent >= 2,
    "budget spent": lambda w: _closed_by(w, BudgetSpent),
    "a group grows": _grew,
    "standby takes over": _replaced,
    "node lost and back as another": lambda w: any(m.node.incarnation for ms in w.sealed.values() for m in ms),
    "a leaver leaves": lambda w: _said(w, Leaving) and _said(w, Left) and _ended_with(w, SignalReceived),
    "new epoch": lambda w: w.jobs[-1].epoch == 1 and _has_succeeded(w),
    "third epoch": lambda w: w.jobs[-1].epoch >= 2,
    "another size": lambda w: any(
        a.node.id == b.node.id and a.local_world_size != b.local_world_size
        for a, b in pairwise(sorted((m for ms in w.sealed.values() for m in ms), key=lambda m: m.node))
    ),
    "eight nodes": lambda w: any(len(members) == 8 for members in w.sealed.values()),
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
    "death excuses its echoes": _is_excused,
    "finisher works again": _finisher_works_again,
    "standby until the end": lambda w: any(_ended_well(p) and p.group is None for p in w.procs),
    "stragglers of the epoch before": _stragglers,
    "other terms": lambda w: _ended_with(w, TermsDiffer) and _has_succeeded(w),
    "refused": lambda w: _ended_with(w, JournalRefused) and _has_succeeded(w),
    "outage borne": lambda w: any(_bore(w, p) and not p.was_full for p in w.procs),
    "full disk borne": lambda w: any(p.was_full and _ended_well(p) for p in w.procs),
    "skipped over": lambda w: any(isinstance(t.event, EntriesRead) and t.event.base for p in w.procs for t in p.trace),
    "host dies": lambda w: w.setup.host and w.procs and w.procs[0].dead and _ended_with(w, StoreLost),
    "host leaves and serves": _serves_others,
    "host told twice": lambda w: _is_told_again(_host(w)) and _ended_with(w, StoreLost),
}

OFTEN = (
    "success",
    "budget spent",
    "standby takes over",
    "node lost and back as another",
    "a leaver leaves",
    "two agents, one id",
    "last call",
    "given up",
    "too unstable",
    "store lost",
    "death excuses its echoes",
    "standby until the end",
    "skipped over",
)
"""The goals that one history in thirty reaches."""
ASKED = {goal: GOALS[goal] for goal in (OFTEN if PROFILE in ("quick", "change") else GOALS)}


@cache
def missed() -> set[str] | Violation:
    """The goals that no history has reached. None is shrunk: that it exists is enough. If a history breaks a promise,
    the search ends with it, and is not made again for each goal."""
    missing = set(ASKED)

    def has_all(script: Script) -> bool:
        world = play(script, oracle=True)
        missing.difference_update([goal for goal in missing if ASKED[goal](world)])
        return not missing

    quiet = settings(
        max_examples=100,  # Hypothesis varies what it has drawn, so a long search stays with a few kinds of histories
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    for part in range(80):
        try:
            find(scripts(), has_all, random=Random(f"{SEED} {part}"), settings=quiet)
            break
        except NoSuchExample:
            continue
        except Violation as violation:
            return violation
    return missing


@pytest.mark.slow
@pytest.mark.parametrize("goal", ASKED)
def test_it_happens(goal: str) -> None:
    """Some history gets there."""
    missing = missed()
    if isinstance(missing, Violation):
        raise missing
    assert goal not in missing
