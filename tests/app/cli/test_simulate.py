"""`reknit simulate`, as a user calls it."""

from __future__ import annotations

import json

import pytest

from reknit.app.cli.simulate import simulate

SMALL = ("nodes=6", "days=2", "failures=60", "--runs=3", "--processes=1")


def test_a_job_is_played(capfd: pytest.CaptureFixture[str]) -> None:
    """Which part of the time is training, with its interval, and where the rest goes."""
    assert simulate(SMALL, {}) == 0
    said, errors = capfd.readouterr()
    assert said.startswith("2 days of 6 nodes, played 3 times\ntraining")
    assert " ± " in said
    assert "recovery, median" in said
    assert not errors


def test_values_are_compared_on_the_same_failures(capfd: pytest.CaptureFixture[str]) -> None:
    """One column each, and which of the differences are real."""
    assert simulate((*SMALL, "--compare", "spares=0,2", "heartbeat_s=2,5"), {}) == 0
    said, _ = capfd.readouterr()
    header = said.splitlines()[1].split("  ")
    assert [word.strip() for word in header if word.strip()] == [
        "heartbeat_s=2 spares=0",
        "heartbeat_s=2 spares=2",
        "heartbeat_s=5 spares=0",
        "heartbeat_s=5 spares=2",
    ]
    assert len([line for line in said.splitlines() if line.startswith("heartbeat_s=")]) == 3


def test_the_same_seed_gives_the_same_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    """As JSON, with all that was asked."""
    found = []
    for _ in range(2):
        assert simulate((*SMALL, "--json", "--seed=7"), {}) == 0
        found.append(capfd.readouterr().out)
    assert found[0] == found[1]
    (answer,) = json.loads(found[0])
    assert answer["cluster"]["nodes"] == 6
    assert sum(answer["causes"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nodez=3",), "nodez=3: there is no key nodez"),
        (("nodes",), "nodes is no KEY=VALUE"),
        (("nodes=few",), "nodes=few: nodes is few; a whole number is expected"),
        (("--scenario=llama4",), "there is no such job; there are llama3"),
        (("trace=/nowhere",), "/nowhere: No such file or directory"),
        (("days=0",), "days is 0.0; a number above 0 is expected"),
    ],
)
def test_what_cannot_be_played(words: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, and the status of a usage error."""
    assert simulate((*words, "--processes=1", "--runs=1"), {}) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
