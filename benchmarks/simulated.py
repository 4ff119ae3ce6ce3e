"""How fast the fleet plays a job, beside the small world, which plays every agent and every beat.

    python benchmarks/simulated.py [--days 54] [--nodes 2048] [--spares 32]

1. The same job, nodes and time in the fleet and in the small world: seconds of the job in a second of processor time.
2. A large job for weeks, as `reknit simulate` plays it, audited, at two rates of failures.
3. Ten thousand nodes form, a hundred are lost, and the others form again.

Each row says the processor time and the memory at the most. Rows 2 and 3 have no peer: nobody else plays them.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

from reknit.adapters.simulated.fleet import Fleet
from reknit.app.simulation.cluster import SimulatedCluster
from reknit.app.simulation.playing import collect_rarely, name_of, play
from reknit.core.job.entries import NodeId, RestartPolicy, Terms
from reknit.testing import Script, Setup, parse
from reknit.testing import play as play_small

SMALL_S = 600.0
"""So long the small world plays."""


def took(what: Callable[[], object]) -> float:
    """Seconds of processor time."""
    begin = time.process_time()
    what()
    return time.process_time() - begin


def row(name: str, cpu_s: float, more: str = "") -> None:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{name:58} {cpu_s:8.2f} s CPU  {most:6} MiB  {more}", flush=True)


def small_world() -> None:
    play_small(parse(f"setup nodes=8 formed=8 min=2 max=8\nwait {SMALL_S:g}"), is_ending=False)


def fleet_of_eight() -> None:
    fleet = Fleet(Script(Setup(nodes=8, formed=8, min=2, max=8)).setup.terms)
    fleet.start([NodeId(name) for name in "abcdefgh"])
    fleet.run_until(SMALL_S)


def form_and_lose(nodes: int, lost: int) -> None:
    fleet = Fleet(Terms(nodes - lost, nodes, RestartPolicy(5), beat_s=5.0, silence_s=15.0))
    fleet.start([name_of(i) for i in range(nodes)])
    fleet.run_until(120.0)
    for i in range(0, nodes, nodes // lost):
        fleet.kill(name_of(i))
    fleet.run_until(600.0)
    if len(fleet.job.members) != nodes - lost:
        raise SystemExit(f"{len(fleet.job.members)} nodes have formed again, and not {nodes - lost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("days", 54), ("nodes", 2048), ("spares", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    collect_rarely()  # as the processes of `reknit simulate` do
    here, there = took(fleet_of_eight), took(small_world)
    row(f"8 nodes for {SMALL_S:g} s, small world with its checks", there)
    row(f"8 nodes for {SMALL_S:g} s, fleet", here, f"{there / here:.0f} times faster")
    row("10,000 nodes form, lose 100, form again", took(lambda: form_and_lose(10_000, 100)))
    for what, per_day in (("419 failures in 54 days", 419 / 54), ("6.50 for each 1,000 node-days", None)):
        nodes = asked.nodes + asked.spares
        rate = 6.5 if per_day is None else 1000 * per_day / nodes
        cluster = SimulatedCluster(
            nodes=asked.nodes, spares=asked.spares, days=asked.days, failures=rate, nproc_per_node=1
        )
        begin = time.process_time()
        run = play(cluster, 0)
        steps = f"{run.rounds} rounds; {run.steps:,} steps for {run.shared:,}"
        row(f"{nodes:,} nodes for {asked.days} days, {what}", time.process_time() - begin, steps)


if __name__ == "__main__":
    main()
