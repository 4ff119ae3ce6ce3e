"""Workers that are forks of the program which has called for them (start method fork).

1. The keeper itself is a fork of that program, made when the workers are started. It forks each worker, without exec.
   So a worker has the closures, the memory and the open files of the program, as of that moment.
2. No process here asks the kernel for a signal at the death of its parent (`PR_SET_PDEATHSIG`), because the signal
   comes at the end of the *thread* that has forked. The guard pipe and the keeper's watch on its agent do this work.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import NoReturn

from reknit.adapters.keeper.common.settling import NAMES, descriptors
from reknit.adapters.keeper.functions.forks import Forks
from reknit.adapters.keeper.functions.function_main import FunctionWorker
from reknit.adapters.keeper.process import boot
from reknit.adapters.keeper.protocol.wire import ToKeeper

from .start import Keeping, by_fork, stream_of


def fork_keeper(
    workers: Mapping[int, FunctionWorker], files: Mapping[int, int], console: tuple[int, int] = (1, 2)
) -> Keeping:
    """Start a keeper as a fork of this process. Its workers are the `workers`, by local rank. `files`: by local rank,
    the descriptor that a worker writes its value to. `console`: the descriptors that become the keeper's stdout and
    stderr. Raises `OSError`."""
    # The program of the keeper is imported here and not in the fork. So a program that starts several rounds pays once.
    from reknit.adapters.keeper.process import keeper as process  # noqa: F401  # `_become` uses it

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()  # otherwise each fork would write once more what is still in the buffer
        except (AttributeError, OSError, ValueError):
            pass  # there is no such stream, or it is closed
    # Duplicates, because the owner of these descriptors closes its copies in every child.
    shown = {number: os.dup(fd) for number, fd in enumerate(console, 1) if fd != number}
    try:
        return by_fork(partial(_become, workers, files, shown, gc.isenabled()))
    finally:
        for fd in shown.values():
            os.close(fd)


def _become(
    workers: Mapping[int, FunctionWorker],
    files: Mapping[int, int],
    shown: Mapping[int, int],
    collects: bool,
    wire: socket.socket,
    agent: int,
) -> NoReturn:
    from reknit.adapters.keeper.process.keeper import keep

    # What the program has dropped must not be collected here. Files would be closed whose numbers are counted as the
    # program's below, and `release` would close what the keeper has opened under these numbers.
    gc.freeze()
    boot.open_standard()
    for number, fd in shown.items():
        os.dup2(fd, number)
        os.close(fd)
        # The object that the program has put there would write to nobody in a fork.
        setattr(sys, NAMES[number], open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # it stays open
    stream = stream_of(wire, ToKeeper)
    hosts = descriptors() - {stream.source, stream.sink, 0, 1, 2}
    keep(stream, agent, has_console=True, forks=Forks(workers, files, hosts, collects))


def cuda_is_initialized() -> bool:
    """Whether this process has initialised CUDA, with torch or without. A fork of it could not use CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return True
    # The driver opens this device, and a library that only reads the state of a GPU does not.
    return any(_target(fd) == "/dev/nvidia-uvm" for fd in descriptors())


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
