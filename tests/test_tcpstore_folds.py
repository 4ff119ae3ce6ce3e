"""The journal in torch's store for agents that are far behind: one of them folds for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from reknit.adapters.journals.tcpstore import journal as journal_module
from reknit.adapters.link import MANY
from reknit.adapters.ports import Batch
from tests.stores import JobStore, folded, hosted, many


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with hosted() as (_, port):
        yield port


@pytest.fixture
def store(port: int) -> Iterator[JobStore]:
    with ExitStack() as closing:
        yield JobStore(port, closing)


def test_the_first_far_behind_reads_everything_and_the_others_take_its_fold(store: JobStore) -> None:
    """A thousand nodes that each fold a thousand entries take longer than the nodes need to join."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    first = store.journal()
    batch = first.read(0, 0.0)
    assert batch == Batch(len(entries), tuple(entries), is_awaited=True)
    others: list[Batch] = []
    thread = threading.Thread(target=lambda: others.append(store.journal().read(0, 0.0)))
    thread.start()
    first.publish(batch.position, folded(entries))
    thread.join()
    late = store.journal().read(0, 0.0)
    assert late.base == folded(entries)
    assert (late.position, late.entries) == (len(entries), ())


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
    assert batch.is_awaited
    journal.publish(batch.position, folded(entries))
    assert store.client.get(store.key("fold")) == b""
    assert store.client.get(store.key(f"done/{len(entries) // MANY}")) == b"1"
    assert store.journal().read(0, 0.0).entries == tuple(entries)


def test_a_claim_that_is_not_kept_holds_nobody_up(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who was to read for all has died: the next one does it."""
    monkeypatch.setattr(journal_module, "_CLAIM_S", 0.05)
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    store.client.add(store.key(f"claim/{len(entries) // MANY}"), 1)
    assert journal.read(0, 0.0) == Batch(len(entries), tuple(entries), is_awaited=True)


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
