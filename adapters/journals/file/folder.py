"""The folder of a job: its name, who may use it, and its small files.

1. Only the user whose agents made the folder may use it: the folder has mode 0700, its files 0600. Another user who
   could read the file `lock` could also lock it, and so hold up every writer.
2. With a group, the members of the group may use the folder as well: the folder has mode 2770, its files 0660, whatever
   the umask is.
3. An agent that makes a file takes the mode of the file from the folder. So only the agent that makes the folder must
   know the group.
4. A folder is made under another name. It gets its own name once it has its mode and the file `lock`. So no agent ever
   finds a folder half made.
"""

from __future__ import annotations

import errno
import os
import stat
from hashlib import sha256

from reknit.adapters.journals.envelope import number
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.reasons import Refusal

PRIVATE, SHARED = 0o600, 0o660
"""The modes of the files in a folder."""
UNNAMED = ".new-"
"""How the name of a folder begins while it is made or removed. No job's folder has such a name."""
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
_LONGEST_NAME = 160
"""Upper bound on a file name, in bytes. A longer name is cut, and a digest is added. File systems allow 255 bytes."""


def file_name(text: str) -> str:
    """A file name for this text. No other text has the same name, and it never leads to another folder."""
    data = text.encode(errors="surrogatepass")
    name = "".join(chr(b) if b in _PLAIN else f"%{b:02X}" for b in data)
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _LONGEST_NAME:
        return f"{name[:_LONGEST_NAME]}+{sha256(data).hexdigest()}"
    return name or "+"


# ---- the folder ----


def make(folder: str, group: int | None) -> int:
    """Make the folder of a job if it is missing, for this user and the members of `group`. Returns the mode of its
    files. Raises `OSError`, and `Refused` if this user may not give anything to the group."""
    if not os.path.isdir(folder):
        path = os.path.dirname(folder)
        os.makedirs(path, exist_ok=True)
        _make(os.path.join(path, f"{UNNAMED}{os.urandom(8).hex()}"), folder, group)
    mode = SHARED if os.stat(folder).st_mode & stat.S_IWGRP else PRIVATE
    make_beats(folder)
    return mode


def make_beats(folder: str) -> None:
    """Make the folder of the counters if it is missing."""
    beats, mode = os.path.join(folder, "beats"), os.stat(folder).st_mode
    try:
        os.mkdir(beats, 0o700)
    except FileExistsError:
        return
    if mode & stat.S_IWGRP:
        os.chmod(beats, 0o2770)  # the group comes from the folder above, if that has S_ISGID


def _make(new: str, folder: str, group: int | None) -> None:
    os.mkdir(new, 0o700)
    lock = os.path.join(new, "lock")
    try:
        if group is not None:
            _give(new, group)
        os.close(opened(lock, os.O_RDWR, PRIVATE if group is None else SHARED))
        os.rename(new, folder)
    except OSError:
        if os.path.exists(lock):
            os.unlink(lock)
        os.rmdir(new)
        if not os.path.isdir(folder):
            raise
        # another agent has made the folder meanwhile


def _give(new: str, group: int) -> None:
    try:
        os.chown(new, -1, group)
        os.chmod(new, 0o2770)
    except PermissionError:
        os.rmdir(new)
        raise Refused(Refusal.SETUP, f"this user is no member of group {group} (--rdzv-conf=group)") from None


def complaint(path: str, job: str, group: int | None) -> str | None:
    """One line for the operator if other users may use the job's folder in `path` than those who should. None: the
    folder is as it should be, or is not there yet."""
    folder = os.path.join(path, file_name(job))
    try:
        found = os.stat(folder)
    except OSError:
        return None  # the agent makes it later
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if group is not None and not (found.st_gid == group and mode & 0o070 == 0o070):
        return f"{folder} is there already, and is not open to group {group} (--rdzv-conf=group): it is left so"
    if mode & 0o007 or (mode & 0o070 and mode & 0o070 != 0o070):
        return (
            f"{folder} is open to other users of the host (mode {mode:04o}), who can hold up the job; to close it: "
            f"chmod -R go= {folder}"
        )
    return None


def owner(path: str) -> str:
    """The name of the user who owns this file or folder. Empty: this user owns it, or the owner is not known."""
    import pwd  # slow to import on some hosts, and rarely needed

    try:
        user = os.stat(path).st_uid
    except OSError:
        return ""
    try:
        return "" if user == os.geteuid() else pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


# ---- files ----


def there(path: str, flags: int) -> int:
    """Open a file that is there. Raises `OSError`, also if something else than a file has this name. A named pipe would
    hold up whoever opens or reads it."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        # A folder has an error of its own. `os.open` gives it only to who wants to write.
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise OSError(number, os.strerror(number), path)
    return fd


def opened(path: str, flags: int, mode: int) -> int:
    """Open a file. If it is missing, it is made with exactly this mode."""
    while True:
        try:
            return there(path, flags)
        except FileNotFoundError:
            if os.path.islink(path):  # a link that leads nowhere is neither there nor can the file be made
                raise OSError(errno.ELOOP, "a link that leads nowhere", path) from None
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            continue
        if mode != PRIVATE:
            os.fchmod(fd, mode)  # the umask may have taken away what the group needs
        return fd


def contents(path: str) -> bytes:
    with open(there(path, os.O_RDONLY), "rb") as file:
        return file.read()


def replace(path: str, data: bytes, mode: int) -> None:
    """Replace the content of the file in one instant. Several processes may do this at the same time: one of them is
    the last."""
    beside = f"{path}.{os.urandom(8).hex()}"
    try:
        fd = opened(beside, os.O_WRONLY, mode)
        try:
            write_at(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
    except OSError:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def write_at(fd: int, data: bytes, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


# ---- counters ----


def write_count(path: str, count: int, mode: int) -> None:
    fd = opened(path, os.O_WRONLY, mode)
    try:
        # The number is written twice. A reader that looks during the write sees two numbers that differ, and looks
        # again. With one number it might take half of the old and half of the new number for the counter.
        write_at(fd, f"{count:019} {count:019}\n".encode(), 0)
    finally:
        os.close(fd)


def read_count(path: str) -> int | None:
    """None: there is no counter, or the file holds no number."""
    for _ in range(3):  # the numbers differ only during a write, and writes are about a second apart
        try:
            fd = there(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            count = _count(os.pread(fd, 64, 0))
        finally:
            os.close(fd)
        if count is not None:
            return count
    return None


def _count(data: bytes) -> int | None:
    first, _, second = data.partition(b"\n")[0].partition(b" ")
    return number(first) if first == second else None
