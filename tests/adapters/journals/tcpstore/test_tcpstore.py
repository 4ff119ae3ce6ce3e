"""The journal in torch's store, beside what `test_journals` demands of all."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TypeVar

import psutil
import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import journal as journal_module
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.journals.tcpstore.keys import OWNER, StoreKeys
from reknit.adapters.runtime.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Aborted, Entry, Filler, Node, NodeId
from reknit.core.job.reasons import Refusal
from tests.support.alone import ENV, ROOT, command
from tests.support.stores import HOST, JobStore, folded, hosted, noted_clients, plain
from tests.support.waiting import PATIENCE_S, until

T = TypeVar("T")
JOBS = (f"job-{number}" for number in count())
ME = Node(NodeId("me"))


# ---- slots and holes ----


def test_a_slot_whose_writer_died_is_plugged_and_the_same_for_all(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies between two words must neither stop the journal nor be read differently by two."""
    monkeypatch.setattr(journal_module, "HOLE_S", 0.05)
    journal, other = store.journal(), store.journal()
    journal.append("1", Aborted("first"))
    for _ in range(3):
        store.client.add(store.key("head"), 1)
    journal.append("2", Aborted("second"))
    assert plain(journal.read(0, PATIENCE_S)) == Batch(1, (Aborted("first"),)), "what precedes it is told at once"
    found, position = list[Entry]([Aborted("first")]), 1
    while position < 5:
        batch = journal.read(position, PATIENCE_S)
        found, position = [*found, *batch.entries], batch.position
    assert found == [Aborted("first"), Filler(), Filler(), Filler(), Aborted("second")]
    assert other.read(0, PATIENCE_S).entries == tuple(found)


def test_a_slot_that_is_filled_late_is_not_plugged(store: JobStore) -> None:
    """The writer was slow, not dead: all wait a moment for it."""
    journal, writer = store.journal(), store.journal()
    writer.beat(ME, 1, ())  # it is connected
    store.client.add(store.key("head"), 1)
    envelope = Envelope(store.job)
    envelope.admit(store.client.get(store.key("header")))
    record = envelope.wrap("1", Aborted("late"), "0")
    thread = threading.Thread(target=lambda: store.client.compare_set(store.key("slot/0"), b"", record))
    thread.start()
    assert plain(journal.read(0, 0.0)) == Batch(1, (Aborted("late"),))
    thread.join()


