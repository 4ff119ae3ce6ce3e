"""One agent per job and node on a host, and the end of what a killed agent has left behind.

The files of the locks are in one folder per host and user (`place.py`).

A job with several nodes:

1. The lock is `flock` on a file that is named by job, endpoint and node. It ends with the process. A socket shows it to
   agents that have another /tmp (`socket.py`).
2. An agent that ends in order removes the file while it holds the lock. A file that is found unlocked was left by an
   agent that was killed, whose workers may still run. The agent that takes such a lock looks for them.
3. Workers carry a mark in their environment. Besides, the agent writes its keeper and its workers into the file
   (`record.py`). `orphans.py` finds what is left by both.

A job with one node has no name that another agent could take. Its mark is the nonce of its agent:

1. The agent holds a lock on a file that is named by its nonce. The file gets this name when it is locked already. So a
   file with such a name and without a lock has a dead agent, and is never locked again by an agent.
2. Each agent that starts looks for files of dead agents, and ends what these have left (`left.py`). Meanwhile it
   holds their locks. So whoever wants a lock whose file names a dead agent waits for a while.
3. A keeper that dies alone changes nothing: its agent lives and holds the lock. A keeper that lives longer than its
   agent is about to end its workers, so nothing is lost if another agent is faster.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING

from reknit.adapters.runtime.ports import Refused
from reknit.core.job.reasons import Refusal

from .children import abandon_in_forks
from .place import boot, open_folder, pid_namespace
from .socket import Busy, listen

if TYPE_CHECKING:
    from .record import ProcessId

_MOST_AGENTS = 10_000
END_S = 5.0
"""Time for the processes of a dead agent to end, after SIGKILL. Seconds."""
_NAP_S = 0.005
NEW = "new-"
"""How the name of a file begins that is not locked yet."""
ALONE = "alone-"
"""How the name of a file begins that an agent of a job with one node has locked."""
_TRIES = 1000
"""How often an agent tries to make a file that others remove at the same time."""


class Taken(Exception):
    """Another agent of the job runs on this host under this name. The text is one line."""


class _Held(Exception):
    """Another agent holds the lock. The text says which."""


class HostLock:
    """Held until `release`, or the end of the process."""

    def __init__(self, fd: int, folder: int, name: str, node: str, mark: str) -> None:
        """`fd`: the locked file. `folder`: the folder in which it is `name`. The lock owns both descriptors."""
        self._fd = fd
        self._folder = folder
        self._socket = -1
        """The second sign of this lock (`socket.py`). -1: there is none."""
        self._name = name
        self._was_left = False
        self._left: tuple[ProcessId, ...] = ()
        """Processes that earlier agents have left, and that were not ended yet."""
        self._processes: tuple[ProcessId, ...] = ()
        """The keeper and the workers of this agent, as it has written them down."""
        self._note = ""
        self.node = node
        self.mark = mark
        """The value of `orphans.MARK` in the environment of this node's workers, or its beginning up to a slash."""
        self.left_note = ""
        """The note of an agent with the same job and node on this host that has not ended in order. Empty: there was no
        such agent, or it had made no note."""
        abandon_in_forks(self)
        _of_this_process[mark] = self

    def listen(self, base: str) -> None:
        """Keep out agents that have another folder below a base of the same name. Raises `Busy`."""
        self._socket = listen(f"{base}-{self.mark}")

    def take_over(self, *, was_left: bool) -> None:
        """Read what an earlier agent has left in the file, and write down who holds the lock now."""
        from .record import read

        self._was_left = was_left
        if was_left and (left := read(self._fd)) is not None:
            self._left, self._note = left.processes, left.note
            self.left_note = left.note
        self._write()

    def note(self, text: str) -> None:
        """Leave a text for the next agent of this job and node on this host, in case that this one does not end in
        order: see `left_note`. The note is gone after `release`. Empty: there is no note.

        At most 256 characters, otherwise it raises `ValueError`. A note is lost if the disk is full.
        """
        from .record import LONGEST_NOTE

        if len(text) > LONGEST_NOTE:
            raise ValueError(f"a note of at most {LONGEST_NOTE} characters, not {len(text)}")
        self._note = text
        self._write()

    def remember(self, processes: tuple[ProcessId, ...]) -> None:
        """Write down the keeper and the workers of this agent, for the case that all are killed at once."""
        self._processes = processes
        self._write()

    def _write(self) -> None:
        from .record import HostRecord, identified, write

        if self._fd >= 0:
            write(self._fd, HostRecord(identified(os.getpid()), (*self._left, *self._processes), self._note))

    def end_orphans(self, deadline_s: float = END_S) -> int:
        """Kill the processes that an earlier agent has left behind and wait until they have ended; how many there were.

        Raises `Refused` if some are still there after `deadline_s` seconds.
        """
        if not self._was_left:
            return 0
        from .orphans import end_marked  # slow to import, and rarely needed

        ended, left = end_marked(self.mark, deadline_s, self._left)
        if left:
            pids = ", ".join(map(str, left))
            raise Refused(Refusal.SETUP, f"processes {pids}, which an earlier agent left here, survive SIGKILL")
        self._left = ()
        return ended

    def release(self) -> None:
        """May be repeated. A forked child of the agent lets go of its copy at once, and has nothing to release."""
        if self._fd >= 0:
            remove(self._folder, self._name)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the lock is its parent's, and must end with the parent."""
        _of_this_process.pop(self.mark, None)
        if self._fd >= 0:
            _close(self._socket, self._fd, self._folder)
            self._fd = self._folder = self._socket = -1


