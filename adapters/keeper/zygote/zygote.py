"""One zygote, on the side of its keeper: starting it, hearing from it, and having it fork a worker."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from signal import SIGKILL, Signals
from typing import Any

from reknit.adapters.host.children import descendants, signal_process
from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.common.spawn import spawn
from reknit.adapters.keeper.protocol.files import new_file

from .program import checking, environment
from .zygote_line import PLAN, SOCKET, Line

_ANSWER_S = 5.0
"""Time for a zygote to fork a worker, or to answer a question. A zygote that needs longer is ended. Seconds."""
_LOOK_S = 0.1
"""Time between two looks whether the agent lives. Seconds."""


class ZygoteFailed(Exception):
    """This zygote cannot be used any more. The text says why."""


class NotForked(Exception):
    """The zygote does not fork this worker, or cannot now. The text says why."""


_UNUSABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)
"""What its answer raises if it does not come, or if it is none."""


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _message(line: Line) -> dict[str, Any]:
    """Raises what `Line.receive` raises, and `ZygoteFailed` at the end of the line."""
    message, _ = line.receive()
    if not isinstance(message, dict):
        raise ZygoteFailed("its process has ended")
    return message


class Zygote:
    """A zygote that was started."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        options: Sequence[str],
        *,
        guard: Guard,
        given_back: Collection[Signals],
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Starts it. `plan`: see `program.py`. `options`: those of its Python. The other arguments are those of `spawn`
        and of `Processes`. Raises `OSError` and `ValueError`."""
        self.is_ready = False
        """It has imported everything."""
        self._is_abandoned = is_abandoned
        ours, theirs = socket.socketpair()
        self._line = Line(ours)
        try:
            file = new_file()
            try:
                with open(file, "wb", closefd=False) as opened:
                    opened.write(json.dumps(plan).encode())
                env = environment(plan["environ"], "checks")
                ends = {SOCKET: theirs.fileno(), PLAN: file}
                argv = checking(options, plan["argv"][0])
                self.pid = spawn(argv, env, ends, guard=guard, given_back=given_back)
            finally:
                os.close(file)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    @property
    def fd(self) -> int:
        """Readable when the zygote has said something, or has ended."""
        return self._line.socket.fileno()

    def hear(self) -> dict[str, Any] | None:
        """What it has said since the last call. None: nothing. Raises `ZygoteFailed` if it has ended."""
        self._line.socket.settimeout(0.0)
        try:
            message = _message(self._line)
        except BlockingIOError:
            return None
        except _UNUSABLE as error:
            raise ZygoteFailed(_why(error)) from None
        match message:
            case {"fails": str()} | {"ready": dict(), "modules": int()} | {"harms": dict(), "first": list()}:
                texts = [*message.get("harms", ()), *message.get("harms", {}).values(), *message.get("first", ())]
                texts += message.get("ready", {}).values()
                if all(isinstance(text, str) for text in texts):
                    return message
        raise ZygoteFailed("a module has written to its socket")

    def stale(self) -> str:
        """Why what it has imported cannot be used any more. Empty: it can. Raises `ZygoteFailed`."""
        try:
            self._line.socket.settimeout(_ANSWER_S)
            self._line.send({"check": None})
            return str(self._answer(self._line)["stale"])
        except _UNUSABLE as error:
            raise ZygoteFailed(_why(error)) from None

    def fork(self, argv: Sequence[str], env: Mapping[str, str], ends: Mapping[int, int], *, guard: Guard) -> int:
        """Have a worker forked, as leader of a new process group. Returns its pid. Raises `NotForked` and
        `ZygoteFailed`: then there is no such worker.

        `argv`: its command line. The other arguments are those of `spawn`."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise NotForked(_why(error)) from None
        link = Line(ours)
        ours.settimeout(_ANSWER_S)
        ticket = guard.ticket(above=max(ends, default=2))
        try:
            of_the_worker = [*ends.values(), *([ticket] if ticket >= 0 else [])]
            request = {
                "argv": [*argv],
                "env": dict(env),
                "numbers": [*ends],
                "files": len(of_the_worker),
            }
            self._line.socket.settimeout(_ANSWER_S)
            self._line.send({"fork": request}, [theirs.fileno(), *of_the_worker])
            theirs.close()
            answer = self._answer(link)
            if "fails" in answer:
                raise NotForked(answer["fails"])
            pid = int(answer["pid"])
            if ticket >= 0:
                guard.arm(ticket, pid)
                ticket = -1
            link.send({"go": None})
            return pid
        except _UNUSABLE as error:
            raise ZygoteFailed(_why(error)) from None
        finally:
            # If the worker was not told to go on, it ends when it finds this closed.
            ours.close()
            theirs.close()
            if ticket >= 0:
                os.close(ticket)

    def _answer(self, line: Line) -> dict[str, Any]:
        poll = select.poll()
        poll.register(line.socket, select.POLLIN)
        give_up = time.monotonic() + _ANSWER_S
        while not poll.poll(_LOOK_S * 1000):
            if self._is_abandoned() or time.monotonic() > give_up:
                raise ZygoteFailed(f"it has not answered within {_ANSWER_S:g} s")
        return _message(line)

    def close(self) -> None:
        """End it, and what modules have started at their import. May be repeated."""
        for pid in (self.pid, *descendants(self.pid)):
            signal_process(pid, SIGKILL)
        self._line.socket.close()
