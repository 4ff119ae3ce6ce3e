"""A folder for locks that belongs to a test, or to all tests of one process.

No variable moves the folder of the locks. So it is changed in this process, and in others by `tests/support/placed`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reknit.adapters.host import place as hostplace
from tests.support.alone import ENV

VARIABLE = "LOCKS_OF_TESTS"
_PLACED = str(Path(__file__).with_name("placed"))


def begin() -> str:
    """From now on the locks of this process, and of those that it starts, are in a folder of its own. Returns its
    base, which every user can write to."""
    base = tempfile.mkdtemp(prefix="locks-")
    os.chmod(base, 0o1777)
    hostplace.BASES = (base,)
    paths = [_PLACED, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(paths) if path)
    ENV["PYTHONPATH"] += os.pathsep + _PLACED
    os.environ[VARIABLE] = ENV[VARIABLE] = base
    return base


def end(base: str) -> None:
    shutil.rmtree(base, ignore_errors=True)


def move(monkeypatch: pytest.MonkeyPatch, base: os.PathLike[str]) -> Path:
    """Give the test a folder of its own below `base`. Returns its path."""
    monkeypatch.setattr(hostplace, "BASES", (str(base),))
    monkeypatch.setenv(VARIABLE, str(base))
    monkeypatch.setitem(ENV, VARIABLE, str(base))
    return below(base)


def below(base: os.PathLike[str]) -> Path:
    """The folder of this user's locks, if nobody else has taken its name."""
    return Path(base) / f"reknit-{os.geteuid()}"


def locks(folder: Path) -> list[str]:
    """The names of the files in a folder of locks. The traces of agents are there as well, and stay."""
    return sorted(name for name in os.listdir(folder) if name != "traces")


@contextmanager
def shared() -> Iterator[Path]:
    """A folder that every user can write to, as /tmp is."""
    base = tempfile.mkdtemp(prefix="locks-")
    try:
        os.chmod(base, 0o1777)
        yield Path(base)
    finally:
        end(base)
