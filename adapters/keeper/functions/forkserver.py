"""The fork server: a process that has imported what functions need, and forks the workers (start method forkserver).

1. The keeper starts it by exec when the first worker needs it, and keeps it for later rounds.
2. It forks twice. The process between ends at once, so the keeper adopts the worker (it is a subreaper) and gets its
   exit status. Without subreapers, which only Linux has, workers are spawned instead.
3. The keeper sends it one request per worker, with the worker's open files, and waits for the pid. While the server
   imports, the keeper waits, but not longer than its agent lives.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Mapping
from signal import SIGKILL, Signals

from reknit.adapters.host.children import reaped, signal_process
from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.common.spawn import spawn

SOCKET = 9
"""The descriptor, in the fork server, by which requests come."""
LENGTH = 8
"""Bytes of a number on this socket."""
_READY_S = 120.0
"""Time for the server to import everything and start the first worker, or to start another one. Seconds."""
_LOOK_S = 0.1
"""Time between two looks whether the agent lives. Seconds."""


class ForkServer:
    """The fork server of a keeper."""

    def __init__(
        self,
        argv: Collection[str],
        env: Mapping[str, str],
        files: Mapping[int, int],
        *,
        guard: Guard,
        given_back: Collection[Signals],
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Starts it. `files`: by number in the server, the open files that it gets. The other arguments are those of
        `spawn` and of `Processes`. Raises `OSError`."""
        self._is_abandoned = is_abandoned
        self._socket, theirs = socket.socketpair()
        try:
            ends = {**files, SOCKET: theirs.fileno()}
            self.pid = spawn([*argv], env, ends, guard=guard, given_back=given_back)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def is_alive(self) -> bool:
        return not reaped(self.pid)

    def start(self, env: Mapping[str, str], ends: Mapping[int, int], *, guard: Guard) -> int:
        """Start a worker, as leader of a new process group. The arguments are those of `spawn`. Returns its pid. Raises
        `OSError`."""
        ticket = guard.ticket(above=max(ends, default=2))
        try:
            tickets = [ticket] if ticket >= 0 else []
            request = json.dumps({"env": dict(env), "numbers": [*ends], "has_ticket": ticket >= 0}).encode()
            # The files go with the length. The request itself may be longer than what one call takes.
            socket.send_fds(self._socket, [len(request).to_bytes(LENGTH)], [*ends.values(), *tickets])
            self._socket.sendall(request)
            pid = self._answer()
        except BaseException as error:
            if ticket >= 0:
                os.close(ticket)
            if isinstance(error, ConnectionError):
                raise OSError("the fork server has ended: its last lines on stderr say why") from None
            raise
        if ticket >= 0:
            guard.arm(ticket, pid)
        return pid

    def _answer(self) -> int:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        give_up = time.monotonic() + _READY_S
        while not poll.poll(_LOOK_S * 1000):
            if self._is_abandoned() or time.monotonic() > give_up:
                raise OSError(f"the fork server has not answered within {_READY_S:g} s")
        answer = self._socket.recv(LENGTH, socket.MSG_WAITALL)
        if len(answer) < LENGTH:
            raise ConnectionResetError
        number = int.from_bytes(answer, signed=True)
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return number

    def close(self) -> None:
        """End it. May be repeated."""
        signal_process(self.pid, SIGKILL)
        self._socket.close()
