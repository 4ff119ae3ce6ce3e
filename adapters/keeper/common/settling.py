"""The descriptors of a new process: which of this process's become which of its own.

The standard library alone is imported here, because a process that is forked from a zygote imports this module.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NAMES = {1: "stdout", 2: "stderr"}


@contextmanager
def apart(ends: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """A context. Its value: `ends`, so that a new process can be given one descriptor after the other.

    `ends`: for a descriptor of the new process, the descriptor of this process that it becomes. If one number stands on
    both sides, a `dup2` would overwrite what a later one copies. So such a descriptor is first duplicated to a number
    above all others. The duplicates are closed at the end. Raises `OSError`.
    """
    above = max(ends, default=2) + 1
    moved: list[int] = []
    try:
        for number, fd in ends.items():
            if fd != number and fd in ends:
                moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above))
                ends = {**ends, number: moved[-1]}
        yield dict(ends)
    finally:
        for fd in moved:
            os.close(fd)


def settle(env: Mapping[str, str], ends: Mapping[int, int], ticket: int, foreign: Collection[int]) -> None:
    """In a process that was forked: become what a worker is that was started by exec. The arguments are those of
    `spawn.spawn`.

    `ticket`: the descriptor of the guard pipe. -1: there is none. `foreign`: descriptors that the worker must not have.
    """
    os.setpgid(0, 0)
    if ticket in ends:
        ticket = fcntl.fcntl(ticket, fcntl.F_DUPFD, max(ends) + 1)
    with apart(ends) as numbers:
        for number, fd in numbers.items():
            os.dup2(fd, number)
    if 0 not in ends and os.isatty(0):
        null = os.open(os.devnull, os.O_RDONLY)  # a background group that reads the terminal would be stopped
        os.dup2(null, 0)
        os.close(null)
    for fd in {*foreign} - {*ends, ticket}:
        os.close(fd)
    if ticket >= 0:
        os.set_inheritable(ticket, True)
    os.environ.clear()
    os.environ.update(env)
    _attach(ends)


def _attach(ends: Collection[int]) -> None:
    """Let `sys.stdout` and `sys.stderr` write to a file that was asked for. A notebook, for example, has put objects of
    its own there, which write elsewhere."""
    for number, name in NAMES.items():
        if number in ends and stat.S_ISREG(os.fstat(number).st_mode) and _number(getattr(sys, name)) != number:
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # it stays open


def _number(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1


def descriptors() -> set[int]:
    """The descriptors that are open in this process."""
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # this is the descriptor through which the list was read
        found.add(int(name))
    return found
