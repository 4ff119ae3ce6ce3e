"""What killed agents have left behind: finding these processes and ending them.

Workers get a variable with the mark of their node. Whatever a worker starts inherits it, and keeps it when it makes a
session of its own or when its parent dies. Agents also write down which processes they have (`record.py`).

1. A process is found by its mark, or because its agent has written it down. Its descendants are found as well. If it
   leads a process group, so are the members of the group.
2. A process may clear its environment. And of a forked process the kernel shows the environment with which the forking
   program was started. So on Linux the mark is also a number in a limit of the keeper (`carry`). Children inherit
   limits, and a daemon that has cleared its environment and closed its files still has them.
3. The pid of a process that has ended may be given to another process at any time. So a pidfd of the process is opened
   before its environment or its start time is read, and the signal goes through the pidfd. Where there are no pidfds,
   psutil compares the time at which the process was started.
4. A process that vanishes during the look, or that this user must not read, is not an error.
5. While a program takes the place of another one in a process (exec), the kernel shows an empty environment. So a
   process without any variable is looked at again a moment later.
6. Between fork and exec a process shows the environment of its parent. A process that starts marked processes carries
   the mark itself. Otherwise its children would not be found in that moment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.runtime.clock import is_readable

from .children import stat_of

if TYPE_CHECKING:
    from psutil import Process

    from .record import ProcessId

MARK = "REKNIT_NODE"
"""The environment variable that marks the workers of a node. A mark has at most 200 characters, without spaces."""
_NAP_S = 0.005
"""Seconds between two looks at a process."""
_CARRIED, _NODE_BITS, _PART_BITS = 1 << 62, 40, 22
"""A limit that shows a mark has this bit, then bits for the mark up to a slash, then bits for the whole mark. No other
program asks for such a limit: as microseconds it is more than a hundred thousand years."""


@frozen
class _Pinned:
    """A process that cannot be mistaken for a later one with its pid."""

    process: Process
    pidfd: int
    """-1 where the system has none."""

    def kill(self) -> None:
        import psutil

        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            else:
                self.process.kill()
        except (OSError, psutil.Error):
            pass  # it is dead already, or it runs as another user, who alone can end it

    def wait(self, give_up: float) -> None:
        """Wait until the process has ended, or the monotonic clock shows `give_up`."""
        if self.pidfd >= 0:
            is_readable(self.pidfd, give_up - time.monotonic())
            return
        while _is_alive(self.process) and time.monotonic() < give_up:
            time.sleep(_NAP_S)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


def carry(mark: str) -> None:
    """Make this process and what it starts from now on carry the mark, whatever becomes of the environment. Does
    nothing where the system cannot do that, or where the operator has set the limit, also if only the soft one.

    The limit is RLIMIT_RTTIME. It bounds a real-time process that does not sleep, and is infinite almost everywhere.
    The value that shows a mark is as good as infinite, and a process may still raise it."""
    import resource

    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        if hard == resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or _is_mark(soft)):
            resource.setrlimit(resource.RLIMIT_RTTIME, (_number(mark), hard))
    except (AttributeError, OSError, ValueError):
        pass  # no Linux, or a sandbox


def _is_mark(limit: int) -> bool:
    return _CARRIED <= limit < 2 * _CARRIED


def _number(mark: str) -> int:
    """The limit that shows this mark."""
    node = _hashed(mark.partition("/")[0]) >> 64 - _NODE_BITS
    return _CARRIED | node << _PART_BITS | _hashed(mark) >> 64 - _PART_BITS


def _hashed(text: str) -> int:
    """FNV-1a with 64 bits. The library's hashes are slow to import, and Python's own differs between processes."""
    value = 0xCBF29CE484222325
    for byte in text.encode(errors="surrogateescape"):
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def end_marked(
    marks: str | Collection[str], give_up_s: float, known: Collection[ProcessId] = ()
) -> tuple[int, tuple[int, ...]]:
    """SIGKILL what killed agents have left: (1) every process of this user whose variable `MARK` is one of the marks,
    or begins with one and a slash, (2) the `known` processes, (3) the descendants and the process groups of both.

    Spares this process and its ancestors. Looks again until none is left, as a process may fork before it dies, or
    until `give_up_s` seconds have passed. Returns how many processes ended, and the pids of those that are still there.
    """
    give_up = time.monotonic() + give_up_s
    wanted = {marks} if isinstance(marks, str) else {*marks}
    ended: set[int] = set()
    while found := _found(wanted, known):
        try:
            for held in found:
                held.kill()
            for held in found:
                held.wait(give_up)
            left = [held.process.pid for held in found if _is_alive(held.process)]
        finally:
            for held in found:
                held.close()
        ended |= {held.process.pid for held in found}.difference(left)
        if time.monotonic() >= give_up:
            return len(ended), tuple(sorted(left))
    return len(ended), ()


def processes_of(pairs: Collection[tuple[int, int]]) -> tuple[ProcessId, ...]:
    """Processes by pid and start time."""
    from .record import ProcessId

    return tuple(ProcessId(pid, start) for pid, start in pairs)


def _found(wanted: Collection[str], known: Collection[ProcessId]) -> list[_Pinned]:
    """Each process once."""
    passed = _ancestors()
    found = {held.process.pid: held for held in _marked(wanted, passed)}
    try:
        more = [pid for pid in known if pid.pid not in found and pid.pid not in passed]
        for held in _held_known(more):
            found[held.process.pid] = held
        if found:
            for held in _held_known(_belonging({*found}, passed)):
                found[held.process.pid] = held
    except BaseException:
        for held in found.values():
            held.close()
        raise
    return [*found.values()]


def _marked(wanted: Collection[str], passed: Collection[int]) -> list[_Pinned]:
    """`passed`: pids that are not looked at."""
    found: list[_Pinned] = []
    unclear: list[_Pinned] = []
    try:
        for pid in _pids():
            if pid not in passed and (held := _held(pid)):
                environ = _environ(held.process)
                if _carries(pid, wanted) and _is_alive(held.process):  # a dead process has limits until it is reaped
                    found.append(held)
                elif environ == {}:
                    unclear.append(held)
                else:
                    _keep(held, found, environ, wanted)
        if unclear:
            time.sleep(_NAP_S)  # rule 5 above
        while unclear:
            held = unclear.pop()
            _keep(held, found, _environ(held.process), wanted)
    except BaseException:
        for held in (*found, *unclear):
            held.close()
        raise
    return found


def _keep(held: _Pinned, found: list[_Pinned], environ: dict[str, str] | None, wanted: Collection[str]) -> None:
    """Put the process among those that were found, or let go of it."""
    if environ is not None and _is_wanted(environ.get(MARK, ""), wanted):
        found.append(held)
    else:
        held.close()


def _is_wanted(mark: str, wanted: Collection[str]) -> bool:
    return any(mark == each or mark.startswith(each + "/") for each in wanted)


def _carries(pid: int, wanted: Collection[str]) -> bool:
    """Whether a limit of the process shows one of these marks (`carry`)."""
    import resource

    try:
        limit = resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    except (AttributeError, OSError):
        return False  # no Linux; or the process has just ended, or belongs to another user
    if not _is_mark(limit):
        return False  # infinite, as it is for almost all processes, or set by the operator
    for each in wanted:
        ignored = 0 if "/" in each else _PART_BITS  # without a slash it stands for all marks that begin with it and one
        if limit >> ignored == _number(each) >> ignored:
            return True
    return False


def _held_known(known: Collection[ProcessId]) -> list[_Pinned]:
    """Those of these processes that are there and belong to this user."""
    from .record import identified

    found: list[_Pinned] = []
    for process in known:
        if held := _held(process.pid):
            if identified(process.pid) == process and _is_ours(held.process) and _is_alive(held.process):
                found.append(held)
            else:
                held.close()
    return found


def _belonging(pids: Collection[int], passed: Collection[int]) -> list[ProcessId]:
    """The descendants of these living processes, and the members of the groups that they lead, with their descendants.
    Empty where there is no /proc."""
    from .record import ProcessId

    parents: dict[int, int] = {}
    groups: dict[int, int] = {}
    starts: dict[int, int] = {}
    for pid in _pids():
        try:
            fields = stat_of(str(pid))
            parents[pid], groups[pid], starts[pid] = int(fields[1]), int(fields[2]), int(fields[19])
        except (OSError, IndexError, ValueError):
            continue  # it has just ended
    found = _with_descendants(pids, parents, passed)
    # This process may be a member of such a group, and so may what it has started.
    spared = {*passed, *_with_descendants({os.getpid()}, parents, ())} - found
    found |= _with_descendants({pid for pid, group in groups.items() if group in pids} - spared, parents, spared)
    return [ProcessId(pid, starts[pid]) for pid in found - {*pids} if pid in starts]


def _with_descendants(pids: Collection[int], parents: Mapping[int, int], passed: Collection[int]) -> set[int]:
    found = {*pids}
    while more := {pid for pid, parent in parents.items() if parent in found} - found - {*passed}:
        found |= more
    return found


def _pids() -> list[int]:
    import psutil

    try:
        return list(psutil.pids())
    except OSError:
        return []  # a sandbox hides the process table, or no descriptor is free


def _held(pid: int) -> _Pinned | None:
    import psutil

    pidfd = -1
    if hasattr(os, "pidfd_open"):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError:
            pass  # a kernel without pidfds, or no descriptor is free
    try:
        return _Pinned(psutil.Process(pid), pidfd)
    except (psutil.Error, OSError):
        if pidfd >= 0:
            os.close(pidfd)
        return None


def _is_ours(process: Process) -> bool:
    import psutil

    try:
        return bool(process.uids().real == os.getuid())
    except (psutil.Error, OSError):
        return False


def _environ(process: Process) -> dict[str, str] | None:
    """None if it is not known: the process has just ended, or belongs to another user."""
    import psutil

    try:
        return dict(process.environ()) if os.getuid() in (0, process.uids().real) else None
    except (psutil.Error, OSError):
        return None


def _is_alive(process: Process) -> bool:
    """Not ended: a dead process that nobody has reaped counts as ended."""
    import psutil

    try:
        is_dead: bool = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return not is_dead
    except (psutil.Error, OSError):
        return False


def _ancestors() -> set[int]:
    """This process, its parent, and so on."""
    import psutil

    try:
        return {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    except (psutil.Error, OSError):
        return {os.getpid(), os.getppid()}  # the others are hidden from this user, and so are their environments
