"""`reknit prune`: remove what jobs have left in a store, one line for each job.

1. A job that has ended is removed when its last entry is older than --older-than.
2. A job that has not ended is removed only with --abandoned, when its last entry is older than that and none of its
   agents gives a sign of life.
3. A journal is kept if an agent writes into it meanwhile, be it only a beat. The store checks that in the moment of the
   removal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.runtime.ports import Refused, Stored, Unavailable
from reknit.app.input import readers
from reknit.app.input.meeting import kept
from reknit.app.report import PREFIX, USAGE, exit_status, write
from reknit.core.agent.commands import Result
from reknit.core.agent.reasons import JournalRefused, StoreLost
from reknit.core.agent.states import WorkerState

from .arguments import Parsed, Table, help_text, parse
from .options import Option, UsageError, borrowed

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Shelf
    from reknit.app.settings import Meeting

_LONGEST_SILENCE_S = 600.0
"""Upper bound on the wait for signs of life, in seconds."""
_WHERE, _WHAT = "Where the jobs are", "Which jobs to remove"
_SHARED = {
    "rdzv-backend": "where nodes met: etcd or file",
    "rdzv-endpoint": "HOST[:PORT],… of etcd, or the shared folder",
    "rdzv-conf": "etcd: protocol, ca_cert, ssl_cert, ssl_cert_key, user, password_file",
    "rdzv-secret": "file: the secret of the jobs. Better set REKNIT_RDZV_SECRET",
}
"""Options of `reknit run`, with their help text here."""
_OPTIONS = (
    *borrowed(_SHARED, _WHERE),
    Option("rdzv-id", "only this job", "ID", group=_WHAT),
    Option(
        "older-than",
        "only jobs whose last entry is older: 90s, 12h (default: 7d)",
        "TIME",
        "7d",
        readers.age,
        group=_WHAT,
    ),
    Option("abandoned", "also jobs that never ended, if none of their agents lives", group=_WHAT),
    Option("dry-run", "remove nothing, and say what would be removed", group=_WHAT),
    Option("help", "this text", short="h", group="Help"),
)
TABLE = Table(
    "reknit prune",
    _OPTIONS,
    "reknit prune --rdzv-backend=etcd --rdzv-endpoint=HOST:PORT [options]",
    "Remove what finished jobs have left in etcd or in a shared folder. By default these are the jobs that have"
    " succeeded, failed or were aborted, and whose last entry is older than 7 days. A removed job is forgotten: if it"
    " is started again with the same --rdzv-id, it begins anew, even if it had succeeded.",
    "One line on stdout tells what was done with each job, and why. The exit status is 0 if the store has answered,"
    " whether or not anything was removed.",
)


def prune(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, wait: Callable[[float], None] = time.sleep
) -> int:
    """Run the command. Returns the exit status. `wait`: waits for seconds."""
    try:
        parsed = parse(argv, environ, TABLE)
        if parsed["help"]:
            write(1, help_text(TABLE, shows_all=False))
            return 0
        if parsed.script:
            raise UsageError(f"reknit prune takes options only, and not {parsed.script}")
        shelf = _shelf(kept(parsed, environ, "reknit prune", ("etcd", "file")), parsed)
        try:
            for line in _pruned(shelf, parsed, wait):
                write(1, line + "\n")
        finally:
            shelf.close()
    except UsageError as e:
        write(2, f"{PREFIX}{e}\n")
        return USAGE
    except Refused as e:
        write(2, f"{PREFIX}{e}\n")
        return exit_status(Result(WorkerState.FAILED, JournalRefused(e.refusal, str(e))))
    except Unavailable as e:
        write(2, f"{PREFIX}the store cannot be reached: {e}\n")
        return exit_status(Result(WorkerState.FAILED, StoreLost(str(e))))
    return 0


def _pruned(shelf: Shelf, parsed: Parsed, wait: Callable[[float], None]) -> Iterator[str]:
    """Remove the jobs. Gives a line for each."""
    older_s, now = parsed["older-than"], time.time()
    jobs = shelf.jobs()
    if not jobs:
        yield f"no {'job ' + only if (only := parsed['rdzv-id']) else 'jobs'} at {parsed['rdzv-endpoint']}"
    silent = []
    for stored in map(shelf.look, jobs):
        if why := _kept_because(stored, now, older_s, is_abandoned_too=parsed["abandoned"]):
            yield f"{_told(stored, now)}: kept: {why}"
        elif stored.verdict is None:
            silent.append(stored)
        else:
            yield _removed(shelf, stored, now, is_dry=parsed["dry-run"])
    if silent:
        # An agent of a job that is silent for so long is taken for dead by the other agents as well.
        wait(min(_LONGEST_SILENCE_S, max(stored.silence_s for stored in silent)))
    for stored in silent:
        yield _removed(shelf, stored, now, is_dry=parsed["dry-run"])


def _kept_because(stored: Stored, now: float, older_s: float, *, is_abandoned_too: bool) -> str:
    """Why a job is not removed. Empty: it is to be removed."""
    if stored.why:
        return stored.why
    if stored.verdict is None and not is_abandoned_too:
        return "it has not ended; --abandoned removes such jobs if no agent lives"
    if stored.verdict is None and stored.silence_s > _LONGEST_SILENCE_S:
        return f"its agents may be silent for {stored.silence_s:.0f} s, so it cannot be told whether one lives"
    if stored.at is None and older_s:
        return "its entries do not say when they were written; --older-than=0 removes it"
    if stored.at is not None and now - stored.at < older_s:
        return f"that is less than --older-than={_length(older_s)}"
    return ""


def _removed(shelf: Shelf, stored: Stored, now: float, *, is_dry: bool) -> str:
    if not (shelf.is_quiet if is_dry else shelf.remove)(stored.job):
        return f"{_told(stored, now)}: kept: an agent lives, or the job has just begun again"
    return f"{_told(stored, now)}: {'would be removed' if is_dry else 'removed'}"


def _told(stored: Stored, now: float) -> str:
    """The job, and what has become of it."""
    if stored.why:
        return f"job {stored.job}"
    what = f"{stored.verdict.value}" if stored.verdict else "not ended"
    when = "" if stored.at is None else f", last entry {_length(max(0.0, now - stored.at))} ago"
    return f"job {stored.job}: {what}{when}"


def _length(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _shelf(meeting: Meeting, parsed: Parsed) -> Shelf:
    if meeting.backend == "file":
        from reknit.adapters.journals.file.pruning import FolderShelf

        shelf = FolderShelf(meeting.folder, meeting.secret, parsed["rdzv-id"], older_than_s=parsed["older-than"])
        if not parsed["dry-run"]:
            shelf.sweep()
        return shelf
    from reknit.adapters.journals.etcd.pruning import EtcdShelf
    from reknit.app.wiring.several_nodes import cluster_of

    return EtcdShelf(cluster_of(meeting), parsed["rdzv-id"])
