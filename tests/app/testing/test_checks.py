"""The checks of the small world. What each of them catches is in property_tests/planted, by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from reknit.app.testing.play import play
from reknit.app.testing.script import parse
from reknit.app.testing.violation import CHECKS, Violation, asking, demand

FOLDER = Path(__file__).parents[3] / "app" / "testing"


def demanded() -> set[str]:
    """The names that the files of the checks give to `demand` and `violated`."""
    found: set[str] = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                at = {"demand": 1, "violated": 0, "Violation": 0}.get(node.func.id)
                if at is not None and isinstance(node.args[at], ast.Constant):
                    found.add(str(ast.literal_eval(node.args[at])))
    return found


def test_every_check_has_a_name_and_is_asked() -> None:
    """A name that no check has would be left out in silence, and a check without a name could not be left out."""
    assert {name for name in demanded() if not name.startswith("owes ")} == CHECKS.keys()


def test_a_check_can_be_left_out() -> None:
    """A policy may break a promise on purpose."""
    with asking(CHECKS.keys() - {"S4"}):
        demand(False, "S4", "nothing was spent")
        with pytest.raises(Violation, match="S5: another end"):
            demand(False, "S5", "another end")
    with pytest.raises(Violation, match="S4"):
        demand(False, "S4", "nothing was spent")


def test_a_check_that_does_not_exist() -> None:
    """A typing mistake must not leave out a check."""
    with pytest.raises(ValueError, match="no check is named S: the names are S1, S2"), asking(["S"]):
        pass


def test_the_oracle_is_asked_at_every_entry() -> None:
    """It knows what no other check can see: all agents draw the same wrong conclusion."""

    world = play(parse("setup\nfail a\nwait 5"), oracle=True)
    assert world.oracle is not None
    assert (world.oracle.round, world.oracle.spent) == (world.jobs[-1].round, world.jobs[-1].spent) == (1, 1)
