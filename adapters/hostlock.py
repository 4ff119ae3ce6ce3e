"""One agent per job and node on a host, and the end of what a killed agent has left behind.

A job with several nodes:

1. The lock is `flock` on a file that is named by job, endpoint and node. It ends with the process.
2. An agent that ends in order removes the file while it holds the lock. A file that is found unlocked was left by an
   agent that was killed, whose workers may still run. The agent that takes such a lock looks for them.
3. Workers carry a mark in their environment, by which they are found (`orphans`).

A job with one node has no name that another agent could take. Its mark is the nonce of its agent:

1. The agent holds a lock on a file that is named by its nonce. The file gets this name when it is locked already. So a
   file with such a name and without a lock has a dead agent, and is never locked again.
2. Each agent that starts looks for such files. It first ends every process that carries their nonces, and then removes
   the files. Two agents that start together both do so, and neither starts a worker before the processes have ended.
3. A keeper that dies alone changes nothing: its agent lives and holds the lock. A keeper that lives longer than its
   agent is about to end its workers, so nothing is lost if another agent is faster.
4. Containers may share the folder of the locks and not their processes. So the name of the file also names the
   namespace of the pids. Files of other namespaces are left to the agents there.
"""

from __future__ import annotations

import fcntl
import os
import time

from reknit.core.job.reasons import Refusal

from .children import abandon_in_forks
from .ports import Refused

_MOST_AGENTS = 10_000
_END_S = 5.0
_NEW = "new-"
"""How the name of a file begins that is not locked yet."""
_NEW_S = 60.0
"""A file that has had such a name for longer than this was left by a killed agent. Seconds."""


class Taken(Exception):
    """Another agent of the job runs on this host under this name. The text is one line."""


class HostLock:
    """Held until `release`, or the end of the process."""

    def __init__(self, fd: int, path: str, node: str, mark: str, *, was_left: bool) -> None:
        self._fd = fd
        self._path = path
        self._was_left = was_left
        abandon_in_forks(self)
        self.node = node
        self.mark = mark
        """The value of `orphans.MARK` in the environment of this node's workers."""

    def end_orphans(self, deadline_s: float = _END_S) -> int:
        """Kill the processes that an earlier agent has left behind and wait until they have ended; how many there were.

        Raises `Refused` if some are still there after `deadline_s` seconds.
        """
        if not self._was_left:
            return 0
        from .orphans import end_marked_counting  # slow to import, and rarely needed

        ended, left = end_marked_counting(self.mark, deadline_s)
        if left:
            pids = ", ".join(map(str, left))
            raise Refused(Refusal.SETUP, f"processes {pids}, which an earlier agent left here, survive SIGKILL")
        return ended

    def release(self) -> None:
        """May be repeated. A forked child of the agent lets go of its copy at once, and has nothing to release."""
        if self._fd < 0:
            return
        _remove(self._path)
        os.close(self._fd)
        self._fd = -1

    def abandon(self) -> None:
        """In a forked child: the lock is its parent's, and must end with the parent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def take(job: str, endpoint: str, node: str) -> HostLock:
    """Become the only agent of `job` on this host that is `node`.

    Raises `Taken` if there is one already, and `Refused` if the lock's file or folder cannot be used.
    """
    import hashlib  # slow to import, and not needed for a job with one node

    digest = hashlib.sha256(f"{job}\0{endpoint}\0{node}".encode(errors="surrogateescape")).hexdigest()[:32]
    path = os.path.join(_folder(), digest)
    try:
        fd, was_left = _locked(path)
    except BlockingIOError:
        pid = _read(path)
        whose = f" (pid {pid})" if pid else ""
        raise Taken(f"another agent of job {job} runs on this host as {node}{whose}") from None
    except OSError as e:
        raise Refused(Refusal.SETUP, f"the lock of this node, {path}: {e.strerror}") from None
    try:
        os.pwrite(fd, f"{os.getpid():<20}".encode(), 0)
    except OSError:
        pass  # a full disk: an agent that finds the lock taken cannot say by which process
    return HostLock(fd, path, node, f"{job}/{node}/{digest}", was_left=was_left)


def take_free(job: str, endpoint: str, name: str) -> HostLock:
    """Become `name`, or the first of `name`-2, `name`-3, … that is free.

    Several agents on one host are a usual way to try reknit out.
    """
    for number in range(1, _MOST_AGENTS):
        try:
            return take(job, endpoint, name if number == 1 else f"{name}-{number}")
        except Taken:
            continue
    raise Taken(f"{_MOST_AGENTS} agents of job {job} run on this host")


# ---- a job with one node ----


def take_alone(nonce: str) -> HostLock | None:
    """Show to later agents that this agent lives. Its workers carry `nonce` as their mark.

    None: no lock can be had here, for example because the disk is full. The job can run without one. If agent and
    keeper are killed together, what has left the workers' groups then stays.
    """
    try:
        folder = _folder()
        path, new = os.path.join(folder, _alone() + nonce), os.path.join(folder, _NEW + nonce)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except (OSError, Refused):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, path)
    except OSError:  # a file system without locks
        _remove(new)
        os.close(fd)
        return None
    return HostLock(fd, path, "", nonce, was_left=False)


def end_left_alone(deadline_s: float = _END_S) -> tuple[int, tuple[int, ...]]:
    """Kill the processes that killed agents of jobs with one node have left behind, and wait until they have ended.

    Returns how many there were, and the pids of those that are still there after `deadline_s` seconds. The next agent
    tries these again.
    """
    try:
        folder, prefix = _folder(), _alone()
        names = os.listdir(folder)
        for name in names:
            if name.startswith(_NEW) and _is_old(f"{folder}/{name}"):
                _remove(f"{folder}/{name}")
        left = [name for name in names if name.startswith(prefix) and _is_left(f"{folder}/{name}")]
        if not left:
            return 0, ()
        from .orphans import end_marked_counting  # slow to import, and rarely needed

        ended, stuck = end_marked_counting(frozenset(name.removeprefix(prefix) for name in left), deadline_s)
    except (OSError, ImportError, Refused):
        return 0, ()  # no descriptor is free, or the folder cannot be used: the files stay for the next agent
    if not stuck:
        for name in left:
            _remove(f"{folder}/{name}")
    return ended, stuck


def _alone() -> str:
    """How the names of the files begin that agents in this namespace of pids lock."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0  # no Linux, or no /proc
    return f"alone-{namespace}-"


