"""One agent per job and node on a host; and the end of what an agent that was killed has left behind.

1. The lock is `flock` on a file that is named by job, endpoint and node. It ends with the process, however that ends.
2. The file is removed by an agent that ends in order, while it holds the lock. One that is found unlocked was left by
   an agent that was killed: its workers may still run. So whoever takes it knows to look for them.
3. Workers carry a mark in their environment, and are found by it whatever they did to hide. (A program that overwrites
   its own environment, as some do to change their title, is not.)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import time
from collections.abc import Iterator

from reknit.core.reasons import Refusal

from .ports import Refused

MARK = "REKNIT_NODE"
"""The variable that marks the workers of a node."""
_MOST_AGENTS = 10_000
_END_S = 5.0


class Taken(Exception):
    """Another agent of the job runs on this host under that name. The text is one line."""


class HostLock:
    """Held until `release`, or the end of the process."""

    def __init__(self, fd: int, path: str, node: str, mark: str, *, was_left: bool) -> None:
        self._fd = fd
        self._path = path
        self._was_left = was_left
        self.node = node
        self.mark = mark
        """The value of `MARK` in the environment of this node's workers."""

    def end_orphans(self, deadline_s: float = _END_S) -> int:
        """Kill what an earlier agent has left behind, and see it end; how many processes that were.

        Raises `Refused` if there are still some after `deadline_s` seconds.
        """
        if not self._was_left:
            return 0
        give_up = time.monotonic() + deadline_s
        ended: set[int] = set()
        while orphans := _marked(f"{MARK}={self.mark}"):  # again, as they may have forked meanwhile
            ended |= orphans.keys()
            _kill(orphans, give_up)
            if time.monotonic() >= give_up:
                pids = ", ".join(map(str, sorted(orphans)))
                raise Refused(Refusal.SETUP, f"processes {pids}, which an earlier agent left here, survive SIGKILL")
        return len(ended)

    def release(self) -> None:
        """May be repeated."""
        if self._fd < 0:
            return
        try:
            os.unlink(self._path)
        except OSError:
            pass  # a file that stays makes the next agent look for orphans in vain
        os.close(self._fd)
        self._fd = -1


def take(job: str, endpoint: str, node: str) -> HostLock:
    """Be the only agent of `job` on this host that is `node`. Raises `Taken`, and `Refused` if there is no place."""
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
        pass  # a full disk: whoever finds the lock taken is not told by whom
    return HostLock(fd, path, node, f"{job}/{node}/{digest}", was_left=was_left)


def take_free(job: str, endpoint: str, name: str) -> HostLock:
    """Be `name`, or the first of `name`-2, `name`-3, … that is free: several agents on one host are a usual test."""
    for number in range(1, _MOST_AGENTS):
        try:
            return take(job, endpoint, name if number == 1 else f"{name}-{number}")
        except Taken:
            continue
    raise Taken(f"{_MOST_AGENTS} agents of job {job} run on this host")


# ---- the file ----


def _folder() -> str:
    """A folder of this user alone, the same for all agents of the user. Raises `Refused`."""
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
    # /tmp is everybody's: somebody may have made it first, to hand us files of theirs.
    if not os.path.isdir(path) or os.path.islink(path) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise Refused(Refusal.SETUP, f"the folder for this node's lock, {path}, is not a folder of this user alone")
    return path


def _locked(path: str) -> tuple[int, bool]:
    """A descriptor of the file, locked, and whether the file was there. Raises `BlockingIOError` if another has it."""
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
        os.close(fd)  # its holder has just removed it, and the next one makes a new one


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
        return ""  # its holder is just leaving


# ---- the orphans ----


def _marked(item: str) -> dict[int, int]:
    """Descriptors of this user's living processes with that item in their environment, by pid; not our own."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}  # no /proc: nothing can be found
    wanted, ours = item.encode(errors="surrogateescape"), {*_ancestors()}
    found = {}
    for pid in pids:
        if pid in ours:
            continue
        try:
            # Opened before the look: the number may be another's at any time, a descriptor never.
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_marked = os.fstat(file.fileno()).st_uid == os.getuid() and wanted in file.read().split(b"\0")
        except OSError:
            is_marked = False  # it has just ended, or is not ours to read
        if is_marked:
            found[pid] = fd
        else:
            os.close(fd)
    return found


def _ancestors() -> Iterator[int]:
    """This process, its parent, and so on."""
    pid = os.getpid()
    while pid > 0:
        yield pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return


def _kill(pidfds: dict[int, int], give_up: float) -> None:
    """SIGKILL, and wait for the end of each until `give_up`. Closes the descriptors."""
    for fd in pidfds.values():
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            pass  # dead already; or it changed its user, and then it stays
    for fd in pidfds.values():
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, give_up - time.monotonic()) * 1000)
        os.close(fd)
