"""The journal in torch's store, beside what `test_journals` demands of all."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import journal as journal_module
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.host import host_store
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.link import MANY
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Aborted, Entry, Filler, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.alone import ENV, ROOT, command
from tests.stores import HOST, hosted
from tests.waiting import PATIENCE_S

JOBS = (f"job-{number}" for number in count())
ME = Node(NodeId("me"))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with hosted() as (_, port):
        yield port


class Store:
    """One job in a store that other tests use as well."""

    def __init__(self, port: int, closing: ExitStack) -> None:
        self.port = port
        self.job = next(JOBS)
        self._closing = closing
        self.client = Client(HOST, port, PATIENCE_S)
        closing.callback(self.client.close)

    def journal(self, job: str = "", *, secret: str = "", **settings: Any) -> TCPStoreJournal:
        settings = {"exclusive": False, "timeout_s": PATIENCE_S, **settings}
        journal = TCPStoreJournal(HOST, self.port, Envelope(job or self.job, secret), **settings)
        self._closing.callback(journal.close)
        return journal

    def key(self, name: str) -> str:
        return f"reknit/{self.job}/{name}"


@pytest.fixture
def store(port: int) -> Iterator[Store]:
    with ExitStack() as closing:
        yield Store(port, closing)


def many(number: int) -> list[Entry]:
    """Enough to make who reads them far behind."""
    joined = (
        Joined(Node(NodeId(f"n{i:03}")), nonce="x", round=0, address="10.0.0.1", port=i) for i in range(number - 1)
    )
    return [Opened(Terms(min_nodes=1000, max_nodes=1000), "x"), *joined]


def folded(entries: list[Entry]) -> Job:
    job = Job()
    for entry in entries:
        job = fold(job, entry)
    return job


# ---- slots and holes ----


def test_a_slot_whose_writer_died_is_plugged_and_the_same_for_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies between two words must neither stop the journal nor be read differently by two."""
    monkeypatch.setattr(journal_module, "_HOLE_S", 0.05)
    journal, other = store.journal(), store.journal()
    journal.append("1", Aborted("first"))
    for _ in range(3):
        store.client.add(store.key("head"), 1)
    journal.append("2", Aborted("second"))
    assert journal.read(0, PATIENCE_S) == Batch(1, (Aborted("first"),)), "what precedes it is told at once"
    found, position = list[Entry]([Aborted("first")]), 1
    while position < 5:
        batch = journal.read(position, PATIENCE_S)
        found, position = [*found, *batch.entries], batch.position
    assert found == [Aborted("first"), Filler(), Filler(), Filler(), Aborted("second")]
    assert other.read(0, PATIENCE_S).entries == tuple(found)


def test_a_slot_that_is_filled_late_is_not_plugged(store: Store) -> None:
    """The writer was slow, not dead: all wait a moment for it."""
    journal, writer = store.journal(), store.journal()
    writer.beat(ME, ())  # it is connected
    store.client.add(store.key("head"), 1)
    record = Envelope(store.job).wrap("1", Aborted("late"), "0")
    thread = threading.Thread(target=lambda: store.client.compare_set(store.key("slot/0"), b"", record))
    thread.start()
    assert journal.read(0, 0.0) == Batch(1, (Aborted("late"),))
    thread.join()


def test_a_writer_whose_slot_was_plugged_takes_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for a while and knows nothing of it; its entry must not be lost."""
    journal = store.journal()
    real = Client.compare_set

    def late(client: Client, key: str, expected: bytes, desired: bytes) -> bytes:
        if key == store.key("slot/0"):
            real(client, key, b"", Envelope(store.job).wrap("", Filler(), "0"))
        return real(client, key, expected, desired)

    monkeypatch.setattr(Client, "compare_set", late)
    journal.append("1", Aborted("x"))
    assert journal.read(0, 0.0) == Batch(2, (Filler(), Aborted("x")))


@pytest.mark.parametrize("is_written", [True, False])
def test_an_append_that_broke_is_continued_where_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """Whether the store had done it or not, the entry is there once, and leaves no hole."""
    journal = store.journal()
    real = Client.compare_set

    def breaking(client: Client, key: str, expected: bytes, desired: bytes) -> bytes:
        if "/slot/" not in key:
            return real(client, key, expected, desired)
        monkeypatch.setattr(Client, "compare_set", real)
        if is_written:
            real(client, key, expected, desired)
        client.close()
        raise Unavailable("as if the connection was lost")

    monkeypatch.setattr(Client, "compare_set", breaking)
    with pytest.raises(Unavailable):
        journal.append("1", Aborted("x"))
    journal.append("1", Aborted("x"))
    journal.append("2", Aborted("y"))
    assert journal.read(0, 0.0) == Batch(2, (Aborted("x"), Aborted("y")))


def test_a_connection_that_was_lost_is_made_again(store: Store) -> None:
    """An agent outlives any of its connections."""
    journal = store.journal()
    journal.append("1", Aborted("x"))
    journal.read(0, 0.0)
    for client in journal._clients.values():
        client.close()
    journal.append("2", Aborted("y"))
    assert journal.read(1, 0.0) == Batch(2, (Aborted("y"),))


# ---- whose store it is ----


def test_a_store_that_serves_another_job_is_refused() -> None:
    """Two jobs with one endpoint is an operator's mistake that would otherwise end as a mystery."""
    with hosted() as (_, port), ExitStack() as closing:
        store = Store(port, closing)
        store.journal("one", exclusive=True).append("1", Aborted("x"))
        store.journal("one", exclusive=True).append("2", Aborted("x"))
        with pytest.raises(
            Refused, match=rf"^127\.0\.0\.1:{port} serves job one, not two; choose another endpoint$"
        ) as refused:
            store.journal("two", exclusive=True).read(0, 0.0)
        assert refused.value.refusal is Refusal.OTHER_JOB


