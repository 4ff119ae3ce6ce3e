"""The terminal of `reknit run`, for a worker that somebody talks to (`--stdin`): who has it, and how it is left behind.

The worker is in the process group of the agent (adapters/keeper/common/spawn.py), so the shell treats both as one job.
"""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reknit.adapters.keeper.output.streams import is_same


def is_terminal() -> bool:
    """stdin, stdout and stderr are one terminal, so somebody can talk to a worker."""
    return all(map(os.isatty, (0, 1, 2))) and is_same(0, 1) and is_same(1, 2)


@contextmanager
def restored(is_given: bool) -> Iterator[None]:
    """A context in which a worker may have the terminal. At its end the terminal works as before: a worker may have
    switched off its echo, and died. `is_given`: there is such a worker."""
    try:
        before = termios.tcgetattr(0) if is_given else None
    except termios.error:
        before = None  # stdin is no terminal
    try:
        yield
    finally:
        if before is not None:
            _restore(before)


def _restore(before: Any) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])  # otherwise a background job would be stopped
    try:
        if os.tcgetpgrp(0) == os.getpgrp():  # else the shell has the terminal again
            termios.tcsetattr(0, termios.TCSADRAIN, before)
    except (OSError, termios.error):
        pass  # the terminal is gone
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
