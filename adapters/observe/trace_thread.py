"""Writing a trace into a folder that may be slow or hang, for example one that several hosts share.

A disk must not hold up an agent, whose beats others count on. So a thread writes. The agent waits for it, because the
line of a step must be in the file before the commands of the step are carried out. If that takes longer than `WAIT_S`,
the agent waits no more until the thread has caught up.
"""

from __future__ import annotations

import threading
from collections import deque

from reknit.adapters.runtime.threads import Thread

from .trace_folder import Parts

WAIT_S = 0.05
_MOST = 16 << 20
"""Characters that wait for the disk, at most. What comes then is lost."""
_END_S = 2.0
"""How long the end of an agent waits for the disk. Seconds."""


class PartsThread:
    """Implements `trace_folder.Files`. A forked child must not use it."""

    def __init__(self, parts: Parts, most: int = _MOST) -> None:
        """`most`: see `_MOST`."""
        self._parts = parts
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, bool]] = deque()
        """What is to be written, and whether it begins a file."""
        self._size = 0
        """The size of what is not written yet."""
        self._is_slow = self._is_closed = False
        self._error: OSError | None = None
        self._thread: Thread | None = None

    def write(self, text: str, *, begins: bool, must_wait: bool) -> bool:
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._size and self._size + len(text) > self._most:
                return False
            if self._thread is None:
                thread = Thread(self._run, name="reknit trace")
                try:
                    thread.start()
                except RuntimeError as error:  # how Python says that no further thread can be started
                    raise OSError(0, str(error)) from None
                self._thread = thread
            self._waiting.append((text, begins))
            self._size += len(text)
            self._changed.notify_all()
            if must_wait and not self._is_slow:
                self._is_slow = not self._changed.wait_for(self._is_done, WAIT_S)
            return True

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(self._is_done, _END_S)
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.wait(_END_S)

    def _is_done(self) -> bool:
        return not self._size or self._error is not None

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                text, begins = item
                self._parts.write(text, begins=begins)
                with self._changed:
                    self._size -= len(text)
                    self._is_slow = self._is_slow and bool(self._size)
                    self._changed.notify_all()
        except OSError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._parts.close()

    def _next(self) -> tuple[str, bool] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None
