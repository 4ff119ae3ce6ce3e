"""A journal in etcd that is opened for reading alone. The user of etcd needs only the right to read its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reknit.adapters.runtime.ports import Batch, NoJournal, Record
from reknit.core.job.entries import Filler

from .gateway import Gateway, created_after, get
from .keys import EtcdKeys, place_of

if TYPE_CHECKING:
    from reknit.adapters.journals.envelope import Envelope

    from .gateway import Cluster

_PAGE = 1000
"""Number of records that one request asks for."""


class EtcdRecords:
    """Implements `ports.Readable`."""

    def __init__(self, cluster: Cluster, envelope: Envelope, *, timeout_s: float = 5.0) -> None:
        """Does not connect yet. `timeout_s`: see `EtcdJournal`."""
        self._keys = EtcdKeys(envelope.job)
        self._gateway = Gateway(cluster, timeout_s, cluster.login(f"read {self._keys.root}"))
        self._envelope = envelope

    def records(self, after: int) -> tuple[int, Sequence[tuple[str, Record]]]:
        wanted = [get(self._keys.header), created_after(self._keys.entries, after, _PAGE)]
        header, entries = self._gateway.transact([], wanted, []).ranges
        if not header.found:
            raise NoJournal(f"there is no journal of job {self._envelope.job} in etcd")
        self._envelope.admit(header.found[0].value)
        records = []
        for found in entries.found:
            place = place_of(found.key)
            records.append((place, self._envelope.unwrap(found.value, place) or Record(Filler())))
        return entries.found[-1].created if entries.found else after, records

    def read(self, after: int, wait_s: float) -> Batch:
        """The entries of `records`. Does not wait."""
        position, records = self.records(after)
        return Batch(position, tuple(record.entry for _, record in records))

    def close(self) -> None:
        self._gateway.close()
