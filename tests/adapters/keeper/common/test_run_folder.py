"""The folders of runs: a scratch folder is removed by its keeper or by the next one. Output is never removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from reknit.adapters.keeper.common.run_folder import CannotMake, LogFolder, remove_abandoned
from tests.support.alone import run_killed

OLD = (0, 0)


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def left_by_a_killed_keeper(run_id: str) -> str:
    """The path of a scratch folder whose keeper was killed."""
    script = """
        import sys
        from reknit.adapters.keeper.common.run_folder import LogFolder
        folder = LogFolder("", sys.argv[1], keeps=False)
        print(folder.path)
    """
    return run_killed(script, run_id).strip()


def test_a_scratch_folder_of_a_killed_keeper_is_removed_by_a_later_one(base: Path) -> None:
    """83 of 140 kills left one behind."""
    abandoned = left_by_a_killed_keeper("a/b")
    used, output = LogFolder("", "b", keeps=False), LogFolder("", "c", keeps=True)
    for path in (abandoned, used.path, output.path):
        (Path(path) / "file").touch()
    os.mkfifo(base / "reknit_scratch_fifo")  # another user's joke: must not block
    (base / "reknit_scratch_link").symlink_to(output.path)
    assert remove_abandoned() == 1
    assert not os.path.exists(abandoned)
    assert all(os.path.exists(os.path.join(path, "file")) for path in (used.path, output.path))
    used.close()
    used.close()
    output.close()
    assert not os.path.exists(used.path)
    assert os.path.exists(output.path)


def test_a_folder_that_is_not_locked_yet_stays(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keepers that start together must not remove each other's. Without locks nobody knows whose a folder is."""
    young, old, unlocked = base / "reknit_new_young", base / "reknit_new_old", base / "reknit_new_used"
    for path in (young, old, unlocked):
        path.mkdir()
    (unlocked / "file").touch()
    os.utime(old, OLD)
    os.utime(unlocked, OLD)
    assert remove_abandoned() == 1
    assert sorted(base.iterdir()) == [unlocked, young]
    monkeypatch.setattr("fcntl.flock", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    without = LogFolder("", "job", keeps=False)
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(base))
    assert remove_abandoned() == 0
    assert os.path.isdir(without.path)
    without.close()
    assert sorted(base.iterdir()) == [unlocked, young]


def test_a_folder_that_was_removed_is_made_again(base: Path) -> None:
    """A keeper was killed, and another agent was faster than the next keeper."""
    first = left_by_a_killed_keeper("job")
    assert remove_abandoned() == 1
    second = LogFolder("", "job", keeps=False, made=first)
    assert os.path.isdir(second.path)
    assert remove_abandoned() == 0
    second.close()
    assert list(base.iterdir()) == []


def test_a_later_keeper_goes_on_with_the_folder(base: Path) -> None:
    """It holds the error files of the rounds before, and is then its own to remove."""
    first = left_by_a_killed_keeper("job")
    second = LogFolder("", "job", keeps=False, made=first)
    assert second.path == first
    assert remove_abandoned() == 0
    second.close()
    assert list(base.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(base: Path) -> None:
    """The operator has asked for output there; error files alone are not worth failing for."""
    (base / "file").touch()
    with pytest.raises(CannotMake, match=r"^--log-dir=.*file cannot be made: Not a directory$"):
        LogFolder(str(base / "file"), "job", keeps=False)
    assert LogFolder(os.devnull, "job", keeps=False).path == ""


def test_a_folder_of_this_run_alone(base: Path) -> None:
    """Two runs with the same id and --log-dir must not write over each other's files."""
    first, second = (LogFolder(f"{base}/a/b", "job", keeps=False) for _ in range(2))
    assert first.path != second.path
    for folder in (first, second):
        assert Path(folder.path).parent == base / "a" / "b"
        assert Path(folder.path).name.startswith("job_")
        folder.close()
        assert os.path.isdir(folder.path), "it was asked for"


def test_a_run_id_decides_over_no_other_folder(base: Path) -> None:
    """Ids are made from job names and paths; a slash in one must not leave the base."""
    for run_id in ("a/b", "../../x", "/etc", "x" * 300):
        folder = LogFolder("", run_id, keeps=False)
        assert Path(folder.path).parent == base
        folder.close()
    assert os.listdir(base) == []


def test_a_temporary_folder_is_removed(base: Path) -> None:
    """torchrun leaves one behind with every run. What the error files said is in the report."""
    folder = LogFolder("", "job", keeps=False)
    os.makedirs(f"{folder.path}/round_0/0")
    Path(folder.path, "round_0/0/error.json").write_text("{}")
    folder.close()
    assert os.listdir(base) == []


def test_a_temporary_folder_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /tmp is no reason not to train."""
    monkeypatch.setenv("TMPDIR", "/proc")
    folder = LogFolder("", "job", keeps=False)
    folder.close()
    assert folder.path == ""


def test_what_cannot_be_removed_fails_no_job(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system refuses for its own reasons; the job has succeeded all the same."""
    folder = LogFolder("", "job", keeps=False)
    Path(folder.path, "error.json").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", lambda *args, **settings: (_ for _ in ()).throw(PermissionError(args)))
        folder.close()
    assert os.listdir(folder.path) == ["error.json"]


def test_an_interrupted_removal_is_left_to_a_later_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that lives on must not hold on to the folder."""

    def interrupted(path: str, **how: object) -> None:
        raise KeyboardInterrupt

    folder = LogFolder("", "a", keeps=False)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.close()
    assert remove_abandoned() == 1


def test_a_missing_temporary_folder_is_not_made(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR of another host, in a copied environment: like Python, we take /tmp, and leave nothing at that place."""
    monkeypatch.setenv("TMPDIR", str(base / "none"))
    folder = LogFolder("", "job", keeps=False)
    folder.close()
    assert folder.path.startswith("/tmp/reknit_")
    assert not (base / "none").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours(base: Path) -> None:
    """The usual case on a cluster."""
    base.chmod(0o500)
    with pytest.raises(CannotMake, match=r"^--log-dir=.* cannot be made: Permission denied$"):
        LogFolder(f"{base}/logs", "job", keeps=False)
    base.chmod(0o700)