def test_a_writer_whose_slot_was_plugged_takes_another(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for a while and knows nothing of it; its entry must not be lost."""
    journal = store.journal()
    real = StoreClient.compare_set

    def late(client: StoreClient, key: str, expected: bytes, desired: bytes) -> bytes:
        if key == store.key("slot/0"):
            real(client, key, b"", Envelope(store.job).wrap("", Filler(), "0"))
        return real(client, key, expected, desired)

    monkeypatch.setattr(StoreClient, "compare_set", late)
    journal.append("1", Aborted("x"))
    assert plain(journal.read(0, 0.0)) == Batch(2, (Filler(), Aborted("x")))


@pytest.mark.parametrize("is_written", [True, False])
def test_an_append_that_broke_is_continued_where_it_was(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """Whether the store had done it or not, the entry is there once, and leaves no hole."""
    journal = store.journal()
    real = StoreClient.compare_set

    def breaking(client: StoreClient, key: str, expected: bytes, desired: bytes) -> bytes:
        if "/slot/" not in key:
            return real(client, key, expected, desired)
        monkeypatch.setattr(StoreClient, "compare_set", real)
        if is_written:
            real(client, key, expected, desired)
        client.close()
        raise Unavailable("as if the connection was lost")

    monkeypatch.setattr(StoreClient, "compare_set", breaking)
    with pytest.raises(Unavailable):
        journal.append("1", Aborted("x"))
    journal.append("1", Aborted("x"))
    journal.append("2", Aborted("y"))
    assert plain(journal.read(0, 0.0)) == Batch(2, (Aborted("x"), Aborted("y")))


def test_a_connection_that_was_lost_is_made_again(store: JobStore) -> None:
    """An agent outlives any of its connections."""
    journal = store.journal()
    with noted_clients() as clients:
        journal.append("1", Aborted("x"))
        journal.read(0, 0.0)
    for client in clients:
        client.close()
    journal.append("2", Aborted("y"))
    assert plain(journal.read(1, 0.0)) == Batch(2, (Aborted("y"),))


# ---- whose store it is ----


def test_a_store_that_serves_another_job_is_refused() -> None:
    """Two jobs with one endpoint is an operator's mistake that would otherwise end as a mystery."""
    with hosted() as (_, port), ExitStack() as closing:
        store = JobStore(port, closing)
        store.journal("one", exclusive=True).append("1", Aborted("x"))
        store.journal("one", exclusive=True).append("2", Aborted("x"))
        with pytest.raises(
            Refused, match=rf"^127\.0\.0\.1:{port} serves job one, not two: give --rdzv-id=one, or another endpoint$"
        ) as refused:
            store.journal("two", exclusive=True).read(0, 0.0)
        assert refused.value.refusal is Refusal.OTHER_JOB


def test_a_store_that_serves_another_job_later_is_an_outage() -> None:
    """Somebody has started the wrong job at the endpoint of a host that was lost. The workers of this one run on."""
    with hosted() as (_, port), ExitStack() as closing:
        store = JobStore(port, closing)
        mine = store.journal("one", exclusive=True)
        with noted_clients() as clients:
            mine.append("1", Aborted("x"))
            mine.remember(1, folded([*mine.read(0, 0.0).entries]))
        store.client.set(OWNER, b"two")
        store.client.set(StoreKeys("one").header, b"")
        store.client.set(StoreKeys("one").begun, b"")
        for client in clients:
            client.close()
        with pytest.raises(Unavailable, match="serves job two, not one"):
            mine.read(1, 0.0)


def test_only_who_founds_a_journal_begins_it(store: JobStore) -> None:
    """Else one with a wrong secret that is there first would turn the job's own host away."""
    stranger = store.journal(founds=False, secret="wrong", timeout_s=0.1)
    with pytest.raises(Unavailable, match=r"waited 0\.1 s for its host to begin the journal"):
        stranger.read(0, 0.0)
    store.journal(secret="right").append("1", Aborted("x"))
    with pytest.raises(Refused, match="another secret"):
        stranger.read(0, 0.0)
    guest = store.journal(founds=False, secret="right")
    assert guest.read(0, 0.0).entries == (Aborted("x"),)


# ---- what others have read ----


def test_a_record_that_was_changed_after_it_was_read_is_noticed(store: JobStore) -> None:
    """Folds that differ in silence make a job that hangs."""
    journal, other = store.journal(), store.journal()
    journal.append("1", Aborted("x"))
    journal.read(0, 0.0)
    forger = Envelope(store.job, author="somebody")
    forger.admit(store.client.get(store.key("header")))
    store.client.set(store.key("slot/0"), forger.wrap("1", Aborted("y"), "0"))
    other.read(0, 0.0)
    journal.append("2", Aborted("z"))
    with pytest.raises(Refused, match=r"has read other records than this node before record 1 ") as refused:
        other.read(1, 0.0)
    assert refused.value.refusal is Refusal.IDENTITY
    assert journal.read(1, 0.0).entries == (Aborted("z"),)


def test_names_with_separators_do_not_meet(store: JobStore) -> None:
    """A job's name may hold anything, also what looks like another job's keys."""
    one = store.journal(f"{store.job}/beat/0/x")
    other = store.journal(store.job)
    one.append("1", Aborted("x"))
    assert other.beat(Node(NodeId("x/head")), 1, ())[Node(NodeId("x/head"))] == 1
    assert plain(one.read(0, 0.0)) == Batch(1, (Aborted("x"),))


# ---- the end ----


@contextmanager
def silent(*, is_full: bool) -> Iterator[int]:
    """A server that never answers. Gives its port. `is_full`: it does not even take connections."""
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server((HOST, 0), backlog=0))
        port = int(listener.getsockname()[1])
        for _ in range(2 if is_full else 0):
            sock = closing.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex((HOST, port))
        yield port


def connections_to(port: int) -> int:
    """How many connections this process has there, or is making."""
    found = psutil.Process().net_connections("tcp4")
    return sum(bool(connection.raddr) and connection.raddr.port == port for connection in found)


@pytest.mark.parametrize("is_full", [True, False])
def test_closing_ends_a_connection_that_is_being_made(is_full: bool) -> None:
    """A thread that waits for a host that is gone must not outlive the agent."""
    with silent(is_full=is_full) as port:
        journal = TCPStoreJournal(HOST, port, Envelope("job"), timeout_s=1000.0)
        found: list[str] = []

        def read() -> None:
            try:
                journal.read(0, 0.0)
            except Unavailable as error:
                found.append(str(error))

        before = connections_to(port)
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        until(lambda: connections_to(port) > before, "the connection, or its beginning")
        journal.close()
        thread.join(PATIENCE_S)
        assert found == [f"{HOST}:{port}: the connection was closed here"]


def test_who_has_closed_it_connects_no_more(store: JobStore) -> None:
    """A thread that tries again must not leave a connection behind."""
    journal = store.journal()
    journal.append("1", Aborted("x"))
    journal.close()
    for call in (lambda: journal.append("2", Aborted("y")), lambda: journal.read(0, 0.0)):
        with pytest.raises(Unavailable, match="the journal was closed here"):
            call()


@pytest.mark.slow
def test_twenty_agents_that_say_something_at_once_are_all_heard_once(store: JobStore) -> None:
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
