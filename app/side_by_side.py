"""The same work for several things, side by side in processes."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

from reknit.app.input.devices import cpus

T = TypeVar("T")


@contextmanager
def side_by_side(
    work: Callable[..., T], *arguments: Sequence[Any], processes: int | None = None
) -> Iterator[Iterator[T]]:
    """What `work` returns, in the order of the arguments, which are paired as by `map`. Each is there as soon as it and
    those before it are.

        with side_by_side(play, clusters, seeds) as runs:
            found = list(runs)

    `work` and its arguments and results are pickled. `processes`: how many work at once. None: one for each CPU that
    this process may use. One alone is this process. They end with this process. What `work` raises is raised here.
    Raises `OSError` if a process was killed or cannot be started, and `RuntimeError` if no thread can be started.
    """
    count = min(len(arguments[0]), processes or cpus())
    if count < 2:
        yield map(work, *arguments)
        return
    try:
        with ProcessPoolExecutor(count, initializer=_begun) as pool:
            yield pool.map(work, *arguments)
    except BrokenProcessPool:
        text = "a process of this command was killed, perhaps because no memory was left"
        raise OSError(errno.ENOMEM, text) from None


def collect_rarely() -> None:
    """Let this process look for garbage in cycles rarely. Pure functions make many values and no cycles, and the search
    costs a quarter of the time. It is for processes that do nothing else."""
    gc.set_threshold(1_000_000)


def _begun() -> None:
    """Prepare a process. It must not outlive the one that wants its results."""
    collect_rarely()
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
