"""Knowing and ending the descendants of this process, and what a forked child does with copies that it must not keep.

1. A subreaper adopts every descendant whose parent dies, even if the descendant has forked twice or has a session of
   its own. So once this process has no child, nothing that it ever started is left. Killing the children until there
   are none ends all descendants.
2. A process that adopts children must also reap them.
3. A host program may fork at any time. Its child gets a copy of every descriptor. A socket or a lock whose end means
   that its owner has died must not live on in such a copy (`abandon_in_forks`).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from signal import SIGKILL
from typing import Protocol
from weakref import WeakSet

_PR_SET_CHILD_SUBREAPER = 36
_NAP_S, _LONG_NAP_S = 0.001, 0.05
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def become_subreaper() -> bool:
    """Make this process adopt its orphaned descendants. False where the system does not offer that."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        return int(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False  # this libc has no `prctl`


def children() -> list[int]:
    """The children of this process, dead children that nobody has reaped included. Raises `OSError` if no descriptor
    is free."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise
        return _scan()  # no Linux
    found: list[int] = []
    for thread in threads:  # a child belongs to the thread that forked it, an adopted child to any thread
        try:
            found += map(int, _read(f"/proc/self/task/{thread}/children").split())
        except FileNotFoundError:
            # Either the thread has just ended, or the kernel was built without these files.
            if not os.path.exists("/proc/self/task/" + thread):
                continue
            return _scan()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise
            return _scan()
    return found


class Children:
    """`children` for a process that must know them even if no descriptor is free. To be made by its first thread, which
    alone starts processes."""

    def __init__(self) -> None:
        try:
            self._fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
        except OSError:
            self._fd = -1  # the kernel has no such file, or no descriptor is free now

    def now(self) -> list[int]:
        """Raises `OSError` if no descriptor is free and none was free at the start."""
        try:
            return children()
        except OSError:
            if self._fd < 0:
                raise
        # The kernel gives adopted children to the first thread of a process as long as this thread lives.
        parts: list[bytes] = []
        while part := os.pread(self._fd, 65536, sum(map(len, parts))):
            parts.append(part)
        return [*map(int, b"".join(parts).split())]

    def close(self) -> None:
        """May be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def stat_of(process: str) -> list[bytes]:
    """What the kernel says of a process in /proc/<pid>/stat, beginning with its state (proc_pid_stat(5)).

    `process`: the pid, or `<pid>/task/<tid>` for a thread. Raises `OSError` if there is no such process, or no /proc.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # the name of the program may hold anything


def descendants(pid: int) -> list[int]:
    """The children of a child of this process, their children, and so on. Empty where there is no /proc."""
    found: list[int] = []
    rest = [pid]
    while rest:
        parent = rest.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                rest += map(int, _read(f"/proc/{parent}/task/{thread}/children").split())
        except OSError:
            continue  # it has just ended, or the kernel has no such files
        found += [p for p in rest if p not in found]
    return found


def _scan() -> list[int]:
    """The same, from the table of all processes. Loads psutil, which the start of a job on Linux does without."""
    import psutil

    try:
        return [child.pid for child in psutil.Process().children()]
    except (psutil.Error, OSError):
        return []  # a sandbox that hides even this process


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def sweep(deadline_s: float, spared: Collection[int] = ()) -> tuple[int, ...]:
    """SIGKILL and reap the children, and the children that these leave behind, until only the `spared` pids are left.

    Returns the pids that are still there after `deadline_s` seconds: processes that cannot be killed.
    """
    return sweep_counting(deadline_s, spared)[1]


def sweep_counting(
    deadline_s: float, spared: Collection[int] = (), look: Callable[[], list[int]] = children
) -> tuple[int, tuple[int, ...]]:
    """Like `sweep`. Returns also, first, how many processes ended. `look`: finds the children."""
    give_up = time.monotonic() + deadline_s
    ended, nap_s = 0, _NAP_S
    while True:
        pids = [pid for pid in look() if pid not in spared]
        for pid in pids:
            signal_process(pid, SIGKILL)
        if spared:
            # No waitpid(-1): it could reap a spared child, and the code that waits for that child would never know.
            count = sum(map(reaped, pids)) if pids else None
        else:
            count = _reap_all()
        if count is None:  # the kernel says that there is no child, which is more certain than a list
            return ended, ()
        ended += count
        # The deadline counts in every case: something that forks faster than we kill must not keep us.
        if time.monotonic() >= give_up:
            return ended, tuple(pids)
        if count:
            nap_s = _NAP_S
            continue
        # A killed process takes a moment to end. Sleeping is harmless: this is the end of a run, not the agent's loop.
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONG_NAP_S)


def reap(pids: Sequence[int], deadline_s: float) -> None:
    """Reap these children, which were killed, as they die. Those that live after `deadline_s` seconds are left."""
    give_up = time.monotonic() + deadline_s
    for pid in pids:
        nap_s = _NAP_S
        while not reaped(pid) and time.monotonic() < give_up:
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONG_NAP_S)


def reaped(pid: int) -> bool:
    """True if this child is dead. It is reaped then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _reap_all() -> int | None:
    """How many dead children were reaped, None if there is no child at all."""
    count = 0
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return count or None
        if pid == 0:
            return count
        count += 1


class Abandoned(Protocol):
    """Something whose descriptors belong to one process alone."""

    def abandon(self) -> None:
        """In a forked child: close its copies of the descriptors, and do nothing else."""


def abandon_in_forks(what: Abandoned) -> None:
    """Let every child that is forked from this process call `what.abandon()`, as long as `what` exists."""
    _abandoned.add(what)


def _abandon_all() -> None:
    for what in _abandoned:
        what.abandon()


_abandoned: WeakSet[Abandoned] = WeakSet()
os.register_at_fork(after_in_child=_abandon_all)


def pidfd_of(pid: int) -> int:
    """A descriptor that is readable once this process has ended. -1: the system has none, or the process has ended."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    except OSError:
        return -1


def signal_process(pid: int, signum: int) -> None:
    """Send a signal to a child. No error if it is dead already, or runs as another user."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # dead; or it runs as another user now, and is reported as a process that cannot be killed


def signal_group(pgid: int, signum: int) -> None:
    """Send a signal to a process group. Its leader must be a child that is not reaped yet: until then the number cannot
    belong to another group."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        pass
