"""Workers that are forks of this process: the side of the keeper and of the fork server (start method fork).

1. A worker has nothing of the keeper: no descriptor, signal handler or ignored signal. The environment of a worker is
   written in its own process.
2. When all workers run, the keeper closes the open files of the program. Otherwise it would hold pipes open that the
   program waits for.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Collection, Mapping
from typing import Any

from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.common.settling import descriptors, settle

from .function_main import FunctionWorker

_FAILED = 1


class Forks:
    """The workers that a keeper can fork."""

    def __init__(
        self, workers: Mapping[int, FunctionWorker], files: Mapping[int, int], hosts: Collection[int], collects: bool
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


def _run(worker: FunctionWorker) -> int:
    process: Any = worker  # the stubs have no such name
    status: int = process._bootstrap()
    return status


def _show() -> None:
    import traceback

    traceback.print_exc()
    sys.stderr.flush()