def _is_old(path: str) -> bool:
    """Whether the agent that was about to give this file its name is dead. It needs a moment for that."""
    try:
        return time.time() - os.lstat(path).st_mtime > _NEW_S
    except FileNotFoundError:
        return False  # it has its name now


def _is_left(path: str) -> bool:
    """Whether the agent that has locked this file is dead."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # its agent has just ended, or another one has cleared it
    try:
        # Shared: with an exclusive lock, an agent that looks at the same moment would take this one for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _is_same_file(fd, path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # another agent has removed it. A file that stays makes the next agent look for processes in vain


# ---- the file ----


def _folder() -> str:
    """A folder that only this user can write to, the same for all agents of the user. Raises `Refused`."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    # Schedulers hand down the variable of another host, where the folder exists.
    is_usable = os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK) and os.stat(base).st_uid == os.getuid()
    path = os.path.join(base, "reknit") if is_usable else f"/tmp/reknit-{os.getuid()}"
    try:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        found = os.lstat(path)
    except OSError as e:
        raise Refused(Refusal.SETUP, f"the folder for this node's lock, {path}: {e.strerror}") from None
    # Everybody can write to /tmp: another user may have made the folder first, with files of theirs in it.
    if not os.path.isdir(path) or os.path.islink(path) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise Refused(Refusal.SETUP, f"the folder for this node's lock, {path}, is not a folder of this user alone")
    return path


def _locked(path: str) -> tuple[int, bool]:
    """A descriptor of the locked file, and whether the file was there before.

    Raises `BlockingIOError` if another agent holds the lock.
    """
    while True:
        was_there = os.path.exists(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(fd, path):
                return fd, was_there
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # its holder has just removed the file: make a new one


def _is_same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(32).strip()
    except OSError:
        return ""  # its holder has just removed the file
