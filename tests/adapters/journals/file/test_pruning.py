"""Jobs that are over are removed from a folder of journals, and no others."""

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
from reknit.adapters.journals.file.pruning import FolderShelf
from reknit.adapters.journals.file.turn import Turn
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.entries import Aborted, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.job import Verdict
from reknit.core.job.reasons import Refusal
from tests.support.journals import everything
from tests.support.waiting import PATIENCE_S

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


def shelf(path: Path, job: str = "", secret: str = "") -> FolderShelf:
    """A shelf that has looked at all jobs."""
    made = FolderShelf(str(path), secret, job, older_than_s=HOUR_S)
    for name in made.jobs():
        made.look(name)
    return made


def test_the_journals_in_a_folder_are_found_and_judged(tmp_path: Path) -> None:
    """Everything else in the folder belongs to somebody."""
    before = time.time() - 1
    aborted(tmp_path, "b/b")
    aborted(tmp_path, "again").append("9", Opened(Terms(1, 2, beat_s=1.0, silence_s=7.0), "j", epoch=1))
    aborted(tmp_path, "signed", "secret")
    damaged = tmp_path / "damaged" / "journal"
    aborted(tmp_path, "damaged")
    damaged.write_bytes(damaged.read_bytes().replace(b'"nonce":"n"', b'"nonce":"m"'))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "journal").write_bytes((tmp_path / "again" / "journal").read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "journal").write_text("mine")
    (tmp_path / "a file").write_text("mine")
    one = FolderShelf(str(tmp_path))
    assert one.jobs() == ["again", "b/b", "damaged", "signed"]
    assert FolderShelf(str(tmp_path), job="b/b").jobs() == ["b/b"]
    assert FolderShelf(str(tmp_path), job="none").jobs() == []
    end = one.look("b/b")
    assert (end.verdict, end.why) == (Verdict.ABORTED, "")
    assert end.at is not None
    assert before < end.at < time.time() + 1
    again = one.look("again")
    assert (again.verdict, again.silence_s, again.why) == (None, 7.0, "")
    assert "is damaged; if no agent of the job lives, remove the folder" in one.look("damaged").why
    assert one.look("signed").why == "it has another secret (--rdzv-secret)"
    assert FolderShelf(str(tmp_path), "secret").look("signed").verdict is Verdict.ABORTED
    with pytest.raises(Refused, match="none: No such file"):
        FolderShelf(str(tmp_path / "none")).jobs()


def test_what_nobody_touches_is_removed(tmp_path: Path) -> None:
    """Once, and nothing else is."""
    for job in ("b/b", "a"):
        aborted(tmp_path, job)
    one, two = shelf(tmp_path), shelf(tmp_path)
    assert one.is_quiet("b/b")
    assert one.remove("b/b")
    assert not one.remove("b/b")
    assert not two.is_quiet("b/b")
    assert not two.remove("b/b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("what", ["a beat", "a counter of another node", "an entry"])
def test_what_an_agent_touches_is_kept(tmp_path: Path, what: str, is_old: bool) -> None:
    """The times of files may be wrong, and what is in the files is not."""
    agent = aborted(tmp_path, "job")
    one = shelf(tmp_path)
    if what == "an entry":
        agent.append("9", Opened(Terms(1, 2), "j", epoch=1))
    else:
        agent.beat(ME if what == "a beat" else Node(ME.id, 1), 2, ())
    if is_old:
        age(tmp_path, "job")
    assert not one.is_quiet("job")
    assert not one.remove("job")
    assert shelf(tmp_path).remove("job") == is_old


def test_folders_that_crashed_processes_have_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that another process is making or removing now."""
    aborted(tmp_path, "job")
    for name in (".new-1", ".new-2"):
        (tmp_path / name / "beats").mkdir(parents=True)
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name, (0.0, 0.0))
    (tmp_path / ".other").mkdir()
    one = FolderShelf(str(tmp_path))
    one.sweep()
    assert {*os.listdir(tmp_path)} == {"job", ".new-1", ".new-2", ".other"}
    monkeypatch.setattr(pruning, "CRASHED_S", 0.0)
    one.sweep()
    assert {*os.listdir(tmp_path)} == {"job", ".other"}


def test_an_agent_that_begins_the_next_epoch_just_before_keeps_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the lock."""
    one = aborted(tmp_path, "job")
    judged, enter = shelf(tmp_path), Turn.__enter__

    def late(turn: Turn) -> Turn:
        monkeypatch.undo()
        one.append("9", Opened(Terms(1, 2), "j", epoch=1))
        return enter(turn)

    monkeypatch.setattr(Turn, "__enter__", late)
    assert not judged.remove("job")
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
