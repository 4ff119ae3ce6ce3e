"""Processes that a program starts, watches and ends as one.

The counterpart of `torch.distributed.elastic.multiprocessing`. `start_processes` starts copies of a function or of a
program, and returns a `PContext`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        DefaultLogsSpecs,
        LogsDest,
        LogsSpecs,
        MultiprocessContext,
        PContext,
        RunProcsResult,
        SignalException,
        Std,
        SubprocessContext,
        to_map,
    )
    from .errors import ProcessFailure
    from .shared import SharedKeeper

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]

_IN_API = {*__all__, "_validate_full_rank"} - {"start_processes", "ProcessFailure"}


def __getattr__(name: str) -> object:
    if name not in _IN_API | {"ProcessFailure"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{'api' if name in _IN_API else 'errors'}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    _shared: SharedKeeper | None = None,
) -> PContext:
    """Start copies of `entrypoint`, one for each local rank, and return their context. Close the context at the end.

    The local ranks are 0 to n-1: the keys of `args` and of `envs`.

    `name`: what the processes are, for the prefix of teed lines and for messages.
    `entrypoint`: a program (a text) or a function. A function's exception is recorded in its error file.
    `args`: the arguments by local rank. A program gets their texts.
    `envs`: variables by local rank, besides those of this process. `logs_specs` adds to them.
    `logs_specs`: where output and error files go.
    `log_line_prefixes`: prefixes of teed lines by local rank. Default: `[<name><local rank>]:`.
    `start_method`: "spawn", "fork" or "forkserver", for functions only.
    `numa_options`: torch's `NumaOptions`. None: processes are not bound to CPUs.
    `duplicate_stdout_filters`, `duplicate_stderr_filters`: teed lines that contain one of these texts are also written
    to one file of all processes.
    `_shared`: a keeper that successive contexts use. None: the context has a keeper of its own.

    Raises `RuntimeError` if the keys do not fit, `ValueError` if `entrypoint` or `logs_specs` is of a wrong type, and
    `OSError` if a program cannot be started. If this raises, nothing is left running.
    """
    from .api import MultiprocessContext, SubprocessContext, _validate_full_rank

    if not isinstance(entrypoint, str) and not callable(entrypoint):
        raise ValueError(f"entrypoint must be a function or the path of a program, not {entrypoint!r:.100}")
    if isinstance(logs_specs, str):
        raise ValueError(f"logs_specs must be what DefaultLogsSpecs(folder) makes, not {logs_specs!r:.100}")
    _validate_full_rank(args, len(args), "args")
    _validate_full_rank(envs, len(args), "envs")
    more: dict[str, Any] = {
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
        "_shared": _shared,
    }
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, **more)
    else:
        context = MultiprocessContext(name, entrypoint, args, envs, start_method, logs_specs, **more)
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context
