"""The keeper of a `PContext`, driven by the thread that calls.

1. The keeper is started with the first round, and again when something that workers inherit has changed: a variable of
   `os.environ`, the working folder, how functions are started, or the pipe for timers. So workers see what they would
   see if this process started them.
2. A keeper carries out one round at a time.
3. If this process and its keeper are killed in one instant, the next start of reknit on this host ends what is left.
   For that, this process holds a lock for as long as it has keepers (`hostlock`).
4. Only the process that opened a keeper uses and closes it. In a forked child `close` does nothing.
"""

from __future__ import annotations

import os
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.client.start import by_exec
from reknit.adapters.keeper.common.run_folder import working_folder
from reknit.adapters.keeper.protocol.wire import Configure
from reknit.adapters.runtime.clock import SystemClock

if TYPE_CHECKING:
    from reknit.adapters.host.lock import HostLock

_logger = getLogger(__name__)


class User(Protocol):
    """Whose processes run on a keeper."""

    @property
    def is_running(self) -> bool: ...


class SharedKeeper:
    """A keeper and the clock that waits for it. Successive contexts use it in turn, so that a restart does not pay for
    a new keeper. Whoever makes one closes it, after the contexts that used it."""

    def __init__(
        self,
        name: str = "reknit",
        grace_s: float = 30.0,
        *,
        mark: str = "",
        hang_after_s: float | None = None,
        start_timeout_s: float | None = None,
    ) -> None:
        """Starts nothing. `name`: what the processes are. `grace_s`: time that the processes of a context get to end
        when one of them has failed. Seconds. `mark`: the mark of an agent whose workers they are. The agent's lock
        covers them. Empty: they have a mark and a lock of their own. `hang_after_s`, `start_timeout_s`: as in
        `Settings`."""
        self._hang_after_s, self._start_timeout_s = hang_after_s, start_timeout_s
        self.grace_s = grace_s
        self.timer_file: str | None = None
        """See `Settings.timer_file`. It counts from the next start of workers."""
        self.user: User | None = None
        """Whose processes run on the keeper, or ran last."""
        self._clock: SystemClock | None = None
        self._name = name
        self._mark = mark or os.urandom(8).hex()
        self._owes_lock = not mark
        self._lock: HostLock | None = None
        self._owner = os.getpid()
        self._keeper: KeeperClient | None = None
        self._inherited: _Inherited | None = None
        self._round = -1
        self._is_closed = False

    @property
    def clock(self) -> SystemClock:
        """What waits for the keeper."""
        if self._clock is None:
            self._clock = SystemClock()
        return self._clock

    @property
    def keeper_pid(self) -> int:
        """The pid of the keeper. 0: there is none. Any thread may ask."""
        keeper = self._keeper
        return 0 if keeper is None else keeper.pid

    def check_owner(self) -> None:
        """Raises `RuntimeError` in a forked child."""
        if os.getpid() != self._owner:
            raise RuntimeError("these processes belong to the parent of this process, which was forked")

    def keeper(self, start_method: str | None = None) -> KeeperClient:
        """The keeper. It is started if there is none that is fit to start workers now. Raises `CannotStart`.
        Ends a worker that imports the program's script.

        `start_method`: how functions are started. None: programs are started."""
        self.check_owner()
        if self._is_closed:
            raise RuntimeError("this keeper was closed")
        if start_method is not None:
            from reknit.adapters.keeper.client.function_workers import (
                end_import,  # slow to import, and not needed for programs
            )

            end_import(start_method)
        else:
            start_method = "spawn" if self._inherited is None else self._inherited.start_method
        inherited = _Inherited(dict(os.environ), working_folder(), start_method, self.timer_file)
        if self._keeper is not None and inherited != self._inherited:
            self.end()
        if self._keeper is None:
            self._keeper = self._opened(inherited)
            self._inherited = inherited
        return self._keeper

    def _opened(self, inherited: _Inherited) -> KeeperClient:
        nonce = os.urandom(8).hex()
        configure = Configure(
            argv=(),
            run_id=self._name,
            cwd=inherited.cwd,
            timer_file=inherited.timer_file,
            hang_after_s=self._hang_after_s,
            start_timeout_s=self._start_timeout_s,
            log_base=os.devnull,  # the files of workers are named by the context
            mark=f"{self._mark}/{nonce}",
        )
        start = partial(by_exec, inherited.env)
        keeper = KeeperClient(
            self.clock, configure, nonce, start, say=_logger.warning, start_method=inherited.start_method
        )
        if self._owes_lock:
            try:
                self._take_lock()  # while the keeper gets ready
                self._owes_lock = False
            except BaseException:  # for example an import that finds no free descriptor
                keeper.close()
                raise
        return keeper

    def _take_lock(self) -> None:
        from reknit.adapters.host.left import end_left
        from reknit.adapters.host.lock import take_alone

        self._lock = take_alone(self._mark)
        ended, stuck = end_left()
        if ended or stuck:
            from reknit.app.wiring.surroundings import left_lines  # slow to import, and rarely needed

            for line in left_lines(ended, stuck):
                _logger.warning("%s", line)

    def next_round(self) -> int:
        """A number for a round that this keeper has not used yet."""
        self._round += 1
        return self._round

    def close(self) -> None:
        """Kill the workers that still run, end the keeper, and close all descriptors. Bounded in time. May be
        repeated."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        try:
            self.end()
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._clock is not None:
                self._clock.close()

    def end(self) -> None:
        """End the keeper, and with it what it has started, at once. The next start has another keeper."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()


@frozen
class _Inherited:
    """What a keeper has from this process, and its workers from the keeper."""

    env: dict[str, str]
    cwd: str
    start_method: str
    """How functions are started."""
    timer_file: str | None
