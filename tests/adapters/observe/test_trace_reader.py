"""Reading traces: made again step by step, or only looked at."""

from __future__ import annotations

import json

import pytest

from reknit.adapters.observe.trace_reader import Replayed, Resumed, read, replay, skim
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.world import World
from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.text.doing import situation
from reknit.core.text.story import Told
from tests.support.traces import simulated


def play(world: World) -> None:
    world.run_for(60.0)
    staff.fail(world, world.procs[1])
    world.run_for(60.0)
    world.kill(world.procs[2])
    world.run_for(300.0)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A trace with a failure, a lost node, and a quiet stretch."""
    terms = Terms(2, 3, RestartPolicy(max_restarts=3), last_call_s=5.0)
    watching = simulated(tmp_path_factory.mktemp("t"), terms, 3, play)
    return next(watching.folder.rglob("000000.jsonl")).read_text().splitlines(keepends=True)


def test_a_look_tells_what_a_replay_finds(lines: list[str]) -> None:
    """`explain` makes no step, and must tell the same: what the agent does, and what it reads."""
    found = [situation(made.after) for made in read(lines) if isinstance(made, Replayed)]
    changes = [now for before, now in zip([None, *found], found, strict=False) if now != before]
    assert [each.now for each in skim(lines) if isinstance(each, Told) and each.now is not None] == changes
    read_by_look = [e.event.entries for e in skim(lines) if isinstance(e, Told) and hasattr(e.event, "entries")]
    read_by_agent = [e.event.entries for e in read(lines) if isinstance(e, Replayed) and hasattr(e.event, "entries")]
    assert [entries for entries in read_by_look if entries] == [entries for entries in read_by_agent if entries]


def test_a_trace_of_before_can_be_read(lines: list[str]) -> None:
    """It has no `about`, no times, and does not say what the agent does."""
    old = []
    for line in lines:
        data = json.loads(line)
        for name in ("time", "now", "quiet"):
            data.pop(name, None)
        if "about" not in data:
            old.append(json.dumps(data, separators=(",", ":")) + "\n")
    assert [made.commands for made in replay(old)] == [made.commands for made in replay(lines)]
    assert all(made.is_same and made.time == 0.0 for made in replay(old))
    assert next(each.agent for each in skim(old) if isinstance(each, Resumed)) == next(replay(lines)).before


def test_a_change_of_what_was_decided_is_found(lines: list[str]) -> None:
    """By the first step that differs."""
    at = next(number for number, line in enumerate(lines) if '"StartWorkers"' in line)
    changed = lines[at].replace('"world_size":6', '"world_size":7')
    assert changed != lines[at]
    made = [*replay([*lines[:at], changed, *lines[at + 1 :]])]
    assert [one.is_same for one in made].index(False) == sum('"event"' in line for line in lines[:at])


def test_a_hole_is_told(lines: list[str]) -> None:
    """Steps were lost: the disk took nothing for a while."""
    steps = [line for line in lines if "event" in json.loads(line)]
    agents = [line for line in lines if "agent" in json.loads(line)]
    assert len(agents) >= 2
    lost = json.loads(agents[1])
    lost.pop("quiet")
    found = [*read([agents[0], steps[0], json.dumps(lost) + "\n"])]
    assert isinstance(found[-1], Resumed)
    assert found[-1].has_lost
    looked = [*skim([agents[0], steps[0], json.dumps(lost) + "\n"])]
    assert isinstance(looked[-1], Resumed)
    assert looked[-1].has_lost
    assert not any(each.has_lost for each in read(lines) if isinstance(each, Resumed))
