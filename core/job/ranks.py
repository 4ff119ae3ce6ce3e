"""Which worker gets which rank. It depends on the sealed round alone.

1. The members of a round stand in group rank order. The `Joined` of each member holds its `local_world_size` and
   `role`. So every agent computes the same ranks, and nothing is exchanged once the round is sealed.
2. Global ranks are contiguous per node, in group rank order.
3. Role ranks count the workers of one role in the same order.

The numbers equal torchelastic's (docs/torchelastic.md#ranks); the tests ask torch itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from .entries import Joined, Node
from .workers import Assignment, WorkerRanks


def assign(
    members: Sequence[Joined],
    node: Node,
    *,
    round: int = 0,
    restart_count: int = 0,
    max_restarts: int = 0,
) -> Assignment:
    """The assignment of `node`, which must be one of `members`. The members stand in group rank order.

    The bootstrap address and port of the round are those of the node with group rank 0.
    """
    group_rank, me = next((i, m) for i, m in enumerate(members) if m.node.id == node.id and m.node == node)
    sizes = [m.local_world_size for m in members]
    role_sizes = [m.local_world_size if m.role == me.role else 0 for m in members]
    base, role_base = sum(sizes[:group_rank]), sum(role_sizes[:group_rank])
    return Assignment(
        round=round,
        group_rank=group_rank,
        group_world_size=len(members),
        world_size=sum(sizes),
        role=me.role,
        role_world_size=sum(role_sizes),
        master_addr=members[0].address,
        master_port=members[0].port,
        workers=tuple(
            WorkerRanks(local_rank=i, rank=base + i, role_rank=role_base + i) for i in range(me.local_world_size)
        ),
        restart_count=restart_count,
        max_restarts=max_restarts,
    )
