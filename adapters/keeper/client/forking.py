"""Workers that are forks of the program which has called for them (start method fork).

1. The keeper itself is a fork of that program, made when the workers are started. It forks each worker, without exec.
   So a worker has the closures, the memory and the open files of the program, as of that moment.
2. A worker has nothing of the keeper: no descriptor, signal handler or ignored signal. The environment of a worker is
   written in its own process.
3. When all workers run, the keeper closes the open files of the program. Otherwise it would hold pipes open that the
   program waits for.
4. No process here asks the kernel for a signal at the death of its parent (`PR_SET_PDEATHSIG`), because the signal
   comes at the end of the *thread* that has forked. The guard pipe and the keeper's watch on its agent do this work.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import stat
import sys
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NoReturn

from reknit.adapters.host.children import apart
from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.functions.function_main import Worker
from reknit.adapters.keeper.process import boot
from reknit.adapters.keeper.protocol.wire import ToKeeper

from .start import Keeping, by_fork, stream_of

_FAILED = 1
_NAMES = {1: "stdout", 2: "stderr"}


def fork_keeper(workers: Mapping[int, Worker], files: Mapping[int, int], console: tuple[int, int] = (1, 2)) -> Keeping:
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
    workers: Mapping[int, Worker],
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
        setattr(sys, _NAMES[number], open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # it stays open
    stream = stream_of(wire, ToKeeper)
    hosts = descriptors() - {stream.source, stream.sink, 0, 1, 2}
    keep(stream, agent, has_console=True, forks=Forks(workers, files, hosts, collects))


class Forks:
    """The workers that a keeper can fork."""

    def __init__(
        self, workers: Mapping[int, Worker], files: Mapping[int, int], hosts: Collection[int], collects: bool
    ) -> None:
        """`hosts`: the descriptors of the program. `collects`: the program's garbage collector is on."""
        self._workers = workers
        self._files = files
        self._hosts = set(hosts)
        self._collects = collects

    def start(
        self,
        local_rank: int,
        env: Mapping[str, str],
        ends: Mapping[int, int],
        *,
        guard: Guard,
        given_back: Collection[signal.Signals],
    ) -> int:
        """Fork the worker of this local rank, as leader of a new process group. The arguments are those of `spawn`.
        Returns its pid. Raises `OSError`."""
        worker = self._workers[local_rank]
        ticket = guard.ticket(above=max(ends, default=2))
        # The keeper ignores these signals. A worker that has no handlers of its own yet would lose them.
        signal.pthread_sigmask(signal.SIG_BLOCK, given_back)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, given_back)
            if ticket >= 0:
                os.close(ticket)
            raise
        if pid == 0:
            status = _FAILED
            try:
                self._forget_keeper(given_back)
                kept = {0, 1, 2, ticket, self._files[local_rank], *(self._hosts - {*self._files.values()})}
                settle(env, ends, ticket, descriptors() - kept)
                status = _run(worker)
            except BaseException:
                _show()
            finally:
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, given_back)
        try:
            os.setpgid(pid, pid)  # the worker does the same. One of the two is first
        except OSError:
            pass  # the worker has done so already, or is dead
        if ticket >= 0:
            guard.arm(ticket, pid)
        return pid

    def _forget_keeper(self, given_back: Collection[signal.Signals]) -> None:
        """In the worker: what the keeper has changed in its process, besides descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for signum in given_back:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, given_back)
        # The program may have forked from a thread of an executor. At the end of this process the executor's module
        # would wait for this thread, which is now the main thread.
        executors = sys.modules.get("concurrent.futures.thread")
        getattr(executors, "_threads_queues", {}).clear()
        gc.unfreeze()
        if not self._collects:
            gc.disable()

    def release(self) -> None:
        """In the keeper, when all workers run: close the program's open files. No further worker can be forked."""
        for fd in self._hosts:
            try:
                os.close(fd)
            except OSError:
                pass  # closed already
        self._hosts.clear()


def settle(env: Mapping[str, str], ends: Mapping[int, int], ticket: int, foreign: Collection[int]) -> None:
    """In a process that was forked: become what a worker is that was started by exec. The arguments are those of
    `leaders.spawn`.

    `ticket`: the descriptor of the guard pipe. -1: there is none. `foreign`: descriptors that the worker must not have.
    """
    os.setpgid(0, 0)
    if ticket in ends:
        ticket = fcntl.fcntl(ticket, fcntl.F_DUPFD, max(ends) + 1)
    with apart(ends) as numbers:
        for number, fd in numbers.items():
            os.dup2(fd, number)
    if 0 not in ends and os.isatty(0):
        null = os.open(os.devnull, os.O_RDONLY)  # a background group that reads the terminal would be stopped
        os.dup2(null, 0)
        os.close(null)
    for fd in {*foreign} - {*ends, ticket}:
        os.close(fd)
    if ticket >= 0:
        os.set_inheritable(ticket, True)
    os.environ.clear()
    os.environ.update(env)
    _attach(ends)


def _attach(ends: Collection[int]) -> None:
    """Let `sys.stdout` and `sys.stderr` write to a file that was asked for. A notebook, for example, has put objects of
    its own there, which write elsewhere."""
    for number, name in _NAMES.items():
        if number in ends and stat.S_ISREG(os.fstat(number).st_mode) and _number(getattr(sys, name)) != number:
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # it stays open


def _number(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1


def _run(worker: Worker) -> int:
    process: Any = worker  # the stubs have no such name
    status: int = process._bootstrap()
    return status


def _show() -> None:
    import traceback

    traceback.print_exc()
    sys.stderr.flush()


def descriptors() -> set[int]:
    """The descriptors that are open in this process."""
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # this is the descriptor through which the list was read
        found.add(int(name))
    return found


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
