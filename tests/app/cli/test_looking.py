"""Which runs of a job a user means."""

from __future__ import annotations

from pathlib import Path

import pytest

from reknit.app.cli.looking import clock_of, runs
from reknit.app.cli.options import UsageError
from tests.support import places
from tests.support.command import run


def test_a_name_means_the_latest_run_and_a_folder_means_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is started again under its name. What it did before is another story."""
    places.move(monkeypatch, tmp_path)
    for argv in (("--log-dir=logs",), ("--log-dir=logs",), ()):
        run(tmp_path, "--rdzv-id=j", *argv, "w.py", script="pass")
    (latest,) = runs(["j"])
    assert runs([])[0].nodes[0].began == latest.nodes[0].began
    both = runs([str(tmp_path / "logs")])
    assert [one.job for one in both] == ["j", "j"]
    assert both[0].nodes[0].began < both[1].nodes[0].began < latest.nodes[0].began
    assert latest.live == frozenset()
    with pytest.raises(UsageError, match="nix is no folder"):
        runs(["nix"])


def test_the_day_is_left_out_if_it_is_one_day() -> None:
    """Times are short, and never ambiguous."""
    assert len(clock_of(1000.0, 1001.0)(1000.25)) == len("00:16:40.2")
    assert clock_of(0.0, 3 * 86400.0)(0.0).count("-") == 2
