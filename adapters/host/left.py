"""Ending what killed agents have left on this host: processes, and the files of their locks (`lock.py`).

1. Each agent that starts calls `end_left`. It looks for files whose agents are dead, first ends every process that they
   have left, and then removes the files. Two agents that start together both do so, and neither starts a worker
   before the processes have ended.
2. The file of a job with several nodes has a name that the next agent of the job and node locks again. That agent must
   not start workers while another agent ends processes with the same mark. So the other agent holds the lock meanwhile,
   and the next agent of the job waits for it (`hostlock.lock`).
3. Such a file may hold a note for the next agent of the job and node, which says that its agent hosted the store. Then
   the file stays for a day after its agent was found dead. From then on the file names no process.
4. Containers may share the folder of the locks and not their processes, and so may hosts. A file says to which boot of
   the host and which namespace of pids it belongs. Files of others are left to the agents there. If nobody has cleared
   or written such a file for a day and it is not locked, any agent removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from reknit.adapters.runtime.ports import Refused

from .lock import ALONE, END_S, NEW, alone_prefix, is_same_file, lock, remove
from .place import open_folder

if TYPE_CHECKING:
    from .record import HostRecord, ProcessId

_NEW_S = 60.0
"""A file that has had the name of a new one for longer than this was left by a killed agent. Seconds."""
_KEPT_S = 86400.0
"""How long files stay that must not be removed at once (rules 3 and 4 above). Seconds."""
_NAMED = re.compile("[0-9a-f]{32}")
"""The name of the file of a job with several nodes."""


def end_left(deadline_s: float = END_S) -> tuple[int, tuple[int, ...]]:
    """Kill the processes that killed agents have left behind on this host, wait until they have ended, and remove the
    files of these agents.

    Returns how many processes there were, and the pids of those that are still there after `deadline_s` seconds. The
    next agent tries these again.
    """
    try:
        folder, _ = open_folder()
    except (OSError, Refused):
        return 0, ()
    named: dict[str, int] = {}
    try:
        alone = _left_alone(folder)
        for name in filter(_NAMED.fullmatch, os.listdir(folder)):
            if (fd := _claimed(folder, name)) >= 0:
                named[name] = fd
        return _end(folder, alone, named, deadline_s) if alone or named else (0, ())
    except (OSError, ImportError):
        return 0, ()  # no descriptor is free, or the folder cannot be used: the files stay for the next agent
    finally:
        for fd in (*named.values(), folder):
            os.close(fd)


def left_alive() -> tuple[ProcessId, ...]:
    """The processes of killed agents on this host that still run, as far as the agents have written them down. Nothing
    is ended or removed. The next agent ends them."""
    from .record import is_alive

    try:
        folder, _ = open_folder()
    except (OSError, Refused):
        return ()
    try:
        names = [n for n in os.listdir(folder) if n.startswith(alone_prefix()) or _NAMED.fullmatch(n)]
        records = [_written(folder, name) for name in names if _is_left(folder, name)]
        known = {process for record in records if record is not None for process in record.processes}
        return tuple(sorted((p for p in known if is_alive(p)), key=lambda process: process.pid))
    except OSError:
        return ()
    finally:
        os.close(folder)


def _end(folder: int, alone: Collection[str], named: dict[str, int], deadline_s: float) -> tuple[int, tuple[int, ...]]:
    """`named`: by name, the locked files of jobs with several nodes."""
    from .orphans import end_marked  # slow to import, and rarely needed
    from .record import read

    records = [*(_written(folder, name) for name in alone), *map(read, named.values())]
    known = [process for record in records if record is not None for process in record.processes]
    marks = [*(name.removeprefix(alone_prefix()) for name in alone), *named]
    ended, stuck = end_marked(marks, deadline_s, known)
    if not stuck:
        for name in alone:
            remove(folder, name)
        for name, fd in named.items():
            _clear(folder, name, fd)
    return ended, stuck


def _left_alone(folder: int) -> list[str]:
    """The files of dead agents of jobs with one node."""
    left, prefix = [], alone_prefix()
    for name in os.listdir(folder):
        if name.startswith(prefix):
            if _is_left(folder, name):
                left.append(name)
        elif name.startswith(NEW):
            if _is_older(folder, name, _NEW_S):
                remove(folder, name)
        elif name.startswith(ALONE) and _is_older(folder, name, _KEPT_S) and _is_left(folder, name):
            remove(folder, name)
    return left


def _claimed(folder: int, name: str) -> int:
    """A descriptor of the locked file of a dead agent, which was not cleared yet. -1: it is none."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return -1  # its agent has just ended, or another one has cleared it
    try:
        if lock(fd) and is_same_file(fd, folder, name) and _is_uncleared(folder, name, fd):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1


def _is_uncleared(folder: int, name: str, fd: int) -> bool:
    from .record import CLEARED, read

    record = read(fd)
    if record is not None and record.agent not in (None, CLEARED):
        return True
    if _is_older(folder, name, _KEPT_S):
        remove(folder, name)
    return False


def _clear(folder: int, name: str, fd: int) -> None:
    """No process of the dead agent is left."""
    from .record import CLEARED, HostRecord, read, write

    record = read(fd)
    if record is not None and record.note:
        write(fd, HostRecord(CLEARED, (), record.note))
    else:
        remove(folder, name)


def _written(folder: int, name: str) -> HostRecord | None:
    """What a killed agent of a job with one node has written down. None: nothing."""
    from .record import read

    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None  # another agent has cleared it
    try:
        return read(fd)
    finally:
        os.close(fd)


def _is_older(folder: int, name: str, age_s: float) -> bool:
    """Whether nobody has changed this file for so long."""
    try:
        return time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > age_s
    except FileNotFoundError:
        return False  # its agent has just ended, or has given it another name


def _is_left(folder: int, name: str) -> bool:
    """Whether the agent that has locked this file is dead."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return False  # its agent has just ended, or another one has cleared it
    try:
        # Shared: with an exclusive lock, an agent that looks at the same moment would take this one for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return is_same_file(fd, folder, name)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
