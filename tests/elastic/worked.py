"""Functions for workers. They are here, because a worker imports their module, which must not cost much."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def adds(a: int, b: int) -> dict[str, Any]:
    """Returns what the worker has got."""
    return {"sum": a + b, "mine": os.environ["MINE"], "rank": os.environ.get("RANK")}


def prints(text: str) -> None:
    print(text)
    print(f"{text} error", file=sys.stderr)


def fails(text: str) -> None:
    raise ValueError(text)


def fails_or_waits(rank: int) -> None:
    """Local rank 1 fails."""
    if rank == 1:
        raise ValueError("spilt")
    time.sleep(1000)


def waits(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(1000)


def cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def launches() -> None:
    """A launcher, whose worker fails."""
    from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from reknit.elastic.multiprocessing.errors import ChildFailedError

    context = start_processes("inner", fails, {0: ("deep",)}, {0: {}}, DefaultLogsSpecs())
    result = context.wait()
    context.close()
    if result is not None and result.is_failed():
        raise ChildFailedError("inner", result.failures)


def gives(value: object) -> object:
    return value


def gives_a_lambda() -> object:
    return lambda: None


def trainer(args: str) -> str:
    return f"do train {args} {os.environ['RANK']}"


def flaky(args: str) -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first time")
    return trainer(args)


def leaves() -> None:
    os._exit(0)
