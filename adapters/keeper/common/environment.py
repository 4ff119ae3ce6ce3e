"""What a worker is told: torchelastic's environment variables (docs/torchelastic.md#environment)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.host.orphans import MARK
from reknit.adapters.keeper.common.run_folder import is_scratch
from reknit.core.job.workers import Assignment, WorkerRanks

if TYPE_CHECKING:
    from reknit.adapters.keeper.protocol.wire import Configure

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
"""The variable that tells workers the path of the pipe for timers (`timerpipe.py`)."""
SOCKET = "TORCH_WORKER_SERVER_SOCKET"
"""The variable that tells a worker the path at which it serves its flight recorder (`flight_recorder.py`)."""

TELLING = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "REKNIT_ROUND",
    }
)
"""The variables that a worker gets when its round begins: those of `given_by`, and its error file. A zygote starts
earlier, and does not have them."""


def handed_down(
    own: Mapping[str, str], wanted: Configure, timer_file: str, is_read: Callable[[str], bool]
) -> dict[str, str]:
    """The variables with which the environment of every worker begins.

    `own`: those of the keeper. `timer_file`: the path of the keeper's pipe for timers. Empty: it has none. If then no
    other process reads the pipe that the variable names (`is_read`), it is left out: a client would find nobody, and
    fail. So is the socket that an outer keeper has given to its worker: only one process can make it.
    """
    env = {name: value for name, value in own.items() if name not in wanted.withheld}
    if timer_file:
        env[TIMER_FILE] = timer_file
    elif TIMER_FILE in env and not is_read(env[TIMER_FILE]):
        del env[TIMER_FILE]
    if is_scratch(env.get(SOCKET, "")):
        del env[SOCKET]
    return {**env, **dict(wanted.env), **({MARK: wanted.mark} if wanted.mark else {})}


def environment(
    base: Mapping[str, str],
    assignment: Assignment,
    worker: WorkerRanks,
    *,
    run_id: str,
    error_file: str,
) -> dict[str, str]:
    """The whole environment of one worker: the variables in `base`, and those of its ranks.

    `error_file`: the value of TORCHELASTIC_ERROR_FILE. Empty: the worker has no such variable. (torch takes an empty
    value for a file name, and writes `.<pid>` into the working directory.) The value in `base` is never handed down.
    """
    return whole(base, given_by(base, assignment, worker, run_id=run_id, virtual_local_rank=False), error_file)


def whole(base: Mapping[str, str], given: Mapping[str, str], error_file: str) -> dict[str, str]:
    """`base`, and on top of it `given` and the variable TORCHELASTIC_ERROR_FILE: see `environment`."""
    error = {"TORCHELASTIC_ERROR_FILE": error_file} if error_file else {}
    handed_down = {name: value for name, value in base.items() if name != "TORCHELASTIC_ERROR_FILE"}
    return {**handed_down, **given, **error}


def given_by(
    base: Mapping[str, str], assignment: Assignment, worker: WorkerRanks, *, run_id: str, virtual_local_rank: bool
) -> dict[str, str]:
    """The variables of a worker that come from its ranks. `virtual_local_rank`, and the error: as in `device`."""
    return {
        **device(base, worker.local_rank, virtual=virtual_local_rank),
        "RANK": str(worker.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_WORLD_SIZE": str(len(assignment.workers)),
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(assignment.role_world_size),
        "ROLE_NAME": assignment.role,
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(assignment.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # The worker with rank 0 hosts the workers' store. So each round has a new one, which no earlier round has used.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "REKNIT_ROUND": str(assignment.round),
    }


def device(base: Mapping[str, str], local_rank: int, *, virtual: bool) -> dict[str, str]:
    """The variables that say which device a worker uses. `base`: the worker's environment before. `virtual`: the
    worker sees one GPU, as its device 0. Raises `ValueError` if CUDA_VISIBLE_DEVICES in `base` names too few devices.
    """
    if not virtual:
        return {"LOCAL_RANK": str(local_rank)}
    listed = base.get("CUDA_VISIBLE_DEVICES")
    devices = listed.split(",") if listed is not None else [str(rank) for rank in range(local_rank + 1)]
    if local_rank >= len(devices):
        raise ValueError(f"CUDA_VISIBLE_DEVICES={listed} has no device for local rank {local_rank}")
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


def arguments(argv: Sequence[str], local_rank: int) -> list[str]:
    """The command line of one worker. `${local_rank}` is replaced in its arguments, but not in the program's name."""
    return [*argv[:1], *(_substitute(arg, local_rank) for arg in argv[1:])]


def _substitute(arg: str, local_rank: int) -> str:
    # torchelastic sends every argument through Template, which also turns `$$` into `$`. Here other arguments stay as
    # they are.
    if "$" not in arg or "local_rank" not in arg:
        return arg
    from string import Template

    return Template(arg).safe_substitute(local_rank=local_rank)
