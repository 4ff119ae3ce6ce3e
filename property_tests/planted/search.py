"""Finds the shortest history that shows a planted bug."""

from __future__ import annotations

import contextlib

from attrs import evolve
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from property_tests.shrink import shrunk
from reknit.app.testing.play import play
from reknit.app.testing.script import Script, parse
from reknit.app.testing.violation import Violation
from reknit.app.testing.weather import scripts

from .bug import Bug, planted


class Found(Exception):
    def __init__(self, script: Script) -> None:
        self.script = script


def verdict(bug: Bug, script: Script) -> Violation | None:
    """What the suite says about this history with the bug in the core."""
    with planted(bug):
        try:
            play(script, oracle=True if bug.needs_oracle else None)
        except Violation as violation:
            return violation
    return None


def is_caught(bug: Bug, script: Script) -> bool:
    """Whether the right check speaks, and only because of the bug."""
    violation = verdict(bug, script)
    return violation is not None and violation.check == bug.check


def search(bug: Bug, *, seed: int, examples: int) -> tuple[Script, str] | None:
    """A short history that breaks the check, and its text with the story; None if there was none."""

    @seeded(seed)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts())
    def look(script: Script) -> None:
        if is_caught(bug, script):
            raise Found(script)

    try:
        hint(bug)
        with contextlib.redirect_stdout(None):
            look()
    except Found as found:
        script = shrunk(found.script, lambda smaller: is_caught(bug, smaller))
        return script, told(bug, script)
    return None


def hint(bug: Bug) -> None:
    """Look where the ledger says, under many seeds."""
    if bug.hint:
        script = parse(bug.hint)
        for n in range(200):
            candidate = evolve(script, setup=evolve(script.setup, seed=n))
            if is_caught(bug, candidate):
                raise Found(candidate)


def told(bug: Bug, script: Script) -> str:
    """The text that is kept: the script, then what happens with the bug planted."""
    violation = verdict(bug, script)
    assert violation is not None, f"{bug.name} is not caught"
    story = violation.__notes__[0].split("\n\n", 1)[1]
    lines = [line[:200] for line in story.splitlines()]
    if len(lines) > 120:
        lines = [*lines[:90], "        …", *lines[-29:]]
    return "\n".join([f"# rule {bug.rule}: {bug.where}", str(script), "", *lines, "", str(violation)[:200], ""])
