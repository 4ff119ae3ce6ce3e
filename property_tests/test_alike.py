"""Alike agents step alike: what one agent decides in the name of another is what the other would decide."""

from __future__ import annotations

from unittest import mock

import pytest
from attrs import evolve, fields
from hypothesis import given, settings

from reknit.app.testing.checks.renamed import is_asked
from reknit.app.testing.play import play
from reknit.app.testing.script import Script, parse
from reknit.app.testing.violation import Violation, demand
from reknit.app.testing.weather import scripts
from reknit.core.agent import alike
from reknit.core.agent.agent import Agent
from reknit.core.agent.alike import OWN, PULSE, standing
from reknit.core.agent.step import step
from reknit.core.agent.timers import STAGGERED
from reknit.core.job.entries import Entry, Node
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job

from .conftest import PROFILE
from .journals import PLAUSIBLE, written
from .planted.bug import Bug, planted

KINDS = {
    "spec": "own",
    "at": "pulse",
    "nonce": "own",
    "births": "shared",
    "me": "own",
    "port": "own",
    "offered": "own",
    "life": "shared",
    "job": "shared",
    "stage": "shared",
    "epoch": "shared",
    "epochs_before": "shared",
    "is_renewed": "shared",
    "workers": "own",
    "lifecycle": "own",
    "quick": "shared",
    "max_restarts": "shared",
    "contact": "pulse",
    "silence": "pulse",
    "said": "own",
    "unread": "own",
    "since": "shared",
}
"""What each field of an agent is. Whoever adds a field decides it here, and in core/agent/alike.py: an own field is
renamed by `as_other`, the pulse is what a beat changes, and a shared field is equal for alike agents."""


def test_every_field_is_classified() -> None:
    """A field that nobody has thought of would be shared by agents for which it differs."""
    assert [field.name for field in fields(Agent)] == list(KINDS)
    assert {name for name, kind in KINDS.items() if kind == "own"} == OWN
    assert {name for name, kind in KINDS.items() if kind == "pulse"} == PULSE


def asked(script: Script, every: int = 1) -> int:
    """Asks at every step of every agent, or at each of so many. Returns how many steps were renamed."""
    world, count = play(script, is_ending=False), 0
    for proc in world.procs:
        for number, (before, event, _, _) in enumerate(proc.steps()):
            count += number % every == 0 and is_asked(world, before, event)
    return count


@settings(max_examples={"quick": 3, "change": 6}.get(PROFILE, 30))  # each of them has thousands of steps
@given(scripts())
def test_alike_agents_step_alike(script: Script) -> None:
    """Eight nodes, of which all but the first four can be alike. Whatever happens."""
    asked(
        evolve(script, setup=evolve(script.setup, nodes=8, formed=8, max=8, sizes=(2,), graces=(7,), roles="t")),
        every=7,
    )


def check_all_past(script: Script) -> None:
    for proc in play(script, is_ending=False).procs:
        for before, event, _, _ in proc.steps():
            made, mine = step(before, event), step(alike.without_past(before, before.at), event)
            demand(made.commands == mine.commands, "alike", f"what is past has decided at {event}: {before}")
            is_same = alike.without_past(made.agent, event.at) == alike.without_past(mine.agent, event.at)
            demand(is_same, "alike", f"what is past counts at {event}: {before}")


@settings(max_examples={"quick": 3, "change": 6}.get(PROFILE, 30))
@given(scripts())
def test_what_is_past_decides_nothing(script: Script) -> None:
    """Alike agents may differ in it."""
    check_all_past(script)


PAST = (
    Bug(
        "a-start-is-past-at-once",
        0,
        "agent.alike.without_past",
        "have_lasted(workers, now)",
        "workers.up_at is not None",
        hint="setup nodes=3 formed=3 min=2 max=3 budget=9\nfail a\nwait 5",
    ),
    Bug(
        "an-offer-is-past-too-early",
        0,
        "agent.alike.without_past",
        "offered[1] >= job.round",
        "offered[1] > job.round",
        hint="setup nodes=3 formed=3 min=2 max=3 budget=9\nfail a\nwait 5",
    ),
)


@pytest.mark.parametrize("bug", PAST, ids=lambda bug: bug.name)
def test_the_law_of_the_past_finds_a_planted_bug(bug: Bug) -> None:
    """A law that finds no bug shows nothing."""
    with planted(bug), pytest.raises(Violation):
        check_all_past(parse(bug.hint))


def test_most_steps_of_a_calm_job_are_renamed() -> None:
    """Otherwise the law would say nothing. With failures of workers, of which each names its own ranks."""
    text = f"setup nodes=8 formed=8 min=6 max=8 budget=9\nfail {'abcdefgh'[STAGGERED]}\nwait 25\nfreeze b\nwait 25"
    assert asked(parse(text)) > 100


def groups(journal: list[Entry]) -> tuple[set[frozenset[Node]], set[frozenset[Node]]]:
    """All nodes of a journal by how they stand at its end: asked together, and one by one. These journals have five
    nodes. `by_standing` asks for the first `STAGGERED` one by one, so that is 1 here."""
    job = fold_all(Job(), journal)
    nodes = {joined.node for joined in job.live.values()}
    nodes |= {node for entry in journal if isinstance(node := getattr(entry, "node", None), Node)}
    alone: dict[tuple[object, ...], set[Node]] = {}
    with mock.patch.object(alike, "STAGGERED", 1):
        for node in nodes:
            alone.setdefault(standing(job, node), set()).add(node)
        together = alike.by_standing(job, nodes)
    return {frozenset(group) for group in together}, {frozenset(group) for group in alone.values()}


@given(PLAUSIBLE)
def test_nodes_that_are_asked_together_stand_as_they_do_alone(journal: list[Entry]) -> None:
    """Those of a crew are asked together, because there are thousands."""
    together, alone = groups(journal)
    assert together == alone


GROUPING = tuple(
    Bug(f"groups-ignore-{what}", 0, "agent.alike.by_standing", old, new)
    for what, old, new in (
        ("who-leaves", "job.succeeded | job.leaving", "job.succeeded"),
        ("who-has-succeeded", "job.succeeded | job.leaving", "job.leaving"),
        ("who-is-expected", "(phase.expected, phase.told)", "(frozenset(), phase.told)"),
        ("who-is-a-member", "frozenset(job.members.group_ranks)", "frozenset()"),
        ("failures", "by_count.setdefault(len(told[node].failures)", "by_count.setdefault(0"),
        ("the-first", "islice(live.values(), STAGGERED)", "()"),
    )
)


@pytest.mark.parametrize("bug", GROUPING, ids=lambda bug: bug.name)
def test_this_law_finds_a_planted_bug(bug: Bug) -> None:
    """A law that finds no bug shows nothing."""
    with planted(bug):
        assert any(together != alone for together, alone in map(groups, (written(seed, 40) for seed in range(300))))