_of_this_process: dict[str, HostLock] = {}
"""The locks that this process holds, by mark."""


def remember(mark: str, processes: tuple[ProcessId, ...]) -> None:
    """Write down the keeper and the workers that carry this mark, if this process holds a lock for the mark."""
    lock = _of_this_process.get(mark) or _of_this_process.get(mark.partition("/")[0])
    if lock is not None:
        lock.remember(processes)


def take(job: str, endpoint: str, node: str) -> HostLock:
    """Become the only agent of `job` on this host that is `node`.

    Raises `Taken` if there is one already, and `Refused` if the lock's file or folder cannot be used.
    """
    import hashlib  # slow to import, and not needed for a job with one node

    digest = hashlib.sha256(f"{job}\0{endpoint}\0{node}".encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        fd, folder, path, was_left = _locked(digest)
    except _Held as held:
        raise Taken(f"another agent of job {job} runs on this host as {node}{held}") from None
    except OSError as e:
        raise Refused(Refusal.SETUP, f"the lock of this node, {e.filename}: {e.strerror}") from e
    lock = HostLock(fd, folder, digest, node, digest)
    try:
        lock.listen(os.path.dirname(path))
    except Busy as other:
        if was_left:
            lock.abandon()  # the file still tells of an agent that was killed here
        else:
            lock.release()
        where = f"pid {other.pid}, which has another {os.path.dirname(path)}" if other.pid else "in another container"
        raise Taken(f"another agent of job {job} runs on this host as {node} ({where})") from None
    lock.take_over(was_left=was_left)
    return lock


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
    new, name = NEW + nonce, alone_prefix() + nonce
    try:
        folder, _ = open_folder()
    except (OSError, Refused):
        return None
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:  # a file system without locks
            remove(folder, new)
            os.close(fd)
            raise
    except OSError:
        os.close(folder)
        return None
    return HostLock(fd, folder, name, "", nonce)


def alone_prefix() -> str:
    """How the names of the files begin that agents of this boot and this namespace of pids lock."""
    return f"{ALONE}{boot()[:8]}-{pid_namespace()}-"


# ---- the file ----


def _locked(name: str) -> tuple[int, int, str, bool]:
    """Descriptors of the locked file and of its folder, the path of the folder, and whether the file was there before.

    Raises `_Held`, `Refused` and `OSError`.
    """
    for _ in range(_TRIES):
        folder, path = open_folder()
        fd = -1
        try:
            was_there = _exists(folder, name)
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            if not lock(fd):
                raise _Held(_holder(fd))
            if is_same_file(fd, folder, name):
                return fd, folder, path, was_there
        except FileNotFoundError:
            pass  # the folder was cleaned away
        except _Held:
            _close(fd, folder)
            raise
        except OSError as error:
            _close(fd, folder)
            error.filename = f"{path}/{name}"
            raise
        _close(fd, folder)  # its holder has just removed the file: make a new one
    raise Refused(Refusal.SETUP, f"another program removed the lock of this node {_TRIES} times while it was taken")


def lock(fd: int) -> bool:
    """Lock the file. False: another agent holds it. Waits while others end what a dead agent has left (`left.py`):
    the file names the dead agent then, and not the holder of the lock. Raises `OSError`."""
    give_up = time.monotonic() + END_S + 1.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not _names_a_dead_agent(fd) or time.monotonic() >= give_up:
                return False
        time.sleep(_NAP_S)


def _names_a_dead_agent(fd: int) -> bool:
    from .record import is_alive, read

    found = read(fd)
    return found is not None and found.agent is not None and not is_alive(found.agent)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _holder(fd: int) -> str:
    """Who holds the lock, for people. Empty: this is not known."""
    from .record import is_alive, read, shown

    found = read(fd)
    if found is None:
        return ""
    if found.agent is None:
        return " (in another container)"
    return f" ({shown(found.agent)})" if is_alive(found.agent) else ""


def _exists(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def remove(folder: int, name: str) -> None:
    """Remove the file. To be called with its lock."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # another agent has removed it. A file that stays makes the next agent look for processes in vain


def is_same_file(fd: int, folder: int, name: str) -> bool:
    """Whether this open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False
