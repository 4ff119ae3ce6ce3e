"""Every planted bug is caught: in its shortest known history, and by the check that is meant to catch it.

`REKNIT_REWRITE=1` searches new histories for the bugs that have none or whose history no longer shows them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reknit.app.testing.play import play
from reknit.app.testing.script import parse

from .bug import Bug
from .ledger import BUGS
from .search import is_caught, search, told, verdict

pytestmark = pytest.mark.slow
HISTORIES = Path(__file__).parent / "histories"
REWRITE = "REKNIT_REWRITE" in os.environ


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_history_catches_it(bug: Bug) -> None:
    """With the bug planted the check that is meant to catch the bug speaks."""
    path = HISTORIES / f"{bug.name}.txt"
    if REWRITE:
        _rewrite(bug, path)
    violation = verdict(bug, parse(path.read_text()))
    assert violation is not None, f"{bug.name} survives its history"
    assert violation.check == bug.check, f"{bug.name} is caught by another check: {violation}"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_history_is_clean_without_it(bug: Bug) -> None:
    """Without the bug no check speaks. These histories also find other bugs quickly, so the mutation tests play them
    first (`mutation.toml`)."""
    play(parse((HISTORIES / f"{bug.name}.txt").read_text()), oracle=True)


def test_no_history_is_left_over() -> None:
    """A history without a bug tests nothing."""
    assert {p.stem for p in HISTORIES.glob("*.txt")} == {bug.name for bug in BUGS}


def _rewrite(bug: Bug, path: Path) -> None:
    """Keep the script if it still catches the bug, and tell its story anew."""
    script = parse(path.read_text()) if path.exists() else None
    if script is not None and is_caught(bug, script):
        path.write_text(told(bug, script))
        return
    found = search(bug, seed=1, examples=3000)
    assert found is not None, f"{bug.name}: no history catches it"
    path.write_text(found[1])
