"""Where the store is, if it may be at two endpoints. Rule 16 of docs/protocol.md says why this is safe.

A *quorum* is more than half of the members of the last sealed round. Half of them are a quorum if the member with group
rank 0 is among them. So two quorums of one round have a member in common.

1. The host lets its server serve only while a quorum reaches it (`Lease`). A server that hears nothing from its agent
   for `LEASE_BEATS` ends.
2. The journal is founded again only if a quorum offers that (`rebirth`), in the store of either endpoint.
3. After the last beat of a quorum the store serves for 4.5 intervals of beats at most: one until the host looks, and
   then the two numbers below. The silence limit is 4.6 intervals at least. So the store has ended before any node can
   call the last member of the quorum lost there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from reknit.core.job.entries import Entry, Joined, Left, Node, NodeId
from reknit.core.job.job import Job, Running

HEARD_BEATS = 1.5
"""A node reaches the store if the host has seen its counter move within so many intervals of beats."""
LEASE_BEATS = 2
"""The server ends if its agent has not renewed the lease for so many intervals of beats."""
GRACE_BEATS = 2.5
"""So long after a life of the journal has begun, the lease is renewed in any case: a quorum has just founded it."""
_LOOKS = 2
"""Everything that was in the journal so many looks ago must be folded. Otherwise the host may know an old round."""


def is_quorum(members: Sequence[NodeId], present: Collection[NodeId]) -> bool:
    """`members`: in the order of their group ranks. True if there are none."""
    count = sum(member in present for member in members)
    return 2 * count > len(members) or (2 * count == len(members) and (not members or members[0] in present))


def members_of(job: Job) -> list[NodeId]:
    return [joined.node.id for joined in job.members]


def sealed_round(job: Job) -> int:
    """The number of the last sealed round. -1: none was sealed."""
    if not job.members:
        return -1
    return job.round if isinstance(job.phase, Running) else job.round - 1


class Lease:
    """What the host's agent knows of the nodes that reach its store."""

    def __init__(self) -> None:
        self._left: set[NodeId] = set()
        """Nodes that have said goodbye. Nobody waits to hear them."""
        self._heard: dict[Node, tuple[int, float]] = {}
        """The counter of each node, and when it was seen to move."""
        self._heads: deque[int] = deque(maxlen=_LOOKS)

    def note(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Left):
                self._left.add(entry.node.id)
            elif isinstance(entry, Joined):
                self._left.discard(entry.node.id)

    def asks(self, job: Job) -> list[Node]:
        """The nodes whose counters are to be looked at."""
        ids = (joined.node for joined in job.members if joined.node.id not in self._left)
        return [job.live[node.id].node if node.id in job.live else node for node in ids]

    def is_due(self, job: Job, position: int, head: int, counts: Mapping[Node, int], me: NodeId, now: float) -> bool:
        """Whether the lease is to be renewed. `position`: before it everything is folded into `job`. `head`: the end of
        the journal. `now`: monotonic seconds."""
        is_behind = len(self._heads) == _LOOKS and position < self._heads[0]
        self._heads.append(head)
        heard_s = HEARD_BEATS * job.terms.beat_s
        for node, count in counts.items():
            if node not in self._heard:
                self._heard[node] = count, now - job.terms.beat_s  # nobody knows when it moved
            elif count != self._heard[node][0]:
                self._heard[node] = count, now
        self._heard = {node: heard for node, heard in self._heard.items() if node in counts}
        present = {node.id for node, (_, at) in self._heard.items() if now - at <= heard_s}
        if job.outcome is not None:
            return True
        return not is_behind and is_quorum([node.id for node in counts], present | {me})
