"""The keeper of a `PContext`, driven by the thread that calls.

1. The keeper is started with the first round, and again when something that workers inherit has changed: a variable of
   `os.environ`, or the working folder. So workers see what they would see if this process started them.
2. A keeper carries out one round at a time.
3. Only the process that opened a keeper uses and closes it. In a forked child `close` does nothing.
"""

from __future__ import annotations

import os
from functools import partial
from logging import getLogger

from attrs import frozen

from reknit.adapters.clock import Clock
from reknit.adapters.keeper.client import Keeper
from reknit.adapters.keeper.folder import working_folder
from reknit.adapters.keeper.start import by_exec
from reknit.adapters.keeper.wire import Configure

_logger = getLogger(__name__)


class SharedKeeper:
    """A keeper and the clock that waits for it. Successive contexts use it in turn, so that a restart does not pay for
    a new keeper. Whoever makes one closes it, after the contexts that used it."""

    def __init__(self, name: str = "reknit") -> None:
        """Starts nothing. `name`: what the processes are, for their mark."""
        self.clock = Clock()
        self._name = name
        self._owner = os.getpid()
        self._keeper: Keeper | None = None
        self._inherited: _Inherited | None = None
        self._round = -1
        self._is_closed = False

    def keeper(self) -> Keeper:
        """The keeper. It is started if there is none that is fit to start workers now. Raises `CannotStart`."""
        if self._is_closed or os.getpid() != self._owner:
            raise RuntimeError("this keeper was closed, or belongs to the parent of this process")
        inherited = _Inherited(dict(os.environ), working_folder())
        if self._keeper is not None and inherited != self._inherited:
            self._end_keeper()
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
        return Keeper(self.clock, configure, nonce, partial(by_exec, inherited.env), say=_logger.warning)

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
            self._end_keeper()
        finally:
            self.clock.close()

    def _end_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()


@frozen
class _Inherited:
    """What a keeper has from this process, and its workers from the keeper."""

    env: dict[str, str]
    cwd: str
