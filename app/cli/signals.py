"""Signals to the agent's process. Only `reknit run` handles signals. A library leaves those of its host program
alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from reknit.adapters.runtime.clock import SystemClock


_KEYS = (signal.SIGINT, signal.SIGQUIT)


class Signals:
    """Implements `ports.Requests`: collects signals and wakes `SystemClock.wait`.

    To be made in the main thread. A signal that is ignored when reknit starts stays ignored (nohup). SIGTERM is the
    exception: a scheduler that waits for the end of reknit sends it. A signal that the parent has blocked is unblocked.
    A signal that cannot be caught is left out. SIGCHLD and SIGWINCH are handled as well: `taken` does not return them,
    but calls `on_child` or `on_resize`.
    """

    on_child: Callable[[], None] | None = None
    """Called when a child process has ended."""
    on_resize: Callable[[], None] | None = None
    """Called when the terminal has another size."""

    takes_key: Callable[[int], bool] | None = None
    """Called with the signal of Ctrl-C or Ctrl-\\. True: it is for a worker that has the terminal, which gets it as
    well. `taken` does not return it then."""

    def __init__(self, clock: SystemClock, signals: Iterable[int]) -> None:
        self._clock = clock
        self._handed_out = frozenset(signals) - {signal.SIGCHLD, signal.SIGWINCH}
        self._before: dict[int, Any] = {}
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        clock.watch(self._read_end)
        for signum in sorted(self._handed_out):
            self._install(signum, ignored_too=signum == signal.SIGTERM)
        # Handled even if it was ignored. Otherwise nobody could learn how the keeper has ended.
        self._install(signal.SIGCHLD, ignored_too=True)
        self._install(signal.SIGWINCH)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)

    def _install(self, signum: int, *, ignored_too: bool = False) -> None:
        try:
            if ignored_too or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, _nothing)
        except (OSError, ValueError):
            pass  # SIGKILL, SIGSTOP, or no signal at all

    def taken(self) -> list[int]:
        """The signals that came since the last call, in order. Each is returned once, however often it came: the system
        does not count pending signals either."""
        came: dict[int, None] = {}
        while data := _read(self._read_end):
            for signum in data:
                came[signum] = None
        if signal.SIGCHLD in came and self.on_child is not None:
            self.on_child()
        if signal.SIGWINCH in came and self.on_resize is not None:
            self.on_resize()
        takes = self.takes_key
        others = [] if takes is None else [key for key in _KEYS if key in came and takes(key)]
        return [s for s in came if s in self._handed_out and s in self._before and s not in others]

    def close(self) -> None:
        """Restore the earlier handlers, and the mask of blocked signals. May be repeated."""
        if self._read_end < 0:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for signum, handler in self._before.items():
            # None: the earlier handler was not installed from Python, and cannot be restored.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._clock.unwatch(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)
        self._read_end = -1


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _nothing(signum: int, frame: object) -> None:
    """Does nothing. Python writes to the wake-up descriptor only for signals that have a handler."""
