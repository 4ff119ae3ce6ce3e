"""Which worker gets which rank. The tables A and B are copied from torchelastic (docs/torchelastic.md#ranks)."""

from __future__ import annotations

import pytest

from reknit.core.job.ranks import Members, assign
from tests.support.playbook import joined, node

TABLE_A = [("default", 2), ("default", 4), ("default", 1)]
TABLE_B = [("trainer", 2), ("ps", 1), ("trainer", 3), ("ps", 2)]


def members(table: list[tuple[str, int]]) -> Members:
    return Members(
        joined(f"n{i}", role=role, local_world_size=size, port=29500 + i) for i, (role, size) in enumerate(table)
    )


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
