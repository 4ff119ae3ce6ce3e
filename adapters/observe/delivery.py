"""Handing events to somebody's handler, which may be slow, hang or fail, without waiting for it.

1. `put` never waits and never raises. One thread calls the handler, in the order of the calls of `put`.
2. The thread runs only while there is something to hand over. It is a daemon thread: a handler that hangs does not keep
   the process alive.
3. At most `MOST` events wait. A further one is dropped, and counted.
4. What goes wrong is not raised. `troubles` tells it, each kind once, so that the caller can show it.
5. A handler that does not come back until the end of a `flush` gets nothing more before it does.

The standard library's `QueueListener` will not do. It ends with the first error of a handler, and its `stop` waits
without a limit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .destinations import told

MOST = 1000
"""Events that wait for the handler, at most."""
LEFT_S = 5.0
"""Seconds after which a thread no longer waits for the lock. Calls hold the lock for microseconds, and never while the
handler runs. So a call that was interrupted has left it locked."""


class Delivery:
    """The way to the handlers of one logger. Thread-safe. A forked child must make its own."""

    def __init__(self, destination: str, logger: logging.Logger) -> None:
        """`destination`: the name of the handler, for messages. `logger`: its logger, which gets each event as a
        line."""
        self._destination = destination
        self._logger = logger
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._thread = threading.Thread()
        """The latest thread that hands over what waits."""
        self._is_busy = False
        """The thread hands something over. Otherwise nothing waits, and the thread has ended or is about to."""
        self._has_line = False
        """The handler has a line, and has not come back."""
        self._is_given_up = False
        """The handler has not come back in time. Events are dropped until it does."""
        self._dropped = 0
        self._said: set[str] = set()
        """The kinds of trouble that were told."""
        self._troubles: list[str] = []
        """What was not told yet."""

    def put(self, line: str) -> None:
        """Hand a line over to the handler, soon."""
        with self._locked():
            if self._is_given_up:
                self._dropped += 1
            elif len(self._waiting) >= MOST:
                self._dropped += 1
                what = f"{MOST} events wait for the event handler {self._destination}: further ones are dropped"
                self._trouble("dropped", what)
            else:
                self._waiting.append(line)
                self._start()

    def flush(self, within_s: float) -> None:
        """Wait until the handler has taken everything, at most for `within_s` seconds. What waits then is dropped."""
        with self._locked():
            self._start()
            if not self._is_given_up and not self._changed.wait_for(lambda: not self._is_busy, within_s):
                self._give_up()
            is_busy, dropped = self._is_busy, self._dropped + len(self._waiting)
            self._dropped = 0
            self._waiting.clear()
            if dropped:
                count = f"{dropped} event{'s' * (dropped != 1)}"
                self._troubles.append(f"the event handler {self._destination} has not taken {count}")
        if not is_busy and self._thread.ident is not None:
            self._thread.join(within_s)  # it has nothing left to do

    def troubles(self) -> list[str]:
        """What has gone wrong since the last call: lines for the operator."""
        with self._locked():
            found, self._troubles = self._troubles, []
            return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The handler of a signal may raise an error between the moment at which a lock is taken and the one at which it
        # is sure to be released. Then the other threads would wait for it for ever.
        while not (changed := self._changed).acquire(timeout=LEFT_S):
            if self._changed is changed:
                self._changed, self._is_busy = threading.Condition(), False
        try:
            yield
        finally:
            changed.release()

    # ---- under the lock ----

    def _start(self) -> None:
        if self._is_busy or not self._waiting:
            return
        thread = threading.Thread(target=self._run, name=f"events {self._destination}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no further thread now; the next event or the flush tries again
            return
        self._thread, self._is_busy = thread, True

    def _trouble(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._troubles.append(line)

    def _give_up(self) -> None:
        self._is_given_up = True
        self._dropped += self._has_line + len(self._waiting)
        self._waiting.clear()
        for handler in self._logger.handlers:
            # The handler holds its lock. At the end of the process `logging` takes the locks of all handlers, and would
            # wait for ever.
            handler.createLock()

    # ---- the thread ----

    def _run(self) -> None:
        while (line := self._next()) is not None:
            try:
                self._logger.info(line)
            except BaseException as error:  # the handler is somebody else's: not even its SystemExit ends this thread
                with self._locked():
                    if self._is_given_up:
                        continue  # that was told, and the handler has lost the lock that it releases
                    self._trouble("failed", f"the event handler {self._destination} fails: {told(error)}")

    def _next(self) -> str | None:
        with self._locked():
            self._has_line = bool(self._waiting)
            if self._has_line:
                return self._waiting.popleft()
            self._is_busy = self._is_given_up = False
            self._changed.notify_all()
            return None
