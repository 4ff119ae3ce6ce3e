"""Which command lines a zygote can hold."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reknit.adapters.keeper.zygote.commandline import CommandLine, NotWarm, folders_of, parts_of


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("python train.py -m x", CommandLine((), "", "train.py")),
        ("/usr/bin/python3.11 -u train.py", CommandLine(("-u",), "", "train.py")),
        ("python3.13t -uB -m pkg.train --lr 1", CommandLine(("-uB",), "pkg.train", "")),
        ("python -um pkg.train", CommandLine(("-u",), "pkg.train", "")),
        ("python -mpkg.train", CommandLine((), "pkg.train", "")),
        ("python -c pass", CommandLine((), "", "")),
        (
            "python -Wignore -W error -Xdev -X utf8 a.py",
            CommandLine(("-Wignore", "-W", "error", "-Xdev", "-X", "utf8"), "", "a.py"),
        ),
        ("python --check-hash-based-pycs never a.py", CommandLine(("--check-hash-based-pycs", "never"), "", "a.py")),
        ("python -u -", CommandLine(("-u",), "", "")),
    ],
)
def test_the_parts_of_a_command_line(line: str, parts: CommandLine) -> None:
    """A program begins where Python says, and not at the first word without a dash."""
    assert parts_of(line.split()) == parts


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("./train.sh", "./train.sh is no Python"),
        ("", "the command is no Python"),
        ("pythonic train.py", "pythonic is no Python"),
        ("python -I train.py", "Python's option -I keeps it from becoming a zygote"),
        ("python -uE train.py", "Python's option -E keeps it from becoming a zygote"),
        ("python -S train.py", "Python's option -S keeps it from becoming a zygote"),
        ("python --version", "Python's option --version runs no program"),
        ("python -u", "the command line of the workers names no program"),
    ],
)
def test_what_no_zygote_can_hold(line: str, why: str) -> None:
    """The user is told why, before anything is started."""
    with pytest.raises(NotWarm) as caught:
        parts_of(line.split())
    assert str(caught.value) == why


@pytest.mark.parametrize("how", ["script", "link", "module", "folder", "zip", "safe"])
def test_the_folders_are_those_that_python_puts_first(how: str, tmp_path: Path) -> None:
    """As Python itself says."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for name in ("train.py", "__main__.py"):
        (inside / name).write_text("import sys; print(sys.path[0])")
    (tmp_path / "link.py").symlink_to(inside / "train.py")
    with zipfile.ZipFile(tmp_path / "packed", "w") as packed:
        packed.write(inside / "__main__.py", "__main__.py")
    program = {
        "script": ["inside/train.py"],
        "link": ["link.py"],
        "module": ["-m", "inside.train"],
        "folder": ["inside"],
        "zip": ["packed"],
        "safe": ["-uP", "-Xdev", "inside/train.py"],
    }[how]
    argv = [sys.executable, *program]
    first = subprocess.check_output(argv, cwd=tmp_path, text=True).strip()
    folders = folders_of(parts_of(argv), str(tmp_path), {})
    assert (str(tmp_path / first) in folders) == (how != "safe")
    assert folders_of(parts_of(argv), str(tmp_path), {"PYTHONSAFEPATH": "1"}) == ()
