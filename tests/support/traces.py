"""Traces of simulated agents, and whether the traces of real ones replay."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from reknit.adapters.observe.trace_folder import Parts, TraceFolder, about_line
from reknit.adapters.observe.trace_reader import Replayed
from reknit.adapters.observe.traces import StoredTrace, Unreadable, steps_of, stored
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, NodeId, Terms
from reknit.core.job.job import Job
from tests.support import places


class Watching:
    """Watches a simulated world: a trace in a folder for each agent."""

    def __init__(self, folder: Path, job: str = "simulated") -> None:
        self.folder = folder
        self._job = job
        self.made: dict[Proc, TraceFolder] = {}
        self.lines: list[str] = []
        """What was said to the operator."""
        folder.mkdir(parents=True, exist_ok=True)

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        if proc not in self.made:
            path = str(self.folder / f"{proc.spec.node_id}-{len(self.made)}")
            os.mkdir(path)
            about = about_line(self._job, proc.spec.node_id, "0", ("python", "train.py"), 0.0)
            self.made[proc] = TraceFolder(about, Parts(partial(str, path)), self.lines.append)
        self.made[proc](before, event, proc.agent, commands)

    def landed(self, entry: Entry, before: Job) -> None: ...

    def close(self) -> None:
        for trace in self.made.values():
            trace.close()


def simulated(folder: Path, terms: Terms, nodes: int, play: Callable[[World], None], *, seed: int = 1) -> Watching:
    """The traces of a job with so many nodes. `play`: lets it happen, and lets the agents end if they are to."""
    world, watching = World(seed=seed), Watching(folder)
    world.watchers.append(watching)
    for i in range(nodes):
        spec = Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms, local_world_size=2)
        world.begin(Proc(f"p{i}", i, spec, 0.0, i))
    play(world)
    watching.close()
    return watching


def left(folder: Path) -> list[StoredTrace]:
    """The traces that agents have left below this test's folder, the oldest first. Those in log folders are among
    them."""
    place = places.below(folder) / "traces"
    found = [stored(str(entry)) for entry in sorted(place.iterdir())] if place.is_dir() else []
    return [trace for trace in found if trace is not None]


def check(folder: Path) -> int:
    """Every trace that agents have left below this test's folder replays identically. Returns the number of steps."""
    return sum(map(_replayed, left(folder)))


def _replayed(trace: StoredTrace) -> int:
    count = 0
    for made in steps_of(trace):
        assert not isinstance(made, Unreadable), f"{made.path}, line {made.line}: {made.why}"
        if isinstance(made, Replayed):
            count += 1
            assert made.is_same, f"{trace.path}: step {count} differs: {made.event}"
    return count
