"""The trace of an agent on a disk: what is there when the agent is killed, and how large it gets."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from reknit.adapters.observe import trace_folder
from reknit.adapters.observe.trace_folder import Parts, TraceFolder
from reknit.adapters.observe.trace_reader import Replayed, Resumed, read
from reknit.adapters.observe.traces import StoredTrace, below, steps_of
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.events import Event, Started, StopRequested, Woken
from reknit.core.agent.step import step
from reknit.core.job.entries import NodeId, RestartPolicy, Terms
from tests.support.traces import Watching, simulated

PAIR = Terms(2, 2, RestartPolicy(max_restarts=9))


def fail_every(world: World, seconds: float, times: int) -> None:
    for _ in range(times):
        world.run_for(seconds)
        staff.fail(world, world.procs[0])
    world.run_for(seconds)


def traces(watching: Watching) -> list[StoredTrace]:
    return below(str(watching.folder))


def test_a_line_is_there_before_its_commands_are_carried_out(tmp_path: Path) -> None:
    """The loop tells its observers first. So the trace of an agent that is killed holds all that it did."""
    agent = Agent(Spec(NodeId("n0"), "10.0.0.1"))
    trace = TraceFolder("{}\n", Parts(partial(str, tmp_path)), print)
    event = Started(0.0, "nonce", 1)
    after = step(agent, event)
    trace(agent, event, after.agent, after.commands)
    lines = (tmp_path / "000000.jsonl").read_text().splitlines(keepends=True)
    assert [type(made).__name__ for made in read(lines[1:])] == ["Resumed", "Replayed"]
    trace.close()


def test_a_quiet_stretch_is_not_written(tmp_path: Path) -> None:
    """Many beats take no more room than a few, and what comes after them replays."""
    sizes = []
    for name, seconds in (("a minute", 60.0), ("ten minutes", 600.0)):
        watching = simulated(tmp_path / name, PAIR, 2, partial(fail_every, seconds=seconds, times=1))
        sizes.append(sum(path.stat().st_size for path in watching.folder.rglob("*.jsonl")))
        for trace in traces(watching):
            made = [*steps_of(trace)]
            assert all(one.is_same for one in made if isinstance(one, Replayed))
            assert not any(one.has_lost for one in made if isinstance(one, Resumed))
            assert len([one for one in made if isinstance(one, Resumed)]) >= 2
    assert sizes[1] < 1.2 * sizes[0]


def fed(trace: TraceFolder, *events: Event) -> Agent:
    """Let an agent make these steps while it is traced. Returns the agent after them."""
    agent = Agent(Spec(NodeId("n0"), "10.0.0.1"))
    for event in events:
        made = step(agent, event)
        trace(agent, event, made.agent, made.commands)
        agent = made.agent
    trace.close()
    return agent


def test_what_came_before_an_event_is_written_with_it(tmp_path: Path) -> None:
    """The end of a quiet stretch shows what led to the event. The agent before it stands for all that is left out."""
    ticks = [Woken(at / 100) for at in range(1, 500)]
    trace = TraceFolder("{}\n", Parts(partial(str, tmp_path)), print)
    last = fed(trace, Started(0.0, "nonce", 1), *ticks, StopRequested(6.0, 15))
    lines = (tmp_path / "000000.jsonl").read_text().splitlines(keepends=True)[1:]
    (again,) = [number for number, line in enumerate(lines) if '"quiet":true' in line and number]
    kept = [made for made in read(lines[again:]) if isinstance(made, Replayed)]
    assert [made.event for made in kept] == [*ticks[-len(kept) + 1 :], StopRequested(6.0, 15)]
    assert 10 < len(kept) < 100
    assert len(lines) == again + 1 + len(kept)
    assert kept[-1].after == last
    assert not any(each.has_lost for each in read(lines) if isinstance(each, Resumed))


class Full:
    """Takes no line while `is_full`, and loses it."""

    def __init__(self) -> None:
        self.is_full = False
        self.text = ""

    def write(self, text: str, *, begins: bool, must_wait: bool) -> bool:
        self.text += "" if self.is_full else text
        return not self.is_full

    def close(self) -> None: ...


def test_a_hole_in_a_trace_says_so() -> None:
    """The disk was too slow. The trace goes on with the agent as it was then, and nobody takes it for complete."""
    files = Full()
    trace = TraceFolder("", files, print)
    agent = Agent(Spec(NodeId("n0"), "10.0.0.1"))
    for number, event in enumerate((Started(0.0, "nonce", 1), StopRequested(1.0, 15), StopRequested(2.0, 2))):
        files.is_full = number == 1
        made = step(agent, event)
        trace(agent, event, made.agent, made.commands)
        agent = made.agent
    found = [*read(files.text.splitlines(keepends=True))]
    assert [each.has_lost for each in found if isinstance(each, Resumed)] == [False, True]
    assert isinstance(found[-1], Replayed)
    assert found[-1].after == agent


def test_the_first_and_the_last_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails for weeks keeps how it began and how it ended. Each part can be read alone."""
    monkeypatch.setattr(trace_folder, "PART", 20_000)
    watching = simulated(tmp_path / "t", PAIR, 2, partial(fail_every, seconds=30.0, times=8))
    (first, *_) = traces(watching)
    numbers = [int(os.path.basename(part)[:6]) for part in first.parts]
    assert len(numbers) == 4
    assert numbers[0] == 0
    assert numbers[1] > 1
    assert numbers[1:] == [*range(numbers[1], numbers[1] + 3)]
    assert first.is_cut
    for part in first.parts:
        made = [one for one in steps_of(StoredTrace(first.path, (part,), first.about)) if isinstance(one, Replayed)]
        assert made
        assert all(one.is_same for one in made)


def test_a_full_disk_ends_the_trace_and_not_the_job() -> None:
    """One line says so."""
    lines: list[str] = []

    def make() -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trace = TraceFolder("{}\n", Parts(make), lines.append)
    agent = Agent(Spec(NodeId("n0"), "10.0.0.1"))
    for at in range(3):
        trace(agent, Woken(float(at)), agent, ())
    trace.close()
    assert lines == ["no trace of this agent: No space left on device; the job goes on"]


def test_the_time_of_the_file_shows_that_the_agent_lives(tmp_path: Path) -> None:
    """In a quiet stretch nothing else does."""
    trace = TraceFolder("{}\n", Parts(partial(str, tmp_path)), print)
    agent = Agent(Spec(NodeId("n0"), "10.0.0.1"))
    trace(agent, Woken(0.0), agent, ())
    file = tmp_path / "000000.jsonl"
    size = file.stat().st_size
    os.utime(file, (1.0, 1.0))
    trace(agent, Woken(1.0), agent, ())
    assert file.stat().st_mtime > 1.0
    assert file.stat().st_size == size
    trace.close()
