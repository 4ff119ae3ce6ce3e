"""A journal in a folder as this version writes it. Later versions must read it.

    python -m tests.test_file_golden      # writes it anew: after a change of the format, or a new kind of entry

tests/golden/file holds the folder of the journal. tests/golden/file.json holds its entries.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.folds import MANY
from reknit.core.job.entries import Entry, Failed, Filler
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.codec import decode, dumps
from tests.alone import ROOT
from tests.journals import entry
from tests.test_journals import EVERY_KIND, ME, PEER

FOLDER, ENTRIES = ROOT / "tests" / "golden" / "file", ROOT / "tests" / "golden" / "file.json"
JOB, SECRET, AUTHOR = "golden job", "s3cret", "node-a pid 41"
FAILED = Failed(
    ME, 0, (WorkerFailure(0, 0, 1, 4, "RuntimeError", "Traceback …\n  boom\n", ("last", "lines"), "/logs"),)
)


def write() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    short = [FAILED if isinstance(e, Failed) else e for e in EVERY_KIND]  # the other one fills a file by itself
    with closing(FileJournal(str(FOLDER), Envelope(JOB, SECRET, AUTHOR))) as journal:
        for i, said in enumerate([*short, *(entry("a", i) for i in range(MANY))]):
            journal.append(f"n-{i}", said)
        journal.beat(ME, 7, ())
        batch = journal.read(0, 0.0)
        journal.publish(batch.position, fold_all(Job(), batch.entries))
        with open(FOLDER / "golden%20job" / "journal", "ab") as file:
            file.write(b"a line of another program\n")
        last = entry("a", MANY)
        journal.append("last", last)
    lines = [dumps(e) for e in (*batch.entries, Filler(), last)]
    ENTRIES.write_text(json.dumps(lines, indent=1) + "\n")


def expected() -> list[Entry]:
    return [decode(json.loads(line), Entry) for line in json.loads(ENTRIES.read_text())]


def test_the_golden_journal_is_read() -> None:
    """A job may be older than the version that reads its journal."""
    with closing(FileJournal(str(FOLDER), Envelope(JOB, SECRET), reads_only=True)) as journal:
        position, records = journal.records(0)
        assert [record.entry for _, record in records] == expected()
        assert {record.by for _, record in records if record.entry != Filler()} == {AUTHOR}
        assert all(record.at is not None for _, record in records if record.by)
        assert journal.records(position) == (position, [])
        batch = journal.read(0, 0.0)
    assert batch.base == fold_all(Job(), expected()[:-2])
    assert batch.entries == (Filler(), expected()[-1])


def test_agents_go_on_with_the_golden_journal(tmp_path: Path) -> None:
    """Its digests and its counters count for them as well."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    with closing(FileJournal(str(tmp_path), Envelope(JOB, SECRET))) as journal:
        assert journal.beat(PEER, 1, [ME]) == {PEER: 1, ME: 7}
        journal.append("more", Filler())
        end = journal.read(0, 0.0).position
    with closing(FileJournal(str(tmp_path), Envelope(JOB, SECRET), reads_only=True)) as journal:
        assert journal.records(0)[0] == end
    assert {type(e) for e in expected()} == {type(e) for e in EVERY_KIND}, "see the top of this file"


if __name__ == "__main__":
    write()
