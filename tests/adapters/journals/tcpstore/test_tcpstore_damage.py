"""The journal in a TCPStore after another program has changed its keys: whoever finds out says so, in one line, and is
refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.entries import Filler
from reknit.core.job.reasons import Refusal
from tests.support.stores import JobStore, folded, hosted, noted_clients, stubborn


@pytest.fixture
def store() -> Iterator[JobStore]:
    with ExitStack() as closing, hosted() as (_, port):
        store = JobStore(port, closing)
        begun(store)
        yield store


def begun(store: JobStore) -> TCPStoreJournal:
    """A journal with an entry, and an agent that has read it and has to connect again."""
    journal = store.journal()
    with noted_clients() as clients:
        journal.append("t", Filler())
        batch = journal.read(0, 0)
    journal.remember(batch.position, folded(list(batch.entries)))
    for client in clients:
        client.close()
    return journal


def refused(journal: TCPStoreJournal) -> Refused:
    with pytest.raises(Refused) as caught:
        stubborn(lambda: journal.read(0, 0))
    return caught.value


@pytest.mark.parametrize("header", [b"", b"garbage", b"{}"])
def test_a_header_that_was_changed_refuses_everybody(store: JobStore, header: bytes) -> None:
    """Who knows the journal, and who comes new. An agent must not found the journal again: others may run on in it."""
    known = begun(store)
    store.client.set(store.key("header"), header)
    for journal in (known, store.journal(), store.journal(founds=False)):
        said = refused(journal)
        assert said.refusal is Refusal.IDENTITY
        assert "another program has" in str(said)


@pytest.mark.parametrize("value", [b"garbage", b"9" * 30])
def test_a_number_of_slots_that_is_none_refuses_everybody(store: JobStore, value: bytes) -> None:
    """torch's server closes the connection of whoever adds to it, and says nothing."""
    known = begun(store)
    store.client.set(store.key("head"), value)
    for journal in (known, store.journal()):
        said = refused(journal)
        assert said.refusal is Refusal.IDENTITY
        assert "another program has changed the number of slots" in str(said)


def test_a_number_of_slots_that_was_emptied_refuses_who_knows_it(store: JobStore) -> None:
    """torch's server closes the connection here as well."""
    known = begun(store)
    store.client.set(store.key("head"), b"")
    assert "another program has changed the number of slots" in str(refused(known))


def test_a_number_of_slots_that_is_too_large_refuses_everybody(store: JobStore) -> None:
    """A reader would fill a hundred million holes, one after the other."""
    known = begun(store)
    store.client.set(store.key("head"), b"100000000")
    for journal in (known, store.journal()):
        with pytest.raises(Refused, match="another program has changed the number of slots"):
            stubborn(lambda j=journal: j.read(2, 0))


def test_a_newcomer_that_can_read_no_record_is_refused(store: JobStore) -> None:
    """It would open the job a second time. The agents that know the journal would have to end, and it would go on."""
    store.client.set(store.key("slot/0"), b"garbage")
    said = refused(store.journal())
    assert said.refusal is Refusal.IDENTITY
    assert "another program has changed the records" in str(said)


def test_an_entry_that_was_changed_before_it_was_read_refuses_its_readers(store: JobStore) -> None:
    """Other agents have read something else."""
    known = begun(store)
    known.append("u", Filler())
    store.client.set(store.key("slot/0"), b"garbage")
    said = refused(store.journal())
    assert said.refusal is Refusal.IDENTITY
    assert "has read other records than this node before record" in str(said)
