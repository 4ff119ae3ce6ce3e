"""Who gets which rank. The tables A and B are those of torchelastic (its contract, section 4.2), literally."""

from __future__ import annotations

import pytest

from reknit.core.entries import Joined, LastCall, Node, Terms
from reknit.core.ranks import assign, node_of_rank

from .playbook import folded, joined, lost, node, running

TABLE_A = [("default", 2), ("default", 4), ("default", 1)]
TABLE_B = [("trainer", 2), ("ps", 1), ("trainer", 3), ("ps", 2)]


def members(table: list[tuple[str, int]]) -> list[Joined]:
    return [joined(f"n{i}", role=role, local_world_size=size, port=29500 + i) for i, (role, size) in enumerate(table)]


def ranks_of(names: tuple[Joined, ...]) -> list[str]:
    return [m.node.id for m in names]


@pytest.mark.parametrize(
    ("group", "local", "rank", "local_world"),
    [(0, [0, 1], [0, 1], 2), (1, [0, 1, 2, 3], [2, 3, 4, 5], 4), (2, [0], [6], 1)],
)
def test_table_a_one_role(group: int, local: list[int], rank: list[int], local_world: int) -> None:
    """Scripts written for torchrun must find the same numbers: 3 nodes with 2, 4 and 1 workers."""
    a = assign(members(TABLE_A), node(f"n{group}"))
    assert (a.group_rank, a.group_world_size, a.world_size, a.role_world_size) == (group, 3, 7, 7)
    assert [w.local_rank for w in a.workers] == local
    assert [w.rank for w in a.workers] == rank
    assert [w.role_rank for w in a.workers] == rank
    assert len(a.workers) == local_world


@pytest.mark.parametrize(
    ("group", "role", "rank", "role_rank", "role_world"),
    [
        (0, "trainer", [0, 1], [0, 1], 5),
        (1, "ps", [2], [0], 3),
        (2, "trainer", [3, 4, 5], [2, 3, 4], 5),
        (3, "ps", [6, 7], [1, 2], 3),
    ],
)
def test_table_b_two_roles(group: int, role: str, rank: list[int], role_rank: list[int], role_world: int) -> None:
    """Global ranks are contiguous per node, not per role; role ranks are dense per role."""
    a = assign(members(TABLE_B), node(f"n{group}"))
    assert (a.role, a.world_size, a.role_world_size) == (role, 8, role_world)
    assert [w.rank for w in a.workers] == rank
    assert [w.role_rank for w in a.workers] == role_rank


@pytest.mark.parametrize("table", [TABLE_A, TABLE_B])
def test_every_rank_is_given_once(table: list[tuple[str, int]]) -> None:
    """A hole or a repetition hangs the first collective."""
    nodes = members(table)
    given = [w.rank for m in nodes for w in assign(nodes, m.node).workers]
    assert given == list(range(sum(size for _, size in table)))


def test_the_bootstrap_address_is_that_of_group_rank_0() -> None:
    """All workers of a round must meet in one place, without asking anybody."""
    nodes = members(TABLE_A)
    assert {(a.master_addr, a.master_port) for a in (assign(nodes, m.node) for m in nodes)} == {("n0", 29500)}


def test_a_rank_leads_back_to_its_node() -> None:
    """Reports name the node of a failed rank."""
    nodes = members(TABLE_A)
    assert [node_of_rank(nodes, r).node.id for r in range(7)] == ["n0"] * 2 + ["n1"] * 4 + ["n2"]
    with pytest.raises(IndexError):
        node_of_rank(nodes, 7)


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
