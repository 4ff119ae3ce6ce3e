"""The place of this node in a round, and the ranks of its workers, as this API has them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from attrs import frozen

from reknit.adapters.keeper.common.bootstrap import Reservation
from reknit.core.job.workers import Assignment

from .group import Worker, WorkerGroup, WorkerSpec, _RoleInstanceInfo

_INFO = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
"""Keys in the store of a round, each followed by a group rank. torch's agents use the same."""


_BARRIER = "torchelastic/agent/terminal_state"
_POLL_S = 0.05


@frozen
class Place:
    """The place of this node in a round."""

    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    store: Any = None
    """The store of the round that a torch handler has made. None: there is none."""


def place_of(assignment: Assignment) -> Place:
    return Place(assignment.group_rank, assignment.group_world_size, assignment.master_addr, assignment.master_port)


def alone(spec: WorkerSpec) -> Place:
    """Wait for the next round at the spec's handler, without an agent's loop. Without a handler this node is alone."""
    if spec.rdzv_handler is None:
        reservation = Reservation()
        reservation.release()  # nobody would do it later
        return Place(0, 1, "127.0.0.1", spec.master_port or reservation.port)
    return place_at(spec.rdzv_handler.next_rendezvous(), spec)


def place_at(info: Any, spec: WorkerSpec) -> Place:
    """The place that a handler of torch has found: its `RendezvousInfo`."""
    bootstrap = info.bootstrap_store_info
    port = spec.master_port or bootstrap.master_port
    return Place(info.rank, info.world_size, bootstrap.master_addr, port, info.store)


def workers_of(assignment: Assignment) -> list[Worker]:
    return [
        Worker(ranks.local_rank, ranks.rank, ranks.role_rank, assignment.world_size, assignment.role_world_size)
        for ranks in assignment.workers
    ]


def assignment_of(group: WorkerGroup, *, round_: int, restart_count: int) -> Assignment:
    """The ranks in `group`, which a subclass may have changed, as the core has them."""
    from reknit.core.job.workers import WorkerRanks

    first = group.workers[0]
    return Assignment(
        round=round_,
        group_rank=group.group_rank or 0,
        group_world_size=group.group_world_size or 1,
        world_size=first.world_size,
        role=group.spec.role,
        role_world_size=first.role_world_size,
        master_addr=group.master_addr or "127.0.0.1",
        master_port=group.master_port or 0,
        workers=tuple(WorkerRanks(w.local_rank, w.global_rank, w.role_rank) for w in group.workers),
        restart_count=restart_count,
        max_restarts=group.spec.max_restarts,
    )


def workers_alike(group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
    """The workers of this node, if all nodes have the same role and the same number of workers."""
    base, world_size = group_rank * spec.local_world_size, group_world_size * spec.local_world_size
    return _workers(base, world_size, base, world_size, spec)


def workers_over_store(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
    """The workers of this node. The agents of the round tell each other in the store what they have. This waits until
    the agent with group rank 0 has heard all of them.

    With TORCH_ELASTIC_WORKER_IDENTICAL=1, all nodes are taken to be alike, and the store is not used.
    """
    if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return workers_alike(group_rank, group_world_size, spec)
    store.set(f"{_INFO}{group_rank}", _RoleInstanceInfo(spec.role, group_rank, spec.local_world_size).serialize())
    if group_rank == 0:
        infos = [f"{_INFO}{rank}" for rank in range(group_world_size)]
        _wait_for(store, infos)
        told = store.multi_get(infos)
        bases = _bases([_RoleInstanceInfo.deserialize(data) for data in told])
        store.multi_set([f"{_RANKS}{rank}" for rank in range(group_world_size)], [json.dumps(base) for base in bases])
    _wait_for(store, [f"{_RANKS}{group_rank}"])
    rank, world_size, role_rank, role_world_size = json.loads(store.get(f"{_RANKS}{group_rank}"))
    return _workers(rank, world_size, role_rank, role_world_size, spec)


def _wait_for(store: Any, keys: list[str]) -> None:
    """Wait until the store has these keys, or as long as the store itself would wait. The call that follows raises the
    store's error then.

    The store is asked again and again, for the reasons that `wait_for_all` gives.
    """
    give_up = time.monotonic() + store.timeout.total_seconds()
    while not store.check(keys) and time.monotonic() < give_up:
        time.sleep(_POLL_S)


def wait_for_all(store: Any, count: int, timeout_s: float, pause: Callable[[float], None]) -> bool:
    """The exit barrier of agents that share a store: wait until all `count` agents are here. False: they are not after
    `timeout_s` seconds. `pause`: waits so many seconds.

    torch's agents take part with the same keys. The store is asked again and again: a call that waits in the store
    could not be ended by a signal, and would hold up the handler, which uses the same connection.
    """
    if store.add(f"{_BARRIER}/num_members", 1) == count:
        store.set(f"{_BARRIER}/last_member", "")
    give_up = time.monotonic() + timeout_s
    while not store.check([f"{_BARRIER}/last_member"]):
        if time.monotonic() >= give_up:
            return False
        pause(_POLL_S)
    return True


def _bases(infos: list[_RoleInstanceInfo]) -> list[tuple[int, int, int, int]]:
    """Per agent: the rank of its first worker, the world size, and both within its role."""
    world_size = sum(info.local_world_size for info in infos)
    bases = []
    for at, info in enumerate(infos):
        peers = [peer for peer in infos if peer.role == info.role]
        before = sum(other.local_world_size for other in infos[:at])
        role_before = sum(other.local_world_size for other in infos[:at] if other.role == info.role)
        bases.append((before, world_size, role_before, sum(peer.local_world_size for peer in peers)))
    return bases


def _workers(rank: int, world_size: int, role_rank: int, role_world_size: int, spec: WorkerSpec) -> list[Worker]:
    return [
        Worker(local_rank, rank + local_rank, role_rank + local_rank, world_size, role_world_size)
        for local_rank in range(spec.local_world_size)
    ]
