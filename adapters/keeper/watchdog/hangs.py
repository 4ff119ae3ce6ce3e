"""Finds the workers that report no progress (`--hang-after`).

1. Progress is a call of `reknit.progress`, or of `Hangs.progressed`. Before the first one, the start of the worker
   counts.
2. Workers write the time of their progress into a page. So the keeper need not look before the oldest of these times is
   `limit_s` seconds ago. Nothing is polled.
3. A worker can write anything into the page. If a time cannot be right, progress was made when the keeper first saw it.
4. A keeper that was itself stopped, for example with its whole container, counts anew. Its workers may have been
   stopped as well.
5. A worker that only waits for other workers to end (`together.py`) is not watched any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reknit.core.job.workers import NoProgress

from .page import Page
from .progress import BETWEEN, FOR_EVER, VARIABLE

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Leader

_TOGETHER_S = 1.0
"""Workers whose time runs out within so many seconds hang together: mostly they wait for each other. It is less if the
limit is less than four times as long."""
LATE_S = 5.0
"""A look that comes so much too late shows that the keeper was stopped, and perhaps its workers with it. Seconds."""


class _Watched:
    """A worker whose progress is awaited."""

    def __init__(self, leader: Leader, now: float) -> None:
        self.leader = leader
        self.seen = 0
        """The number in the page at the last look."""
        self.at = now
        """The last progress, on the clock's time."""
        self.since_start = True
        """It has made no progress since its start."""
        self.step: int | None = None


class Hangs:
    def __init__(self, limit_s: float, folder: str = "") -> None:
        """`limit_s`: a worker without progress for so many seconds is hung. `folder`: see `Page`."""
        self._limit_s = limit_s
        self._folder = folder
        self._together_s = min(_TOGETHER_S, limit_s / 4)
        self._page: Page | None = None
        self._watched: dict[int, _Watched] = {}
        """By local rank."""
        self._look_at: float | None = None

    def variables(self, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """What this worker needs in its environment besides `env`, before it is started. Raises `OSError`."""
        if self._page is None:
            self._page = Page(self._folder)
        own = self._page.variables(local_rank)
        # This agent may itself be a worker, whose own agent waits for progress as well.
        return {VARIABLE: BETWEEN.join([own[VARIABLE], *filter(None, [env.get(VARIABLE)])])}

    def watch(self, leader: Leader, now: float) -> None:
        """This worker was started."""
        self._watched[leader.local_rank] = _Watched(leader, now)
        self._plan()

    def progressed(self, leader: Leader, now: float) -> None:
        """This worker has made progress, as another source than the page tells."""
        watched = self._watched.get(leader.local_rank)
        if watched is not None:
            watched.at, watched.since_start = max(watched.at, now), False

    def found(self, now: float, *, is_last: bool = False) -> list[tuple[Leader, NoProgress]]:
        """The workers that hang now. Each is returned once.

        `is_last`: there is no later look. So a worker whose time would run out within `_TOGETHER_S` hangs already."""
        if self._look_at is None or now < self._look_at - (self._together_s if is_last else 0.0):
            return []
        is_late = now > self._look_at + LATE_S
        alive = {rank: one for rank, one in self._watched.items() if one.leader.exitcode is None}
        for local_rank, one in alive.items():
            self._take(local_rank, one, now)
            if is_late:
                one.at = now
        alive = {rank: one for rank, one in alive.items() if one.seen != FOR_EVER}
        oldest = min((one.at for one in alive.values()), default=now)
        hung = {}
        if is_last or oldest + self._limit_s <= now:
            hung = {rank: one for rank, one in alive.items() if one.at + self._limit_s <= now + self._together_s}
        self._watched = {rank: one for rank, one in alive.items() if rank not in hung}
        self._plan()
        return [(one.leader, NoProgress(round(now - one.at, 1), one.step, one.since_start)) for one in hung.values()]

    def _take(self, local_rank: int, one: _Watched, now: float) -> None:
        seen, step = (0, None) if self._page is None else self._page.read(local_rank)
        if seen != one.seen:
            one.seen, one.step, one.since_start = seen, step, False
            written_at = seen / 1e9
            one.at = written_at if one.at < written_at <= now else max(one.at, now)

    def _plan(self) -> None:
        self._look_at = min((one.at + self._limit_s for one in self._watched.values()), default=None)

    @property
    def wakes_at(self) -> float | None:
        """When `found` must be called at the latest, on the clock's time. None: no worker is watched."""
        return self._look_at

    def forget(self) -> None:
        """The round is over, or is being stopped. Closes the page. May be repeated."""
        self._watched.clear()
        self._look_at = None
        if self._page is not None:
            self._page.close()
            self._page = None
