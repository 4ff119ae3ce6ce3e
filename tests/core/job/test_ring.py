"""The ring in which nodes watch each other. The fold keeps it, and it is the same as a ring that is made anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reknit.core.job.entries import Joined, Node, NodeId
from reknit.core.job.ring import after, ring_of, with_nodes, without

IDS = [NodeId(f"n{i}") for i in range(8)]
SEATS = st.dictionaries(st.sampled_from(IDS), st.integers(0, 7), max_size=6).map(
    lambda drawn: {node_id: i for i, node_id in enumerate(sorted(drawn, key=lambda n: (drawn[n], n)))}
)
CHANGES = st.lists(st.tuples(st.booleans(), st.sampled_from(IDS), st.integers(0, 2)), max_size=20)


@given(SEATS, CHANGES)
def test_a_ring_that_is_kept_is_the_ring_made_anew(
    seats: dict[NodeId, int], changes: list[tuple[bool, NodeId, int]]
) -> None:
    """Whoever is missing from it is watched by nobody: its death would never be noticed."""
    live: dict[NodeId, Joined] = {}
    ring: tuple[Node, ...] = ()
    for joins, node_id, incarnation in changes:
        node = Node(node_id, incarnation)
        live.pop(node_id, None)
        ring = without(ring, node, seats)
        if joins:
            live[node_id] = Joined(node, "x", 0, "a", 1)
            ring = with_nodes(ring, [node], seats)
        assert ring == ring_of(live, seats)


@given(SEATS, st.lists(st.sampled_from(IDS), unique=True), st.integers(0, 8))
def test_a_crowd_that_joins_makes_the_ring_of_all(seats: dict[NodeId, int], ids: list[NodeId], count: int) -> None:
    """The fold takes in many new nodes at once."""
    live = {node_id: Joined(Node(node_id), "x", 0, "a", 1) for node_id in ids}
    before = ring_of({node_id: live[node_id] for node_id in ids[:count]}, seats)
    assert with_nodes(before, map(Node, ids[count:]), seats) == ring_of(live, seats)


@given(SEATS, st.sets(st.sampled_from(IDS)), st.sampled_from(IDS), st.integers(0, 9))
def test_the_next_in_the_ring(seats: dict[NodeId, int], ids: set[NodeId], me: NodeId, count: int) -> None:
    """Each once, never oneself, and all of them if so many are asked for."""
    ring = ring_of({i: Joined(Node(i), "x", 0, "a", 1) for i in ids}, seats)
    found = list(after(ring, Node(me), seats, count))
    assert len(found) == min(count, len(ids - {me}))
    assert len(set(found)) == len(found)
    assert Node(me) not in found
    if me in ids and found:
        i = ring.index(Node(me))
        assert found == [*ring[i + 1 :], *ring[:i]][:count]


def test_a_node_that_is_in_no_large_ring() -> None:
    """Its place would be after the last of a thousand."""
    nodes = [Node(NodeId(f"n{i:03}")) for i in range(1000)]
    ring = ring_of({node.id: Joined(node, "x", 0, "a", 1) for node in nodes}, {})
    assert without(ring, Node(NodeId("z")), {}) == ring == tuple(nodes)
    assert list(after(ring, Node(NodeId("z")), {}, 2)) == nodes[:2]
