"""Where the workers' files go: a folder of this run alone.

1. If the user asked for files, the folder stays.
2. Otherwise it is a scratch folder, which holds error files only. It is removed at the end, when they have been
   reported.
3. A keeper that is killed leaves its scratch folder behind. The next keeper of this user removes it. A keeper holds a
   lock on its scratch folder, and the lock ends with the process. The folder gets its name when it is locked already.
   So a folder with such a name and without a lock has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

_SCRATCH = "reknit_scratch_"
_NEW = "reknit_new_"
"""How the name of a scratch folder begins that is not locked yet, or cannot be locked."""
LIMITS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors that say that the disk is full, or that no descriptor is left."""
_OLD_S = 60.0
"""An empty folder that has had the name of a new one for longer than this has no owner. Seconds."""


class CannotMake(Exception):
    """A folder or a pipe that the user asked for cannot be made. The text is one line that names it."""

    def __init__(self, why: str, *, is_limit: bool) -> None:
        super().__init__(why)
        self.is_limit = is_limit
        """The disk is full, or no descriptor is left. The user has not asked for anything impossible."""


class LogFolder:
    def __init__(self, base: str, run_id: str, *, keeps: bool, made: str = "") -> None:
        """`base`: the folder in which the folder of this run is made. Empty: the host's folder for temporary files.
        /dev/null: there is no folder, and there are no files.
        `keeps`: the workers' output goes into the folder, so it stays.
        `made`: the path of the folder if an earlier keeper has made it. Empty: it is made now.

        Raises `CannotMake` if the folder cannot be made and the user asked for it. Without a scratch folder the job
        runs all the same, without error files.
        """
        self.path = made
        """Empty: there is no folder."""
        self.error: OSError | None = None
        """Why there is no folder. None: there is one, or none was wanted."""
        self._is_scratch = not (base or keeps)
        self._lock = -1
        if os.path.basename(made).startswith(_SCRATCH) and not self._hold():
            made = ""  # a keeper of another agent has removed it: it had no owner for a moment
        if base != os.devnull and not made:
            self._make(base, run_id, keeps)

    def _make(self, base: str, run_id: str, keeps: bool) -> None:
        # A run id may hold any character. It must not lead into another folder. A folder that the user has named may be
        # shared by several hosts.
        host = f"_{os.uname().nodename[:100]}" if base else ""
        name = f"{run_id.replace('/', '_')[:100]}{host}_{os.urandom(4).hex()}"
        if not base:
            name = f"{_NEW if self._is_scratch else 'reknit_'}{name}"
        try:
            self.path = os.path.abspath(os.path.join(base or temporary_base(), name))
            os.makedirs(self.path, mode=0o700)
            if self._is_scratch and self._hold():
                named = os.path.join(os.path.dirname(self.path), name.replace(_NEW, _SCRATCH, 1))
                os.rename(self.path, named)
                self.path = named
        except OSError as e:
            self.path, self.error = "", e
            if base or keeps:
                asked = f"--log-dir={base}" if base else f"temporary folder {temporary_base()}"
                raise CannotMake(f"{asked} cannot be made: {e.strerror}", is_limit=e.errno in LIMITS) from None

    def _hold(self) -> bool:
        """Lock the folder. False: there are no locks on this file system, or no descriptor is free. If this keeper is
        killed, the folder stays then."""
        try:
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self._lock), os.lstat(self.path)):
                return True
        except OSError:
            pass
        self._let_go()
        return False

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        """Remove the folder if it is a scratch folder. May be repeated."""
        try:
            if self._is_scratch and self.path:
                import shutil  # slow to import, and not needed before

                shutil.rmtree(self.path, ignore_errors=True)
        except (OSError, ImportError):
            pass  # no descriptor is free for the import: a later keeper removes the folder
        finally:  # also after an interrupt: a later keeper removes a folder without a lock only
            self._let_go()


def worker_folder(log_dir: str, round_: int, local_rank: int, *, must: bool) -> str:
    """The folder of one worker's files, made in the folder of the run. Empty: it has none.

    `must`: output goes there, so an `OSError` is raised if the folder cannot be made. A job runs without error files,
    for example on a full disk.
    """
    if not log_dir:
        return ""
    folder = os.path.join(log_dir, f"round_{round_}", str(local_rank))
    try:
        os.makedirs(folder)
    except FileExistsError:
        # An earlier run has left this folder. Its error file would be taken for this worker's.
        try:
            os.unlink(os.path.join(folder, "error.json"))
        except FileNotFoundError:
            pass
    except OSError:
        if must:
            raise
        return ""
    return folder


def is_scratch(path: str) -> bool:
    """The file at this path is in a scratch folder."""
    return os.path.basename(os.path.dirname(path)).startswith(_SCRATCH)


def remove_abandoned() -> int:
    """Remove the scratch folders of this user whose keeper was killed. Returns how many there were."""
    base, removed = temporary_base(), 0
    try:
        import shutil  # this import fails if no descriptor is free

        names = [name for name in os.listdir(base) if name.startswith((_SCRATCH, _NEW))]
    except (OSError, ImportError):
        return 0
    for name in names:
        path = os.path.join(base, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)  # a FIFO would block
        except OSError:
            continue
        try:
            found = os.fstat(fd)
            if found.st_uid == os.getuid() and name.startswith(_SCRATCH):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
            elif found.st_uid == os.getuid() and time.time() - found.st_mtime > _OLD_S:
                os.rmdir(path)
                removed += 1
        except OSError:
            pass  # its owner lives, or it is not empty
        finally:
            os.close(fd)
    return removed


def temporary_base() -> str:
    """The folder that the variable TMPDIR names, if there is one, else /tmp."""
    base = os.environ.get("TMPDIR", "")
    return base if os.path.isdir(base) else "/tmp"


def working_folder() -> str:
    """Where this process is. Empty: the folder was removed, or is out of this user's reach."""
    try:
        return os.getcwd()
    except OSError:
        return ""
