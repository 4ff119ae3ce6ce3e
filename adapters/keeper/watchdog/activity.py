"""What a hung worker did, from its stacks and from the kernel: does it wait for other workers?

1. The main thread counts. If it only waits for another thread, and that thread is in a collective, the worker waits
   too.
2. Only the innermost calls count, up to the first one in the user's own code. A hook of the user that hangs inside the
   backward pass is the user's code.
3. What a call in the user's code waits for is not in a Python stack: `work.wait()` of torch looks like a computation.
   Then the function of the kernel in which the thread waits may tell. It may also be ambiguous, and then nothing is
   claimed.
4. On a GPU, a worker that waits for others is mostly busy: it asks the device again and again whether it is done.

The files and functions named here were found in the stacks of hung workers (`benchmarks/hangs.py`, torch 2.13).
This module is imported when a worker is hung.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from attrs import frozen

from reknit.core.job.workers import Activity, Stance

_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)|^<frozen ")
_TORCH = re.compile(r"/(site|dist)-packages/torch/|/torch/(distributed|autograd|cuda|nn|utils|_\w+)(/|\.py)")
_LIBRARIES = re.compile(r"^.*/(site-packages|dist-packages|lib(64)?/python3[^/]*)/")
"""The folder from which a module of a library is imported."""
_DISTRIBUTED = "/torch/distributed/"
_COLLECTIVES = re.compile(
    r"/torch/distributed/(distributed_c10d|rendezvous|_functional_collectives|c10d_logger|utils)\.py$"
)
"""A worker whose innermost Python call is in one of these files waits for others."""
_BACKWARD = "_engine_run_backward"
_OPERATORS = "/torch/_ops.py"
_DEVICE = "/torch/cuda/"
_OF_THREADS = re.compile(r"/(threading|queue|selectors)\.py$|/(concurrent/futures|asyncio)/[^/]+\.py$")
_OWN_WAITS = re.compile(
    r"nanosleep|nsleep|pipe|fifo|wait_for_partner|flock|setlk|posix_lock|wait4|waitid|tty_read|io_schedule|fuse|nfs|rpc"
    r"|^do_wait$"
)
"""Functions of the kernel in which no thread waits for another worker. A futex, a poll and a socket may be anything."""


@frozen
class Frame:
    """One call in a stack."""

    name: str
    path: str
    line: int

    @property
    def site(self) -> str:
        """`train.py:88`: the file without its folder. Nodes may have the program in different folders."""
        library = _LIBRARIES.search(self.path)
        return f"{self.path[library.end() :] if library else os.path.basename(self.path)}:{self.line}"

    @property
    def is_library(self) -> bool:
        """It is in torch or in the standard library, and not in the user's code."""
        return bool(_STANDARD_LIBRARY.search(self.path) or _TORCH.search(self.path))


@frozen
class ThreadStack:
    """One thread of a Python process."""

    frames: tuple[Frame, ...]
    """The innermost first."""
    title: str
    """What stands above its frames: its name, and whether it runs."""
    is_main: bool
    is_busy: bool | None = None
    """It runs on a processor. None: this is not known."""
    has_gil: bool = False
    """It holds the interpreter's lock."""

    def lines(self) -> Iterator[str]:
        yield self.title
        for frame in self.frames:
            yield f"    {frame.name} ({frame.site})"


@frozen
class Kernel:
    """What the kernel says of the main thread of a process."""

    state: str = ""
    """Its state as a letter (proc_pid_stat(5)). Empty: this is not known."""
    waits_in: str = ""
    """The function of the kernel in which it waits. Empty: it runs, or this is not known."""
    has_gpu: bool = False
    """The process uses a GPU."""

    @property
    def is_stopped(self) -> bool:
        """A signal has stopped it."""
        return self.state in ("T", "t")

    @property
    def description(self) -> str:
        """`state S, waits in hrtimer_nanosleep`. Empty: nothing is known."""
        return f"state {self.state}" + (f", waits in {self.waits_in}" if self.waits_in else "") if self.state else ""

    @property
    def remark(self) -> str:
        """What the state of the process alone explains. Empty: nothing."""
        if self.is_stopped:
            return "it was stopped by a signal"
        if self.state == "D":
            return "the kernel does not let it run" + (f", it waits in {self.waits_in}" if self.waits_in else "")
        return ""


def activity_of(threads: Sequence[ThreadStack], kernel: Kernel) -> Activity:
    """What the worker did. `threads`: its stacks. Empty: they are not known."""
    main = next((thread for thread in threads if thread.is_main and thread.frames), None)
    seen = Activity(_by_kernel(kernel, None)) if main is None else _of_thread(main, kernel)
    if kernel.is_stopped:
        return Activity(Stance.STOPPED, seen.op, seen.site)
    if any(thread.has_gil and thread.is_busy is False for thread in threads):
        return Activity(Stance.OWN, seen.op, seen.site)  # a call in C that keeps all other threads waiting
    if main is not None and _OF_THREADS.search(main.frames[0].path):
        device = Kernel(has_gpu=kernel.has_gpu)  # what the kernel says is said of the main thread
        others = [_of_thread(thread, device) for thread in threads if thread is not main and thread.frames]
        for other in others:
            if other.stance in (Stance.COLLECTIVE, Stance.WAITING):
                return Activity(Stance.WAITING, other.op, other.site)
        if any(other.stance is Stance.UNKNOWN for other in others):
            return Activity(Stance.UNKNOWN, seen.op, seen.site)  # this thread may wait for another worker
    return seen


def _of_thread(thread: ThreadStack, kernel: Kernel) -> Activity:
    frames = thread.frames
    depth = next((at for at, frame in enumerate(frames) if not frame.is_library), len(frames))
    users = frames[min(depth, len(frames) - 1)]
    top, calls = frames[0], [frame for frame in frames[:depth] if _is_call(frame)]
    if calls and _COLLECTIVES.search(top.path):
        return Activity(Stance.COLLECTIVE, calls[-1].name.rpartition(".")[2], users.site)
    if depth and _STANDARD_LIBRARY.search(top.path):
        return Activity(Stance.OWN, users.name, users.site)
    is_busy = kernel.state == "R" if thread.is_busy is None else thread.is_busy
    if depth and (top.name == _BACKWARD or top.path.endswith(_OPERATORS)):
        is_waiting = kernel.has_gpu or not is_busy
        op = "backward" if top.name == _BACKWARD else calls[-1].name if calls else users.name
        return Activity(Stance.WAITING if is_waiting else Stance.OWN, op, users.site)
    if depth and _DEVICE in top.path:
        return Activity(Stance.WAITING, top.name, users.site)
    return Activity(_by_kernel(kernel, is_busy), users.name, users.site)


def _is_call(frame: Frame) -> bool:
    """It is a function of torch.distributed, and not one that torch wraps around each of these."""
    return _DISTRIBUTED in frame.path and not frame.path.endswith("/c10d_logger.py")


def _by_kernel(kernel: Kernel, is_busy: bool | None) -> Stance:
    """Whether a thread waits for others, if its innermost call says nothing. `is_busy`: None if this was not seen. One
    look at a process that runs proves nothing: it may be about to end."""
    if kernel.state == "R" and is_busy:
        return Stance.WAITING if kernel.has_gpu else Stance.OWN
    return Stance.OWN if _OWN_WAITS.search(kernel.waits_in) else Stance.UNKNOWN
