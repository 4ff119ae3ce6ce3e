"""Which worker gets which rank. It depends on the sealed round alone.

1. The members of a round stand in group rank order. The `Joined` of each member holds its `local_world_size` and
   `role`. So every agent computes the same ranks, and nothing is exchanged once the round is sealed.
2. Global ranks are contiguous per node, in group rank order.
3. Role ranks count the workers of one role in the same order.

The numbers equal torchelastic's (docs/torchelastic.md#ranks); the tests ask torch itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property

from .entries import Joined, Node
from .workers import Assignment, WorkerRanks


class Members(tuple[Joined, ...]):
    """The members of a sealed round, in group rank order. What follows from them is computed once, when it is asked for
    first, and not by each of the agents that share the value."""

    @property
    def nodes(self) -> Set[Node]:
        return self.group_ranks.keys()

    @cached_property
    def group_ranks(self) -> Mapping[Node, int]:
        return {joined.node: group_rank for group_rank, joined in enumerate(self)}

    @cached_property
    def counted(self) -> tuple[Sequence[tuple[int, int]], Mapping[str, int]]:
        """Two values: for each member, the rank and the role rank of its first worker; and by role, the number of
        workers."""
        world_size, role_sizes, firsts = 0, Counter[str](), []
        for joined in self:
            firsts.append((world_size, role_sizes[joined.role]))
            world_size += joined.local_world_size
            role_sizes[joined.role] += joined.local_world_size
        return firsts, role_sizes


def members(joined: Iterable[Joined]) -> Members:
    """The same members, if they are known as such."""
    return joined if isinstance(joined, Members) else Members(joined)


def assign(
    members: Members,
    node: Node,
    *,
    round: int = 0,
    restart_count: int = 0,
    max_restarts: int = 0,
) -> Assignment:
    """The assignment of `node`, which must be one of `members`.

    The bootstrap address and port of the round are those of the node with group rank 0.
    """
    group_rank, (firsts, role_world_sizes) = members.group_ranks[node], members.counted
    me, (first, role_first) = members[group_rank], firsts[group_rank]
    return Assignment(
        round=round,
        group_rank=group_rank,
        group_world_size=len(members),
        world_size=sum(role_world_sizes.values()),
        role=me.role,
        role_world_size=role_world_sizes[me.role],
        master_addr=members[0].address,
        master_port=members[0].port,
        workers=tuple(
            WorkerRanks(local_rank=i, rank=first + i, role_rank=role_first + i) for i in range(me.local_world_size)
        ),
        restart_count=restart_count,
        max_restarts=max_restarts,
    )
