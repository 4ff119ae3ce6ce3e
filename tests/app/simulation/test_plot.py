"""The picture of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from reknit.app.simulation import plot
from reknit.app.simulation.cluster import SimulatedCluster, with_values
from reknit.app.simulation.playing import Sweep, answers

SMALL = with_values(SimulatedCluster(), {"nodes": 2, "days": 1, "failures": 3000, "worker": 1, "node": 0}, "here")
VALUES = (60.0, 600.0, 6000.0)


def made(runs: int) -> Sweep:
    clusters = [with_values(SMALL, {"checkpoint_s": value}, "here") for value in VALUES]
    return Sweep("checkpoint_s", VALUES, tuple(answers(clusters, range(runs), 1)))


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
@pytest.mark.slow
def test_a_picture_is_drawn(name: str, begins: bytes, tmp_path: Path) -> None:
    """In each format, and twice with the same bytes: a picture in a repository only changes if its numbers do."""
    pytest.importorskip("matplotlib")
    sweep, drawn = made(2), []
    for _ in range(2):
        plot.draw(sweep, str(tmp_path / name))
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0].startswith(begins)
    assert drawn[0] == drawn[1]


def test_one_run_has_no_interval(tmp_path: Path) -> None:
    """Its picture has points without bars. A bar without end would hide them."""
    pytest.importorskip("matplotlib")
    plot.draw(made(1), str(tmp_path / "a.svg"))
    assert "checkpoint_s" in (tmp_path / "a.svg").read_text()


def test_why_no_picture_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name, a folder that is not there, and matplotlib that is not installed. The line says what helps."""
    assert plot.why_not("a.jpg") == "a name that ends with .png, .svg, .pdf is expected"
    assert plot.why_not("png") == "a name that ends with .png, .svg, .pdf is expected"
    assert plot.why_not(str(tmp_path / "none" / "a.png")) == "there is no such folder"
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert plot.why_not(str(tmp_path / "a.png")) == "it needs matplotlib: pip install 'reknit[plots]'"
