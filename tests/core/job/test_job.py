"""The questions that other code asks of a job."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.job.entries import Aborted, Admission, Leaving, Opened, RestartPolicy, Succeeded, Terms
from reknit.core.job.fold import fold, fold_all
from reknit.core.job.job import Job, admissible, can_seal, coming, has_admissible, lacking, ready, room
from reknit.core.job.reasons import AbortedByOperator
from tests.support.playbook import failed, folded, joined, lost, node, running


def test_a_job_has_a_round_in_every_phase() -> None:
    """Callers show it, and compare with it, without asking for the phase first."""
    assert [j.round for j in (Job(), folded(Terms()), running(1), running(2, None, failed("n0")))] == [0, 0, 0, 1]
    assert running(1, None, Aborted("x")).round == 0


def test_equal_journals_make_equal_jobs() -> None:
    """S1 and S9 rest on it: agents are compared by their jobs."""
    assert running(3, None, lost("n1", by="n0")) == running(3, None, lost("n1", by="n0"))


def test_the_highest_incarnation_is_over_the_live_and_the_gone() -> None:
    """A new agent must come as a higher one than any that was ever seen."""
    job = running(2, None, joined("n1", 1, incarnation=4), lost("n0", by="n1"))
    assert [job.highest_incarnation(node(n).id) for n in ("n0", "n1", "n9")] == [0, 4, -1]


def test_gone_is_every_incarnation_up_to_the_last_that_went() -> None:
    """A `Joined` of an incarnation that never got in may come late."""
    job = running(2, None, joined("n1", 1, incarnation=4, seen=0))
    assert [job.is_gone(node("n1", i)) for i in range(6)] == [True, True, True, True, False, False]
    job = fold(job, lost("n1", by="n0", incarnation=4))
    assert [job.is_gone(node("n1", i)) for i in range(6)] == [True, True, True, True, True, False]
    assert not job.is_gone(node("n9"))


def test_the_ends_of_the_epochs_before_are_told_apart() -> None:
    """An agent that was away for an epoch ends with the outcome of its own."""
    job = Job()
    for epoch in range(4):
        job = fold_all(job, (Opened(Terms(), "x", epoch), Aborted(f"{epoch}", epoch)))
    told = [outcome and outcome.why for outcome in map(job.outcome_of, range(5))]
    assert told == [*(AbortedByOperator(f"{epoch}") for epoch in range(4)), AbortedByOperator("3")]


def test_ready_are_neither_expected_nor_leaving() -> None:
    """Only they could be seated now."""
    job = running(3, None, joined("n3", 1), failed("n0"), joined("n0", 1), joined("n4", 1), Leaving(node("n4")))
    assert [j.node.id for j in ready(job)] == ["n0", "n3"]
    assert coming(job) == 4


def test_a_last_call_would_seal_only_with_the_minimum_and_nobody_expected() -> None:
    """The timer of the last call runs while this holds."""
    terms = Terms(2, 3)
    assert [can_seal(folded(terms, *(joined(f"n{i}") for i in range(n)))) for n in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert not can_seal(running(2, terms, failed("n0"), joined("n0", 1)))


@pytest.mark.parametrize(("admission", "most"), [(Admission.SOON, 4), (Admission.AT_FAILURE, 4), (Admission.NEVER, 2)])
def test_the_room_of_the_next_round(admission: Admission, most: int) -> None:
    """Under `NEVER` a job keeps the size that it began with: batch sizes were chosen for it."""
    assert room(running(2, Terms(1, 4, admission=admission))) == most


def test_nobody_is_admissible_once_a_member_has_succeeded() -> None:
    """Rule 10: the finished would have to start again for a newcomer's sake."""
    job = running(2, Terms(1, 4), joined("n2", 1))
    assert admissible(job) == (node("n2"),)
    assert admissible(evolve(job, succeeded=frozenset({node("n0")}))) == ()
    assert admissible(running(2, Terms(1, 4), Succeeded(node("n0"), 0), joined("n2", 1))) == ()


def test_whoever_is_admissible_is_found_among_others() -> None:
    """The latest of the standbys leaves."""
    job = running(1, Terms(1, 4), joined("n2", 1), joined("n3", 1), Leaving(node("n3")))
    assert (admissible(job), has_admissible(job)) == ((node("n2"),), True)
    assert not has_admissible(fold(job, Leaving(node("n2"))))


def test_what_is_lacking_is_the_least_that_can_change_anything() -> None:
    """A journal may hold back fewer entries than this, so too high a number makes a round late."""
    terms = Terms(3, 6)
    assert [lacking(folded(terms, *map(joined, names))) for names in ("", "a", "ab", "abc", "abcd")] == [3, 2, 1, 1, 1]
    gathering = running(3, Terms(1, 3, RestartPolicy(1)), failed("n0"))
    assert lacking(gathering) == 3
