"""A function that has returned waits in its process until all functions of its node have returned.

The end of a process closes its connections. torch's gloo sometimes aborts another process that still uses one of them,
although nothing is left to be done.

1. All workers of a round share a pipe that holds one byte less than there are workers. A worker that has returned takes
   a byte. A worker that finds none is the last one. (A file would not do: two workers may read the same byte of it.)
2. The last one writes to a second pipe, the *gate*, which all others watch. Nobody waits for the end of a pipe: a child
   of a worker may hold it open.
3. A worker that fails takes no byte, so the gate stays closed. The agent is told of the failure at once, and its stop
   ends those that wait.
4. The signal of a stop ends the wait also if the function has ignored this signal or left a handler for it. A worker
   that waits opens the gate itself then.
"""

from __future__ import annotations

import os
import select
import signal
from typing import NamedTuple

from reknit.adapters.keeper.watchdog.progress import rest

_STOPS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""The signals that torchelastic hands on to workers if TORCHELASTIC_SIGNALS_TO_HANDLE does not say which."""


class Together(NamedTuple):
    """What the workers of one round share: descriptors of the process that has this value."""

    turns: int
    """The read end of the pipe that is shared out."""
    gate: int
    """The read end of the gate."""
    opener: int
    """Its write end."""

    def wait(self) -> None:
        """Wait until all have called this, or until a signal comes that stops workers. To be called by the main
        thread. Raises `OSError` if the descriptors are closed."""
        if self._is_last():
            self._open()
            return
        before = {signum: signal.getsignal(signum) for signum in _stops()}
        try:
            for signum in before:
                signal.signal(signum, lambda *_: self._open())
            rest()
            poll = select.poll()  # unlike `select`, it takes descriptors of any number
            poll.register(self.gate, select.POLLIN)
            poll.poll()
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _is_last(self) -> bool:
        try:
            return not os.read(self.turns, 1)
        except BlockingIOError:
            return True  # a fork of the agent's program still holds the other end

    def _open(self) -> None:
        os.write(self.opener, b".")


def meet(workers: int) -> Together:
    """For so many workers, in the agent. The caller closes the descriptors. Raises `OSError`."""
    turns, full = os.pipe()
    try:
        os.set_blocking(turns, False)
        os.write(full, bytes(workers - 1))
        return Together(turns, *os.pipe())
    except BaseException:
        os.close(turns)
        raise
    finally:
        os.close(full)


def _stops() -> list[signal.Signals]:
    """The signals that stop workers, without those that end this process anyway."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _STOPS).split(",")
    wanted = {signal.SIGTERM, *(each for each in signal.Signals if each.name in names)}
    # None: a handler that is not Python's, which could not be put back.
    return sorted(each for each in wanted if signal.getsignal(each) not in (None, signal.SIG_DFL))
