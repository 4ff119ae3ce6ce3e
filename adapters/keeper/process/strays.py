"""Strays: processes that workers leave behind. The keeper is a subreaper, so it adopts them when their parents die.

Use this only in a process whose children all belong to the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from reknit.adapters.host.children import Children, reaped, signal_process, sweep_counting
from reknit.adapters.keeper.common.spawn import PidWatch

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock

_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for a stray."""
STUCK_AFTER_S = 5.0
"""Seconds after which a process that survives SIGKILL is given up. Such a process hangs in a call of the kernel,
perhaps for ever."""


class _Stray:
    def __init__(self, pid: int, clock: Clock, seen_at: float) -> None:
        self.watch = PidWatch(pid, clock)
        self.kill_at = seen_at + _GRACE_S
        self.killed_at: float | None = None


class Strays:
    """All children of this process, except the leaders of the round."""

    def __init__(self, clock: Clock, spared: Callable[[], Collection[int]] = tuple) -> None:
        """`spared`: gives the children that belong to this process itself."""
        self._clock = clock
        self._spared = spared
        self._children = Children()
        self._pressed: dict[int, _Stray] = {}
        self._given_up: set[int] = set()

    def alive(self, leaders: Collection[int]) -> list[int]:
        """Reap the dead strays. In a long job they would fill the process table otherwise. Returns the pids of the
        strays that are alive, without those that were given up."""
        spared = {*leaders, *self._spared()}
        found = [pid for pid in self._children.now() if pid not in spared and not reaped(pid)]
        for pid in self._pressed.keys() - set(found):
            self._pressed.pop(pid).watch.close()
        self._given_up &= set(found)
        return [pid for pid in found if pid not in self._given_up]

    def press(self, pids: Collection[int], now: float, kill_at: float, signalled: Collection[int]) -> None:
        """End these strays. Each gets SIGTERM when this method first sees it. SIGKILL follows a second later, or at
        `kill_at` if that is earlier.

        `signalled`: process groups that have got the stop's signal already. Their members get no SIGTERM here, because
        some programs end at once at a second SIGTERM.
        """
        for pid in pids:
            stray = self._pressed.get(pid)
            if stray is None:
                stray = self._pressed[pid] = _Stray(pid, self._clock, now)
                if now < kill_at and _group(pid) not in signalled:
                    signal_process(pid, signal.SIGTERM)
                    signal_process(pid, signal.SIGCONT)
            stray.kill_at = min(stray.kill_at, kill_at)
            if now >= stray.kill_at and stray.killed_at is None:
                stray.killed_at = now
                signal_process(pid, signal.SIGKILL)

    def stuck(self, pids: Collection[int], now: float) -> bool:
        """True if each of these processes has survived SIGKILL for `STUCK_AFTER_S`."""
        killed = [self._pressed[pid].killed_at for pid in pids if pid in self._pressed]
        return len(killed) == len(pids) and all(at is not None and now >= at + STUCK_AFTER_S for at in killed)

    @property
    def wakes_at(self) -> float | None:
        """When a stray must be killed or given up next, on the clock's time. None: no stray is being ended."""
        return min(
            (s.kill_at if s.killed_at is None else s.killed_at + STUCK_AFTER_S for s in self._pressed.values()),
            default=None,
        )

    def give_up(self, pids: Collection[int]) -> None:
        """Do not wait for these processes any more, in this round or a later one. They are still reaped when they
        end."""
        self._given_up |= set(pids)
        for pid in list(self._pressed):
            self._pressed.pop(pid).watch.close()

    def end_all(self, deadline_s: float) -> tuple[int, tuple[int, ...]]:
        """SIGKILL all children of this process, the leaders included. Returns how many processes ended, and the pids of
        those that are still there after `deadline_s` seconds."""
        return sweep_counting(deadline_s, look=self._children.now)

    def close(self) -> None:
        """May be repeated."""
        self._children.close()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
