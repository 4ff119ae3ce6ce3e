"""Binding processes to the CPUs near their GPU. Whoever asks for it brings torch's own options, so torch does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def bind_program(argv: tuple[str, ...], local_rank: int, numa_options: Any) -> tuple[str, ...]:
    """The command line that binds the program to the CPUs of the GPU with index `local_rank`, by `numactl`.
    `numa_options`: torch's `NumaOptions`. None: nothing is bound. Raises what torch raises."""
    if numa_options is None:
        return argv
    wrapped = _torchs("maybe_wrap_command_args_with_numa_binding")(
        argv, gpu_index=local_rank, numa_options=numa_options
    )
    return argv if wrapped is None else tuple(wrapped)


def bind_function(fn: Callable[..., Any], local_rank: int, numa_options: Any) -> Callable[..., Any]:
    """The function, which first binds its process. It can be pickled if `fn` can."""
    return fn if numa_options is None else partial(_call_bound, fn, local_rank, numa_options)


def _call_bound(fn: Callable[..., Any], local_rank: int, numa_options: Any, *args: Any) -> Any:
    return _torchs("maybe_wrap_with_numa_binding")(fn, gpu_index=local_rank, numa_options=numa_options)(*args)


def _torchs(name: str) -> Callable[..., Any]:
    """torch's function of this name. Some versions have it with an underscore."""
    from torch.numa import binding

    found = getattr(binding, f"_{name}", None) or getattr(binding, name, None)
    if found is None:
        raise RuntimeError(f"numa_options: this version of torch has no {name}")
    function: Callable[..., Any] = found
    return function
