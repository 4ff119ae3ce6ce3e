"""The trace of an agent: it holds what happened, and a replay makes it happen again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from attrs import evolve

from reknit.adapters.observe.trace import Trace
from reknit.adapters.observe.trace_reader import replay
from reknit.adapters.simulated import faults
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.text.codec import CodecError, dumps


class Traces:
    """Watches a simulated world: one trace per agent."""

    def __init__(self) -> None:
        self.lines: dict[Proc, list[str]] = {}
        self.traces: dict[Proc, Trace] = {}
        self.said: dict[Proc, list[Sequence[Command]]] = {}

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        if proc not in self.traces:
            self.lines[proc], self.said[proc] = [], []
            self.traces[proc] = Trace(self.lines[proc].append)
        self.traces[proc](before, event, proc.agent, commands)
        self.said[proc].append(commands)

    def landed(self, entry: Entry, before: Job) -> None: ...


@pytest.fixture(scope="module")
def traced() -> Traces:
    """A job with much in it: failures, an outage, a death, a newcomer, an end."""
    world, traces = World(seed=5, troubles=("lose", "skip", "partial")), Traces()
    world.watchers.append(traces)
    terms = Terms(min_nodes=2, max_nodes=3, last_call_s=5.0, restarts=RestartPolicy(max_restarts=2))

    def begin(i: int) -> None:
        number = len(world.procs)
        spec = Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms, local_world_size=2)
        world.begin(Proc(f"n{number}", i, spec, 10.0 * number, number))

    for i in range(3):
        begin(i)
    world.after(10.0, lambda: staff.fail(world, world.procs[0]))
    world.after(30.0, partial(faults.begin_outage, world))
    world.after(40.0, partial(faults.end_outage, world))
    world.after(60.0, lambda: world.kill(world.procs[2]))
    world.after(80.0, lambda: begin(2))
    world.run_for(100.0)
    world.calm = world.finishing = True
    for proc in world.procs:
        staff.succeed(world, proc, proc.group)
    assert world.run_for(120.0, until=lambda: not any(p.up for p in world.procs))
    return traces


def test_a_replay_makes_the_same_commands_byte_for_byte(traced: Traces) -> None:
    """A report of a bug comes with a trace: the bug happens again on the desk of whoever mends it."""
    assert len(traced.lines) == 4
    for proc, lines in traced.lines.items():
        steps = list(replay(lines))
        assert len(steps) == len(lines) - 1 > 20
        assert all(made.is_same for made in steps)
        assert [made.commands for made in steps] == traced.said[proc]
        assert steps[-1].after == proc.agent
        assert dumps(steps[-1].after) == dumps(proc.agent)


def test_a_trace_written_again_from_its_replay_is_the_same_trace(traced: Traces) -> None:
    """Nothing of a step is missing in its line."""
    for lines in traced.lines.values():
        again: list[str] = []
        times = iter([made.time for made in replay(lines)])
        trace = Trace(again.append, now=times.__next__)
        for made in replay(lines):
            trace(made.before, made.event, made.after, made.commands)
        assert again == lines


def test_what_is_not_the_same_is_noticed(traced: Traces) -> None:
    """Another version decides otherwise: the first step that differs is what one looks for."""
    lines = next(iter(traced.lines.values()))
    first = next(replay(lines)).before
    other = f'{{"agent":{dumps(evolve(first, spec=evolve(first.spec, address="10.9.9.9")))}}}\n'
    assert not all(made.is_same for made in replay([other, *lines[1:]]))


def test_a_torn_last_line_is_left_out(traced: Traces) -> None:
    """The agent was killed while it wrote: what came before is as good as ever."""
    lines = next(iter(traced.lines.values()))
    assert len(list(replay([*lines[:5], lines[5][:-3]]))) == 4


@pytest.mark.parametrize("line", ["not JSON\n", "[]\n", '{"event":{"kind":"Woken","at":1.0},"commands":[]}\n'])
def test_what_is_no_trace_is_refused(line: str) -> None:
    """Somebody gives another file: one error that says so."""
    with pytest.raises(CodecError):
        list(replay([line]))
