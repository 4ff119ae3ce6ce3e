"""Rule 17: histories in which both of two journals form a further round, because a process counts in both."""

from __future__ import annotations

from attrs import evolve

from property_tests.test_majority import TERMS, failed, joined
from reknit.core.job import entries as said
from reknit.core.job.entries import Joined, Node, NodeId
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job, Running
from reknit.core.job.moving import moved

A, B, C = (Node(NodeId(name)) for name in "abc")


def begun(min_nodes: int = 1) -> Job:
    """Round 0 runs on a, b and c."""
    terms = evolve(TERMS, min_nodes=min_nodes)
    return fold_all(Job(), [said.Opened(terms, "j"), *(joined(name, 0) for name in "abc"), said.LastCall(0)])


def again(name: str, nonce: str = "", incarnation: int = 0) -> Joined:
    return joined(name, 1, nonce, incarnation)


def test_a_goodbye_before_the_move_counts_in_one_journal() -> None:
    """c has left, and a and b have read that. Then they cannot reach each other: each of them is one of three."""
    job = fold_all(begun(), [said.Leaving(C), said.Left(C)])
    x = fold_all(job, [again("a"), said.Lost(B, A)])
    y = fold_all(moved(job), [again("b"), said.Lost(A, B)])
    assert not (isinstance(x.phase, Running) and isinstance(y.phase, Running)), (x.members, y.members)


def test_a_standby_that_was_a_member_counts_in_one_journal() -> None:
    """b has succeeded, was declared lost, and is a standby when the journal moves. It says nothing afterwards."""
    job = fold_all(begun(), [said.Succeeded(B, 0), said.Lost(B, A), again("b", "nonce of b", 1)])
    x = fold_all(job, [failed(A, 0), again("a"), said.Lost(C, A)])
    y = fold_all(moved(job), [failed(C, 0), again("c"), said.Lost(A, C)])
    assert not (isinstance(x.phase, Running) and isinstance(y.phase, Running)), (x.members, y.members)


def test_no_epoch_follows_on_the_word_of_nodes_that_are_only_expected() -> None:
    """a gives up while b is expected. b then speaks in the other journal. A new epoch asks for no majority."""
    job = fold_all(begun(min_nodes=3), [failed(A, 0)])
    x = fold_all(job, [again("a"), said.Lost(C, A), said.GaveUp(1), said.Opened(job.terms, "j", 1)])
    x = fold_all(x, [joined(f"x{i}", 0) for i in range(3)])
    x = fold_all(x, [said.LastCall(0, 1)])
    y = fold_all(moved(job), [again("b"), again("c"), said.Lost(A, B), joined("d", 1), said.LastCall(1)])
    assert not (isinstance(x.phase, Running) and isinstance(y.phase, Running)), (x.members, y.members)
