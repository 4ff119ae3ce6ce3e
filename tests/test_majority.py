"""Whether the nodes that are there may go on as the job (rule 17)."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.job import memory
from reknit.core.job.entries import (
    Aborted,
    Confirmed,
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
from reknit.core.job.majority import (
    can_open,
    can_seal,
    has_enough,
    has_majority,
    has_to_confirm,
    is_majority,
    is_over,
    is_read,
    lack,
    missing,
    moved,
)
from reknit.core.job.reasons import BudgetSpent, NoMajority, TooFewNodes
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
    assert is_majority(members, there) is is_one


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


def test_the_goodbye_of_a_standby_is_none_of_a_member() -> None:
    """Two of three members agree to what follows, and not three."""
    job = running("bcd", joined("a", 1), Leaving(node("a")), Left(node("a")), Left(node("b")))
    assert job.farewells == {"b"}


def test_a_process_counts_and_not_its_host() -> None:
    """Nobody knows what the process before has said elsewhere. New hosts do not count either."""
    again = joined("a", 1, incarnation=1, nonce="another")
    waiting = running("abc", *lost("a", "b", by="c"), joined("c", 1), again, joined("d", 1), LastCall(1))
    assert isinstance(waiting.phase, Gathering)
    assert not has_majority(waiting)


def test_who_said_goodbye_agrees() -> None:
    """A preempted node must not hold the job. It has said its last word here, so it agrees nowhere else."""
    leaving = running("abc", Leaving(node("a")), *lost("b", by="c"), joined("c", 1))
    assert has_majority(leaving), "a is about to say it"
    assert not can_seal(leaving)
    left = fold_all(leaving, [Left(node("a")), LastCall(1)])
    assert left.phase == Running(1)
    assert left.farewells == frozenset(), "in the next round the members are other ones"


def test_the_round_after_a_goodbye_waits_for_no_newcomers() -> None:
    """a has group rank 0 of two, and is told to leave. Nobody is missing, so b goes on as soon as a is gone."""
    leaving = running("ab", Leaving(node("a")))
    assert fold_all(leaving, [joined("b", 1), Left(node("a"))]).phase == Running(1)
    assert fold_all(leaving, [Left(node("a")), joined("b", 1)]).phase == Running(1)


def test_a_renewed_node_can_say_goodbye() -> None:
    """Its incarnation is another one than that of the member, and its process is the same."""
    job = running("abc", *lost("a", by="b"), joined("a", 1, incarnation=1, nonce="a"), Left(node("a", 1)))
    assert job.farewells == {"a"}


SPENT = [failed("a"), joined("a", 1), joined("b", 1), joined("c", 1), failed("a", 1), *(joined(n, 2) for n in "abc")]
"""The second failure spends a restart too many."""


@pytest.mark.parametrize("entries", [SPENT, [Aborted("x")]])
def test_an_epoch_follows_when_a_majority_has_read_the_end(entries: list[Entry]) -> None:
    """Until then the others may go on as the job in another journal, and a new epoch would be a second job."""
    job = running("abc", *entries, Left(node("a")))
    assert isinstance(job.phase, Closed)
    assert not can_open(job, 1)
    assert fold_all(job, [Opened(TERMS, "k", 1)]) == job
    read = fold_all(job, [Left(node("c"))])
    assert (can_open(read, 0), can_open(read, 1), can_open(read, 2)) == (False, True, False)
    assert fold_all(read, [Opened(TERMS, "k", 1)]).epoch == 1


def test_no_epoch_follows_an_end_for_want_of_a_majority() -> None:
    """Its agents have read the end. The others have not, and may go on."""
    job = running("abc", *lost("a", "b", by="c"), joined("c", 1), GaveUp(1), Left(node("c")))
    assert isinstance(job.phase, Closed)
    assert not can_open(job, 1)


def test_what_is_lacking_is_told() -> None:
    """No majority is final, so it is told even if there are too few nodes as well."""
    three = evolve(TERMS, min_nodes=3)
    few = running("abc", Left(node("a")), joined("b", 1), joined("c", 1), terms=three)
    assert lack(few) == TooFewNodes(2, 3)
    assert lack(fold_all(few, lost("b", by="c"))) == TooFewNodes(1, 3)
    assert lack(running("abc", *lost("a", "b", by="c"), joined("c", 1), terms=three)) == NoMajority(1, 3)
    assert lack(running("abc", *lost("a", "b", by="c"), terms=three)) == NoMajority(0, 3), "c is expected"
    assert lack(running("abc", failed("a"), *lost("b", by="c"), joined("a", 1), terms=three)) == NoMajority(1, 3)


# ---- who has read the last seal ----


CHANGED = [*lost("c", by="a"), joined("d", 1), joined("a", 1), joined("b", 1)]
"""Round 1 has other members than round 0: a, b and d."""


def test_a_round_with_other_members_counts_once_its_seal_was_read() -> None:
    """b and c may have gone to another journal before b has read the seal. There they are a majority."""
    job = running("abc", *CHANGED)
    assert (job.phase, job.former, job.confirmed) == (Running(1), ("a", "b", "c"), frozenset())
    alone = fold_all(job, [*lost("b", by="a"), joined("a", 2), joined("d", 2), LastCall(2)])
    assert isinstance(alone.phase, Gathering)
    assert missing(alone, {"a", "d"}) == NoMajority(1, 3)
    assert lack(alone) == NoMajority(1, 3)
    read = fold_all(job, [Confirmed(node("a"), 1), Confirmed(node("b"), 1)])
    assert (read.former, read.confirmed) == ((), frozenset())
    assert fold_all(read, [*lost("b", by="a"), joined("a", 2), joined("d", 2), LastCall(2)]).phase == Running(2)


def test_who_joins_the_next_round_has_read_the_last_seal() -> None:
    """It goes to no journal without this seal."""
    job = running("abc", *CHANGED, failed("d", 1), joined("a", 2), joined("b", 2), joined("d", 2))
    assert job.phase == Running(2)
    assert job.former == ("a", "b", "d")


def test_a_goodbye_shows_it_too() -> None:
    """Before the seal or after it: an agent that said goodbye goes to no other journal."""
    before = running("abc", Left(node("c")), joined("a", 1), joined("b", 1), LastCall(1))
    assert (before.former, before.confirmed) == (("a", "b", "c"), {"c"})
    assert fold_all(before, [Left(node("b"))]).former == ()
    enough = running("abc", Left(node("c")), Left(node("b")), joined("a", 1), LastCall(1))
    assert (enough.phase, enough.former) == (Running(1), ())
    assert running("abc", joined("d"), Left(node("d"))).farewells == frozenset(), "d is no member"


def test_what_confirms_nothing() -> None:
    """Another round, a node that was no member of the round before, one that is gone, and a second time."""
    job = running("abc", *CHANGED)
    vain = [Confirmed(node("a"), 0), Confirmed(node("a"), 2), Confirmed(node("d"), 1), Confirmed(node("c"), 1)]
    assert fold_all(job, vain) == job
    once = fold_all(job, [Confirmed(node("a"), 1)])
    assert once.confirmed == {"a"}
    assert fold_all(once, [Confirmed(node("a"), 1)]) == once
    assert running("abc", Confirmed(node("a"), 0)).former == ()
    over = fold_all(job, [Aborted("x")])
    assert fold_all(over, [Confirmed(node("a"), 1)]) == over
    one = running("abc", *CHANGED, terms=evolve(TERMS, needs_majority=False))
    assert (one.phase, one.former) == (Running(1), ())


def test_who_has_to_confirm() -> None:
    """Members that stay the same need not say so. A node that was never seated has to, or the next round waits."""
    job = running("abc", *CHANGED)
    assert [has_to_confirm(job, node(name), name) for name in "abcd"] == [True, True, False, False]
    assert not has_to_confirm(job, node("a"), "another process")
    assert not has_to_confirm(fold_all(job, [Confirmed(node("a"), 1)]), node("a"), "a")
    same = running("abc", failed("a"), joined("a", 1), joined("b", 1), joined("c", 1))
    assert same.former == ("a", "b", "c")
    assert not has_to_confirm(same, node("a"), "a")
    assert not has_to_confirm(fold_all(same, [failed("a", 1)]), node("a"), "a"), "it is about to join"
    assert has_to_confirm(evolve(same, former=("b", "a", "c")), node("a"), "a"), "another node has group rank 0"
    assert has_to_confirm(fold_all(job, [joined("c", 0, incarnation=1, nonce="c")]), node("c", 1), "c")
    # b takes another incarnation for round 1, and has not read that it is in round 1 already. a and c have left.
    late = fold_all(same, [joined("b", 1, incarnation=1, nonce="b"), Left(node("c")), joined("a", 2)])
    assert late.phase == Running(2), "a has joined, and c has said goodbye"
    few = fold_all(same, [*lost("c", by="a"), joined("b", 1, incarnation=1, nonce="b"), joined("a", 2), LastCall(2)])
    assert isinstance(few.phase, Gathering)
    assert (has_majority(few), is_read(few), can_seal(few)) == (True, False, False)
    assert has_to_confirm(few, node("b", 1), "b")
    early = fold_all(same, [*lost("c", by="a"), joined("b", 0, incarnation=1, nonce="b"), joined("a", 2), LastCall(2)])
    assert isinstance(early.phase, Gathering), "what b has said before round 1 shows no more"
    assert fold_all(few, [Confirmed(node("b", 1), 1), LastCall(2)]).phase == Running(2)


def test_a_member_process_that_was_renewed_is_seated_before_old_seats() -> None:
    """It was counted for the round, so it must be one of those that read the seal."""
    terms = evolve(TERMS, max_nodes=3)
    job = running("abx", *lost("x", by="a"), joined("c", 1), joined("a", 1), joined("b", 1), terms=terms)
    assert [m.node.id for m in job.members] == ["a", "b", "c"]
    back = [joined("x", 2, incarnation=1, nonce="new x"), *lost("b", by="a"), joined("b", 2, incarnation=1, nonce="b")]
    job = fold_all(job, [*back, joined("a", 2), joined("c", 2)])
    assert (job.phase, {m.node.id for m in job.members}) == (Running(2), {"a", "b", "c"})


# ---- another journal ----


def test_a_member_process_is_seated_first_also_if_all_seats_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """a, the only member, was lost and came back. c was in the round in its place, without a majority."""
    monkeypatch.setattr(memory, "REMEMBERED", 0)
    one = evolve(TERMS, max_nodes=1)
    job = running("a", joined("b", 1), joined("c", 1), *lost("a", "b", by="c"), terms=one)
    assert not job.seats
    job = fold_all(job, [joined("a", 1, incarnation=1, nonce="a")])
    assert job.phase == Running(1)
    assert [member.nonce for member in job.members] == ["a"]


def test_what_was_said_for_a_sealed_round_is_over() -> None:
    """An agent goes on in another journal only if what it has said last cannot count in the one before."""
    job, back = running("ab"), joined("a", 1)
    assert is_over(joined("a"), job)
    assert not is_over(joined("c"), job), "c may be in the next round"
    assert not is_over(back, job)
    assert not is_over(back, fold_all(job, [failed("a"), back])), "the round is gathered"
    assert is_over(back, fold_all(job, [failed("a"), back, joined("b", 1)]))
    assert not is_over(joined("a", 0, incarnation=1), job), "it replaces the member"


def test_who_has_joined_is_expected_in_the_next_journal() -> None:
    """b has joined, and may not come to the other journal. If it comes, it joins there as the same incarnation."""
    job = running("abc", failed("a"), joined("b", 1), joined("d", 1))
    base = moved(job)
    assert isinstance(base.phase, Gathering)
    assert base.phase.expected == {node("a"), node("b"), node("c"), node("d")}
    assert list(base.live) == list(job.live)
    assert fold_all(base, [joined("d", 1), joined("b", 1)]) == job


def test_a_renewed_member_is_expected_in_the_next_journal_too() -> None:
    """b was declared lost, and has joined again. Otherwise a would form the round with b, which may not come."""
    job = running("abc", *lost("b", by="a"), joined("b", 1, incarnation=1, nonce="b"), *lost("c", by="a"))
    assert fold_all(moved(job), [joined("a", 1)]).phase != Running(1)


def test_a_goodbye_counts_in_one_journal() -> None:
    """c has left, and a and b have read that. Then they cannot reach each other: each of them is one of three."""
    job = running("abc", Leaving(node("c")), Left(node("c")))
    assert (job.farewells, moved(job).farewells) == ({"c"}, frozenset())
    x = fold_all(job, [joined("a", 1), *lost("b", by="a"), LastCall(1)])
    y = fold_all(moved(job), [joined("b", 1), *lost("a", by="b"), LastCall(1)])
    assert (isinstance(x.phase, Running), isinstance(y.phase, Running)) == (True, False)


def test_a_round_that_runs_moves_as_it_is() -> None:
    """Its workers run on."""
    for job in (running("abc"), fold_all(Job(), [Opened(TERMS, "j")]), Job()):
        assert moved(job) == job


def test_a_standby_joins_again_in_the_next_journal() -> None:
    """c has succeeded, was declared lost, and is a standby with seat 0. Round 1 may have been sealed with it in the
    journal before. The workers of that round would dial the port at which the round of this journal has its store."""
    job = running("cab", Succeeded(node("c"), 0), *lost("c", by="a"), joined("c", 1, incarnation=1, nonce="c"))
    base = moved(job)
    assert job.phase == base.phase == Running(0)
    assert (job.is_live(node("c", 1)), base.is_live(node("c", 1)), base.is_gone(node("c", 1))) == (True, False, True)
    x = fold_all(job, [failed("b"), *lost("a", by="b"), joined("b", 1), LastCall(1)])
    y = fold_all(base, [failed("a"), *lost("b", by="a"), joined("a", 1), LastCall(1)])
    assert [member.node for member in x.members] == [node("c", 1), node("b")]
    assert isinstance(y.phase, Gathering)
    y = fold_all(y, [joined("c", 1, incarnation=2, nonce="c"), LastCall(1)])
    assert [member.node for member in y.members] == [node("c", 2), node("a")]


def test_a_standby_that_joins_again_has_read_the_last_seal() -> None:
    """Otherwise the job would wait for ever for those of the round before, if the standby does not come."""
    job = running("abc", failed("a"), joined("b", 1), joined("a", 1), joined("c", 1), Succeeded(node("b"), 1))
    job = fold_all(job, [*lost("b", by="a"), joined("b", 2, incarnation=1, nonce="b")])
    assert (job.former, moved(job).former, moved(job).confirmed) == (("a", "b", "c"), ("a", "b", "c"), {"b"})


def test_everybody_joins_again_without_a_majority_too() -> None:
    """One agent may have read that the round was sealed, and its workers dial the ports of that round."""
    one = evolve(TERMS, needs_majority=False)
    for job in (
        running("abc", failed("a"), joined("b", 1), terms=one),
        fold_all(Job(), [Opened(one, "j"), joined("a")]),
    ):
        base = moved(job)
        assert isinstance(base.phase, Gathering)
        assert base.phase.expected == {joined.node for joined in job.live.values()}


def test_who_goes_after_a_move_excuses_no_failure_if_it_was_back() -> None:
    """d is a standby, and c has joined the next round already. Both are expected after the move."""
    terms = evolve(TERMS, restarts=RestartPolicy(0), max_nodes=3, min_nodes=2)
    job = running("abc", joined("d", 1), failed("b"), joined("c", 1), terms=terms)
    for gone in ("d", "c"):
        for base in (job, moved(job)):
            back = [joined(name, 1) for name in "abcd" if name != gone]
            end = fold_all(base, [*lost(gone, by="a"), *back, LastCall(1)])
            assert isinstance(end.phase, Closed), gone
            assert isinstance(end.phase.outcome.why, BudgetSpent)


def test_a_round_that_was_sealed_in_vain_ends_there() -> None:
    """All have joined round 1 in x. Then b and c go on in y without having read the seal of x. There they form another
    round 1. In x new nodes would be a majority of round 1, and not of round 0."""
    job = running("abc", failed("a"), joined("b", 1), joined("c", 1), joined("d", 1), joined("e", 1))
    x = fold_all(job, [joined("a", 1)])
    y = fold_all(moved(job), [joined("b", 1), joined("c", 1), *lost("a", "d", "e", by="b"), LastCall(1)])
    assert (x.phase, y.phase) == (Running(1), Running(1))
    x = fold_all(x, [*lost("b", "c", by="a"), joined("a", 2), joined("d", 2), joined("e", 2), LastCall(2)])
    assert (isinstance(x.phase, Gathering), lack(x)) == (True, NoMajority(1, 3))
    y = fold_all(y, [Confirmed(node("b"), 1), Confirmed(node("c"), 1), *lost("c", by="b")])
    assert fold_all(y, [joined("b", 2)]).phase == Running(2)
