"""Finished jobs are removed from a folder of journals, and no others."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file import pruning
from reknit.adapters.journals.file.folder import file_name
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.file.turn import Turn
from reknit.adapters.ports import Refused
from reknit.core.job.entries import Aborted, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.job import Verdict
from reknit.core.job.reasons import Refusal
from tests.journals import everything
from tests.waiting import PATIENCE_S

ME = Node(NodeId("me"))
HOUR_S = 3600.0


def journal(path: Path, job: str, secret: str = "") -> FileJournal:
    return FileJournal(str(path), Envelope(job, secret), timeout_s=PATIENCE_S)


def aborted(path: Path, job: str, secret: str = "") -> FileJournal:
    """The journal of a job that has ended two hours ago."""
    one = journal(path, job, secret)
    for i, entry in enumerate((Opened(Terms(1, 2), "j"), Joined(ME, "n", 0, "h", 1), Aborted("enough"))):
        one.append(str(i), entry)
    one.beat(ME, 1, ())
    age(path, job)
    return one


def age(path: Path, job: str) -> None:
    then = time.time() - 2 * HOUR_S
    for folder, _, names in os.walk(path / file_name(job), topdown=False):
        for name in names:
            os.utime(os.path.join(folder, name), (then, then))
        os.utime(folder, (then, then))


def found(path: Path, secret: str = "") -> list[str]:
    return [end.job for end in pruning.finished(str(path), HOUR_S, secret)]


def test_only_jobs_that_have_ended_and_are_old_are_found(tmp_path: Path) -> None:
    """Everything else in the folder belongs to somebody."""
    before = time.time() - 1
    for job in ("b/b", "a"):
        aborted(tmp_path, job)
    journal(tmp_path, "running").append("t", Opened(Terms(1, 2), "j"))
    age(tmp_path, "running")
    os.utime(tmp_path / "running" / "journal")
    age(tmp_path, "running")
    aborted(tmp_path, "beats").beat(ME, 2, ())
    aborted(tmp_path, "again").append("9", Opened(Terms(1, 2), "j", epoch=1))
    age(tmp_path, "again")
    aborted(tmp_path, "signed", "secret")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "journal").write_bytes((tmp_path / "a" / "journal").read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "journal").write_text("mine")
    (tmp_path / "a file").write_text("mine")
    ends = pruning.finished(str(tmp_path), HOUR_S)
    assert [(end.job, end.verdict) for end in ends] == [("a", Verdict.ABORTED), ("b/b", Verdict.ABORTED)]
    assert all(before < end.ended_at < time.time() + 1 for end in ends)
    assert found(tmp_path, "secret") == ["signed"]
    for job in ("running", "beats", "again", "signed", "copy", "other", "a file", "none"):
        assert not pruning.remove(str(tmp_path), job, HOUR_S)
    left = {file_name(job) for job in ("running", "beats", "again", "signed", "copy", "other", "a")}
    assert pruning.remove(str(tmp_path), "b/b", HOUR_S)
    assert not pruning.remove(str(tmp_path), "b/b", HOUR_S)
    assert {*os.listdir(tmp_path)} == left | {"a file"}
    with pytest.raises(Refused, match="none: No such file"):
        pruning.finished(str(tmp_path / "none"), HOUR_S)


def test_an_agent_that_begins_the_next_epoch_just_before_keeps_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the lock."""
    one = aborted(tmp_path, "job")
    enter = Turn.__enter__

    def late(turn: Turn) -> Turn:
        monkeypatch.undo()
        one.append("9", Opened(Terms(1, 2), "j", epoch=1))
        return enter(turn)

    monkeypatch.setattr(Turn, "__enter__", late)
    assert not pruning.remove(str(tmp_path), "job", HOUR_S)
    assert len(everything(one)) == 4


def test_an_agent_that_comes_too_late_writes_nowhere(tmp_path: Path) -> None:
    """Neither into the folder that was removed nor into the one that another agent has made since."""
    one = aborted(tmp_path, "job")
    refused: list[Refused] = []

    def write() -> None:
        try:
            one.append("9", Opened(Terms(1, 2), "j", epoch=1))
        except Refused as e:
            refused.append(e)

    writer = threading.Thread(target=write)
    with Turn(str(tmp_path / "job" / "lock"), PATIENCE_S):
        writer.start()
        os.rename(tmp_path / "job", tmp_path / "gone")
    writer.join()
    assert [e.refusal for e in refused] == [Refusal.IDENTITY]
    assert os.listdir(tmp_path) == ["gone"]
    two = journal(tmp_path, "job")
    two.append("t", Aborted("x"))
    write()
    assert len(refused) == 2
    with pytest.raises(Refused):
        one.beat(ME, 3, ())
    assert everything(two) == [Aborted("x")]
