"""etcd that forgets its history all the time, is defragmented, or has no space left, while a job runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Unavailable
from reknit.core.job.entries import Aborted, Node, NodeId
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from tests.support.etcd import Etcd, change, patiently, watch_of
from tests.support.waiting import PATIENCE_S, until

ME = Node(NodeId("me"))
QUOTA = 4 << 20
Make = Callable[[Etcd], EtcdJournal]


@pytest.fixture
def journal() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(server: Etcd) -> EtcdJournal:
            return stack.enter_context(closing(EtcdJournal(Cluster(server.endpoints), Envelope("j"), timeout_s=30.0)))

        yield make


@contextmanager
def compacted(server: Etcd) -> Iterator[Callable[[], int]]:
    """Compact and defragment the server without a pause. Gives a function that tells how often."""
    times, is_over = 0, False

    def run() -> None:
        nonlocal times
        while not is_over:
            server.compact()
            server.defragment()
            times += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: times
    finally:
        is_over = True
        thread.join(PATIENCE_S)


def texts(journal: EtcdJournal, after: int = 0) -> list[str]:
    batch = patiently(journal.read, after, 0.0)
    return [entry.why for entry in batch.entries if isinstance(entry, Aborted)]


def test_a_history_that_is_forgotten_at_once_holds_nobody_up(tmp_path: Path, journal: Make) -> None:
    """Entries are present values and no history. Who was away comes back, and who is new reads all."""
    with Etcd(tmp_path) as server, compacted(server) as times:
        writer, reader, away = journal(server), journal(server), journal(server)
        patiently(writer.append, "first", Aborted("first"))
        position = patiently(away.read, 0, 0.0).position
        watch_of(away, position)  # nobody looks at this watch until the end
        found, seen = list[str](), 0

        def follow() -> None:
            nonlocal seen
            while "last" not in found:
                batch = patiently(reader.read, seen, 1.0)
                seen = batch.position
                found.extend(entry.why for entry in batch.entries if isinstance(entry, Aborted))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        begin, i = times(), 0
        while times() < begin + 5 or i < 50:
            patiently(writer.append, str(i), Aborted(str(i)))
            patiently(writer.beat, ME, i + 1, ())
            i += 1
        patiently(writer.append, "last", Aborted("last"))
        follower.join(PATIENCE_S)
        everything = ["first", *map(str, range(i)), "last"]
        assert found == everything
        assert texts(away, position) == everything[1:]
        assert texts(journal(server)) == everything


def test_a_newcomer_begins_with_a_fold_after_a_compaction(server: Etcd, journal: Make) -> None:
    """The fold is a present value as well."""
    writer = journal(server)
    for i in range(MANY + 1):
        writer.append(f"m-{i}", Aborted(str(i)))
    batch = writer.read(0, 0.0)
    writer.publish(batch.position, fold_all(Job(), batch.entries))
    server.compact()
    server.defragment()
    assert journal(server).read(0, 0.0).base is not None


def test_a_full_etcd_is_an_outage_that_says_what_to_do(tmp_path: Path, journal: Make) -> None:
    """Another program has used up the space. Reads go on, and writes wait for the operator."""
    with Etcd(tmp_path, options=("--quota-backend-bytes", str(QUOTA))) as server:
        own = journal(server)
        own.append("0", Aborted("0"))

        def is_full() -> bool:
            try:
                change(server, put("/other", bytes(1 << 20)))
            except Unavailable as e:
                return "database space exceeded" in str(e)
            return False

        until(is_full, "the end of the space")
        for call in (lambda: own.append("1", Aborted("1")), lambda: own.beat(ME, 1, ())):
            with pytest.raises(Unavailable) as full:
                call()
            assert str(full.value).endswith(
                "database space exceeded: compact and defragment etcd, then disarm its alarm (etcdctl alarm disarm)"
            )
        assert texts(own) == ["0"]
        server.compact()
        server.defragment()
        member = server.post("/v3/maintenance/status", {})["header"]["member_id"]
        server.post("/v3/maintenance/alarm", {"action": "DEACTIVATE", "alarm": "NOSPACE", "memberID": member})
        own.append("1", Aborted("1"))
        own.beat(ME, 1, ())
        assert texts(own) == ["0", "1"]
