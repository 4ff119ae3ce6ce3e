"""How often jobs have failed, from traces. A simulated job with known failures stands for a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from reknit.app.cli.looking import runs
from reknit.app.cli.simulate import simulate
from reknit.app.simulation.cluster import SimulatedCluster, with_values
from reknit.app.simulation.playing import traced
from reknit.app.simulation.recorded import Recorded, recorded
from reknit.core.text.story import merged

JOB = SimulatedCluster(
    nodes=8, spares=2, days=20, failures=300, nproc_per_node=2, worker=0.6, node=0.2, hang=0.1, leave=0.1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a job of which everything is known."""
    folder = tmp_path_factory.mktemp("recorded") / "seen"
    traced(JOB, 1, str(folder))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Recorded:
    return recorded(merged(run.nodes) for run in runs([str(folder)]))


@pytest.mark.slow
def test_what_a_job_shows_is_what_it_was_given(found: Recorded) -> None:
    """About 48 failures in 160 node-days."""
    assert (found.nodes, found.nproc_per_node) == (8, 2)
    assert 130 < found.node_days <= 160
    count = sum(found.kinds.values())
    rate = 1000 * count / found.node_days
    assert abs(rate - 300) < 3 * 300 / count**0.5, "three standard deviations of a Poisson process"
    assert found.kinds.keys() == {"worker", "node", "hang", "leave"}
    assert found.kinds.most_common(1)[0][0] == "worker"


def test_it_can_be_simulated(found: Recorded, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With what was recorded, and values that count more."""
    cluster = with_values(SimulatedCluster(), found.values(), "here")
    assert (cluster.nodes, cluster.nproc_per_node, cluster.network) == (8, 2, 0.0)
    assert simulate((f"--recorded={folder}", "days=1", "nodes=4", "--runs=1", "--processes=1"), {}) == 0
    said, errors = capfd.readouterr()
    assert said.startswith("1 day of 4 nodes")
    assert errors.startswith("recorded: ")
    assert "node-days, up to 8 nodes" in errors


def test_too_little(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder without traces, and traces without a round, are told in one line."""
    assert simulate((f"--recorded={tmp_path}",), {}) == 2
    traced(SimulatedCluster(nodes=2, days=0.000001, failures=0), 0, str(tmp_path / "short"))
    assert simulate((f"--recorded={tmp_path / 'short'}",), {}) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "holds no trace" in errors[0]
    assert errors[1].endswith("node-days were recorded; at least 0.01 are needed to count failures")


def test_a_job_without_a_round_does_not_count(tmp_path: Path) -> None:
    """It has waited in vain for a second node. Its trace may lie among others."""
    traced(SimulatedCluster(nodes=1, days=1, failures=0), 0, str(tmp_path / "one"))
    (story,) = (merged(run.nodes) for run in runs([str(tmp_path)]))
    waited = evolve(story, rounds=tuple(evolve(round, sealed_at=None) for round in story.rounds))
    assert recorded([waited]).node_days == 0.0
    assert recorded([waited, story]) == recorded([story])
