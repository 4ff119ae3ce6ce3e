"""The ring in which live nodes watch each other.

Nodes with a seat come first, in seat order. Nodes without a seat follow, ordered by name. The fold keeps the ring as
part of the job. So an agent does not sort all nodes at each beat.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from .entries import Joined, Node, NodeId

NEIGHBOURS = 2
"""How many nodes each node watches. It is constant, so a beat costs the same in a job of any size."""
_NO_SEAT = float("inf")


def ring_of(live: Mapping[NodeId, Joined], seats: Mapping[NodeId, int]) -> tuple[Node, ...]:
    """The ring of the nodes in `live`."""
    return tuple(sorted((j.node for j in live.values()), key=_key(seats)))


def with_nodes(ring: tuple[Node, ...], nodes: Iterable[Node], seats: Mapping[NodeId, int]) -> tuple[Node, ...]:
    """The ring once these nodes have joined. No other incarnation of them may be in the ring."""
    grown, key = list(ring), _key(seats)
    for node in nodes:
        insort(grown, node, key=key)
    return tuple(grown)


def without(ring: tuple[Node, ...], node: Node, seats: Mapping[NodeId, int]) -> tuple[Node, ...]:
    """The ring once `node` is gone."""
    i = _index(ring, node, seats)
    return (*ring[:i], *ring[i + _is_at(ring, i, node) :])


def after(ring: tuple[Node, ...], node: Node, seats: Mapping[NodeId, int], count: int) -> Iterator[Node]:
    """The next `count` nodes in the ring, each once, and never `node` itself."""
    i = _index(ring, node, seats)
    # Another incarnation of `node` counts as another node: a host that was replaced must watch the agent in its place.
    start = i + (i < len(ring) and ring[i] == node)
    for k in range(min(count, len(ring) - (start - i))):
        yield ring[(start + k) % len(ring)]


def _key(seats: Mapping[NodeId, int]) -> Callable[[Node], tuple[float, str]]:
    seat_of = seats.get
    return lambda node: (seat_of(node.id, _NO_SEAT), node.id)


def _index(ring: tuple[Node, ...], node: Node, seats: Mapping[NodeId, int]) -> int:
    key = _key(seats)
    return bisect_left(ring, key(node), key=key)


def _is_at(ring: tuple[Node, ...], i: int, node: Node) -> bool:
    return i < len(ring) and ring[i].id == node.id
