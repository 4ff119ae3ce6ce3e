"""Says when a worker was stopped by a signal such as SIGSTOP, and when it goes on.

Such a worker lives and does nothing, so nobody else notices it. The kernel sends SIGCHLD, which wakes the clock. So
nothing is polled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Leader

_FIRST_S, _LONGEST_S = 1.0, 64.0
"""The shortest time between two lines about one worker, at first and at most. It doubles with each line. Seconds."""
_MOST_CHANGES = 100
"""Changes of one worker that are taken in one look."""


class _Told:
    """What was said of one worker."""

    def __init__(self) -> None:
        self.stopped_by = 0
        """The signal that has stopped the worker. 0: it runs."""
        self.said = 0
        """What `stopped_by` was in the last line."""
        self.next_at = 0.0
        """The next line is said at this time at the earliest."""
        self.pause_s = _FIRST_S


class Pauses:
    """The stopped workers of one round."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: dict[int, _Told] = {}
        """By pid: the workers that were stopped at least once."""

    def look(self, leaders: Iterable[Leader], now: float) -> None:
        """Say what has changed. A worker that is stopped and continued all the time gets few lines."""
        for leader in leaders:
            if leader.exitcode is not None:
                self._told.pop(leader.pid, None)
                continue
            changed = _change(leader.pid)
            if changed is not None:
                self._told.setdefault(leader.pid, _Told()).stopped_by = changed
            told = self._told.get(leader.pid)
            if told is not None and told.stopped_by != told.said and now >= told.next_at:
                told.said = told.stopped_by
                told.next_at, told.pause_s = now + told.pause_s, min(2 * told.pause_s, _LONGEST_S)
                what = f"was stopped by {_name(told.said)}" if told.said else "was continued"
                self._say(f"reknit: rank {leader.rank} (pid {leader.pid}) {what}")

    @property
    def wakes_at(self) -> float | None:
        """When a line is due that came too early, on the clock's time. None: there is none."""
        return min((told.next_at for told in self._told.values() if told.stopped_by != told.said), default=None)

    def forget(self) -> None:
        """The round is over, or is being stopped."""
        self._told.clear()


def _change(pid: int) -> int | None:
    """The signal that has stopped this child since the last call. 0: the child was continued. None: neither."""
    latest = None
    if not hasattr(os, "waitid"):  # macOS
        return latest
    for _ in range(_MOST_CHANGES):
        try:
            # The end of the child is not asked for here. So it stays for `Leader.look`.
            found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            break
        if found is None:
            break
        latest = found.si_status if found.si_code == os.CLD_STOPPED else 0
    return latest


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
