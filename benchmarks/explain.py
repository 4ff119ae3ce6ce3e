"""How long `reknit explain` takes for a job with many rounds, and how much memory it needs.

    python benchmarks/explain.py [--rounds 10000]

The traces are made by the simulator: two agents, and in each round a worker of one of them fails. They are read by the
real command, in a process of its own. It is compared with Python's JSON parser, which parses each line of the traces in
a process of its own: that is the least that a reader in Python would do.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from reknit.adapters.observe.trace_folder import Parts, TraceFolder, about_line
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job, Running


class Traces:
    """Watches a simulated world: one trace for each agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Proc, TraceFolder] = {}

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        if proc not in self._made:
            path = str(self._folder / proc.spec.node_id)
            os.mkdir(path)
            about = about_line("benchmark", proc.spec.node_id, "0", (), 0.0)
            self._made[proc] = TraceFolder(about, Parts(partial(str, path)), print)
        self._made[proc](before, event, proc.agent, commands)

    def landed(self, entry: Entry, before: Job) -> None: ...

    def close(self) -> None:
        for trace in self._made.values():
            trace.close()


def runs(proc: Proc) -> bool:
    return isinstance(proc.agent.job.phase, Running) and proc.agent.workers.alive


def is_after(proc: Proc, round: int) -> bool:
    return proc.agent.job.round > round


def make(folder: Path, rounds: int) -> None:
    world, traces = World(seed=1), Traces(folder)
    world.watchers.append(traces)
    terms = Terms(min_nodes=2, max_nodes=2, restarts=RestartPolicy(max_restarts=rounds))
    for i in range(2):
        spec = Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms, local_world_size=2)
        world.begin(Proc(f"n{i}", i, spec, 0.0, i))
    first = world.procs[0]
    while first.agent.job.round < rounds - 1:
        if not world.run_for(120.0, until=partial(runs, first)):
            raise AssertionError("no round was formed")
        staff.fail(world, first)
        world.run_for(120.0, until=partial(is_after, first, first.agent.job.round))
    traces.close()


PARSES = """
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.jsonl")):
    with path.open() as file:
        for line in file:
            json.loads(line)
"""


def measured(*command: str) -> tuple[float, str]:
    """Seconds, the median of three, and what the command has printed."""
    took: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        out = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        took.append(time.perf_counter() - began)
    return sorted(took)[1], out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), rounds)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
        reknit = os.path.join(os.path.dirname(sys.executable), "reknit")
        took_s, told = measured(reknit, "explain", folder)
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        parsing_s, _ = measured(sys.executable, "-c", PARSES, folder)
    print(told)
    print(f"{rounds} rounds, two traces with {size / 1e6:.1f} MB: {took_s:.1f} s, at most {most:.0f} MiB")
    print(f"{took_s / parsing_s:.1f} times the {parsing_s:.1f} s that parsing their JSON takes")


if __name__ == "__main__":
    main()
