"""Whether the nodes that are there may go on as the job (rule 17)."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.job.entries import (
    Aborted,
    Entry,
    Failed,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    NodeId,
    Opened,
    RestartPolicy,
    Succeeded,
    Terms,
)
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Closed, Gathering, Job, Running
from reknit.core.job.majority import can_open, has_enough, has_majority, is_majority, is_over, lack
from reknit.core.job.moving import moved
from reknit.core.job.reasons import NoMajority, TooFewNodes
from reknit.core.job.workers import WorkerFailure

TERMS = Terms(min_nodes=1, max_nodes=5, restarts=RestartPolicy(1), needs_majority=True)


def node(name: str, incarnation: int = 0) -> Node:
    return Node(NodeId(name), incarnation)


def joined(name: str, round: int = 0, incarnation: int = 0, nonce: str = "") -> Joined:
    own = node(name, incarnation)
    return Joined(own, nonce or name, round, f"{name}.net", 1, seen=incarnation - 1)


def failed(name: str, round: int = 0) -> Failed:
    return Failed(node(name), round, (WorkerFailure(0, 0, 1),))


def lost(*names: str, by: str) -> list[Entry]:
    return [Lost(node(name), node(by)) for name in names]


def running(names: str, *entries: Entry, terms: Terms = TERMS) -> Job:
    """Round 0 runs on these nodes, and then this happens."""
    return fold_all(Job(), [Opened(terms, "j"), *map(joined, names), LastCall(0), *entries])


@pytest.mark.parametrize(
    ("members", "there", "is_one"),
    [
        ("a", "a", True),
        ("ab", "a", True),
        ("ab", "b", False),
        ("abc", "bc", True),
        ("abc", "a", False),
        ("abcd", "ad", True),
        ("abcd", "cd", False),
        ("abcde", "cde", True),
    ],
)
def test_two_majorities_have_a_node_in_common(members: str, there: str, is_one: bool) -> None:
    """Otherwise two groups could both go on. Half of the nodes are one of them only with the first."""
    assert is_majority(tuple(map(joined, members)), frozenset(map(node, there))) is is_one


def test_a_job_at_one_place_needs_none() -> None:
    """Its last node goes on alone, as long as there is the minimum."""
    one = evolve(TERMS, needs_majority=False)
    job = running("abc", *lost("a", "b", by="c"), joined("c", 1), terms=one)
    assert job.phase == Running(1)
    assert job.farewells == frozenset()
    assert running("abc", Left(node("a")), terms=one).farewells == frozenset()


def test_a_minority_forms_no_round() -> None:
    """The others may have formed one elsewhere. When one of them is back, they are a majority, and go on at once after
    a last call."""
    waiting = running("abc", *lost("a", "b", by="c"), joined("c", 1), LastCall(1))
    assert isinstance(waiting.phase, Gathering)
    assert (waiting.phase.short, waiting.phase.judged) == (True, False)
    assert (has_enough(waiting), lack(waiting)) == (False, NoMajority(1, 3))
    back = fold_all(waiting, [joined("a", 1, incarnation=1, nonce="a")])
    assert fold_all(back, [LastCall(1)]).phase == Running(1)


def test_a_process_counts_and_not_its_host() -> None:
    """Nobody knows what the process before has said elsewhere. New hosts do not count either."""
    again = joined("a", 1, incarnation=1, nonce="another")
    waiting = running("abc", *lost("a", "b", by="c"), joined("c", 1), again, joined("d", 1), LastCall(1))
    assert isinstance(waiting.phase, Gathering)
    assert not has_majority(waiting)


def test_who_said_goodbye_agrees() -> None:
    """A preempted node must not hold the job. It has said its last word here, so it agrees nowhere else."""
    leaving = running("abc", Leaving(node("a")), *lost("b", by="c"), joined("c", 1))
    assert not has_majority(leaving), "whoever leaves has not said its last word"
    left = fold_all(leaving, [Left(node("a")), LastCall(1)])
    assert left.phase == Running(1)
    assert left.farewells == frozenset(), "in the next round the members are other ones"


def test_a_renewed_node_can_say_goodbye() -> None:
    """Its incarnation is another one than that of the member, and its process is the same."""
    job = running("abc", *lost("a", by="b"), joined("a", 1, incarnation=1, nonce="a"), Left(node("a", 1)))
    assert job.farewells == {node("a")}


@pytest.mark.parametrize(
    ("entries", "can"),
    [
        ([failed("a"), joined("a", 1), joined("b", 1), joined("c", 1), failed("a", 1)], None),
        ([Aborted("x")], False),
        ([*lost("a", "b", by="c"), joined("c", 1), GaveUp(1)], False),
    ],
)
def test_no_epoch_follows_an_end_without_a_majority(entries: list[Entry], can: bool | None) -> None:
    """The others may go on as the job, and a new epoch would be a second job."""
    job = running("abc", *entries)
    if can is None:
        job = fold_all(job, [joined("a", 2), joined("b", 2), joined("c", 2)])
    assert isinstance(job.phase, Closed)
    assert can_open(job, 1) is (can is None)
    assert (fold_all(job, [Opened(TERMS, "k", 1)]).epoch == 1) is (can is None)
    assert not can_open(job, 0)
    assert not can_open(job, 2)


def test_what_is_lacking_is_told() -> None:
    """No majority is final, so it is told even if there are too few nodes as well."""
    three = evolve(TERMS, min_nodes=3)
    few = running("abc", Left(node("a")), joined("b", 1), joined("c", 1), terms=three)
    assert lack(few) == TooFewNodes(2, 3)
    assert lack(fold_all(few, lost("b", by="c"))) == TooFewNodes(1, 3)
    assert lack(running("abc", *lost("a", "b", by="c"), joined("c", 1), terms=three)) == NoMajority(1, 3)
    assert lack(running("abc", *lost("a", "b", by="c"), terms=three)) == NoMajority(0, 3), "c is expected"
    assert lack(running("abc", failed("a"), *lost("b", by="c"), joined("a", 1), terms=three)) == NoMajority(1, 3)


def test_what_was_said_for_a_sealed_round_is_over() -> None:
    """An agent goes on in another journal only if what it has said last cannot count in the one before."""
    job, back = running("ab"), joined("a", 1)
    assert is_over(joined("a"), job)
    assert not is_over(joined("c"), job), "c may be in the next round"
    assert not is_over(back, job)
    assert not is_over(back, fold_all(job, [failed("a"), back])), "the round is gathered"
    assert is_over(back, fold_all(job, [failed("a"), back, joined("b", 1)]))
    assert not is_over(joined("a", 0, incarnation=1), job), "it replaces the member"


def test_who_has_joined_is_gone_in_the_next_journal() -> None:
    """b has said so in the journal before, and counts there. The others go on."""
    job = running("abc", failed("a"), joined("b", 1), joined("d", 1))
    base = moved(job)
    assert isinstance(base.phase, Gathering)
    assert (sorted(base.live), base.phase.expected) == (["a", "c"], {node("a"), node("c")})
    assert base.is_gone(node("b"))
    assert base.phase.excuse is None
    assert not base.farewells


def test_what_was_said_before_counts_in_one_journal() -> None:
    """b stands by as a renewed member, and c has said goodbye. Both may be counted in the journal before."""
    job = running("abc", *lost("b", by="a"), joined("b", 1, incarnation=1, nonce="b"), Left(node("c")))
    assert job.farewells == {node("c")}
    assert moved(job).farewells == frozenset()
    ended = running("abc", Succeeded(node("b"), 0), *lost("b", by="a"), joined("b", 1, incarnation=1, nonce="b"))
    assert isinstance(ended.phase, Running)
    assert sorted(moved(ended).live) == ["a", "c"]


def test_other_jobs_move_as_they_are() -> None:
    """A round that runs has nobody who has joined the next one. Before the first round there is no majority."""
    one = evolve(TERMS, needs_majority=False)
    for job in (running("abc"), fold_all(Job(), [Opened(TERMS, "j"), joined("a")]), Job()):
        assert moved(job) is job
    gathering = running("abc", failed("a"), joined("b", 1), terms=one)
    assert moved(gathering) is gathering


# ---- two journals from one ----


def both_form(x: Job, y: Job) -> bool:
    return isinstance(x.phase, Running) and isinstance(y.phase, Running)


def test_a_goodbye_before_the_move_counts_in_one_journal() -> None:
    """c has left, and a and b have read that. Then they cannot reach each other: each of them is one of three."""
    job = running("abc", Leaving(node("c")), Left(node("c")))
    x = fold_all(job, [joined("a", 1), *lost("b", by="a"), LastCall(1)])
    y = fold_all(moved(job), [joined("b", 1), *lost("a", by="b"), LastCall(1)])
    assert (isinstance(x.phase, Running), isinstance(y.phase, Running)) == (True, False)


def test_a_standby_that_was_a_member_counts_in_one_journal() -> None:
    """b has succeeded, was declared lost, and stands by when the journal moves. It says nothing afterwards."""
    again = joined("b", 1, incarnation=1, nonce="b")
    job = running("abc", Succeeded(node("b"), 0), *lost("b", by="a"), again)
    x = fold_all(job, [failed("a"), joined("a", 1), *lost("c", by="a")])
    y = fold_all(moved(job), [failed("c"), joined("c", 1), *lost("a", by="c")])
    assert not both_form(x, y)


def test_no_epoch_follows_on_the_word_of_nodes_that_are_only_expected() -> None:
    """a gives up while b is expected. b then speaks in the other journal. A new epoch asks for no majority."""
    three = evolve(TERMS, min_nodes=3)
    job = running("abc", failed("a"), terms=three)
    x = fold_all(job, [joined("a", 1), *lost("c", by="a"), GaveUp(1), Opened(three, "j", 1)])
    x = fold_all(x, [*(joined(f"x{i}") for i in range(3)), LastCall(0, 1)])
    y = fold_all(moved(job), [joined("b", 1), joined("c", 1), *lost("a", by="b"), joined("d", 1), LastCall(1)])
    assert not both_form(x, y)
