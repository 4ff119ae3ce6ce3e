"""Timers that workers set for their own work: from the bytes of a pipe to the timers that have expired.

The clients write the requests: `FileTimerClient` of torch, and that of `reknit.elastic.timer`. Each request is one line
of JSON (docs/torchelastic.md#timers).

1. Every process of this user can write to the pipe. What is no request is left out, and the operator gets one line of
   each kind. Nothing that comes is kept without a limit.
2. The *client* of a timer is the process that has set it. It is a worker, or a descendant of a worker such as a data
   loader. A client that has ended has no timers. The time at which it was started tells it from a later process with
   the same pid.
3. A request names a time in seconds since 1970. It is turned into the clock's time when it is read. So a step of the
   system's clock changes no timer that is set already.
"""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Callable, Collection
from math import inf, isnan

from attrs import evolve, frozen

from reknit.adapters.host.children import stat_of

Complain = Callable[[str, str], None]
"""Tells the operator of something that was left out. The first text is its kind, the second the thing itself."""

_LONGEST_LINE = 2 * select.PIPE_BUF
"""Bytes. A client writes no request that is longer than PIPE_BUF, because parts of two lines could be mixed then."""
MOST_TIMERS = 100_000
"""Limit for the timers that are set at the same time on one node."""
_HIGHEST_PID = 1 << 22
_SIGNALS = frozenset(map(int, signal.valid_signals()))


@frozen
class Request:
    """A client sets or releases a timer."""

    pid: int
    """The client's."""
    scope: str
    """Which of the client's timers."""
    at: float | None
    """When the timer expires, in seconds since 1970. None: the timer is released."""
    signal: int
    """What is to end the worker then. 0 or less: the worker is not ended."""


class Reader:
    """Finds the requests in what comes from the pipe."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._unread = b""
        """The beginning of a line whose end has not come yet. Of a line that is too long: its end."""

    def feed(self, data: bytes) -> list[Request]:
        """The requests whose last byte is in `data`, in their order."""
        *lines, rest = (self._unread + data).split(b"\n")
        self._unread = self._bounded(rest)
        found = (self._request(self._bounded(line)) for line in lines if line.strip())
        return [request for request in found if request is not None]

    def _bounded(self, line: bytes) -> bytes:
        if len(line) <= _LONGEST_LINE:
            return line
        self._complain("a line is too long for a timer request", f"{line[:80]!r}…")
        return line[-_LONGEST_LINE:]

    def _request(self, line: bytes) -> Request | None:
        request = request_in(line)
        if request is None:
            self._complain("a line is no timer request", f"{line[:200]!r}")
            # The line may begin with something that a stranger has written without a line end. In a request these two
            # characters are side by side at its begin, and at most once more: where a scope ends in `{`.
            start = len(line)
            for _ in range(2):
                start = line.rfind(b'{"', 0, start)
                if start > 0 and (request := request_in(line[start:])) is not None:
                    break
        return request


def request_in(line: bytes) -> Request | None:
    """The request that this line is. None: it is none."""
    try:
        data = json.loads(line)
        pid, scope, at, signum = (data[name] for name in ("pid", "scope_id", "expiration_time", "signal"))
        if type(pid) is not int or not 0 < pid <= _HIGHEST_PID or not isinstance(scope, str | int):
            return None
        if type(at) not in (int, float) or isnan(at) or type(signum) is not int:
            return None
        if signum > 0 and signum not in _SIGNALS:
            return None
        text = str(scope).encode("utf-8", "backslashreplace").decode()  # JSON can hold lone surrogates
        return Request(pid, text, None if at < 0 else float(at), signum)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


@frozen
class TimerProcess:
    """A process that sets timers."""

    pid: int
    worker: int
    """The pid of the worker that it is, or whose descendant it is. 0: it belongs to no worker of this keeper."""
    started: int
    """When it was started: ticks since the boot of the host. 0: it is the worker itself, whose pid no other process can
    get before its round has ended."""

    @property
    def is_there(self) -> bool:
        """False: the client has ended. True for a worker, whose end the keeper knows from elsewhere."""
        return self.started == 0 or _seen(self.pid)[2] == self.started


def client(pid: int, workers: Collection[int]) -> TimerProcess | None:
    """The process with this pid. None: it has ended. `workers`: the pids of the workers, which lead process groups.

    On a system without /proc only a worker itself is found, and no descendant.
    """
    if pid in workers:
        return TimerProcess(pid, pid, 0)
    parent, group, started = _seen(pid)
    if not started:
        return None
    ancestors = {pid}
    while group not in workers and parent not in workers:
        ancestors.add(parent)
        parent, group, _ = _seen(parent)
        if parent in ancestors or parent <= 1:
            return TimerProcess(pid, 0, started)
    return TimerProcess(pid, group if group in workers else parent, started)


def _seen(pid: int) -> tuple[int, int, int]:
    """Parent, process group and time of the start of a process. Zeros: it has ended."""
    try:
        fields = stat_of(str(pid))
    except OSError:
        return 0, 0, 0
    return (0, 0, 0) if fields[0] in (b"Z", b"X", b"x") else (int(fields[1]), int(fields[2]), int(fields[19]))


@frozen
class WorkerTimer:
    """A timer that is set."""

    client: TimerProcess
    scope: str
    expires_at: float
    """On the keeper's clock."""
    signal: int
    """See `Request.signal`."""
    set_at: float
    """On the keeper's clock: when the request was read."""


class Timers:
    """The timers that are set."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._set: dict[tuple[int, str], WorkerTimer] = {}
        self.wakes_at = inf
        """No timer expires earlier than this. It may be too early, because a release does not change it."""

    def add(self, timer: WorkerTimer) -> None:
        """Set a timer. It replaces the one that the client has set for the same scope."""
        key = timer.client.pid, timer.scope
        if len(self._set) >= MOST_TIMERS and key not in self._set:
            self._complain(f"more than {MOST_TIMERS} timers are set", f"pid {timer.client.pid}, {timer.scope[:80]!r}")
            return
        self._set[key] = timer
        self.wakes_at = min(self.wakes_at, timer.expires_at)

    def begin_anew(self, now: float) -> None:
        """Let the whole time of each timer begin now."""
        timers, self._set, self.wakes_at = [*self._set.values()], {}, inf
        for timer in timers:
            self.add(evolve(timer, set_at=now, expires_at=now + timer.expires_at - timer.set_at))

    def release(self, pid: int, scope: str) -> None:
        self._set.pop((pid, scope), None)

    def expired(self, now: float) -> list[WorkerTimer]:
        """Take the timers that have expired, the first to expire first. A client that has ended has none."""
        if now < self.wakes_at:
            return []
        found = sorted(
            (timer for timer in self._set.values() if timer.expires_at <= now),
            key=lambda timer: (timer.expires_at, timer.client.pid, timer.scope),
        )
        for timer in found:
            self.release(timer.client.pid, timer.scope)
        self.wakes_at = min((timer.expires_at for timer in self._set.values()), default=inf)
        return [timer for timer in found if timer.client.is_there]

    def drop(self, worker: int) -> None:
        """Forget the timers of this worker and its descendants."""
        self._set = {key: timer for key, timer in self._set.items() if timer.client.worker != worker}

    def clear(self) -> None:
        """Forget all timers: the round has ended."""
        self._set.clear()
        self.wakes_at = inf
