"""The signals of a program that waits for its processes.

1. While a context is open, the signals that TORCHELASTIC_SIGNALS_TO_HANDLE names raise `SignalException` in the main
   thread. Without the variable these are SIGTERM, SIGINT, SIGHUP and SIGQUIT.
2. Signals are taken by the main thread only: no other can. A context that is started in another thread takes none, and
   says so once.
3. The handlers that were there come back when the last context that took the signal is closed. A handler that the
   program has set meanwhile stays.
4. While the keeper is being talked to, a signal is held back, and raised afterwards. Otherwise a message could be lost
   half way.
5. A forked child has the handlers that were there before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from reknit.adapters.runtime.threads import is_main_thread

VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class SignalException(Exception):
    """This process got a signal while it waited for its processes."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class _Taken:
    """A signal that contexts have taken."""

    def __init__(self, before: Any) -> None:
        self.before = before
        """The handler that was there."""
        self.handler: Any = None
        """The handler that the latest context has set. None: no context has set one yet."""
        self.count = 0
        """Number of contexts that have taken it and are not closed."""


_taken: dict[signal.Signals, _Taken] = {}
_held_back: list[signal.Signals] | None = None
"""Signals that came while the main thread held them back. None: it does not."""
_wake: Callable[[], None] | None = None
"""Ends the wait that is under way while signals are held back. None: there is no wait."""
_has_warned = False


def take(
    install: Callable[..., Any], handler: Callable[..., Any], warn: Callable[..., None], names: str | None = None
) -> list[signal.Signals]:
    """Take the signals. Returns those that were taken, for `put_back`. `names`: with commas. None: those of the
    variable.

    `install`, `handler`, `warn`: `signal.signal`, `raise_signal` and the method of a logger, as the caller has them. A
    test may have patched them there.
    """
    global _has_warned
    if not is_main_thread():
        if not _has_warned:
            _has_warned = True
            warn(
                "processes were started in another thread than the main thread: a signal that ends this program kills "
                "them without a grace"
            )
        return []
    names = os.environ.get(VARIABLE, DEFAULT) if names is None else names
    return [signum for name in names.split(",") if (signum := _take_one(name.strip(), install, handler, warn))]


def _take_one(
    name: str, install: Callable[..., Any], handler: Callable[..., Any], warn: Callable[..., None]
) -> signal.Signals | None:
    try:
        signum = signal.Signals[name]
        before = install(signum, handler)
    except (KeyError, OSError, ValueError):  # there is no such signal, or nobody can take it
        warn("%s names %s, which cannot be taken", VARIABLE, name or "an empty name")
        return None
    taken = _taken.setdefault(signum, _Taken(before))
    if before is not taken.handler:
        taken.before = before  # the program has set it since the last context took the signal
    taken.handler = handler
    taken.count += 1
    return signum


def put_back(signals: Iterable[signal.Signals]) -> None:
    """A context is closed that has taken these signals."""
    with holding_back():
        for signum in signals:
            _taken[signum].count -= 1
            if _taken[signum].count == 0:
                _put_back_one(signum)


def _put_back_one(signum: signal.Signals) -> None:
    if not is_main_thread():
        return  # only the main thread can. The handler does it at the next signal, or the next `take` does
    taken = _taken.pop(signum)
    # None: the handler that was there is one of C, which Python cannot set again.
    if signal.getsignal(signum) is taken.handler:
        signal.signal(signum, signal.SIG_DFL if taken.before is None else taken.before)


def raise_signal(signum: int, frame: FrameType | None) -> None:
    """The handler. Python calls it in the main thread."""
    number = signal.Signals(signum)
    if number in _taken and _taken[number].count == 0:  # its context was closed in another thread
        _put_back_one(number)
        signal.raise_signal(number)
    elif _held_back is not None:
        _held_back.append(number)
        if _wake is not None:
            _wake()
    else:
        raise _exception(number)


def _exception(signum: signal.Signals) -> SignalException:
    return SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=signum)


@contextmanager
def holding_back(wake: Callable[[], None] | None = None) -> Iterator[Callable[[], int]]:
    """A context in which signals are held back. At its end the first of them is raised. May be nested: the outermost
    raises. In another thread than the main thread it does nothing.

    `wake`: called at each signal, in the main thread. None: as in the context around this one.
    Gives a function that tells how many signals have come since the outermost context began.
    """
    global _held_back, _wake
    if not is_main_thread():
        yield lambda: 0
        return
    is_outermost, wake_before = _held_back is None, _wake
    if is_outermost:
        _held_back = []
    _wake = wake or _wake
    held = _held_back
    try:
        yield lambda: len(held or ())
    finally:
        _wake = wake_before
        if is_outermost:
            _held_back = None
            if held:
                raise _exception(held[0])  # even if there is an exception already: nobody else learns of the signal


def _forget_all() -> None:
    """In a forked child."""
    global _held_back
    _held_back = None
    for signum in list(_taken):
        _put_back_one(signum)


os.register_at_fork(after_in_child=_forget_all)
