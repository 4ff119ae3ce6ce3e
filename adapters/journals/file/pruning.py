"""Removing the journals of jobs from a folder.

1. A journal is removed only if no agent has touched the job's folder for a time, and if nothing was written since the
   look. A beat counts as well: an agent that waits to begin the next epoch beats.
2. The last check is made under the lock. So an agent that has begun the next epoch before keeps its journal. An agent
   that comes later finds no journal and begins a new one. An agent that waits for the lock meanwhile is refused,
   because the journal that it had read is gone (`turn`).
3. The folder first gets another name, in one instant. So no agent ever finds half of it.
4. An agent that dies while it makes a folder leaves it without a name, and so does a process that dies in step 3. Such
   folders are removed when they are old.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.runtime.ports import Record, Refused, Stored, Unavailable
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

from .folder import UNNAMED, contents, file_name, owner, there
from .journal import FileJournal
from .lines import first_line
from .turn import Turn

_TIMEOUT_S = 5.0
CRASHED_S = 3600.0
"""A folder without a name is left over when nothing has happened to it for so many seconds. To make or remove a folder
takes milliseconds, or as long as its file server hangs."""


class FolderShelf:
    """Implements `ports.Shelf`."""

    def __init__(self, path: str, secret: str = "", job: str = "", *, older_than_s: float = 0.0) -> None:
        """`path`: the folder in which the jobs have their folders. `secret`: that of the jobs. `job`: the only job that
        is looked for. Empty: all. `older_than_s`: a journal that was touched within so many seconds is not removed."""
        self._path = path
        self._secret = secret
        self._only = job
        self._older_than_s = older_than_s
        self._looked: dict[str, Mapping[str, object]] = {}
        """By job: what agents had written when they were looked at."""

    def jobs(self) -> Sequence[str]:
        """The ids of the jobs, in order. A folder that this user may not read may be one of a job as well."""
        found = {name: _job_in(os.path.join(self._path, name)) for name in self._names()}
        return sorted(job for name, job in found.items() if job is not None and self._is_wanted(job, name))

    def look(self, job: str) -> Stored:
        try:
            self._looked[job] = _written(self._folder(job))  # before it is read: what comes later must count
            records = self._records(job)
        except (Refused, Unavailable) as e:
            return Stored(job, why=self._unread(job, e))
        except OSError as e:
            whose = f" (it belongs to {who})" if (who := owner(self._folder(job))) else ""
            return Stored(job, why=f"{self._folder(job)}{whose} cannot be read: {e.strerror}")
        folded = fold_all(Job(), [record.entry for record in records])
        verdict = folded.outcome.verdict if folded.outcome else None
        # Of the records, and not only of the last one: the clock of one writer may be wrong.
        at = max((record.at for record in records if record.at is not None), default=None)
        return Stored(job, verdict, at, folded.terms.silence_s)

    def _unread(self, job: str, error: Refused | Unavailable) -> str:
        """Why it cannot be told whether this job has ended."""
        refusal = error.refusal if isinstance(error, Refused) else None
        if refusal is Refusal.SECRET:
            return "it has another secret (--rdzv-secret)"
        if refusal is Refusal.IDENTITY:
            return f"its journal is damaged; if no agent of the job lives, remove the folder {self._folder(job)}"
        return str(error)

    def is_quiet(self, job: str, but: str = "") -> bool:
        """`but`: the name of a file that does not matter."""
        folder = self._folder(job)
        try:
            return _is_untouched(folder, self._older_than_s, but) and _written(folder) == self._looked[job]
        except OSError:
            return False  # another process has removed it

    def remove(self, job: str) -> bool:
        folder, gone = self._folder(job), os.path.join(self._path, f"{UNNAMED}{os.urandom(8).hex()}")
        if not self.is_quiet(job):
            return False
        try:
            with Turn(os.path.join(folder, "lock"), _TIMEOUT_S):
                if not self.is_quiet(job, but="lock"):  # the turn itself has just touched the lock
                    return False
                os.rename(folder, gone)
            shutil.rmtree(gone)
        except Unavailable:
            return False  # another process writes there
        except OSError as e:
            raise Unavailable(f"{folder}: {e.strerror or e}") from None
        return True

    def sweep(self) -> None:
        """Remove the folders without a name that crashed processes have left (rule 4 above)."""
        for name in self._names():
            path = os.path.join(self._path, name)
            if name.startswith(UNNAMED) and time.time() - _happened_at(path) >= CRASHED_S:
                shutil.rmtree(path, ignore_errors=True)  # it may belong to another user, or be removed already

    def close(self) -> None:
        pass

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except OSError as e:
            raise Refused(Refusal.SETUP, f"{self._path}: {e.strerror}") from None

    def _is_wanted(self, job: str, name: str) -> bool:
        return file_name(job) == name and self._only in ("", job)

    def _folder(self, job: str) -> str:
        return os.path.join(self._path, file_name(job))

    def _records(self, job: str) -> list[Record]:
        journal = FileJournal(self._path, Envelope(job, self._secret), reads_only=True)
        found, position, end = list[Record](), 0, -1
        try:
            while position != end:
                end = position
                position, records = journal.records(end)
                found += [record for _, record in records]
        finally:
            journal.close()
        return found


def _job_in(folder: str) -> str | None:
    """The id of the job whose journal lies in this folder, or the name of a folder that this user may not read. None:
    the folder holds no journal."""
    try:
        fd = there(os.path.join(folder, "journal"), os.O_RDONLY)
    except PermissionError:
        return unquote(os.path.basename(folder), errors="surrogatepass")
    except OSError:
        return None
    try:
        job = json.loads(first_line(fd))["job"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(fd)
    return job if isinstance(job, str) else None


def _written(folder: str) -> Mapping[str, object]:
    """What agents have written into this folder: the length of the journal, and the counters.

    The files are opened for it. An NFS client may answer a question for a file's time from its memory, for up to a
    minute."""
    fd = there(os.path.join(folder, "journal"), os.O_RDONLY)
    try:
        found: dict[str, object] = {"": (os.fstat(fd).st_ino, os.fstat(fd).st_size)}
    finally:
        os.close(fd)
    for name in _beats(folder):
        found[name] = contents(os.path.join(folder, name))
    return found


def _beats(folder: str) -> list[str]:
    """The files of the counters, as paths in this folder."""
    try:
        return [os.path.join("beats", name) for name in os.listdir(os.path.join(folder, "beats"))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_untouched(folder: str, older_than_s: float, but: str = "") -> bool:
    names = ["journal", "lock", "fold", "beats", *_beats(folder)]
    newest = max((_changed_at(os.path.join(folder, name)) for name in names if name != but), default=0.0)
    return time.time() - newest >= older_than_s


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _happened_at(folder: str) -> float:
    """When this folder was made, got its name, or lost a file."""
    try:
        return os.stat(folder).st_ctime
    except FileNotFoundError:
        return time.time()
