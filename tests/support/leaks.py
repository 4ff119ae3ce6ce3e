"""Finds what a piece of code leaves behind in this process, with psutil and the interpreter's own lists.

with nothing_left():
    journal = FileJournal(…)
    journal.close()
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.waiting import descriptors, until

_PYTEST = "PYTEST_CURRENT_TEST"  # which pytest itself writes


def children(pid: int | None = None) -> dict[int, str]:
    """The descendants of a process, dead ones that nobody has reaped included, with their command lines. None: of this
    process."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found[process.pid] = " ".join(process.cmdline()) or process.name()
        except psutil.NoSuchProcess:
            pass  # the process has just ended, and was reaped
        except psutil.ZombieProcess:
            found[process.pid] = "dead, and not reaped"
    return found


def marked(item: str) -> set[int]:
    """The processes that have `NAME=value` in their environment."""
    name, _, value = item.partition("=")
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.add(process.pid)
        except psutil.Error:
            pass  # the process has ended, or belongs to another user
    return found


def _state(folder: Path | None) -> Counter[str]:
    found = Counter(f"descriptor {what}" for what in descriptors())
    # Python 3.11 and 3.12 keep the entry of a thread that `threading` has not started and that has called
    # `current_thread`. A finalizer that joins a thread does so, and runs in any thread. The entry is no thread.
    known = (thread for thread in threading.enumerate() if os.path.exists(f"/proc/self/task/{thread.native_id}"))
    found.update(f"thread {thread.name} {thread.ident}" for thread in known)
    found.update(f"child {pid} ({what})" for pid, what in children().items())
    for number in signal.valid_signals():
        found[f"handler of signal {number:d}: {signal.getsignal(number)}"] += 1
    found.update(f"environment {name}={value}" for name, value in os.environ.items() if name != _PYTEST)
    if folder is not None:
        found.update(f"file {path}" for path in folder.rglob("*"))
    return found


@contextmanager
def nothing_left(folder: Path | None = None, may_stay: Callable[[str], bool] = lambda what: False) -> Iterator[None]:
    """A context. Threads, descriptors, children, signal handlers, variables and files below `folder` that come up in it
    must be gone after it. Something that was there before and is gone afterwards, such as a handler, is wrong as well.

    What is about to go, such as a thread that returns, is waited for. `may_stay` picks what may stay, such as the
    journal's file."""
    before = _state(folder)
    yield
    left: list[str] = []

    def is_clean() -> bool:
        after = _state(folder)
        changed = (after - before) + Counter({k: n for k, n in (before - after).items() if k.startswith(("h", "e"))})
        left[:] = sorted(what for what in changed if not may_stay(what))
        return not left

    try:
        until(is_clean, "everything to be let go of")
    except AssertionError:
        raise AssertionError("left behind: " + "; ".join(left)) from None
