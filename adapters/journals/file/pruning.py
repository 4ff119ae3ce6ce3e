"""Removing the journals of finished jobs from a folder.

1. A journal is removed only if its fold says that the job has ended, and if no agent has touched the job's folder for a
   time. An agent that waits to begin the next epoch touches it with every beat.
2. The journal is read once more under the lock. So an agent that has begun the next epoch before keeps its journal. An
   agent that comes later finds no journal and begins a new one. An agent that waits for the lock meanwhile is refused,
   because the journal that it had read is gone (`turn`).
3. The folder first gets another name, in one instant. So no agent ever finds half of it.
"""

from __future__ import annotations

import json
import os
import shutil
import time

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.ports import Finished, Refused, Unavailable
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

from .folder import UNNAMED, file_name
from .journal import FileJournal
from .lines import first_line
from .turn import Turn

_TIMEOUT_S = 5.0


def finished(path: str, older_than_s: float, secret: str = "") -> list[Finished]:
    """The jobs in the folder `path` that have ended and were not touched for `older_than_s` seconds, in the order of
    their ids. Nothing is changed.

    A journal that cannot be read is left out, and so is one with another secret. Raises `Refused` if `path` cannot be
    read."""
    try:
        names = os.listdir(path)
    except OSError as e:
        raise Refused(Refusal.SETUP, f"{path}: {e.strerror}") from None
    found = []
    for name in names:
        folder = os.path.join(path, name)
        job = _job_in(folder)
        if job is None or file_name(job) != name or not _is_untouched(folder, older_than_s):
            continue
        if (end := _ended(path, job, secret)) is not None:
            found.append(end)
    return sorted(found, key=lambda end: end.job)


def remove(path: str, job: str, older_than_s: float, secret: str = "") -> bool:
    """Remove the journal of this job, if what `finished` demands still holds. False: it does not, or another process
    has removed the journal.

    Raises `Unavailable` if another process is writing, `Refused`, and `OSError`."""
    folder = os.path.join(path, file_name(job))
    if not os.path.exists(os.path.join(folder, "journal")) or not _is_untouched(folder, older_than_s):
        return False
    gone = os.path.join(path, f"{UNNAMED}{os.urandom(8).hex()}")
    try:
        with Turn(os.path.join(folder, "lock"), _TIMEOUT_S):
            # The turn itself has just touched the lock.
            if not _is_untouched(folder, older_than_s, but="lock") or _ended(path, job, secret) is None:
                return False
            os.rename(folder, gone)
    except FileNotFoundError:
        return False
    shutil.rmtree(gone)
    return True


def _job_in(folder: str) -> str | None:
    """The id of the job whose journal lies in this folder. None: it holds no journal that can be read."""
    try:
        fd = os.open(os.path.join(folder, "journal"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        job = json.loads(first_line(fd))["job"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(fd)
    return job if isinstance(job, str) else None


def _is_untouched(folder: str, older_than_s: float, but: str = "") -> bool:
    """`but`: the name of a file that does not matter."""
    names = ["journal", "lock", "fold", "beats"]
    try:
        names += [os.path.join("beats", name) for name in os.listdir(os.path.join(folder, "beats"))]
    except (FileNotFoundError, NotADirectoryError):
        pass
    newest = max((_changed_at(os.path.join(folder, name)) for name in names if name != but), default=0.0)
    return time.time() - newest >= older_than_s


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _ended(path: str, job: str, secret: str) -> Finished | None:
    """None: the job has not ended, or its journal cannot be read."""
    journal = FileJournal(path, Envelope(job, secret), reads_only=True)
    entries, position, at = [], 0, 0.0
    try:
        while True:
            after, records = journal.records(position)
            if after == position:
                break
            position = after
            entries += [record.entry for _, record in records]
            at = max([at, *(record.at for _, record in records if record.at is not None)])
    except (Refused, Unavailable):
        return None
    finally:
        journal.close()
    outcome = fold_all(Job(), entries).outcome
    return None if outcome is None else Finished(job, at, outcome.verdict)
