"""A simulated job is told by the commands that tell of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from reknit.app.cli.explain import explain
from reknit.app.cli.replay import replay
from reknit.app.simulation.cluster import SimulatedCluster
from reknit.app.simulation.playing import traced

JOB = SimulatedCluster(nodes=6, spares=1, days=4, failures=250, nproc_per_node=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a job, in which nodes die and workers fail."""
    folder = tmp_path_factory.mktemp("simulated") / "seen"
    traced(JOB, 0, str(folder))
    return folder


def test_it_is_explained(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With its rounds, and why each has ended."""
    assert explain([str(folder)], {}) == 0
    out, _ = capfd.readouterr()
    assert 'job "simulated"' in out
    assert "round 1 " in out
    assert "fell silent, noticed by node" in out
    assert "RuntimeError: a worker has failed" in out
    assert "from 2026-01-01 00:00:00.0 to 2026-01-0" in out


def test_it_is_replayed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every step is the node's own, also one that another agent has made in its name."""
    assert replay([str(folder)], {}) == 0
    out, _ = capfd.readouterr()
    assert "all decided alike" in out
    assert "differ" not in out


def test_the_same_seed_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """A run can be looked at again, and nothing of this machine is in its trace."""
    traced(JOB, 0, str(tmp_path / "again"))
    assert written(folder) == written(tmp_path / "again")


def written(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.jsonl")}
