"""The keeper of a `PContext`, driven by the thread that calls.

1. The keeper is started with the first round, and again when something that workers inherit has changed: a variable of
   `os.environ`, the working folder, or how functions are started. So workers see what they would see if this process
   started them.
2. A keeper carries out one round at a time.
3. Only the process that opened a keeper uses and closes it. In a forked child `close` does nothing.
"""

from __future__ import annotations

import os
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.clock import Clock
from reknit.adapters.keeper.client import Keeper
from reknit.adapters.keeper.folder import working_folder
from reknit.adapters.keeper.start import by_exec
from reknit.adapters.keeper.wire import Configure

if TYPE_CHECKING:
    from .kept import KeptProcesses

_logger = getLogger(__name__)


class SharedKeeper:
    """A keeper and the clock that waits for it. Successive contexts use it in turn, so that a restart does not pay for
    a new keeper. Whoever makes one closes it, after the contexts that used it."""

    def __init__(self, name: str = "reknit", grace_s: float = 30.0) -> None:
        """Starts nothing. `name`: what the processes are, for their mark. `grace_s`: time that the processes of a
        context get to end when one of them has failed. Seconds."""
        self.grace_s = grace_s
        self.user: KeptProcesses | None = None
        """Whose processes run on the keeper, or ran last."""
        self._clock: Clock | None = None
        self._name = name
        self._owner = os.getpid()
        self._keeper: Keeper | None = None
        self._inherited: _Inherited | None = None
        self._round = -1
        self._is_closed = False

    @property
    def clock(self) -> Clock:
        """What waits for the keeper."""
        if self._clock is None:
            self._clock = Clock()
        return self._clock

    def check_owner(self) -> None:
        """Raises `RuntimeError` in a forked child."""
        if os.getpid() != self._owner:
            raise RuntimeError("these processes belong to the parent of this process, which was forked")

    def keeper(self, start_method: str | None = None) -> Keeper:
        """The keeper. It is started if there is none that is fit to start workers now. Raises `CannotStart`.

        `start_method`: how functions are started. None: programs are started."""
        self.check_owner()
        if self._is_closed:
            raise RuntimeError("this keeper was closed")
        if start_method is None:
            start_method = "spawn" if self._inherited is None else self._inherited.start_method
        inherited = _Inherited(dict(os.environ), working_folder(), start_method)
        if self._keeper is not None and inherited != self._inherited:
            self.end()
        if self._keeper is None:
            self._keeper = self._opened(inherited)
            self._inherited = inherited
        return self._keeper

    def _opened(self, inherited: _Inherited) -> Keeper:
        nonce = os.urandom(8).hex()
        configure = Configure(
            argv=(),
            run_id=self._name,
            cwd=inherited.cwd,
            log_base=os.devnull,  # the files of workers are named by the context
            mark=f"{self._name}/{nonce}",
        )
        start = partial(by_exec, inherited.env)
        return Keeper(self.clock, configure, nonce, start, say=_logger.warning, start_method=inherited.start_method)

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
