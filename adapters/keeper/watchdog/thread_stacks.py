"""What a hung worker is doing: the stacks of its threads, or else what the kernel says of it.

There are three ways, in this order.

1. `py-spy dump`, if py-spy is installed and is allowed to look into the worker. The worker needs no preparation.
2. faulthandler, which a worker has enabled by PYTHONFAULTHANDLER=1. At SIGABRT it writes the stacks of all threads to
   stderr, and the worker ends.
3. The state of the process in /proc.

This module is imported when a worker is hung.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reknit.adapters.host.children import descendants, reap, signal_process, stat_of
from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.common.spawn import spawn

from .activity import Frame, Kernel, ThreadStack

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock

DUMP_S = 2.0
"""Time for py-spy. Afterwards the worker is ended without its help. Seconds."""
_MOST_BYTES = 200_000
_MOST_PROCESSES = 4
"""Number of Python processes that are looked into, for a worker that is a shell or another launcher."""
_REAP_S = 0.1
_UNINTERRUPTIBLE = "D"
_FATAL = re.compile(r"^Fatal Python error: ")
_IMPORTING = "<frozen importlib."
"""The file of the frames that an import has. They tell nothing."""
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def dump_command(py_spy: str, pid: int) -> list[str]:
    """The command line that looks into this process."""
    # py-spy cannot halt a process that is stopped already, and need not.
    how = ["--nonblocking"] if kernel_of(pid).is_stopped else []
    return [py_spy, "dump", "--json", *how, "--pid", str(pid)]


class Dump:
    """One run of `py-spy dump`. Nothing here waits."""

    def __init__(self, py_spy: str, pid: int, clock: Clock, guard: Guard) -> None:
        """`guard`: kills py-spy if this process dies. Raises `OSError` if py-spy cannot be started."""
        self.subject = pid
        """The process that is looked into."""
        self._clock = clock
        self._output = b""
        self._fd, theirs = os.pipe()
        try:
            null = os.open(os.devnull, os.O_RDWR)
            try:
                argv = dump_command(py_spy, pid)
                self.pid = spawn(argv, os.environ, {0: null, 1: theirs, 2: null}, guard=guard)
            finally:
                os.close(null)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self._fd, False)
        clock.watch(self._fd)

    def is_over(self) -> bool:
        """Read what is there. True if nothing more will come."""
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return False
            self._output += data
            if not data or len(self._output) > _MOST_BYTES:
                self.close()
        return True

    def close(self) -> None:
        """End py-spy, and read no more. May be repeated."""
        if self._fd < 0:
            return
        self._clock.unwatch(self._fd)
        os.close(self._fd)
        self._fd = -1
        signal_process(self.pid, signal.SIGKILL)  # mostly it has ended
        reap([self.pid], _REAP_S)

    @property
    def threads(self) -> tuple[ThreadStack, ...]:
        """The threads of the process. Empty: py-spy could not look into it."""
        return threads_in(self._output, self.subject)


def threads_in(dump: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """What py-spy has written of the threads of a process. Empty: py-spy could not look into the process."""
    try:
        return tuple(_thread(each, pid) for each in json.loads(dump))
    except (KeyError, TypeError, ValueError):
        return ()


def _thread(said: Any, pid: int) -> ThreadStack:
    """A thread as py-spy writes it."""
    frames = tuple(
        Frame(frame["name"], frame["filename"], frame["line"])
        for frame in said["frames"]
        if _IMPORTING not in frame["filename"]
    )
    is_busy, has_gil, number = bool(said["active"]), bool(said["owns_gil"]), said["os_thread_id"]
    name = f': "{said["thread_name"]}"' if said["thread_name"] else ""
    state = ("active" if is_busy else "idle") + "+gil" * has_gil
    title = f"Thread {number or said['thread_id']} ({state}){name}"
    return ThreadStack(frames, title, number == pid, is_busy, has_gil)


def py_spy_for(pid: int) -> str:
    """The path of py-spy. It is looked for beside the Python of this worker, beside that of reknit, and in PATH. Empty:
    there is none."""
    program = os.fsdecode(_memory_file(pid, "cmdline").partition(b"\0")[0])
    beside = [os.path.dirname(path) for path in (program, sys.executable) if os.path.isabs(path)]
    return shutil.which("py-spy", path=os.pathsep.join([*beside, *os.get_exec_path()])) or ""


def pythons_of(pid: int) -> list[int]:
    """The processes whose stacks tell why this worker hangs: the worker itself, or else Pythons that it has started. A
    worker may be a shell or another launcher."""
    if _is_python(pid):
        return [pid]
    return [child for child in descendants(pid) if _is_python(child)][:_MOST_PROCESSES]


def _is_python(pid: int) -> bool:
    try:
        if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
            return True
    except OSError:
        return False  # it has ended, or belongs to another user
    return b"/libpython" in _memory_file(pid, "maps")


def _memory_file(pid: int, name: str) -> bytes:
    """A file in /proc that the kernel makes from the memory of a process. Empty: it cannot be read now.

    While a thread of the process is in state D, it may hold a lock of the memory. The kernel would let this process
    wait for that lock, perhaps for ever. py-spy may wait for it as well, but py-spy can be killed.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        if any(stat_of(f"{pid}/task/{thread}")[0].decode() == _UNINTERRUPTIBLE for thread in threads):
            return b""
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except (OSError, IndexError):
        return b""


def kernel_of(pid: int) -> Kernel:
    """What the kernel says of this process. An empty value if it has ended, or belongs to another user."""
    try:
        state = stat_of(str(pid))[0].decode()
        with open(f"/proc/{pid}/wchan") as file:
            waits_in = file.read()
    except (OSError, IndexError):
        return Kernel()
    return Kernel(state, "" if waits_in == "0" else waits_in, b"/dev/nvidia" in _memory_file(pid, "maps"))


def split_dump(lines: Sequence[str]) -> tuple[tuple[ThreadStack, ...], tuple[str, ...]]:
    """The threads whose stacks faulthandler has written, and the lines before them. Empty: there are no stacks.

    `lines`: the end of the worker's stderr."""
    start = next((at for at in range(len(lines) - 1, -1, -1) if _FATAL.match(lines[at])), None)
    if start is None:  # the beginning of a long dump is lost. The main thread comes last
        start = next((at - 1 for at, line in enumerate(lines) if _THREAD.match(line)), None)
    if start is None:
        return (), tuple(lines)
    found: list[tuple[str, list[Frame]]] = []
    for line in lines[start + 1 :]:
        if _THREAD.match(line):
            found.append((line.rstrip(":"), []))
        elif found and (call := _CALL.match(line)):
            path, number, name = call.groups()
            found[-1][1].append(Frame(name, path, int(number)))
    # The main thread is the oldest one, and comes last.
    last = len(found) - 1
    threads = tuple(ThreadStack(tuple(frames), title, at == last) for at, (title, frames) in enumerate(found))
    return threads, tuple(lines[: max(0, start)])


def stacks_text(threads: Sequence[ThreadStack]) -> str:
    """The stacks of these threads, each with its innermost call first."""
    return "\n".join(line for thread in threads for line in thread.lines())
