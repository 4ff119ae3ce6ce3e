"""Removing the journals of jobs from etcd.

1. A journal is judged by its entries, without the secret of the job. A user of etcd who may write entries may delete
   them as well. So a signature would protect nothing.
2. All keys of a journal are removed in one transaction. It demands that since the look no entry and no beat was put. So
   an agent that begins the next epoch meanwhile either keeps its journal, or finds none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.adapters.journals.envelope import glimpsed, is_of_this_format
from reknit.adapters.runtime.ports import Record, Refused, Stored
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job

from .gateway import (
    Gateway,
    created_after,
    delete_below,
    first_from,
    get,
    holds,
    is_untouched_since,
)
from .keys import ALL, EtcdKeys, job_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .gateway import Cluster, Json

PAGE = 1000
"""Number of entries that one request asks for."""


class EtcdShelf:
    """Implements `ports.Shelf`."""

    def __init__(self, cluster: Cluster, job: str = "", *, timeout_s: float = 60.0) -> None:
        """Does not connect yet. `job`: the only job that is looked for. Empty: all. `timeout_s`: bound on each request,
        shared by the endpoints. It is long, because the keys of a large journal are removed in one request."""
        self._only = job
        login = cluster.login(f"readwrite {EtcdKeys(job).root if job else ALL}")
        self._gateway = Gateway(cluster, timeout_s, login)
        self._looked: dict[str, Sequence[Json]] = {}
        """By job: what must still hold when its journal is removed."""

    def jobs(self) -> Sequence[str]:
        if self._only:
            return [self._only] if self._first(EtcdKeys(self._only).root) else []
        jobs, key = [], self._first(ALL)
        while key:
            if EtcdKeys(job_of(key)).owns(key):  # otherwise another program has put it
                jobs.append(job_of(key))
            key = self._first(ALL, f"{ALL}{key.removeprefix(ALL).partition('/')[0]}0")  # "0" follows "/"
        return jobs

    def look(self, job: str) -> Stored:
        keys, records, after = EtcdKeys(job), list[Record](), 0
        while True:
            wanted = [get(keys.header), created_after(keys.entries, after, PAGE)]
            answer = self._gateway.transact([], wanted, [])
            header, page = answer.ranges
            value = header.found[0].value if header.found else b""
            if not is_of_this_format(value):
                return Stored(job, why="its journal is of another version of reknit, or of another program")
            try:
                records += [record for found in page.found if (record := glimpsed(found.value))]
            except Refused as e:
                return Stored(job, why=str(e))
            if not page.has_more:
                break
            after = page.found[-1].created
        self._looked[job] = [
            holds(keys.header, value),
            is_untouched_since(keys.entries, answer.revision),
            is_untouched_since(keys.beats, answer.revision),
        ]
        folded = fold_all(Job(), [record.entry for record in records])
        verdict = folded.outcome.verdict if folded.outcome else None
        # Of the entries, and not only of the last one: the clock of one writer may be wrong.
        at = max((record.at for record in records if record.at), default=None)
        return Stored(job, verdict, at, folded.terms.silence_s)

    def is_quiet(self, job: str) -> bool:
        return self._gateway.transact(self._looked[job], [], []).is_met

    def remove(self, job: str) -> bool:
        return self._gateway.transact(self._looked[job], [delete_below(EtcdKeys(job).root)], []).is_met

    def close(self) -> None:
        self._gateway.close()

    def _first(self, prefix: str, key: str = "") -> str:
        """The first key that begins with `prefix`, from `key` on. Empty: there is none."""
        found = self._gateway.transact([], [first_from(prefix, key or prefix)], []).ranges[0].found
        return found[0].key if found else ""
