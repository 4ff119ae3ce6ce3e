"""The file with what is known of a script's imports."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import evolve

from reknit.adapters.keeper.zygote.commandline import CommandLine
from reknit.adapters.keeper.zygote.learned import Known, file_of, forget, note, open_folder, program_of, read, take

SCRIPT = CommandLine(("-u",), "", "train.py")


def test_each_program_of_each_python_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Whichever way a script is named."""
    (tmp_path / "train.py").touch()
    (tmp_path / "link.py").symlink_to("train.py")
    environ = {"HOME": "/home/me"}
    file = file_of(SCRIPT, "/usr/bin/python", str(tmp_path), environ)
    assert file.startswith("/home/me/.cache/reknit/warm/")
    assert file == file_of(SCRIPT._replace(script="link.py"), "/usr/bin/python", str(tmp_path), environ)
    assert file != file_of(SCRIPT, "/opt/bin/python", str(tmp_path), environ)
    assert file != file_of(SCRIPT._replace(script="", module="train"), "/usr/bin/python", str(tmp_path), environ)
    elsewhere = file_of(SCRIPT, "/usr/bin/python", str(tmp_path), environ | {"XDG_CACHE_HOME": "/cache"})
    assert elsewhere == file.replace("/home/me/.cache", "/cache")


def test_a_program_without_a_name_is_not_remembered() -> None:
    """The text of -c, or the standard input."""
    assert file_of(CommandLine((), "", ""), "/usr/bin/python", "/", {}) == ""
    assert program_of(CommandLine((), "pkg.train", ""), "/") == "-m pkg.train"


def test_what_is_noted_is_read_until_it_is_forgotten(tmp_path: Path) -> None:
    """What is not given stays: workers and zygotes write at different times."""
    path = str(tmp_path / "a" / "known.json")
    assert open_folder(path) == ""
    note(path, "train.py", modules=["torch", "numpy"])
    note(path, "train.py", left_out={"x": "starts a thread"})
    known = Known("train.py", ("torch", "numpy"), {"x": "starts a thread"}, is_checked=True)
    assert read(path) == known
    note(path, "train.py", modules=["torch", "numpy"])
    assert read(path) == known
    note(path, "train.py", modules=["torch"])
    assert read(path) == evolve(known, modules=("torch",), is_checked=False), "the new ones are not checked yet"
    assert os.listdir(tmp_path / "a") == ["known.json"]
    assert (forget(path), forget(path), read(path)) == (True, False, None)


def test_a_broken_file_is_no_error(tmp_path: Path) -> None:
    """It is only a cache."""
    path = tmp_path / "known.json"
    for text in (
        "",
        "[]",
        "{}",
        '{"program": 1, "modules": 2, "left_out": 3}',
        '{"program": "", "modules": [], "left_out": []}',
    ):
        path.write_text(text)
        assert read(str(path)) is None
    note(str(tmp_path / "no" / "known.json"), "train.py", modules=["torch"])
    assert open_folder(str(path / "under" / "a.json")) == f"{path / 'under'}: Not a directory"


def test_a_lesson_is_taken_once(tmp_path: Path) -> None:
    """The next round has another one."""
    path = tmp_path / "lesson"
    path.write_text("torch\nnumpy")
    assert (take(str(path)), take(str(path))) == (["torch", "numpy"], [])
