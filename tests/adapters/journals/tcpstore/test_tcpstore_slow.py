"""The journal in torch's store when the store is far away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import journal as journal_module
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.runtime.ports import Batch
from reknit.core.job.entries import Aborted, Entry, Filler, Node, NodeId
from tests.support.stores import HOST, SlowLink, noted_clients, plain, stubborn
from tests.support.waiting import PATIENCE_S

ME = Node(NodeId("me"))
JOBS = (f"job-{number}" for number in count())


class Far:
    """A store, a journal on its host, and one far away."""

    def __init__(self, port: int, link: SlowLink, closing: ExitStack) -> None:
        self.link = link
        self.job = next(JOBS)
        self.near = self.journal(port)
        self.far = self.journal(link.port)
        self.client = StoreClient(HOST, port, PATIENCE_S)
        for each in (self.near, self.far, self.client):
            closing.callback(each.close)
        self.near.read(0, 0.0)

    @property
    def pace(self) -> str:
        return f"reknit/{self.job}/pace"

    def journal(self, port: int, timeout_s: float = PATIENCE_S) -> TCPStoreJournal:
        return TCPStoreJournal(HOST, port, Envelope(self.job), exclusive=False, timeout_s=timeout_s)

    def appended(self, entry: Entry) -> list[Entry]:
        """What the journal on the host reads while the one far away appends."""
        found: list[Entry] = []
        thread = threading.Thread(target=self.far.append, args=(str(entry), entry))
        thread.start()
        position = 0
        while entry not in found:
            batch = self.near.read(position, 0.02)  # a reader that only waits does not see that a slot is taken
            position, found = batch.position, [*found, *batch.entries]
        thread.join()
        return found


@pytest.fixture
def far(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.setattr(journal_module, "HOLE_S", 0.1)
    monkeypatch.setattr(journal_module, "SLOW_S", 0.05)
    with ExitStack() as closing:
        yield Far(port, closing.enter_context(SlowLink(port)), closing)


def test_a_writer_that_is_far_away_is_given_time(far: Far) -> None:
    """A reader on the store's host sees no delay. It would fill each slot before the writer can."""
    far.link.delay_s = 0.15
    assert far.appended(Aborted("x")) == [Aborted("x")]
    assert int(far.client.get(far.pace)) >= 300


def test_a_writer_that_has_become_slow_loses_one_slot(far: Far) -> None:
    """Its slot was filled by a reader. It says that it is slow, and keeps the next one."""
    far.far.append("0", Aborted("fast"))
    far.client.set(far.pace, b"0")
    far.far._connections.pace_ms = 0
    far.far._connections._clients["writer"].round_trip_s = 0.0  # this machine may have been slow
    far.link.delay_s = 0.2
    assert far.appended(Aborted("slow")) == [Aborted("fast"), Filler(), Aborted("slow")]


def test_a_limit_that_is_shorter_than_the_way_grows(far: Far) -> None:
    """Otherwise no call would ever be answered in time."""
    slow = far.journal(far.link.port, timeout_s=0.25)
    far.link.delay_s = 0.15
    try:
        stubborn(lambda: slow.append("0", Aborted("x")))
        assert stubborn(lambda: slow.beat(ME, 1, ())) == {ME: 1}
        assert plain(stubborn(lambda: slow.read(0, 0.1))) == Batch(1, (Aborted("x"),))
    finally:
        slow.close()


def test_a_beat_waits_for_no_append(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a connection. Once an append has taken long, beats have a connection of their own."""
    with noted_clients() as clients:
        far.far.append("0", Aborted("first"))
        far.far.beat(ME, 1, ())
    assert len(clients) == 1
    reached, go_on = threading.Event(), threading.Event()
    real = StoreClient.compare_set

    def slow(client: StoreClient, key: str, expected: bytes, desired: bytes) -> bytes:
        reached.set()
        go_on.wait(PATIENCE_S)
        return real(client, key, expected, desired)

    monkeypatch.setattr(StoreClient, "compare_set", slow)
    monkeypatch.setattr(journal_module, "HOLE_S", PATIENCE_S)
    thread = threading.Thread(target=far.far.append, args=("1", Aborted("x")))
    thread.start()
    assert reached.wait(PATIENCE_S)
    with noted_clients() as clients:
        assert far.far.beat(ME, 2, ()) == {ME: 2}
        assert not go_on.is_set()
        go_on.set()
        thread.join()
        far.far.beat(ME, 3, ())
        far.far.append("2", Aborted("y"))
    assert len(clients) == 1
