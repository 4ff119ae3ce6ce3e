"""Which nodes are in a round, and in which order: seats, hints, and the nodes that remain."""

from __future__ import annotations

import pytest

from reknit.core.job.entries import Joined, LastCall, Node, Terms
from tests.support.playbook import folded, joined, lost, node, running


def ranks_of(names: tuple[Joined, ...]) -> list[str]:
    return [m.node.id for m in names]


def test_nodes_are_seated_in_the_order_in_which_they_joined() -> None:
    """Not by name: torchrun's order puts node10 before node2."""
    job = folded(Terms(3, 3), joined("n10"), joined("n2"), joined("n1"))
    assert ranks_of(job.members) == ["n10", "n2", "n1"]


def test_a_rank_hint_is_a_wish_in_the_first_round() -> None:
    """`--node-rank` must mean what its user thinks it means; torchrun's dynamic rendezvous ignores it."""
    entries = (joined("a", rank_hint=2), joined("b"), joined("c", rank_hint=0))
    assert ranks_of(folded(Terms(3, 3), *entries).members) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("hints", "order"),
    [((1, 1, None), "bac"), ((7, None, 0), "cab"), ((-1, 0, None), "bac"), ((None, None, None), "abc")],
    ids=["taken", "too high", "negative", "none"],
)
def test_a_hint_that_cannot_be_kept_costs_nobody_a_rank(hints: tuple[int | None, ...], order: str) -> None:
    """Two nodes with one hint, or a hint beyond the round, are a user's mistake, not a crash or a hole."""
    nodes = [joined(name, rank_hint=hint) for name, hint in zip("abc", hints, strict=True)]
    assert "".join(ranks_of(folded(Terms(3, 3), *nodes).members)) == order


def test_a_hint_of_a_newcomer_moves_nobody() -> None:
    """Later rounds keep their order: a moved rank 0 would move the bootstrap and the logs."""
    newcomer = joined("new", 1, rank_hint=0)
    job = running(2, Terms(2, 3), lost("n0", by="n1"), newcomer, joined("n1", 1), LastCall(1))
    assert ranks_of(job.members) == ["n1", "new"]


def test_survivors_keep_their_order_and_the_hole_is_closed() -> None:
    """Sticky seats: a lost node must not reshuffle the ranks of all others."""
    job = running(4, Terms(2, 4), lost("n1", by="n0"), *(joined(n, 1) for n in ("n3", "n2", "n0")))
    assert ranks_of(job.members) == ["n0", "n2", "n3"]


def test_a_stable_id_takes_its_old_seat_again() -> None:
    """The same host has the same rank after it came back, so its local caches and logs stay where they were."""
    comeback = joined("n0", 1, incarnation=1)
    job = running(3, Terms(3, 3), lost("n0", by="n1"), joined("n2", 1), joined("n1", 1), comeback)
    assert [m.node for m in job.members] == [Node(node("n0").id, 1), node("n1"), node("n2")]


def test_a_newcomer_goes_to_the_end() -> None:
    """Even in the place of a lost node: the seat is kept for the one that had it."""
    job = running(3, Terms(3, 3), lost("n0", by="n1"), joined("n1", 1), joined("n2", 1), joined("new", 1))
    assert ranks_of(job.members) == ["n1", "n2", "new"]
    assert job.seats == {"n0": 0, "n1": 1, "n2": 2, "new": 3}
