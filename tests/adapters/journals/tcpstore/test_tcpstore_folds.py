"""The journal in torch's store for agents that are far behind: one of them folds for all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.folds import MANY
from reknit.adapters.journals.tcpstore import journal as journal_module
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.runtime.ports import Batch, Unavailable
from tests.support.journals import Proxy
from tests.support.stores import JobStore, folded, many, noted_clients, plain
from tests.support.waiting import PATIENCE_S, until


def test_the_first_far_behind_reads_everything_and_the_others_take_its_fold(store: JobStore) -> None:
    """A thousand nodes that each fold a thousand entries take longer than the nodes need to join."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    first = store.journal()
    batch = first.read(0, 0.0)
    assert plain(batch) == Batch(len(entries), tuple(entries))
    first.remember(batch.position, folded(entries))
    others: list[Batch] = []
    thread = threading.Thread(target=lambda: others.append(store.journal().read(0, 0.0)))
    thread.start()
    until(lambda: store.client.get(store.key("claim/0")) == b"2")
    assert plain(first.read(batch.position, 0.0)) == Batch(batch.position)
    thread.join()
    assert [*map(plain, (*others, store.journal().read(0, 0.0)))] == 2 * [Batch(len(entries), base=folded(entries))]


def test_a_fold_for_which_others_wait_is_published_even_if_little_is_new(store: JobStore) -> None:
    """A reader that is far behind takes an older fold, and reads for all others what came after it."""
    behind, publisher, entries = store.journal(), store.journal(), many(2 * MANY)
    for i, entry in enumerate(entries):
        publisher.append(str(i), entry)
        if i == 0:
            behind.read(0, 0.0)
        if i == MANY + 1:
            publisher.publish(publisher.read(0, 0.0).position, folded(entries[: MANY + 2]))
    batch = behind.read(1, 0.0)
    assert plain(batch) == Batch(len(entries), tuple(entries[MANY + 2 :]), folded(entries[: MANY + 2]))
    behind.remember(batch.position, folded(entries))
    behind.read(batch.position, 0.0)
    assert plain(store.journal().read(0, 0.0)) == Batch(len(entries), base=folded(entries))


def test_one_at_a_time_reads_for_all_however_quickly_the_journal_grows(store: JobStore) -> None:
    """While a thousand nodes join, each finds another number of entries."""
    journal, late, entries = store.journal(), store.journal(), many(4 * MANY)
    journal.append("0", entries[0])
    late.read(0, 0.0)
    for i in range(1, 2 * MANY):
        journal.append(str(i), entries[i])
    first = store.journal()
    batch = first.read(0, 0.0)
    for i in range(2 * MANY, 4 * MANY):
        journal.append(str(i), entries[i])
    found: list[Batch] = []
    thread = threading.Thread(target=lambda: found.append(late.read(1, 0.0)))
    thread.start()
    until(lambda: store.client.get(store.key("claim/0")) == b"2")
    first.remember(batch.position, folded(entries[: 2 * MANY]))
    first.read(batch.position, 0.0)
    thread.join()
    assert [*map(plain, found)] == [Batch(4 * MANY, tuple(entries[2 * MANY :]), folded(entries[: 2 * MANY]))]


def test_a_reader_whose_fold_cannot_be_published_reads_on(store: JobStore) -> None:
    """Nobody depends on a fold. A connection may break at any moment."""
    writer, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        writer.append(str(i), entry)
    with Proxy(f"127.0.0.1:{store.port}") as proxy, ExitStack() as closing:
        behind = JobStore(int(proxy.where.partition(":")[2]), closing, store.job).journal()
        batch = behind.read(0, 0.0)
        behind.remember(batch.position, folded(entries))
        proxy.passes = 0
        with pytest.raises(Unavailable):
            behind.read(batch.position, 0.0)
        proxy.passes = None
        writer.append("last", entries[-1])
        assert behind.read(batch.position, 0.0).entries == (entries[-1],)
    assert store.client.get(store.key("fold")) == b""


def test_the_fold_comes_with_the_few_entries_that_follow(store: JobStore) -> None:
    """Who joins late must not need a second look to know where the job is."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    journal.read(0, 0.0)  # only a reader knows the digest of what it publishes
    journal.publish(MANY + 7, folded(entries[: MANY + 7]))
    batch = journal.read(0, 0.0)
    assert batch.base == folded(entries[: MANY + 7])
    assert (batch.position, batch.entries) == (len(entries), tuple(entries[MANY + 7 :]))


def test_a_fold_that_is_too_large_is_not_published(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's server hangs up on a value of 8 MiB. Those who wait for it are let go all the same."""
    monkeypatch.setattr(journal_module, "LARGEST", 10)
    journal, entries = store.journal(), many(MANY + 1)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    batch = journal.read(0, 0.0)
    journal.remember(batch.position, folded(entries))
    journal.read(batch.position, 0.0)
    assert store.client.get(store.key("fold")) == b""
    assert store.client.get(store.key("done/0")) == b"1"
    assert store.journal().read(0, 0.0).entries == tuple(entries)


def test_a_claim_that_is_not_kept_holds_nobody_up(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who was to read for all has died: the next one does it."""
    monkeypatch.setattr(journal_module, "CLAIM_S", 0.05)
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    store.client.add(store.key("claim/0"), 1)
    assert plain(journal.read(0, 0.0)) == Batch(len(entries), tuple(entries))


@pytest.mark.parametrize("forged", [b"", b"{}", b"\xff", b'{"position":40,"job":7}'])
def test_a_fold_that_cannot_be_used_is_not(store: JobStore, forged: bytes) -> None:
    """The entries are the truth; a fold is a convenience."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    store.client.set(store.key("fold"), forged)
    store.client.set(store.key("fold-at"), b"40")
    assert journal.read(0, 0.0).entries == tuple(entries)


def test_an_older_fold_does_not_replace_a_newer(store: JobStore) -> None:
    """Readers would be thrown back."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    journal.read(0, 0.0)
    journal.publish(MANY + 10, folded(entries))
    journal.publish(MANY + 1, folded(entries[: MANY + 1]))
    assert journal.read(0, 0.0).base == folded(entries)


def test_a_store_that_is_lost_during_the_first_read_is_no_loss_for_the_reader(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has taken a fold, and was given nothing. It takes part in whatever journal is there next."""
    writer, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        writer.append(str(i), entry)
    first = store.journal()
    position = first.read(0, 0.0).position
    first.publish(position, folded(entries))
    store.client.add(store.key("head"), 1)  # a writer has taken a slot, and dies
    newcomer, has_the_fold, wait = store.journal(), threading.Event(), StoreClient.wait

    def noting(client: StoreClient, keys: Sequence[str], wait_s: float) -> bool:
        if store.key(f"slot/{position}") in keys:
            has_the_fold.set()
        return wait(client, keys, wait_s)

    def read() -> None:
        with pytest.raises(Unavailable, match="closed here"):
            newcomer.read(0, 0.0)

    monkeypatch.setattr(StoreClient, "wait", noting)
    thread = threading.Thread(target=read)
    with noted_clients() as clients:
        thread.start()
        assert has_the_fold.wait(PATIENCE_S), "it waits for the slot after the fold"
    store.client.set(store.key("header"), b"")
    for client in clients:
        client.close()
    thread.join()
    store.client.set(store.key("head"), b"0")
    store.client.set(store.key("header"), Envelope(store.job).header())
    assert plain(newcomer.read(0, 0.0)) == Batch(0)