def test_only_who_founds_a_journal_begins_it(store: Store) -> None:
    """Else one with a wrong secret that is there first would turn the job's own host away."""
    stranger = store.journal(founds=False, secret="wrong", timeout_s=0.1)
    with pytest.raises(Unavailable, match=r"waited 0\.1 s for its host to begin the journal"):
        stranger.read(0, 0.0)
    store.journal(secret="right").append("1", Aborted("x"))
    with pytest.raises(Refused, match="another secret"):
        stranger.read(0, 0.0)
    guest = store.journal(founds=False, secret="right")
    assert guest.read(0, 0.0).entries == (Aborted("x"),)


def test_a_store_that_came_back_empty_is_refused() -> None:
    """Its host was restarted: who went on would be in another job than those who remember."""
    with ExitStack() as closing:
        with hosted() as (_, port):
            store = Store(port, closing)
            journal = store.journal()
            journal.append("1", Aborted("x"))
        with pytest.raises(Unavailable):
            journal.append("2", Aborted("y"))
        again = host_store(HOST, port)
        assert again is not None
        closing.callback(again.close)
        for call in (lambda: journal.append("2", Aborted("y")), lambda: journal.read(1, 0.0)):
            with pytest.raises(Refused) as refused:
                call()
            assert refused.value.refusal is Refusal.IDENTITY


def test_names_with_separators_do_not_meet(store: Store) -> None:
    """A job's name may hold anything, also what looks like another job's keys."""
    one = store.journal(f"{store.job}/beat/0/x")
    other = store.journal(store.job)
    one.append("1", Aborted("x"))
    assert other.beat(Node(NodeId("x/head")), ())[Node(NodeId("x/head"))] == 1
    assert one.read(0, 0.0) == Batch(1, (Aborted("x"),))


# ---- who is far behind ----


def test_the_first_far_behind_reads_everything_and_the_others_take_its_fold(store: Store) -> None:
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


def test_the_fold_comes_with_the_few_entries_that_follow(store: Store) -> None:
    """Who joins late must not need a second look to know where the job is."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    journal.publish(MANY + 7, folded(entries[: MANY + 7]))
    batch = journal.read(0, 0.0)
    assert batch.base == folded(entries[: MANY + 7])
    assert (batch.position, batch.entries) == (len(entries), tuple(entries[MANY + 7 :]))


def test_a_fold_that_is_too_large_is_not_published(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's server hangs up on a value of 8 MiB. Those who wait for it are let go all the same."""
    monkeypatch.setattr(journal_module, "_LARGEST", 10)
    journal, entries = store.journal(), many(MANY + 1)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    batch = journal.read(0, 0.0)
    assert batch.is_awaited
    journal.publish(batch.position, folded(entries))
    assert store.client.get(store.key("fold")) == b""
    assert store.client.get(store.key(f"done/{len(entries) // MANY}")) == b"1"
    assert store.journal().read(0, 0.0).entries == tuple(entries)


def test_a_claim_that_is_not_kept_holds_nobody_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who was to read for all has died: the next one does it."""
    monkeypatch.setattr(journal_module, "_CLAIM_S", 0.05)
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    store.client.add(store.key(f"claim/{len(entries) // MANY}"), 1)
    assert journal.read(0, 0.0) == Batch(len(entries), tuple(entries), is_awaited=True)


@pytest.mark.parametrize("forged", [b"", b"{}", b"\xff", b'{"position":40,"job":7}'])
def test_a_fold_that_cannot_be_used_is_not(store: Store, forged: bytes) -> None:
    """The entries are the truth; a fold is a convenience."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    store.client.set(store.key("fold"), forged)
    store.client.set(store.key("fold-at"), b"40")
    assert journal.read(0, 0.0).entries == tuple(entries)


def test_an_older_fold_does_not_replace_a_newer(store: Store) -> None:
    """Readers would be thrown back."""
    journal, entries = store.journal(), many(MANY + 10)
    for i, entry in enumerate(entries):
        journal.append(str(i), entry)
    journal.publish(MANY + 10, folded(entries))
    journal.publish(MANY + 1, folded(entries[: MANY + 1]))
    assert journal.read(0, 0.0).base == folded(entries)


# ---- the end ----


def test_who_has_closed_it_connects_no_more(store: Store) -> None:
    """A thread that tries again must not leave a connection behind."""
    journal = store.journal()
    journal.append("1", Aborted("x"))
    journal.close()
    for call in (lambda: journal.append("2", Aborted("y")), lambda: journal.read(0, 0.0)):
        with pytest.raises(Unavailable, match="the journal was closed here"):
            call()


def test_twenty_agents_that_say_something_at_once_are_all_heard_once(store: Store) -> None:
    """All nodes of a job join at once, each from a process of its own."""
    script = """
        import sys
        from reknit.adapters.journals.envelope import Envelope
        from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
        from reknit.core.job.entries import Aborted
        port, job, me = sys.argv[1:]
        journal = TCPStoreJournal("127.0.0.1", int(port), Envelope(job), exclusive=False, timeout_s=60.0)
        for i in range(10):
            journal.append(f"{me}-{i}", Aborted(f"{me}-{i}"))
        journal.close()
    """
    agents = [
        subprocess.Popen(command(script, str(store.port), store.job, str(me)), env=ENV, cwd=ROOT) for me in range(20)
    ]
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0] * 20
    said = [entry.why for entry in store.journal().read(0, 0.0).entries if isinstance(entry, Aborted)]
    assert len(said) == 200
    for me in range(20):
        assert [why for why in said if why.startswith(f"{me}-")] == [f"{me}-{i}" for i in range(10)]
