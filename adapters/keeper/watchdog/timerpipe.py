"""The named pipe through which workers set timers: makes it, reads it, and removes it.

1. A pipe whose path nobody has chosen is in a scratch folder of its own (`folder.py`). So a later keeper removes what a
   killed keeper has left.
2. Something may be at a path that the operator has chosen. Two things are replaced: a pipe of this user that nobody
   reads, which a killed keeper has left, and an empty file of this user, which `mktemp` makes. Nothing else is removed.
3. A pipe that another process reads belongs to another agent, for example to the agent that has started this one as its
   worker. It is left alone, and this keeper makes a pipe with another path.
4. The keeper has the pipe open for writing, too. So the pipe is never at its end, and a client can always open it.
5. After requests have come, the clock does not watch the pipe for `_PAUSE_S`. So a thousand requests in a second cost
   twenty looks.
6. Before a timer counts as expired, the pipe is read: its release may be there.
7. A keeper that was itself stopped, for example with its whole container, lets the time of all timers begin anew. Its
   workers may have been stopped as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING

from reknit.adapters.keeper.common.environment import TIMER_FILE
from reknit.adapters.keeper.common.run_folder import LIMITS, CannotMake, LogFolder, temporary_base, working_folder

from .hangs import LATE_S
from .worker_timers import Reader, Request, TimerProcess, Timers, WorkerTimer, client

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock

_PAUSE_S = 0.05
_SIZE = 1 << 20
"""Bytes that the pipe should hold. A client that finds the pipe full fails, so there must be room for what comes while
the keeper is busy."""
_CHUNK = 1 << 16


class TimerPipe:
    """The timers of this keeper's workers."""

    def __init__(self, clock: Clock, path: str, run_id: str, say: Callable[[str], None]) -> None:
        """`path`: where the pipe is made. Empty: anywhere. `say`: shows a line to the operator. Raises `CannotMake`."""
        self._clock = clock
        self._say = say
        self._complaints: set[str] = set()
        """The kinds of which the operator was told."""
        self._reader = Reader(self._complain)
        self._timers = Timers(self._complain)
        self._paused_until: float | None = None
        """The clock does not watch the pipe before this time. None: it watches the pipe."""
        self._fd = -1
        path = os.path.join(working_folder(), path) if path else ""  # workers may change their folder
        is_others = bool(path) and is_read(path)
        self._others = path if is_others else ""
        """The path of another agent's pipe, which was wanted. Empty: it was not, or the operator was told."""
        self._folder = LogFolder("", run_id, keeps=False) if is_others or not path else None
        self.path = path if self._folder is None else os.path.join(self._folder.path, "timers")
        if self._folder is not None and (error := self._folder.error) is not None:
            why = f"the pipe for timers ({TIMER_FILE}) cannot be made in {temporary_base()}: {error.strerror}"
            raise CannotMake(f"{why}; let TMPDIR name another folder", is_limit=True)
        try:
            self._open()
        except CannotMake:
            self.close()
            raise

    def _open(self) -> None:
        try:
            _clear(self.path)
            os.mkfifo(self.path, 0o600)
            self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            why = f"the pipe for timers ({TIMER_FILE}) cannot be made: {self.path}: {error.strerror}"
            raise CannotMake(why, is_limit=error.errno in LIMITS) from None
        try:
            fcntl.fcntl(self._fd, getattr(fcntl, "F_SETPIPE_SZ", -1), _SIZE)
        except OSError:
            pass  # the pipes of this user may not hold more, or this system knows one size only
        self._clock.watch(self._fd)
        self._paused_until = None

    def renew(self) -> None:
        """A round begins: forget all timers, and make the pipe again if somebody has removed it."""
        if self._others:
            what = f"{TIMER_FILE}={self._others} is a pipe of another agent; the workers of this node get {self.path}"
            self._say(f"reknit: {what}")
            self._others = ""
        self._timers.clear()
        if self._is_at_its_path():
            return
        self._let_go()
        try:
            self._open()
        except CannotMake as error:
            self._say(f"reknit: the timers of this round are not watched: {error}")

    # ---- what the clients want ----

    def look(
        self, now: float, workers: Mapping[int, int], heard: Callable[[int], None] = lambda worker: None
    ) -> list[WorkerTimer]:
        """The timers for which a worker is to be ended, the first to expire first. They are one of each worker at most,
        because its other timers are forgotten.

        `workers`: by pid, the global ranks of the workers that live. Empty: what comes is left out. `heard`: called
        with the pid of each worker that has set or released a timer. A timer whose signal is 0 or less ends nobody. The
        operator gets a line about it.
        """
        wakes_at = self.wakes_at
        if self._fd < 0 or (self._paused_until is not None and wakes_at is not None and now < wakes_at):
            return []
        if wakes_at is not None and now > wakes_at + LATE_S:
            self._timers.begin_anew(now)
        for worker in self._take(self._requests(now), now, workers):
            heard(worker)
        found: dict[int, list[WorkerTimer]] = {}
        for timer in self._timers.expired(now):
            if timer.client.worker in workers:
                found.setdefault(timer.client.worker, []).append(timer)
        return [timer for worker, expired in found.items() for timer in self._fatal(workers[worker], expired)]

    def _requests(self, now: float) -> list[Request]:
        """What has come. If something has, the clock does not watch the pipe for a while."""
        requests: list[Request] = []
        has_come = False
        try:
            for _ in range(_SIZE // _CHUNK):  # everything that was there when this look began
                requests += self._reader.feed(os.read(self._fd, _CHUNK))
                has_come = True
        except BlockingIOError:
            pass
        if has_come != (self._paused_until is not None):
            (self._clock.unwatch if has_come else self._clock.watch)(self._fd)
        self._paused_until = now + _PAUSE_S if has_come else None
        return requests

    def _take(self, requests: list[Request], now: float, workers: Mapping[int, int]) -> set[int]:
        """Returns the pids of the workers from which requests have come."""
        if not workers:
            self._timers.clear()
            return set()
        ahead = now - time.time()
        clients: dict[int, TimerProcess | None] = {}
        for request in requests:
            if request.pid not in clients:
                clients[request.pid] = self._client(request, workers)
            found = clients[request.pid]
            if found is None:
                continue
            if request.at is None:
                self._timers.release(request.pid, request.scope)
            else:
                self._timers.add(WorkerTimer(found, request.scope, request.at + ahead, request.signal, now))
        return {found.worker for found in clients.values() if found is not None}

    def _client(self, request: Request, workers: Mapping[int, int]) -> TimerProcess | None:
        found = client(request.pid, workers.keys())
        if found is not None and not found.worker:
            self._complain("a process that is no worker here sets a timer", f"pid {request.pid}, {request.scope!r:.80}")
            return None
        return found

    def _fatal(self, rank: int, expired: list[WorkerTimer]) -> list[WorkerTimer]:
        """The first of these timers of one worker that ends it."""
        for timer in expired:
            if timer.signal > 0:
                self._timers.drop(timer.client.worker)
                return [timer]
        scopes = ", ".join(f"{timer.scope!r:.80}" for timer in expired[:3]) + (", …" if len(expired) > 3 else "")
        self._say(f"reknit: a timer of rank {rank} ran out ({scopes}); nothing is done, because it names no signal")
        return []

    @property
    def wakes_at(self) -> float | None:
        """When `look` must be called at the latest, on the clock's time. None: there is no such time."""
        at = min(self._timers.wakes_at, inf if self._paused_until is None else self._paused_until)
        return None if self._fd < 0 or at == inf else at

    def _complain(self, kind: str, what: str) -> None:
        if kind not in self._complaints:
            self._complaints.add(kind)
            self._say(f"reknit: the pipe for timers: {kind}: {what}; it is left out, and so are others of this kind")

    # ---- the end ----

    def close(self) -> None:
        """Remove the pipe. May be repeated."""
        try:
            if self._is_at_its_path():
                os.unlink(self.path)
        except OSError:
            pass  # the folder may not be written to any more
        self._let_go()
        if self._folder is not None:
            self._folder.close()

    def _let_go(self) -> None:
        if self._fd >= 0:
            self._clock.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _is_at_its_path(self) -> bool:
        """False: somebody has removed the pipe, or put something else in its place."""
        try:
            return self._fd >= 0 and os.path.samestat(os.lstat(self.path), os.fstat(self._fd))
        except OSError:
            return False


def is_read(path: str) -> bool:
    """Whether there is a named pipe at this path, and a process reads it."""
    try:
        if not stat.S_ISFIFO(os.lstat(path).st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError:
        return False  # ENXIO: nobody reads it
    return True


def _clear(path: str) -> None:
    """Remove what an earlier agent, or `mktemp`, has left at this path. Raises `OSError` if something else is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    is_left = stat.S_ISFIFO(found.st_mode) or (stat.S_ISREG(found.st_mode) and not found.st_size)
    if found.st_uid != os.getuid() or not is_left:
        raise FileExistsError(errno.EEXIST, "it is there already, and no pipe; remove it, or choose another path")
    if is_read(path):
        raise FileExistsError(errno.EEXIST, "another process reads it; choose another path")
    os.unlink(path)
