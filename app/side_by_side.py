"""The same work for several things, side by side in processes.

`concurrent.futures` would do, but not at the limits of a machine. Its pool waits for ever if it gets no thread, leaves
a process behind if it cannot start the next, ends processes by a SIGTERM that they may ignore, and needs /dev/shm. Here
the caller's thread waits for one pipe of each process.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, TypeVar

from attrs import frozen

from reknit.app.input.devices import cpus

T = TypeVar("T")


@contextmanager
def side_by_side(
    work: Callable[..., T],
    *arguments: Sequence[Any],
    processes: int | None = None,
    tell: Callable[[], None] | None = None,
) -> Iterator[Iterator[T]]:
    """What `work` returns, in the order of the arguments, which are paired as by `map`.

        with side_by_side(play, clusters, seeds) as runs:
            found = list(runs)

    `work`, its arguments and its results are pickled. What it raises is raised here. The processes end with the
    context, and when this process ends. Raises `OSError` if one of them was killed.

    `processes`: how many are wanted. None: one for each CPU that this process may use. If one is wanted, or the system
    has none to give, the work is done in this process. `tell`: `work` gets a function as its last argument. Each call
    of it there calls `tell` here.
    """
    things = [*zip(*arguments, strict=True)]
    wanted = min(len(things), processes or cpus())
    workers: list[_Worker] = []
    try:
        if wanted > 1:
            with suppress(OSError):  # at a limit of the machine, those that there are do it all
                while len(workers) < wanted:
                    workers.append(_started(work, tells=tell is not None))
        if workers:
            yield _results(things, [worker.connection for worker in workers], tell)
        else:
            yield (work(*given) if tell is None else work(*given, tell) for given in things)
    finally:
        for worker in workers:
            worker.end()


def collect_rarely() -> None:
    """Let this process look for garbage in cycles rarely. Pure functions make many values and no cycles, and the search
    costs a quarter of the time. It is for processes that do nothing else."""
    gc.set_threshold(1_000_000)


# ---- the process that wants the results ------------------------------------------------------------------------------


@frozen
class _Worker:
    process: multiprocessing.Process
    connection: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _started(work: Callable[..., Any], *, tells: bool) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = multiprocessing.Process(target=_works, args=(work, theirs, tells), daemon=True)
        try:
            process.start()
        except BaseException:
            ours.close()  # if it has begun all the same, it ends
            raise
    return _Worker(process, ours)


def _results(things: Sequence[Any], idle: list[Any], tell: Callable[[], None] | None) -> Iterator[Any]:
    todo = enumerate(things)
    busy: dict[Any, int] = {}
    done: dict[int, Any] = {}
    for place in range(len(things)):
        while place not in done:
            while idle and (given := next(todo, None)) is not None:
                connection = idle.pop()
                busy[connection] = given[0]
                with suppress(ConnectionError):  # it was killed: there will be no answer either
                    connection.send(given[1])
            for connection in wait([*busy]):
                match _received(connection):
                    case "told", _ if tell is not None:
                        tell()
                    case "raised", error:
                        raise error
                    case "returned", value:
                        done[busy.pop(connection)] = value
                        idle.append(connection)
        yield done.pop(place)


def _received(connection: Any) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        text = "a process of this command was killed, perhaps because no memory was left"
        raise OSError(errno.ENOMEM, text) from None


# ---- the others ------------------------------------------------------------------------------------------------------


def _works(work: Callable[..., Any], connection: Connection, tells: bool) -> None:
    """What such a process does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    collect_rarely()
    with suppress(RuntimeError):  # without this thread, it ends with its parent as well, but not before the work
        Thread(target=_end_with_parent, daemon=True).start()
    more = (partial(connection.send, ("told", None)),) if tells else ()
    with suppress(EOFError, OSError):  # nobody wants the results any more
        while True:
            given = connection.recv()
            connection.send(_answer(work, (*given, *more)))


def _answer(work: Callable[..., Any], given: Sequence[Any]) -> tuple[str, Any]:
    try:
        return "returned", work(*given)
    except Exception as error:
        error.add_note(f"In another process:\n{''.join(traceback.format_exception(error))}")
        return "raised", error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
