"""Where traces are, and which of them are removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from reknit.adapters.observe.trace_folder import about_line
from reknit.adapters.observe.trace_place import about, folders, is_live, new_folder, tidy
from tests.support import places


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return places.move(monkeypatch, tmp_path)


def left(number: int, pid: int = 2**22 + 1) -> str:
    """A trace of an agent that has ended."""
    path = new_folder(f"job{number}", "0123456789", "")
    line = json.loads(about_line("job", "n0", "0", (), 0.0))
    line["about"]["agent"]["pid"] = pid
    Path(path, "000000.jsonl").write_text(json.dumps(line) + "\n")
    return path


def test_it_is_in_the_folder_of_the_user_or_in_the_log_folder(place: Path, tmp_path: Path) -> None:
    """Nobody else can read it. In a log folder it stays as long as the logs, and is found from the host as well."""
    own = new_folder("a/b", "0123456789", "")
    assert os.path.dirname(own) == str(place / "traces")
    assert os.path.basename(own).endswith("_a_b_01234567")
    assert os.stat(own).st_mode & 0o777 == 0o700
    logs = tmp_path / "logs"
    logs.mkdir()
    assert new_folder("job", "0123456789", str(logs)) == str(logs / "trace")
    assert [os.path.realpath(path) for path in folders()] == [own, str(logs / "trace")]


def test_the_older_half_is_removed_when_there_are_too_many(place: Path, tmp_path: Path) -> None:
    """Except for the traces of agents that run, and for what is in a log folder."""
    logs = tmp_path / "logs"
    logs.mkdir()
    linked = new_folder("linked", "0123456789", str(logs))
    live = left(0, os.getpid())
    for number in range(1, 62):
        left(number)
    tidy()
    assert len(folders()) == 63, "64 are kept"
    for number in range(62, 64):
        left(number)
    tidy()
    assert len(folders()) == 34, "32, the one that runs, and the link"
    assert live in folders()
    assert os.path.isdir(linked)


def test_whose_trace_it_is(place: Path) -> None:
    """A later process with the same pid is another one."""
    path = new_folder("job", "0123456789", "")
    assert about(path) == {}
    Path(path, "000000.jsonl").write_text(about_line("job", "n0", "1.2", ("python", "train.py"), 5.0))
    told = about(path)
    assert (told["job"], told["node"], told["version"], told["command"]) == ("job", "n0", "1.2", ["python", "train.py"])
    assert is_live(told)
    assert not is_live({**told, "agent": {**told["agent"], "start": 1}})
    assert not is_live({**told, "host": "another"})
    assert not is_live({})
