"""A journal in a folder as this version writes it. Every version with the same format must read it. A journal of
another format is refused.

    python -m tests.adapters.journals.file.test_file_golden  # writes it anew, after a change of the format

tests/golden/file holds the folder of the journal. tests/golden/file.json holds its entries.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.entries import FORMAT, Entry, Failed, Filler
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.codec import decode, dumps
from tests.adapters.journals.test_journals import EVERY_KIND, ME, PEER
from tests.support.alone import ROOT
from tests.support.journals import entry

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


OLDER = (
    b'{"format":2,"job":"golden job","journal":"ce33ae3c002d5d00","signed":true,'
    b'"mac":"d10688400643c33706f810388f950d769ab2c88a00661dda1bd71d52910d1a4e"}\n'
)
"""The first line of this journal as a version with format 2 has written it."""


@pytest.mark.parametrize("reads_only", [False, True])
def test_a_journal_of_the_format_before_is_refused_in_one_line(tmp_path: Path, *, reads_only: bool) -> None:
    """It may hold entries that this version does not know. Its folder stays as it is, for the version that wrote it."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "golden%20job" / "journal"
    path.write_bytes(before := OLDER + path.read_bytes().split(b"\n", 1)[1])
    made = FileJournal(str(tmp_path), Envelope(JOB, SECRET), reads_only=reads_only)
    with closing(made) as journal, pytest.raises(Refused) as refused:
        journal.records(0) if reads_only else journal.append("t", Filler())
    assert refused.value.refusal is Refusal.FORMAT
    assert str(refused.value).startswith(
        f"the journal of job golden job has format 2, and this node reads format {FORMAT}"
    )
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


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
