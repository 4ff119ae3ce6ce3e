"""Timers over a named pipe. One request is one line of JSON of at most PIPE_BUF bytes, so lines of several workers are
never mixed. The format is torch's: see docs/torchelastic.md."""

from __future__ import annotations

import json
import os
import select
import signal as signals
import threading
import time
from collections.abc import Callable

from reknit.adapters.runtime.clock import is_writable
from reknit.elastic.utils.logging import get_logger

from .api import TimerClient, TimerRequest

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

logger = get_logger(__name__)
_OPEN_TRIES, _OPEN_PAUSE_S = 10, 0.1
ROOM_S = 60.0
"""How long a client waits for room in a full pipe, in seconds. A keeper that lives reads it several times a second."""
_LOOK_S = 0.1
_CHUNK = 1 << 16


class FileTimerRequest(TimerRequest):
    """A worker sets or clears a timer. The worker's pid is its id."""

    __slots__ = ["signal", "version"]

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        """`signal`: what ends the worker when the timer expires. 0: the expiry is logged only."""
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """The process that the timer is of."""
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTimerRequest) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """The request as it goes through the pipe, without the line break."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


class FileTimerClient(TimerClient):
    """The worker's side."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        """`file_path`: the named pipe of the server. `signal`: what ends this process when a timer expires."""
        super().__init__()
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Waits while the pipe is full. Raises `BrokenPipeError` if there is no server for a second, or if it has read
        nothing of a full pipe for a minute."""
        self._send_request(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """As `acquire`."""
        self._send_request(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send_request(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            raise RuntimeError(f"a timer request has {len(line)} bytes; {select.PIPE_BUF} fit: shorten the scope")
        fd = self._opened()
        try:
            give_up = time.monotonic() + ROOM_S
            while not self._has_written(fd, line):
                # Another worker may take the room that this call has waited for.
                if not is_writable(fd, give_up - time.monotonic()):
                    raise BrokenPipeError(f"the timer server does not read {self._file_path}, which is full")
        finally:
            os.close(fd)

    def _has_written(self, fd: int, line: bytes) -> bool:
        """False: the pipe is full. A line is written whole or not at all."""
        try:
            os.write(fd, line)
        except BlockingIOError:
            return False
        return True

    def _opened(self) -> int:
        for _ in range(_OPEN_TRIES):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # there is no server yet, or there is none any more
                time.sleep(_OPEN_PAUSE_S)
        raise BrokenPipeError(f"no timer server reads {self._file_path}")


class FileTimerServer:
    """The agent's side: reads the pipe, and signals workers whose timers have expired.

    Unlike torch's server, it never signals its own process.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        """`file_path`: the named pipe, which `start` makes. `max_interval`: longest time between two looks, in seconds.
        `log_event`: called with the name of each event and its request."""
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event or _nothing
        self._timers: dict[tuple[int, str], FileTimerRequest] = {}
        self._watchdog_thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._run_once = False
        self._unread = b""
        self._last_progress_time = int(time.time())

    def start(self) -> None:
        """Make the pipe, and start the thread that reads it. A file of that name is removed first."""
        if os.path.exists(self._file_path):
            os.remove(self._file_path)
        os.mkfifo(self._file_path)
        self._stopped.clear()
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, daemon=self._daemon, name="timer server")
        self._watchdog_thread.start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """End the thread, and remove the pipe."""
        self._stopped.set()
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None
        if os.path.exists(self._file_path):
            os.remove(self._file_path)
        self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Look once, and end the thread."""
        self._run_once = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None
        if os.path.exists(self._file_path):
            os.remove(self._file_path)

    def get_last_progress_time(self) -> int:
        """When the server last looked, in seconds since 1970."""
        return self._last_progress_time

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether a process with this pid exists."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _watchdog_loop(self) -> None:
        # Opened for writing as well: otherwise the pipe would be at its end whenever no worker has it open.
        fd = os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK)
        try:
            while not self._stopped.is_set():
                try:
                    self._run_watchdog(fd)
                except Exception:
                    logger.exception("a timer server could not look for expired timers; it goes on")
                if self._run_once:
                    return
        finally:
            os.close(fd)

    def _run_watchdog(self, fd: int) -> None:
        self.register_timers(self._get_requests(fd, min(self._max_interval, _LOOK_S)))
        now = time.time()
        ended = set()
        for pid, expired in self.get_expired_timers(now).items():
            for request in expired:
                self._log_event("timer expired", request)
            logger.warning("worker %s: its timers have expired: %s", pid, self._get_scopes(expired))
            number = next((request.signal for request in expired if request.signal > 0), 0)
            if number <= 0 or self._reap_worker(pid, number):
                ended.add(pid)
            if number > 0:
                self._log_event("kill worker process", expired[0])
        self.clear_timers(ended)
        self._last_progress_time = int(now)

    def _get_requests(self, fd: int, max_interval: float) -> list[FileTimerRequest]:
        """Wait for requests for up to `max_interval` seconds. A line that is no request is logged, and left out."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max_interval * 1000):
            return []
        try:
            *lines, self._unread = (self._unread + os.read(fd, _CHUNK)).split(b"\n")
        except BlockingIOError:
            return []
        if len(self._unread) > select.PIPE_BUF:
            self._unread = b""  # no request is so long
        return [request for line in lines if (request := _request(line)) is not None]

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Set and clear timers. A later request for the same scope of a process replaces the earlier one."""
        for request in timer_requests:
            key = (request.worker_pid, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget all timers of these processes."""
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in worker_pids}

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """By pid: the timers that expire at `deadline` (seconds since 1970) or before, the first to expire first."""
        found: dict[int, list[FileTimerRequest]] = {}
        for timer in sorted(self._timers.values(), key=lambda timer: timer.expiration_time):
            if timer.expiration_time <= deadline:
                found.setdefault(timer.worker_pid, []).append(timer)
        return found

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Signal the worker. True if it has the signal, or is gone already."""
        try:
            os.kill(worker_pid, signal)
        except ProcessLookupError:
            return True
        except OSError:
            logger.exception("worker %s could not be ended", worker_pid)
            return False
        return True

    def _get_scopes(self, timer_requests: list[FileTimerRequest]) -> list[str]:
        return [request.scope_id for request in timer_requests]


def _request(line: bytes) -> FileTimerRequest | None:
    from reknit.adapters.keeper.watchdog.worker_timers import (
        request_in,  # not for workers, which import this file for the client
    )

    request = request_in(line)
    if request is None:
        logger.warning("a line that is no timer request was left out: %.80r", line)
        return None
    return FileTimerRequest(request.pid, request.scope, -1 if request.at is None else request.at, request.signal)


def _nothing(name: str, request: FileTimerRequest | None) -> None:
    """Does nothing with an event that nobody wants."""
