"""A journal in etcd that is opened for reading alone: nothing is made, changed or needed but the right to read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.etcd.keys import EtcdKeys
from reknit.adapters.journals.etcd.reading import EtcdRecords
from reknit.adapters.runtime.ports import Batch, NoJournal, Readable, Record, Refused, Unavailable
from reknit.core.job.entries import Aborted, Filler
from tests.support.etcd import Etcd, change


def reader(server: Etcd, envelope: Envelope, **login: str) -> closing[EtcdRecords]:
    return closing(EtcdRecords(Cluster(server.endpoints, **login), envelope, timeout_s=30.0))


def test_who_may_only_read_reads_everything_with_its_author(tmp_path: Path) -> None:
    """A dashboard must not be able to harm a job."""
    with Etcd(tmp_path, options=("--bcrypt-cost", "4")) as server:
        with closing(EtcdJournal(Cluster(server.endpoints), Envelope("j", author="a"), timeout_s=30.0)) as journal:
            for i in range(3):
                journal.append(str(i), Aborted(str(i)))
            change(server, put(EtcdKeys("j").entry(0, "raw"), b"rubbish"))
        server.add_user("guest", "secret")
        server.grant("guest", "/reknit/j/", "READ")
        server.ask_for_users()
        before = server.revision()
        with reader(server, Envelope("j"), user="guest", password="secret") as records:
            opened: Readable = records
            position, found = opened.records(0)
            assert [(place, record.entry, record.by) for place, record in found[:3]] == [
                (f"entry {i}", Aborted(str(i)), "a") for i in range(3)
            ]
            assert found[3] == ("entry raw", Record(Filler()))
            assert opened.records(position) == (position, [])
            assert records.read(0, 0.0) == Batch(position, tuple(record.entry for _, record in found))
        other = reader(server, Envelope("k"), user="guest", password="secret")
        with other as records, pytest.raises(Refused, match="grant-permission ROLE --prefix read /reknit/k/"):
            records.records(0)
        assert server.revision() == before


def test_a_journal_that_is_not_there_is_not_made(server: Etcd) -> None:
    """A mistake in the name must not look like a job without entries."""
    before = server.revision()
    with reader(server, Envelope("none")) as records:
        for look in (lambda: records.records(0), lambda: records.read(0, 0.0)):
            with pytest.raises(NoJournal, match="there is no journal of job none in etcd"):
                look()
    assert server.revision() == before


def test_another_secret_is_refused(server: Etcd) -> None:
    """All records would look like those of strangers."""
    with closing(EtcdJournal(Cluster(server.endpoints), Envelope("signed", "s"), timeout_s=30.0)) as journal:
        journal.append("t", Aborted("x"))
    with reader(server, Envelope("signed", "other")) as records, pytest.raises(Refused, match="another secret"):
        records.records(0)


def test_a_store_that_is_away_is_an_outage(server: Etcd) -> None:
    """Trying again may help."""
    away = closing(EtcdRecords(Cluster([("127.0.0.1", 1)]), Envelope("j"), timeout_s=1.0))
    with away as records, pytest.raises(Unavailable, match="Connection refused"):
        records.records(0)
