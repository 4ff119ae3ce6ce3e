"""What a journal in torch's store writes there, byte for byte. Agents of one job may run several versions of reknit
with the same format.

    REKNIT_REWRITE=1 pytest tests/adapters/journals/tcpstore/test_tcpstore_records.py      writes what is written now

If another version with this format could not read what is written now, raise `FORMAT`. Only the latest format is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.runtime.ports import Batch, Refused
from reknit.core.job.entries import Aborted, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import moved
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.stores import HOST, SlowLink, hosted, stubborn
from tests.support.waiting import PATIENCE_S

GOLDEN = Path(__file__).parents[3] / "golden" / "tcpstore.txt"
ENTRIES = (
    Opened(Terms(min_nodes=2, max_nodes=2), "a1"),
    Joined(Node(NodeId("a")), nonce="a1", round=0, address="10.0.0.1", port=1),
)
ROOT = "reknit/job%2F1/"
FIRST = ("header", "begun", "head", "slot/0", "slot/1", "beat/0/a", "fold", "fold-at")
LATER = ("best", "header", "begun", "{}head", "{}slot/2", "{}beat/0/a", "{}fold", "{}fold-at")


def opened(port: int, closing: ExitStack, *, reads_only: bool = False) -> TCPStoreJournal:
    envelope = Envelope("job/1", "secret", "node-a pid 41")
    journal = TCPStoreJournal(HOST, port, envelope, timeout_s=PATIENCE_S, reads_only=reads_only)
    closing.callback(journal.close)
    return journal


def dump(client: StoreClient, keys: tuple[str, ...], life: str = "") -> list[str]:
    names = ["reknit/owner", *(ROOT + key.format(life) for key in keys)]
    values = client.multi_get(names)
    return [f"/{name} {value.decode()}" for name, value in zip(names, values, strict=True)]


def test_the_keys_and_the_values_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first life of a journal, and after its store was lost."""
    names = iter((2, 6))  # of the journal, and of its second life: they have 8 bytes
    monkeypatch.setattr(time, "time", lambda: 1795871234.5)
    monkeypatch.setattr(os, "urandom", lambda size: bytes([next(names) if size == 8 else 0] * size))
    lines: list[str] = []
    with ExitStack() as closing:
        ports = [closing.enter_context(hosted())[1] for _ in range(2)]
        endpoint = closing.enter_context(SlowLink(ports[0]))
        clients = [StoreClient(HOST, port, PATIENCE_S) for port in ports]
        for client in clients:
            closing.callback(client.close)
        names = iter((2, 6))  # of the journal, and of its second life: they have 8 bytes
        journal = opened(endpoint.port, closing)
        for i, entry in enumerate(ENTRIES):
            journal.append(f"a1-{i}", entry)
            journal.read(i, 0.0)
        journal.remember(2, fold_all(Job(), ENTRIES))
        journal.publish(2, fold_all(Job(), ENTRIES))
        journal.beat(ENTRIES[1].node, 3, ())
        lines += ["# the first life", *dump(clients[0], FIRST), ""]
        endpoint.lead_to(ports[1])
        batch = stubborn(lambda: journal.read(2, 0.0))
        assert batch.base is not None
        journal.remember(2, batch.base)
        life = f"{batch.life.name}/"
        stubborn(lambda: journal.append("a1-2", ENTRIES[1], batch.life))
        journal.beat(ENTRIES[1].node, 4, ())
        lines += ["# the second life", *dump(clients[1], LATER, life), ""]
    text = "\n".join(lines)
    if os.environ.get("REKNIT_REWRITE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("reads_only", [False, True])
def test_golden_records_are_read(*, reads_only: bool) -> None:
    """The file itself, as a store that an earlier version has left. What was before the second life of the journal is
    not forgotten by those who only read, either."""
    values = dict(line.removeprefix("/").split(" ", 1) for line in GOLDEN.read_text().splitlines() if line[:1] == "/")
    with ExitStack() as closing:
        port = closing.enter_context(hosted())[1]
        client = StoreClient(HOST, port, PATIENCE_S)
        closing.callback(client.close)
        for key, value in values.items():
            client.set(key, value.encode())
        journal = opened(port, closing, reads_only=reads_only)
        batch = journal.read(0, 0.0)
        assert batch.base == moved(fold_all(Job(), ENTRIES))
        assert batch.entries == ENTRIES[1:]
        assert journal.read(batch.position, 0.0).position == batch.position


def test_reading_alone_changes_nothing() -> None:
    """People look at a job that runs. What they do must not be seen by its agents."""
    with hosted() as (_, port), ExitStack() as closing:
        journal, reader = (
            TCPStoreJournal(HOST, port, Envelope("j"), reads_only=only, timeout_s=PATIENCE_S) for only in (False, True)
        )
        client = StoreClient(HOST, port, PATIENCE_S)
        for each in (journal, reader, client):
            closing.callback(each.close)
        with pytest.raises(Refused, match="there is no journal of job j") as refused:
            reader.records(0)
        assert refused.value.refusal is Refusal.SETUP
        assert client.get("reknit/j/header") == b""
        journal.append("1", Aborted("x"))
        client.add("reknit/j/head", 1)
        position, records = reader.records(0)
        assert [(place, record.token, record.entry) for place, record in records] == [("0", "1", Aborted("x"))]
        assert position == 1, "a hole is left to the agents"
        assert reader.read(0, 0.0) == Batch(1, (Aborted("x"),))
        calls: list[Callable[[], object]] = [
            lambda: reader.append("2", Aborted("y")),
            lambda: reader.beat(Node(NodeId("a")), 1, ()),
            lambda: reader.publish(1, Job()),
        ]
        for call in calls:
            with pytest.raises(Refused, match="was opened for reading alone"):
                call()
