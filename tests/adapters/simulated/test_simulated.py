"""The simulated cluster itself: what a program that simulates a job relies on. The checks are in property_tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from reknit.adapters.simulated import faults
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import SIGTERM, Command
from reknit.core.agent.events import Event, JournalFailed, Started
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job, Running
from reknit.core.job.reasons import AllSucceeded


def formed(nodes: int, *, least: int = 1, **settings: Any) -> World:
    """A cluster whose workers run."""
    world = World(**settings)
    terms = Terms(min_nodes=least, max_nodes=nodes, last_call_s=5.0, restarts=RestartPolicy(max_restarts=1))
    for i in range(nodes):
        world.begin(Proc(f"n{i}", i, Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms), 100.0 * i, i))
    assert world.run_for(30.0, until=lambda: all(p.agent.workers.state is WorkerState.HEALTHY for p in world.procs))
    return world


def finish(world: World) -> None:
    world.finishing = True
    for proc in world.procs:
        staff.succeed(world, proc, proc.group)
    assert world.run_for(60.0, until=lambda: not any(p.up for p in world.procs))


def test_a_job_runs_from_start_to_end_in_no_time() -> None:
    """Minutes of a job are simulated in milliseconds: nothing sleeps."""
    world = formed(3)
    world.run_for(600.0)
    assert world.now > 600.0
    finish(world)
    assert [p.loop.result and p.loop.result.why for p in world.procs] == [AllSucceeded()] * 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_seed_makes_the_same_history(seed: int) -> None:
    """What went wrong once can be looked at again."""

    def played() -> list[Entry]:
        world = formed(3, seed=seed)
        world.kill(world.procs[1])
        world.run_for(20.0)
        finish(world)
        return world.journal

    assert played() == played()


def test_a_fault_happens_at_its_time() -> None:
    """A schedule of faults is a list of calls with their delays."""
    world = formed(2)
    proc, began = world.procs[1], world.now
    world.after(5.0, partial(faults.cut, world, proc))
    world.after(8.0, partial(faults.mend, proc))
    world.run_for(4.9)
    assert not proc.cut
    world.run_for(1.0)
    assert proc.cut
    assert world.now == began + 5.9
    world.run_for(30.0)
    assert not proc.cut
    assert isinstance(world.jobs[-1].phase, Running)
    finish(world)


def test_a_node_that_dies_is_noticed_and_replaced() -> None:
    """The reason to simulate: what the others do about it."""
    world = formed(3)
    world.kill(world.procs[2])
    assert world.run_for(60.0, until=lambda: len(world.jobs[-1].members) == 2)
    assert world.run_for(
        10.0, until=lambda: all(p.group is not None and p.group.key == (0, 1) for p in world.procs[:2])
    )
    finish(world)


def test_a_request_to_leave_ends_the_agent() -> None:
    """It comes in by the loop's port for requests, like a signal."""
    world = formed(2)
    world.ask_to_leave(world.procs[0], SIGTERM)
    assert world.run_for(30.0, until=lambda: not world.procs[0].up)
    assert world.procs[0].loop.result is not None
    assert world.procs[0].loop.result.why == SignalReceived(SIGTERM)


def test_a_suspended_agent_makes_no_step_until_it_is_resumed() -> None:
    """What happens meanwhile waits for it, as in a process that is stopped."""
    world = formed(2)
    proc = world.procs[1]
    faults.suspend(proc)
    before = proc.agent
    world.run_for(1.0)
    assert proc.agent is before
    faults.resume(proc)
    world.run_for(1.0)
    assert proc.agent.at > before.at


class Notes:
    """A watcher."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[Event] = []
        self.entries: list[Entry] = []

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        self.events.append(event)
        if any(isinstance(command, StartWorkers) for command in commands):
            assert proc.group is None, "the world is as it was when the agent decided"

    def landed(self, entry: Entry, before: Job) -> None:
        assert self.world.journal[-1] is entry
        assert self.world.jobs[-2] is before
        self.entries.append(entry)


def test_watchers_see_every_step_and_every_entry() -> None:
    """Checks compare what an agent does with what is true, before the world has moved on."""
    world = World()
    notes = Notes(world)
    world.watchers.append(notes)
    world.begin(Proc("a", 0, Spec(NodeId("a"), "10.0.0.1", Terms()), 0.0))
    world.run_for(5.0)
    faults.begin_outage(world)
    world.run_for(5.0)
    assert isinstance(notes.events[0], Started)
    assert any(isinstance(event, JournalFailed) for event in notes.events)
    assert notes.entries == world.journal != []


def test_what_a_watcher_raises_comes_out() -> None:
    """A violated property must end the simulation, not drown in it."""
    world = formed(1)

    class Strict(Notes):
        def landed(self, entry: Entry, before: Job) -> None:
            raise ZeroDivisionError

    world.watchers.append(Strict(world))
    with pytest.raises(ZeroDivisionError):
        finish(world)


def test_nobody_waits_in_a_simulated_world() -> None:
    """A blocking shell around a simulated loop would hang for ever: it is told so."""
    world = formed(1)
    with pytest.raises(RuntimeError, match="run_for"):
        world.procs[0].loop.ports.clock.wait(None)
