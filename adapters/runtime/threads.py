"""Threads for whose end one can wait again after a wait that was interrupted, and calls that no interrupt breaks off.

When the handler of a signal raises an error in `threading.Thread.join`, Python 3.11 and 3.12 take the thread for
ended. Every later `join` then returns at once, and whoever closes something closes it under a thread that runs.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


def is_main_thread() -> bool:
    """Whether the caller runs in the main thread. May be asked in any thread: `threading.current_thread` lists a thread
    that `threading` has not started, and up to Python 3.12 for ever. A finalizer may run in such a thread."""
    return threading.get_ident() == threading.main_thread().ident


class Thread(threading.Thread):
    """A daemon thread: whatever it hangs in, it does not keep the process from ending."""

    def __init__(self, target: Callable[..., None], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._creator = os.getpid()
        self._is_begun = False
        self._has_run = False
        self._runs = threading.Lock()
        """Held while the thread runs. An `Event` would not do: a wait for it that is interrupted at the wrong moment
        keeps the lock that `set` needs."""
        self._runs.acquire()

    def start(self) -> None:
        """As `threading.Thread.start`. If this is interrupted, the thread may run all the same."""
        if self._is_begun:
            raise RuntimeError("threads can only be started once")
        self._is_begun = True
        try:
            super().start()
        except RuntimeError:
            self._is_begun = False
            raise

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
        self.join(timeout_s)  # only the interpreter's own last steps are left
        return True


def sheltered(call: Callable[[], _T], *, undo: Callable[[_T], object] = lambda made: None) -> _T:
    """Make a call in a thread of its own, and wait for it. Returns and raises what the call does.

    A signal's handler may raise an error at any moment, but only in the main thread. KeyboardInterrupt is one. Such an
    error comes while this function waits, and does not break off the call. Then (1) this function waits for the end of
    the call. (2) If the call has returned, `undo` gets the value. (3) The handler's error is raised, of several the
    last one. If `undo` fails, its error is raised instead.

    If the system has no thread to give, the call is made in the calling thread, and an interrupt can break it off.
    """
    made: _CallElsewhere[_T] | None = None
    undone: _CallElsewhere[object] | None = None
    interrupt: BaseException | None = None

    def see_through() -> None:
        nonlocal made, undone, interrupt
        while True:
            try:
                made = made or _CallElsewhere(call)
                made.wait()
                if interrupt is not None and made.returned:
                    undone = undone or _CallElsewhere(partial(undo, made.returned[0]))
                    undone.wait()
                return
            except BaseException as error:
                interrupt = error

    is_over = False
    while made is None or not is_over:
        try:
            see_through()
            is_over = True
        except BaseException as error:  # two signals came at once: this is raised where it goes on after the first one
            interrupt = error
    # From here to the end an interrupt would lose the value. Python runs handlers at calls and at jumps backward, and
    # here is neither.
    if undone is not None and undone.raised:
        raise undone.raised[0]
    if interrupt is not None:
        raise interrupt
    if made.raised:
        raise made.raised.pop()
    return made.returned[0]


class _CallElsewhere(Generic[_T]):
    """A call that is made once, in a thread of its own."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self.returned: list[_T] = []
        self.raised: list[BaseException] = []
        """This or `returned` has an item when the call has ended."""
        self._call = call
        self._turn = [True]
        """Whoever takes this item makes the call."""
        self._thread: Thread | None = None
        self._runs = threading.Lock()
        """Held until the call has ended."""
        self._runs.acquire()

    def wait(self) -> None:
        """Begin the call, if nobody has, and wait for its end. May be repeated, also after an interrupt."""
        if self.returned or self.raised:
            return
        if self._turn:
            try:
                # `Thread.start` takes locks, which an interrupt would leave taken. So another thread calls it.
                _thread.start_new_thread(self._begin, ())
            except RuntimeError as error:
                if type(error) is not RuntimeError:
                    raise  # a subclass: a signal's handler has raised it
                self._run()  # there is no thread to be had
        self._runs.acquire()
        if self._thread is not None:
            self._thread.wait(None)  # only its last steps are left

    def _begin(self) -> None:
        self._thread = Thread(self._run, name="reknit call")
        try:
            self._thread.start()
        except RuntimeError:
            self._run()  # there is no further thread to be had

    def _run(self) -> None:
        try:
            try:
                self._turn.pop()
            except IndexError:
                return
            self.returned.append(self._call())
        except BaseException as error:
            self.raised.append(error)
        self._runs.release()
