"""Processes that carry a mark in their environment: finding them and ending them.

Workers get a variable with the mark of their node. Whatever a worker starts inherits it, and keeps it when it makes a
session of its own or when its parent dies.

1. A process that overwrites its own environment, as some programs do to change their title, is not found.
2. The number of a process that has ended may be given to another process at any time. So a process is held by a pidfd
   before its environment is read, and the signal goes through the pidfd. Where there are no pidfds, psutil compares
   the time at which the process was started.
3. A process that vanishes during the look, or that this user must not read, is not an error.
4. While a program takes the place of another one in a process (exec), the kernel shows an empty environment. So a
   process without any variable is looked at again a moment later.
5. Between fork and exec a process shows the environment of its parent. Whoever starts marked processes carries the
   mark itself, or these are not found in that moment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from attrs import frozen

from .clock import is_readable

if TYPE_CHECKING:
    from psutil import Process

MARK = "REKNIT_NODE"
"""The environment variable that marks the workers of a node."""
_NAP_S = 0.005
"""Between two looks at a process."""


@frozen
class _Held:
    """A process that cannot be mistaken for a later one with its number."""

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
            pass  # dead already; or it changed its user, and then it stays

    def wait(self, give_up: float) -> None:
        """Until it has ended, or `give_up` on the monotonic clock."""
        if self.pidfd >= 0:
            is_readable(self.pidfd, give_up - time.monotonic())
            return
        while _is_alive(self.process) and time.monotonic() < give_up:
            time.sleep(_NAP_S)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


def end_marked(mark: str, give_up_s: float, spared: Collection[int] = (), *, name: str = MARK) -> int:
    """SIGKILL every process of this user whose environment variable `name` is `mark`, or begins with `mark` and a
    slash; how many processes ended.

    Not this process, its ancestors, and the `spared` pids. Looks again until none is left, as a process may fork
    before it dies, or until `give_up_s` seconds have passed."""
    return end_marked_counting(mark, give_up_s, spared, name=name)[0]


def end_marked_counting(
    mark: str | frozenset[str], give_up_s: float, spared: Collection[int] = (), *, name: str = MARK
) -> tuple[int, tuple[int, ...]]:
    """Like `end_marked`, and names the processes that are still there when the time is over. `mark`: one mark or
    several, for which the process table is read once."""
    give_up = time.monotonic() + give_up_s
    # psutil reads environments as text files, in which every kind of line end becomes a newline.
    wanted = {each.replace("\r\n", "\n").replace("\r", "\n") for each in ({mark} if isinstance(mark, str) else mark)}
    ended: set[int] = set()
    while found := _marked(wanted, name, spared):
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


def _marked(wanted: Collection[str], name: str, spared: Collection[int]) -> list[_Held]:
    import psutil

    passed = {*spared, *_ancestors()}
    found: list[_Held] = []
    unclear: list[_Held] = []
    try:
        pids = psutil.pids()
    except OSError:
        return []  # a sandbox hides the process table, or no descriptor is free
    try:
        for pid in pids:
            if pid not in passed and (held := _held(pid)):
                environ = _environ(held.process)
                if environ == {}:
                    unclear.append(held)
                else:
                    _keep(held, found, environ, name, wanted)
        if unclear:
            time.sleep(_NAP_S)  # rule 4 above
        while unclear:
            held = unclear.pop()
            _keep(held, found, _environ(held.process), name, wanted)
    except BaseException:
        for held in (*found, *unclear):
            held.close()
        raise
    return found


def _keep(held: _Held, found: list[_Held], environ: dict[str, str] | None, name: str, wanted: Collection[str]) -> None:
    """Put the process among those that were found, or let go of it."""
    value = "" if environ is None else environ.get(name, "")
    if any(value == mark or value.startswith(mark + "/") for mark in wanted):
        found.append(held)
    else:
        held.close()


def _held(pid: int) -> _Held | None:
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
        return _Held(psutil.Process(pid), pidfd)
    except (psutil.Error, OSError):
        if pidfd >= 0:
            os.close(pidfd)
        return None


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
