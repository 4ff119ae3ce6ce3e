"""Threads for whose end one can wait again after a wait that was interrupted, and calls that no interrupt breaks off.

When the handler of a signal raises an error in `threading.Thread.join`, Python 3.11 and 3.12 take the thread for
ended. Every later `join` then returns at once, and whoever closes something closes it under a thread that runs.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class CannotStartThread(RuntimeError):
    """The system has no thread left for this process."""


class Thread(threading.Thread):
    """A daemon thread: whatever it hangs in, it does not keep the process from ending."""

    def __init__(self, target: Callable[..., None], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._creator = os.getpid()
        self._is_begun = False
        self._has_run = False
        self._runs = threading.Lock()
        """Held until the thread has run, or could not be started. An `Event` would not do: a wait for it that is
        interrupted at the wrong moment keeps the lock that `set` needs."""
        self._runs.acquire()

    @property
    def is_begun(self) -> bool:
        """`start` has come so far that the thread runs, or will run."""
        return self._is_begun

    def start(self) -> None:
        """As `threading.Thread.start`. If this is interrupted, the thread may run all the same (`is_begun`). Raises
        `CannotStartThread`, and may be repeated then."""
        self._runs.acquire(blocking=False)  # an earlier start has failed
        begins, failed = threading.Lock(), list[RuntimeError]()
        begins.acquire()
        # `threading.Thread.start` takes locks, which an interrupt would leave taken. So it is called in another thread:
        # there no interrupt comes. Nor does one come before that thread runs: Python looks for signals after a call.
        self._is_begun = True
        try:
            _thread.start_new_thread(self._begin, (begins, failed))
        except RuntimeError as error:
            self._is_begun = False
            raise CannotStartThread(str(error)) from None
        begins.acquire()
        if failed:
            raise CannotStartThread(str(failed[0]))

    def _begin(self, begins: threading.Lock, failed: list[RuntimeError]) -> None:
        try:
            super().start()
        except RuntimeError as error:
            failed.append(error)
            self._is_begun = False
            self._runs.release()
        finally:
            begins.release()

    def run(self) -> None:
        """`threading.Thread` calls this in the thread."""
        try:
            super().run()
        finally:
            self._has_run = True
            self._runs.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the thread has ended. False: it has not ended within so many seconds. None: however long it takes.
        May be repeated after whatever was raised here. A thread that was never started counts as ended, and so does
        the copy of one in a forked child. Raises `RuntimeError` in the thread itself."""
        if not self._is_begun or os.getpid() != self._creator:
            return True
        if threading.current_thread() is self:
            raise RuntimeError("a thread cannot wait for its own end")
        if not self._has_run:
            if not self._runs.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                return False
            self._runs.release()  # if an error comes before this, `_has_run` is True, and nobody needs the lock
        if self._is_begun:
            self.join(timeout_s)  # only the interpreter's own last steps are left
        return True


def sheltered(call: Callable[[], _T], *, undo: Callable[[_T], object] = lambda made: None) -> _T:
    """Make a call in a thread of its own, and wait for it. Returns and raises what the call does.

    A signal's handler may raise an error at any moment, but only in the main thread. KeyboardInterrupt is one. So it
    comes while this function waits, and does not break off the call. When the call has ended, `undo` gets what it has
    returned, and the error is raised.
    """
    returned: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread: Thread | None = None
    interrupt: BaseException | None = None
    while not (returned or raised):
        try:
            if thread is None or not thread.is_begun:
                thread = Thread(run, name="reknit call")
                thread.start()
            thread.wait(None)
        except CannotStartThread:
            run()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        if returned:
            sheltered(lambda: undo(returned[0]))
        raise interrupt
    if raised:
        raise raised.pop()
    return returned[0]
