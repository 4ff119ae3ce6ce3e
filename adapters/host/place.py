"""The folder in which the agents of one user keep their locks: one per host and user.

1. No variable moves the folder. It is in /tmp, or in /dev/shm where /tmp cannot be written to.
2. The *chosen* folder is one that belongs to this user, that nobody else can enter, and whose sticky bit is set. Only
   its owner can make such a folder. So no other user can take the place, whatever they put into /tmp.
3. The usual name is `reknit-<uid>`. If another user has taken this name, the folder has a random suffix. A folder that
   was chosen stays the chosen one, even if the usual name becomes free.
4. At most one folder is chosen. An agent that finds none makes one. Then it locks every folder of the user, looks once
   more, and chooses only if it has locked all that it sees.
   Proof: P chooses x, and Q later chooses y. Q did not see x in its second look, or Q would hold the lock of x and find
   it chosen. So x was made after Q's second look, and P's second look came later still. By then y was there and locked
   by Q. So P saw y, waited for its lock, and chose after Q: a contradiction.
5. An agent holds a shared lock on the folder for as long as it lives. systemd-tmpfiles removes nothing from a folder
   that is locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from reknit.adapters.runtime.ports import Refused
from reknit.core.job.reasons import Refusal

BASES = ("/tmp", "/dev/shm")
"""The folder is in the first of these in which this user can make a folder."""
_UNUSABLE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that say that a base cannot be used on this host, now or later."""
WAIT_S = 5.0
"""How long an agent waits while other processes choose or clean the folder. Seconds."""
_NAP_S = 0.005
_CHOSEN = stat.S_ISVTX | 0o700


def open_folder() -> tuple[int, str]:
    """A descriptor of the chosen folder, and its path. Files in the folder are to be reached by the descriptor, because
    a folder that was cleaned away may have a successor with its path.

    The caller closes the descriptor. Until then the folder is locked as rule 5 above says. Waits 5 s at most. Raises
    `Refused`.
    """
    path = ""
    try:
        for base in BASES:
            try:
                path = f"{base}/reknit-{os.geteuid()}"
                return _opened(base)
            except OSError as error:
                if error.errno not in _UNUSABLE or base == BASES[-1]:
                    raise
    except OSError as error:
        raise Refused(Refusal.SETUP, f"the folder for this node's lock, {path}: {error.strerror}") from error
    raise AssertionError("there is no base")


def pid_namespace() -> int:
    """The namespace of pids of this process. 0: the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def boot() -> str:
    """The boot of this host. Two hosts never have the same. Empty: the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def this_host() -> str:
    """The boot of this host and the namespace of pids: with them a pid and a start time name one process."""
    return f"{boot()}/{pid_namespace()}"


def _opened(base: str) -> tuple[int, str]:
    give_up = time.monotonic() + WAIT_S
    while True:
        if (path := _chosen(base)) and (fd := _entered(path)) >= 0:
            return fd, path
        if not path and _choose(base):
            continue
        if time.monotonic() >= give_up:
            where = path or base
            raise Refused(Refusal.SETUP, f"the folder for this node's lock, {where}, is locked by another process")
        time.sleep(_NAP_S)


def _chosen(base: str) -> str:
    """The path of the chosen folder. Empty: there is none."""
    usual = f"{base}/reknit-{os.geteuid()}"
    return usual if _is_chosen(usual) else next(filter(_is_chosen, _own(base)), "")


def _choose(base: str) -> bool:
    """Choose a folder. False: another agent is choosing one, so the caller looks again."""
    if not _own(base):
        _make(base)
    fds: list[int] = []
    try:
        for path in _own(base):
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
            fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = [os.fstat(fd) for fd in fds]
        seen = [os.lstat(path) for path in _own(base)]
        if not fds or {_identity(one) for one in locked} != {_identity(one) for one in seen}:
            return False
        if not any(one.st_mode & stat.S_ISVTX for one in seen):
            os.fchmod(fds[0], _CHOSEN)
        return True
    except (BlockingIOError, FileNotFoundError):
        return False  # another agent chooses, or a cleaner has removed a folder
    finally:
        for fd in fds:
            os.close(fd)


def _make(base: str) -> None:
    usual = f"{base}/reknit-{os.geteuid()}"
    try:
        os.mkdir(usual, 0o700)
    except FileExistsError:
        if not _mode(usual):  # otherwise another agent has just made it
            os.mkdir(f"{usual}-{os.urandom(8).hex()}", 0o700)


def _entered(path: str) -> int:
    """A descriptor of the chosen folder, with a shared lock. -1: somebody cleans the folder now, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if _is_chosen(path) and os.path.samestat(os.fstat(fd), os.lstat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1


def _own(base: str) -> list[str]:
    """The folders of this user that could be chosen, and the chosen one, in the order of their names."""
    usual = f"reknit-{os.geteuid()}"
    names = [name for name in os.listdir(base) if name == usual or name.startswith(f"{usual}-")]
    return [path for name in sorted(names) if _mode(path := f"{base}/{name}")]


def _is_chosen(path: str) -> bool:
    return bool(_mode(path) & stat.S_ISVTX)


def _mode(path: str) -> int:
    """The mode of this folder. 0: it is not there, or belongs to another user, or is open to others.

    Raises `Refused` for a chosen folder that was opened to others: agents that run may have their locks in it."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return 0
    if not found.st_mode & 0o077:
        return found.st_mode
    if found.st_mode & stat.S_ISVTX:
        raise Refused(
            Refusal.SETUP, f"the folder for this node's lock, {path}, is open to other users; close it with chmod 1700"
        )
    return 0


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
