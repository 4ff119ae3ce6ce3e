"""A journal in etcd as this version writes it. Every version with the same format must read it.

    python -m tests.adapters.journals.etcd.test_etcd_golden      # writes the file anew: after a change of the format

tests/golden/etcd.json holds the keys in the order in which they were put, with their values as text, and the entries.
"""

from __future__ import annotations

import json
import sys
import tempfile
from base64 import b64decode, b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.etcd.keys import EtcdKeys
from reknit.adapters.journals.etcd.reading import EtcdRecords
from reknit.core.job.entries import (
    Aborted,
    Admission,
    Admit,
    Entry,
    Failed,
    Filler,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    NodeId,
    Opened,
    RestartPolicy,
    Succeeded,
    Terms,
)
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.codec import decode, dumps
from reknit.core.text.snapshot import freeze
from tests.support.alone import ROOT
from tests.support.etcd import Etcd, change

FILE = ROOT / "tests" / "golden" / "etcd.json"
JOB, SECRET, AUTHOR = "golden job", "s3cret", "node-a pid 41"
A, B = Node(NodeId("a")), Node(NodeId("b/é"), 2)
ENTRIES: tuple[Entry, ...] = (
    Opened(Terms(1, 2, RestartPolicy(3, 5, 0.1, 1e9), Admission.NEVER, fence_s=3.5), journal="j", epoch=0),
    Joined(A, "n-a", 0, "10.0.0.1", 29401, "default", 8, rank_hint=1),
    Joined(B, "n-b", 0, "fe80::1", 29402, "default", 8),
    LastCall(0, 2),
    Failed(A, 0, (WorkerFailure(0, 0, 1, 4, "RuntimeError", "Traceback …\n  boom\n", ("last", "lines"), "/logs"),)),
    Admit(0),
    Leaving(B),
    Left(B, stuck=(1, 2)),
    Lost(A, B),
    Succeeded(A, 0),
    Filler(),
    GaveUp(1),
    Aborted("told to end"),
)


def every_key(server: Etcd) -> list[dict[str, Any]]:
    """All keys, in the order in which they were put first."""
    wanted = {"key": "AA==", "range_end": "AA==", "sort_target": "CREATE"}
    return list(server.post("/v3/kv/range", wanted)["kvs"])


def written() -> dict[str, Any]:
    """A journal of this version."""
    with tempfile.TemporaryDirectory() as folder, Etcd(Path(folder)) as server:
        envelope = Envelope(JOB, SECRET, AUTHOR)
        with closing(EtcdJournal(Cluster(server.endpoints), envelope, timeout_s=30.0)) as journal:
            position, entries = 0, list[Entry]()
            for i, entry in enumerate(ENTRIES):
                journal.append(f"n-{i}", entry)
                batch = journal.read(position, 0.0)
                position, entries = batch.position, [*entries, *batch.entries]
            journal.publish(position, fold_all(Job(), entries))
            journal.beat(A, 7, (B,))
            keys = [(k["key"], k["value"], int(k["create_revision"])) for k in every_key(server)]
    texts = [[b64decode(key).decode(), b64decode(value).decode(), revision] for key, value, revision in keys]
    entries_text = [json.loads(dumps(entry)) for entry in ENTRIES]
    job = json.loads(freeze(fold_all(Job(), ENTRIES)))
    return {"job": JOB, "secret": SECRET, "keys": texts, "entries": entries_text, "fold": job}


def test_this_version_reads_the_journal_of_the_file(tmp_path: Path) -> None:
    """A job must survive an update of reknit on its nodes, and a journal must be readable years later."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    entries = [decode(entry, Entry) for entry in golden["entries"]]
    fold = fold_all(Job(), entries)
    with Etcd(tmp_path) as server:
        for revision in sorted({revision for _, _, revision in golden["keys"]}):
            puts = [(key, value) for key, value, created in golden["keys"] if created == revision]
            change(server, *({"request_put": {"key": b64(key), "value": b64(value)}} for key, value in puts))
        assert [int(k["create_revision"]) for k in every_key(server)] == [created for _, _, created in golden["keys"]]
        before = server.revision()
        envelope = Envelope(golden["job"], golden["secret"])
        with closing(EtcdRecords(Cluster(server.endpoints), envelope, timeout_s=30.0)) as reader:
            position, records = reader.records(0)
            assert [record.entry for _, record in records] == entries
            assert {record.by for _, record in records} == {AUTHOR}
            assert all(record.at for _, record in records)
            assert [place for place, _ in records] == [f"entry n-{i}" for i in range(len(entries))]
            assert reader.records(position) == (position, [])
        assert server.revision() == before, "to read alone changes nothing"
        envelope = Envelope(golden["job"], golden["secret"])
        with closing(EtcdJournal(Cluster(server.endpoints), envelope, timeout_s=30.0)) as journal:
            batch = journal.read(0, 0.0)
            assert batch.entries == tuple(entries)
            assert journal.beat(B, 1, (A,)) == {B: 1, A: 7}
        keys = {key: value for key, value, _ in golden["keys"]}
        published = envelope.open_fold(keys[EtcdKeys(JOB).fold].encode())
        assert published is not None
        assert published[:2] == (batch.position, fold)
        assert json.loads(freeze(fold)) == golden["fold"]


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(written(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
