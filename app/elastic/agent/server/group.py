"""What an agent of torchelastic's API works with: values that people read, make and write to.

They are mutable, unlike reknit's own values: code that extends an agent assigns to them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from reknit.app.python.fielddocs import with_fields

if TYPE_CHECKING:
    from reknit.elastic.multiprocessing.errors import ProcessFailure


class InvalidSpec(ValueError, AssertionError):
    """A `WorkerSpec` that cannot be. torch raises `AssertionError` without a text here."""


@with_fields
@dataclass
class WorkerSpec:
    """The workers of one role on this node."""

    role: str
    """The role's name. The workers of one role have ranks of their own within it."""
    local_world_size: int
    """Number of workers on this node, at least 1."""
    rdzv_handler: Any = None
    """Where the nodes meet: what `reknit.elastic.rendezvous` makes. None: the job has this node only."""
    fn: Callable[..., Any] | None = None
    """Deprecated: the same as `entrypoint`."""
    entrypoint: Callable[..., Any] | str | None = None
    """What each worker runs: a function, or the path of a program. It must be given."""
    args: tuple[Any, ...] = ()
    """The arguments of `entrypoint`. `${local_rank}` in a text is replaced by the worker's local rank."""
    max_restarts: int = 3
    """Number of failures that the job survives. 0: none."""
    monitor_interval: float = 0.1
    """Time between two looks at the workers, in seconds. More than 0. `LocalElasticAgent` learns of the end of a worker
    at once."""
    master_port: int | None = None
    """MASTER_PORT of every round. None: each round gets another free port."""
    master_addr: str | None = None
    """MASTER_ADDR of every round. None: the address of the node with group rank 0."""
    local_addr: str | None = None
    """The address at which other nodes reach this one. None: it is found out."""
    event_log_handler: str = "null"
    """Where events go: `null`, `console`, the name of a handler, or its import path, `module:name`."""
    numa_options: Any = None
    """Which CPUs the workers may use: torch's `NumaOptions`. None: all."""
    duplicate_stdout_filters: list[str] | None = None
    """Lines of the workers' stdout that contain one of these texts are copied to a file. None: there is no file."""
    duplicate_stderr_filters: list[str] | None = None
    """The same for stderr."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, as its device 0: LOCAL_RANK is 0, and CUDA_VISIBLE_DEVICES names that GPU alone."""

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise InvalidSpec(f"WorkerSpec.local_world_size must be at least 1, not {self.local_world_size!r}")
        if self.monitor_interval <= 0:
            raise InvalidSpec(f"WorkerSpec.monitor_interval must be more than 0 seconds, not {self.monitor_interval!r}")
        if self.fn:
            warnings.warn(
                "WorkerSpec.fn is deprecated: use WorkerSpec.entrypoint", category=DeprecationWarning, stacklevel=2
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise InvalidSpec("WorkerSpec.entrypoint must be a function or the path of a program: it is not given")
        if isinstance(self.rdzv_handler, str):
            wanted = "a handler, as get_rendezvous_handler makes one, and not the name of a backend"
            raise InvalidSpec(f"WorkerSpec.rdzv_handler must be {wanted}: {self.rdzv_handler!r:.100}")

    def get_entrypoint_name(self) -> str:
        """The `__qualname__` of a function, or the file name of a program."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        return str(getattr(self.entrypoint, "__qualname__", self.entrypoint))


class Worker:
    """One worker. Its ranks are those of the present round. -1: there was no round yet."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        """Whatever the agent knows the worker by. `LocalElasticAgent`: its pid. None: it was not started."""
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    __repr__ = __str__


class WorkerState(str, Enum):
    """The state of a worker group. All workers of a group have the same state."""

    UNKNOWN = "UNKNOWN"
    """The agent has lost track of the workers, and cannot go on."""
    INIT = "INIT"
    """Not started yet."""
    HEALTHY = "HEALTHY"
    """All run."""
    UNHEALTHY = "UNHEALTHY"
    """They run, and are not well."""
    STOPPED = "STOPPED"
    """The agent has ended them. Usually they are started again soon."""
    SUCCEEDED = "SUCCEEDED"
    """All have ended with exit code 0, or have returned."""
    FAILED = "FAILED"
    """At least one has failed."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether the processes of workers in this state exist."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class WorkerGroup:
    """The workers of this node, with their ranks in the present round."""

    __slots__ = ("group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers")

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.state = WorkerState.INIT
        # All these are None until there is a round.
        self.store: Any = None
        """The store of the round, if a torch handler has made one. reknit's own agents share none."""
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None


@with_fields
@dataclass
class RunResult:
    """How the workers of this agent have ended. All or nothing: it is a success if all workers of the agent succeed.

    Workers that the agent itself has ended are in neither of the two mappings.
    """

    state: WorkerState
    """SUCCEEDED, FAILED, UNHEALTHY or STOPPED. HEALTHY while the workers run."""
    return_values: dict[int, Any] = field(default_factory=dict)
    """By global rank: what the worker's function has returned. None for a program."""
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    """By global rank: how the worker has failed. If the job has failed, and no worker of this agent has, the failure
    that the job has ended of stands here."""

    def is_failed(self) -> bool:
        """Whether workers have failed."""
        return self.state == WorkerState.FAILED


class _RoleInstanceInfo:
    """What an agent tells the others in a store, so that all workers get their ranks."""

    __slots__ = ("local_world_size", "rank", "role")

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        """`rank`: the group rank of the agent. `local_world_size`: its number of workers."""
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in ("role", "rank", "local_world_size")}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        return _RoleInstanceInfo(**json.loads(data))

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """Order by role, then by group rank. Negative: `obj1` comes first. 0: they are equal."""
        if obj1.role != obj2.role:
            return 1 if obj1.role > obj2.role else -1
        return obj1.rank - obj2.rank

    @staticmethod
    def find_role_boundaries(roles_infos: Sequence[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        """The first and the last index of `role` in a sequence that is sorted by role. -1 and -1: it is not there."""
        found = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (found[0], found[-1]) if found else (-1, -1)
