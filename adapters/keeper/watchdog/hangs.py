"""Finds the workers that report no progress (`--hang-after`, `--start-timeout`).

1. Progress is a call of `reknit.progress`, or of `Hangs.progressed`. Before the first one, the start of the worker
   counts.
2. Workers write the time of their progress into a page. So the keeper need not look before the oldest of these times is
   `limit_s` seconds ago. Nothing is polled.
3. A worker can write anything into the page. If a time cannot be right, progress was made when the keeper first saw it.
4. A keeper that was itself stopped, for example with its whole container, counts anew. Its workers may have been
   stopped as well.
5. A worker that only waits for other workers to end (`together.py`) is not watched any more.
6. When one worker hangs, so do those that make no progress either, even if their own time is not over: mostly they wait
   for each other. The one that the others wait for may have made its last progress seconds after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.core.job.workers import NoProgress

from .progress import FOR_EVER

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Leader

    from .page import Page

_SILENT_S = 10.0
"""When one worker hangs, those that have made no progress for so many seconds hang with it. It is less if the limit is
less than ten times as long."""
_CLOSE_S = 1.0
"""A worker whose time would run out within so many seconds hangs when the round ends for another reason. It is less if
the limit is less than four times as long."""
LATE_S = 5.0
"""A look that comes so much too late shows that the keeper was stopped, and perhaps its workers with it. Seconds."""


@frozen
class Limits:
    """How long workers may make no progress, in seconds. None: there is no limit."""

    hang_after_s: float | None
    start_timeout_s: float | None = None
    """The limit of a worker that has made no progress since its start. None: it is `hang_after_s`."""

    @property
    def are_watched(self) -> bool:
        return self.hang_after_s is not None or self.start_timeout_s is not None

    def limit_s(self, *, since_start: bool) -> float:
        """Infinite if there is no limit."""
        starting_s = self.hang_after_s if self.start_timeout_s is None else self.start_timeout_s
        limit_s = starting_s if since_start else self.hang_after_s
        return inf if limit_s is None else limit_s


class _Watched:
    """A worker whose progress is awaited."""

    def __init__(self, leader: Leader, now: float) -> None:
        self.leader = leader
        self.seen = 0
        """The number in the page at the last look."""
        self.at = now
        """The last progress, on the clock's time."""
        self.since_start = True
        """It has made no progress since its start, or until `looked_at`."""
        self.looked_at = now
        """The last look at the page, on the clock's time."""
        self.step: int | None = None


class Hangs:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._page: Page | None = None
        self._watched: dict[int, _Watched] = {}
        """By local rank."""
        self._look_at: float | None = None

    def watch(self, leader: Leader, page: Page, now: float) -> None:
        """This worker was started. `page`: where it writes, the same one for all workers of a round."""
        self._page = page
        self._watched[leader.local_rank] = _Watched(leader, now)
        self._plan()

    def progressed(self, leader: Leader, now: float) -> None:
        """This worker has made progress, as another source than the page tells."""
        watched = self._watched.get(leader.local_rank)
        if watched is not None:
            watched.at, watched.since_start = max(watched.at, now), False

    def found(self, now: float) -> list[tuple[Leader, NoProgress]]:
        """The workers that hang now, if the time of one of them is over. Each is returned once."""
        if self._look_at is None or now < self._look_at:
            return []
        alive = self._alive(now)
        return self._hung(alive, now) if any(self._over_at(one) <= now for one in alive.values()) else []

    def last(self, now: float, *, hangs: bool) -> list[tuple[Leader, NoProgress]]:
        """The workers that hang now, because the round is to be stopped. `hangs`: it is stopped because another worker
        of the job hangs. Otherwise a worker hangs if its time is nearly over."""
        alive = self._alive(now)
        if hangs or any(self._over_at(one) <= now + min(_CLOSE_S, self._limit_s(one) / 4) for one in alive.values()):
            return self._hung(alive, now)
        return []

    def _alive(self, now: float) -> dict[int, _Watched]:
        """The workers that are watched, by local rank, with what they have reported until now."""
        is_late = self._look_at is not None and now > self._look_at + LATE_S
        self._watched = {rank: one for rank, one in self._watched.items() if one.leader.exitcode is None}
        for local_rank, one in self._watched.items():
            self._take(local_rank, one, now)
            if is_late:
                one.at = now
        self._watched = {rank: one for rank, one in self._watched.items() if one.seen != FOR_EVER}
        self._plan()
        return self._watched

    def _hung(self, alive: Mapping[int, _Watched], now: float) -> list[tuple[Leader, NoProgress]]:
        """The workers that make no progress, now that one of the job hangs. They are not watched any more."""
        silent = {rank: one for rank, one in alive.items() if now - one.at >= min(_SILENT_S, self._limit_s(one) / 10)}
        self._watched = {rank: one for rank, one in alive.items() if rank not in silent}
        self._plan()
        return [(one.leader, NoProgress(round(now - one.at, 1), one.step, one.since_start)) for one in silent.values()]

    def _limit_s(self, one: _Watched) -> float:
        return self._limits.limit_s(since_start=one.since_start)

    def _over_at(self, one: _Watched) -> float:
        return one.at + self._limit_s(one)

    def _take(self, local_rank: int, one: _Watched, now: float) -> None:
        one.looked_at = now
        seen, step = (0, None) if self._page is None else self._page.read(local_rank)
        if seen != one.seen:
            one.seen, one.step, one.since_start = seen, step, False
            written_at = seen / 1e9
            one.at = written_at if one.at < written_at <= now else max(one.at, now)

    def _plan(self) -> None:
        look_at = min(map(self._due_at, self._watched.values()), default=inf)
        self._look_at = None if look_at == inf else look_at

    def _due_at(self, one: _Watched) -> float:
        """When the worker must be looked at. The time of one that starts may be over from then on, because its limit
        changes with its first progress."""
        working_s = self._limits.limit_s(since_start=False)
        return min(self._over_at(one), one.looked_at + working_s) if one.since_start else self._over_at(one)

    @property
    def wakes_at(self) -> float | None:
        """When `found` must be called at the latest, on the clock's time. None: no worker is watched."""
        return self._look_at

    def forget(self) -> None:
        """The round is over, or is being stopped. May be repeated."""
        self._watched.clear()
        self._look_at = self._page = None
