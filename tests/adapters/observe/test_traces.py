"""Finding traces, and reading those that are torn or damaged as far as they go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reknit.adapters.observe import trace_folder
from reknit.adapters.observe.trace_reader import Replayed
from reknit.adapters.observe.traces import StoredTrace, Unreadable, below, of_this_host, steps_of, stored, told_by
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.world import World
from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.text.story import Told
from tests.support import places
from tests.support.command import Run
from tests.support.traces import simulated
from tests.support.waiting import until

PAIR = Terms(2, 2, RestartPolicy(max_restarts=9))


def play(world: World) -> None:
    for _ in range(4):
        world.run_for(30.0)
        staff.fail(world, world.procs[0])
    world.run_for(30.0)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredTrace:
    """One with several files."""
    monkeypatch.setattr(trace_folder, "PART", 20_000)
    watching = simulated(tmp_path / "logs", PAIR, 2, play)
    return next(found for found in below(str(watching.folder)) if len(found.parts) > 1)


def count(trace: StoredTrace) -> int:
    return sum(isinstance(made, Replayed) for made in steps_of(trace))


def test_traces_are_found_below_a_folder(trace: StoredTrace, tmp_path: Path) -> None:
    """What `--log-dir` has named holds a folder for each run."""
    found = below(str(tmp_path))
    assert [one.about.node for one in found if one.about is not None] == ["n0", "n1"]
    assert stored(str(tmp_path)) is None
    assert stored(found[0].path) == found[0]
    assert below(str(tmp_path / "none")) == []


def test_a_damaged_line_costs_the_rest_of_its_file(trace: StoredTrace) -> None:
    """The line is named, and the next file is read."""
    whole = count(trace)
    first = Path(trace.parts[0])
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join([*lines[:10], b"\xff\x00rubbish\n", *lines[10:]]))
    found = [made for made in steps_of(trace) if isinstance(made, Unreadable)]
    assert [(one.path, one.line) for one in found] == [(str(first), 11)]
    assert 0 < count(trace) < whole
    assert sum(isinstance(one, Told) for one in told_by(trace)) > 0
    assert count(trace.latest) > 0


def test_a_file_that_is_torn_is_read_to_its_last_line(trace: StoredTrace) -> None:
    """The agent was killed while it wrote."""
    last = Path(trace.parts[-1])
    os.truncate(last, last.stat().st_size - 10)
    assert not any(isinstance(made, Unreadable) for made in steps_of(trace))


def test_a_running_agent_is_found_from_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it ends. An agent that was killed counts as ended."""
    places.move(monkeypatch, tmp_path)
    assert of_this_host() == []
    script = "import signal; open('up', 'w').close(); signal.pause()"
    with Run(tmp_path, "--rdzv-id=job7", "w.py", script=script) as job:
        until((tmp_path / "up").exists, "the worker")
        (found,) = of_this_host()
        assert found.about is not None
        assert (found.about.job, found.about.agent.pid, found.is_live) == ("job7", job.pid, True)
        assert found.about.command[-1] == "w.py"
    assert not of_this_host()[0].is_live
