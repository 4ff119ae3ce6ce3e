"""Timers: a client in the worker acquires and releases them, a server in the agent ends workers whose timer expires."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getframeinfo, stack
from typing import Any

from reknit.elastic.utils.logging import get_logger

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

logger = get_logger(__name__)


@dataclass
class TimerRequest:
    """A worker sets or clears a timer."""

    worker_id: Any
    scope_id: str
    """Which of the worker's timers."""
    expiration_time: float
    """Seconds since 1970. Negative: the timer is cleared."""


class TimerClient(abc.ABC):
    """The worker's side."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of this scope, or set it anew. `expiration_time`: seconds since 1970."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Clear the timer of this scope."""


class RequestQueue(abc.ABC):
    """Where the requests of workers wait for the server."""

    @abc.abstractmethod
    def size(self) -> int:
        """Number of requests that wait now. It may be out of date when the caller reads it."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests. Waits for them for up to `timeout` seconds."""


class TimerServer(abc.ABC):
    """The agent's side. Every `max_interval` seconds at most, it ends the workers whose timers have expired."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        """`max_interval`: longest time between two looks, in seconds. `daemon`: whether the thread is a daemon."""
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take these requests in. If the number of timers is too large, the server raises an exception."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """By worker: its timers that expire at `deadline` (seconds since 1970) or before."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End this worker. False if it could not be ended, so that the next look tries again. If this raises an
        exception, the worker counts as ended."""

    def start(self) -> None:
        """Start the thread that looks."""
        self._stop_signaled = False
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, daemon=self._daemon, name="timer server")
        self._watchdog_thread.start()

    def stop(self) -> None:
        """End the thread. This may take `max_interval` seconds."""
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                logger.exception("a timer server could not look for expired timers; it goes on")

    def _run_watchdog(self) -> None:
        # At least one is asked for: the call then waits for it, and this loop does not spin.
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), self._max_interval))
        ended = {
            worker_id
            for worker_id, expired in self.get_expired_timers(time.time()).items()
            if self._reaps(worker_id, expired)
        }
        self.clear_timers(ended)

    def _reaps(self, worker_id: Any, expired: list[TimerRequest]) -> bool:
        logger.warning("worker %s is ended: its timers have expired: %s", worker_id, self._get_scopes(expired))
        return self._reap_worker_no_throw(worker_id)

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception("worker %s: its end has raised an exception; its timers are cleared", worker_id)
            return True

    def _get_scopes(self, timer_requests: list[TimerRequest]) -> list[str]:
        return [request.scope_id for request in timer_requests]


_timer_client: TimerClient | None = None
"""The client that `expires` uses. None: none was configured."""


def configure(timer_client: TimerClient) -> None:
    """Set the client that `expires` uses in this process."""
    global _timer_client
    _timer_client = timer_client


@contextmanager
def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> Iterator[None]:
    """Set a timer for the body of a `with` statement.

    `after`: seconds from now. `scope`: the timer's name; None means file and line of the caller. `client`: None means
    the configured one. Raises `RuntimeError` if there is none.
    """
    client = client or _timer_client
    if client is None:
        raise RuntimeError("call timer.configure(client) before timer.expires, or give expires a client")
    if scope is None:
        caller = getframeinfo(stack()[2][0])  # 0 is this function, 1 is contextlib
        scope = f"{caller.filename}#{caller.lineno}"
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)
