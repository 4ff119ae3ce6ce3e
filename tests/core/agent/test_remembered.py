"""What a job and an agent remember: the latest, and no more the longer they live."""

from __future__ import annotations

import json

import pytest

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Append, Finish
from reknit.core.agent.events import EntriesRead
from reknit.core.agent.step import step
from reknit.core.agent.worker_words import WorkersStarted, WorkersStopped
from reknit.core.job import memory
from reknit.core.job.entries import Aborted, Entry, Failed, Left, Lost, Opened, RestartPolicy, Terms
from reknit.core.job.fold import fold, fold_all
from reknit.core.job.job import Job, Outcome, Verdict
from reknit.core.job.memory import EPOCHS, REMEMBERED
from reknit.core.job.reasons import AbortedByOperator, BudgetSpent, LongOver
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.snapshot import freeze, thaw
from tests.support.playbook import (
    Placeholder,
    Playbook,
    an_agent,
    echo,
    failed,
    folded,
    joined,
    lost,
    node,
    playing,
    read,
    running,
    start,
)

TERMS = Terms(1, 2, RestartPolicy(max_restarts=10**6, max_unspent=10**6))
TRACEBACK = WorkerFailure(0, 0, 1, 7, message="ValueError: " + "x" * 3000, traceback="y" * 20_000, stderr=("z" * 900,))


def size(job: Job) -> int:
    assert thaw(json.loads(freeze(job))) == job
    return len(freeze(job))


def test_ten_thousand_ids() -> None:
    """Hosts of a cloud have a new name each time."""
    job, sizes = folded(Terms(2, 2)), []
    for i in range(10_000):
        job = fold_all(job, (joined(f"host-{i:05d}", seen=job.floor, incarnation=job.floor + 1),))
        job = fold(job, Left(next(iter(job.live.values())).node))
        sizes += [size(job)] if i in (2_000, 9_999) else []
    assert sizes[1] < 1.01 * sizes[0]
    assert len(job.gone) == REMEMBERED


def test_thousands_of_rounds() -> None:
    """Only of the last one the failures are kept."""
    job, sizes = running(1, TERMS), []
    for i in range(4_000):
        job = fold_all(job, (failed("n0", i, TRACEBACK), joined("n0", i + 1)))
        sizes += [size(job)] if i in (1_000, 3_999) else []
    assert job.round == 4_000
    assert sizes[1] < 1.01 * sizes[0]


def test_thousands_of_epochs() -> None:
    """A failed job is started again, and its tracebacks are not kept for ever."""
    job, sizes = Job(), []
    for i in range(2_000):
        job = fold_all(job, (Opened(Terms(), "j", i), joined("n0", incarnation=i), *last_words(i)))
        sizes += [size(job)] if i in (1_000, 1_999) else []
    assert job.epoch == 1_999
    assert sizes[1] < 1.01 * sizes[0]
    assert sizes[1] < 200_000


def last_words(incarnation: int) -> tuple[Entry, ...]:
    me = node("n0", incarnation)
    return Failed(me, 0, (TRACEBACK,)), Left(me)


@pytest.mark.slow
def test_thousands_of_rounds_with_another_peer_each() -> None:
    """What the agent itself keeps: entries said, timers, counters heard."""
    agent, sizes = playing("n0", TERMS, joined("n1")).agent, []
    for i in range(2_000):
        peer = next(j.node for j in agent.job.live.values() if j.node != agent.me)
        gone = EntriesRead(agent.at, (Lost(peer, agent.me),))
        agent, said = fed(agent, gone, WorkersStopped(agent.at, agent.workers.round, 30_000 + i))
        job = agent.job
        other = joined(f"n{i + 2}", job.round, incarnation=job.floor + 1)
        agent, said = fed(agent, EntriesRead(agent.at, (other, *said)), WorkersStarted(agent.at, job.round))
        sizes += [len(repr(agent))] if i in (1_500, 1_999) else []
    assert agent.job.round == 2_000
    assert sizes[1] < 1.1 * sizes[0]


def fed(agent: Agent, *events: EntriesRead | WorkersStarted | WorkersStopped) -> tuple[Agent, list[Entry]]:
    said: list[Entry] = []
    for event in events:
        made = step(agent, event)
        agent = made.agent
        said += [c.entry for c in made.commands if isinstance(c, Append)]
    return agent, said


def few(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(memory, "REMEMBERED", count)


def test_the_forgotten_stay_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor counts for every id that nobody remembers, so forgetting changes nothing for the forgotten."""
    few(monkeypatch, 1)
    job = running(1, Terms(1, 1), joined("n1"), Left(node("n1")), joined("n2"), Left(node("n2")))
    assert (dict(job.gone), job.floor, list(job.seats)) == ({"n2": 0}, 0, ["n0"])
    assert fold(job, joined("n1")) == job
    assert job.highest_incarnation(node("n1").id) == job.highest_incarnation(node("new").id) == 0
    assert fold(job, joined("new", 0, 1)).is_live(node("new", 1))


def test_a_job_remembers_as_many_as_its_largest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rack that comes back as a whole has its old order."""
    few(monkeypatch, 0)
    job = running(3, Terms(1, 3), lost("n1", by="n0"), lost("n2", by="n0"))
    assert list(job.gone) == ["n1", "n2"]


def test_an_agent_far_behind_ends_with_what_is_remembered() -> None:
    """It was suspended, and the job was run again many times meanwhile."""
    reopened: list[Entry] = []
    for i in range(1, EPOCHS + 2):
        reopened += [Aborted(f"{i - 1}", i - 1), Opened(TERMS, "x", i)]
    for count, why in ((EPOCHS, AbortedByOperator("0")), (EPOCHS + 1, LongOver(0))):
        playbook = Playbook(an_agent("n0", TERMS)) >> start() >> read(Opened(TERMS, "x"))
        finish = Placeholder(Finish)
        assert playbook << Placeholder(Append)
        assert playbook >> read(*reopened[: 2 * count]) << Append(Left(node("n0"))) >> echo() << finish
        assert finish().result.why == why


def test_old_outcomes_are_kept_in_brief() -> None:
    """The failure that is blamed is told, without its traceback."""
    job = folded(Terms(), joined("n0"), *last_words(0))
    job = fold_all(job, (Opened(Terms(), "x", 1), Aborted("y", 1), Opened(Terms(), "x", 2)))
    outcome = job.outcome_of(0)
    assert isinstance(outcome, Outcome)
    assert isinstance(outcome.why, BudgetSpent)
    assert outcome.verdict is Verdict.FAILED
    failure = outcome.why.root.failure
    assert (failure.message, failure.traceback, failure.pid) == (TRACEBACK.message[:200], "", 7)
    assert [f.failures for f in outcome.failures] == [(failure,)]
