"""What a worker is told: torchelastic's environment variables (`torchelastic-contract.md`, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reknit.core.ranks import Assignment, WorkerRanks


def environment(
    base: Mapping[str, str], assignment: Assignment, worker: WorkerRanks, *, run_id: str, error_file: str
) -> dict[str, str]:
    """The whole environment of one worker. What the agent has (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES…) stays.

    Without `error_file` the variable is left out: torch takes an empty one for a name, and writes `.<pid>` into the
    working directory. The agent's own is never handed down.
    """
    error = {"TORCHELASTIC_ERROR_FILE": error_file} if error_file else {}
    return {
        **{name: value for name, value in base.items() if name != "TORCHELASTIC_ERROR_FILE"},
        **error,
        "LOCAL_RANK": str(worker.local_rank),
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
        # Rank 0 itself hosts the store of its round: a fresh one, that no earlier round has written to.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "REKNIT_ROUND": str(assignment.round),
    }


def arguments(argv: Sequence[str], local_rank: int) -> list[str]:
    """The command of one worker: `${local_rank}` is replaced in its arguments, not in the program's name."""
    return [*argv[:1], *(_substitute(arg, local_rank) for arg in argv[1:])]


def _substitute(arg: str, local_rank: int) -> str:
    # torchelastic sends every argument through Template, which also makes one `$` of `$$`. Ours: those that ask for it.
    if "$" not in arg or "local_rank" not in arg:
        return arg
    from string import Template

    return Template(arg).safe_substitute(local_rank=local_rank)
