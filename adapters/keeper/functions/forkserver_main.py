"""The program of the fork server: see `forkserver.py`."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from multiprocessing import spawn
from typing import Any, NoReturn

from .forks import settle
from .forkserver import LENGTH, SOCKET
from .function_main import PreparedProcess

_MOST_FILES = 253
_FAILED = 1
_ADOPTED_S = 0.0005
"""The pause between two looks of a worker whether its keeper is its parent. Seconds."""


class ForkServerProcess(PreparedProcess):
    """The process of the fork server, made by the agent. The keeper starts it."""

    def __init__(self, preload: Sequence[str], told: int) -> None:
        """`preload`: modules that are imported first. `told`: the number of the descriptor, in each worker, by which it
        is told what to do."""
        super().__init__(daemon=False)
        self._start_method = None  # that of its workers is set when they begin
        self._preload = tuple(preload)
        self._told = told

    def run(self) -> None:
        for name in self._preload:
            try:
                if name != "__main__":  # this was imported with the start, if it has a file
                    importlib.import_module(name)
            except ImportError:
                pass  # as `multiprocessing` does: the worker says so if it needs the module
        gc.collect()
        gc.freeze()  # so the collector of a worker does not write to the memory that all workers share
        with socket.socket(fileno=SOCKET) as requests:
            while self._serve(requests):
                pass

    def _serve(self, requests: socket.socket) -> bool:
        """Start one worker. False if the keeper is gone."""
        length, files, _, _ = socket.recv_fds(requests, LENGTH, _MOST_FILES)
        if not length:
            return False
        request = json.loads(requests.recv(int.from_bytes(length), socket.MSG_WAITALL))
        try:
            answer = self._fork(request, files)
        except OSError as error:
            answer = -(error.errno or 1)
        for fd in files:
            os.close(fd)
        requests.sendall(answer.to_bytes(LENGTH, signed=True))
        return True

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Returns the pid of the worker."""
        read_end, write_end = os.pipe()
        # Python forgets at a fork which signals have come, so a worker would lose one that comes right after it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            between = os.fork()
            if between == 0:
                try:
                    here = os.getpid()
                    pid = os.fork()
                    if pid == 0:
                        while os.getppid() == here:
                            time.sleep(_ADOPTED_S)  # until the worker is a child of the keeper, as its function sees it
                        self._become_worker(request, files, (read_end, write_end), mask)
                    os.write(write_end, pid.to_bytes(LENGTH))
                except OSError as error:
                    os.write(write_end, (-(error.errno or 1)).to_bytes(LENGTH, signed=True))
                finally:
                    os._exit(0)
            os.waitpid(between, 0)  # from now on the worker is a child of the keeper
            return int.from_bytes(os.read(read_end, LENGTH), signed=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(read_end)
            os.close(write_end)

    def _become_worker(
        self, request: dict[str, Any], files: list[int], pipe: tuple[int, int], mask: Collection[int]
    ) -> NoReturn:
        status = _FAILED
        try:
            ends = dict(zip(request["numbers"], files, strict=False))
            ticket = files[len(ends)] if request["has_ticket"] else -1
            settle(request["env"], ends, ticket, {SOCKET, *pipe, *files})
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            main: Any = spawn
            status = main._main(self._told, os.dup(self._told))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
