"""A journal in torch's store that may be at two endpoints: who may found it again, and where a newcomer looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from reknit.adapters.journals.tcpstore import rebirth as rebirth_module
from reknit.adapters.journals.tcpstore.host import host_store
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.journals.tcpstore.places import Places
from reknit.adapters.journals.tcpstore.quorum import Lease, is_quorum
from reknit.adapters.ports import Batch, Unavailable
from reknit.core.job.entries import Aborted, Entry, Joined, Left, Node, NodeId, Opened, Terms
from tests.stores import HOST, JobStore, folded, free_port, hosted, stubborn
from tests.waiting import until

NAMES = "a", "b", "c"
TERMS = Terms(min_nodes=2, max_nodes=3)


def joined(name: str, round: int = 0) -> Joined:
    return Joined(Node(NodeId(name)), nonce=name, round=round, address="10.0.0.1", port=1)


ENTRIES: list[Entry] = [Opened(TERMS, "x"), *map(joined, NAMES)]
JOB = folded(ENTRIES)
"""The job that runs round 0 on a, b and c."""


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    with hosted() as (_, first), hosted() as (_, second):
        yield first, second


@pytest.fixture
def stores(ports: tuple[int, int]) -> Iterator[list[JobStore]]:
    with ExitStack() as closing:
        first = JobStore(ports[0], closing)
        yield [first, JobStore(ports[1], closing, first.job)]


def places_of(first: int, second: int) -> Places:
    return Places((HOST, first), (HOST, second), None)


def elders(stores: list[JobStore], *names: str) -> list[TCPStoreJournal]:
    """The journals of these nodes. They have read `ENTRIES` at the first endpoint, which is gone since."""
    found = []
    for name in names:
        places = places_of(stores[0].port, stores[1].port)
        journal = stores[0].journal(places=places)
        if not found:
            for i, entry in enumerate(ENTRIES):
                journal.append(str(i), entry)
        journal.read(0, 0.0)
        journal.remember(4, JOB)
        places.said(joined(name))
        found.append(journal)
    for journal in found:
        lose(journal)
    return found


def lose(journal: TCPStoreJournal) -> None:
    places = journal._places
    assert places is not None
    places._endpoints = (HOST, free_port()), places._endpoints[1]
    places._reached_at = float("-inf")
    for client in journal._connections._clients.values():
        client.close()


def at_once(*calls: Callable[[], Batch]) -> list[Batch]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(stubborn, call) for call in calls]]


def test_a_quorum_founds_the_journal_again_at_the_second_endpoint(stores: list[JobStore]) -> None:
    """The host of the first one stays away. A newcomer finds the job, too."""
    journals = elders(stores, "b", "c")
    assert at_once(*(partial(journal.read, 4, 0.0) for journal in journals)) == [Batch(4)] * 2
    journals[0].append("5", Aborted("x"))
    newcomer = stores[0].journal(places=places_of(free_port(), stores[1].port))
    assert newcomer.read(0, 0.0) == Batch(4, base=JOB)
    assert newcomer.read(4, 0.0).entries == (Aborted("x"),)


def test_less_than_a_quorum_does_not(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may go on at the first endpoint, which this agent cannot reach."""
    monkeypatch.setattr(rebirth_module, "_QUORUM_S", 0.1)
    (journal,) = elders(stores, "b")
    for _ in range(2):
        with pytest.raises(Unavailable, match="1 of 3 nodes of the round have come to found the journal again"):
            journal.read(4, 0.0)
    key = stores[1].key("offer/b")
    assert stores[1].client.get(key) == b"", "an agent that has gone elsewhere must not be counted"


def test_who_has_joined_a_later_round_elsewhere_does_not_count(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That word may have sealed the round at the first endpoint, for nodes that are still there."""
    monkeypatch.setattr(rebirth_module, "_QUORUM_S", 0.1)
    b, c = elders(stores, "b", "c")
    assert c._places is not None
    c._places.said(joined("c", round=1))
    for journal in (b, c):
        with pytest.raises(Unavailable, match=r"[01] of 3 nodes"):
            journal.read(4, 0.0)


def test_a_host_begins_nothing_while_the_second_endpoint_does_not_answer(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may go on there. Where no server listens, and where there is no journal, it does not."""
    with monkeypatch.context() as patched:
        look = Places._look
        patched.setattr(Places, "_look", lambda self, place, keys: None if place else look(self, place, keys))
        cut_off = stores[0].journal(places=places_of(stores[0].port, stores[1].port))
        with pytest.raises(Unavailable, match="does not answer, so the job may go on there"):
            cut_off.read(0, 0.0)
    assert stores[0].client.get(stores[0].key("header")) == b""
    host = stores[0].journal(places=places_of(stores[0].port, stores[1].port))
    assert host.read(0, 0.0) == Batch(0)
    other = stores[0].journal("another", places=places_of(stores[0].port, free_port()))
    assert other.read(0, 0.0) == Batch(0)


# ---- the lease ----


def test_a_server_whose_lease_is_not_renewed_ends() -> None:
    """The agent may be suspended while its server still runs, and the others may have gone elsewhere."""
    host = host_store(HOST, free_port(), lease_s=0.1)
    assert host is not None
    try:
        assert host.failure() is None
        host.renew()
        until(host.failure)
        assert host.failure() == "less than half of the nodes of the round reach this store, so it has ended"
        host.restart()
        assert host.failure() is None, "a server without any renewal has no lease yet"
    finally:
        host.close()


def test_half_of_the_nodes_are_a_quorum_only_with_the_first() -> None:
    """Two quorums must have a member in common."""
    assert is_quorum([NodeId("a"), NodeId("b")], {"a"})
    assert not is_quorum([NodeId("a"), NodeId("b")], {"b", "c"})
    assert is_quorum([*map(NodeId, NAMES)], {"b", "c"})
    assert not is_quorum([*map(NodeId, NAMES)], {"a"})


def test_the_lease_goes_by_counters_that_move() -> None:
    """b and c are heard at first, then neither, then c alone. A node that has left is not waited for."""
    lease, me, beat_s = Lease(), NodeId("a"), TERMS.beat_s
    nodes = lease.asks(JOB)

    def is_due(beats: float, *counts: int, head: int = 4) -> bool:
        return lease.is_due(JOB, 4, head, dict(zip(nodes, counts, strict=True)), me, 100.0 + beats * beat_s)

    assert is_due(0, 1, 1, 1)
    assert is_due(1, 2, 2, 2)
    assert is_due(2, 3, 2, 2)
    assert not is_due(3, 4, 2, 2)
    assert is_due(4, 5, 2, 3)
    assert is_due(5, 6, 2, 4, head=5)
    assert is_due(6, 7, 2, 5, head=6)
    assert not is_due(7, 8, 2, 6, head=6), "the host has not folded what was there two looks ago"
    lease = Lease()
    lease.note([Left(Node(NodeId("b"))), Left(Node(NodeId("c")))])
    assert [node.id for node in lease.asks(JOB)] == ["a"]
    assert lease.is_due(JOB, 4, 4, {Node(NodeId("a")): 1}, me, time.monotonic())
