"""Which worker gets which rank. It depends on the sealed round alone.

1. The members of a round stand in group rank order. The `Joined` of each member holds its `local_world_size` and
   `role`. So every agent computes the same ranks, and nothing is exchanged once the round is sealed.
2. Global ranks are contiguous per node, in group rank order.
3. Role ranks count the workers of one role in the same order.

The numbers equal torchelastic's (docs/torchelastic.md#ranks); the tests ask torch itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from .entries import Joined, Node


@frozen
class WorkerRanks:
    """The ranks of one worker, as in its environment: LOCAL_RANK, RANK and ROLE_RANK."""

    local_rank: int
    rank: int
    role_rank: int


@frozen
class Assignment:
    """All that one node needs to start its workers of one round. The numbers are those of the workers' environment."""

    round: int
    group_rank: int
    group_world_size: int
    world_size: int
    role: str
    role_world_size: int
    master_addr: str
    master_port: int
    workers: tuple[WorkerRanks, ...]
    restart_count: int = 0
    """Number of restarts that the job has spent before this round."""
    max_restarts: int = 0
    """`RestartPolicy.max_restarts` of the job."""


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
