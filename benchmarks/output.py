"""How much time the relay of the workers' output takes, and which order it keeps, beside torchrun.

    python benchmarks/output.py                     # about a minute
    python benchmarks/output.py --only order

Run it with the Python of an environment that has both commands. Rules:

- Output goes to one file, stdout and stderr together (`> log 2>&1`).
- Cost: one worker writes numbered lines. *direct* is the worker alone. *inherit* and *relay* are the two values of
  `StreamSettings.output`. The three take turns. The figures are medians. CPU is the time of the process with the relay.
- Order: two ranks write pairs of numbered lines, one to stdout and one to stderr. Each line is written whole, or in
  two pieces, as `print` does in an unbuffered interpreter. A line is *torn* if no rank wrote it like this. A line is
  *out of order* if it comes after a line that the same rank wrote later.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reknit.adapters.keeper.output.console import LAST_WORDS_S
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.keeper.process.processes import Processes
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.worker_words import StartWorkers, WorkersExited
from reknit.core.job.workers import Assignment, WorkerRanks

BIN = Path(sys.executable).parent

BUFFERED = "for i in range(1_000_000): print('line', i)"
FLUSHED = "for i in range(300_000): print('line', i, flush=True)"

PAIRS = """\
import os
rank = os.environ["RANK"].encode()
for i in range({pairs}):
    for fd, name in ((1, b"out"), (2, b"err")):
        line = b"%s %s %d\\n" % (rank, name, i)
        for piece in (line,) if {pieces} == 1 else (line[:6], line[6:]):
            os.write(fd, piece)
"""


def cost(how: str, script: str) -> tuple[float, float]:
    """Run one worker with `script`. Returns the seconds that it took, and the seconds of CPU without the worker's
    own."""
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-c", script] if how == "direct" else [sys.executable, __file__, "--as", how, script]
        began = time.monotonic()
        subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=True)
        took = time.monotonic() - began
        if how == "direct":
            return took, 0.0
        log.seek(-64, os.SEEK_END)
        took_text, cpu_text = log.read().split(b"\n")[-2].split()
        return float(took_text), float(cpu_text)


def hold(how: str, script: str) -> None:
    """The process with the relay. It runs one worker, and then writes down how long that took."""
    began, cpu = time.monotonic(), _cpu()
    clock = SystemClock()
    workers = Processes(
        clock=clock,
        argv=[sys.executable, "-c", script],
        env=os.environ,
        run_id="output",
        streams=StreamSettings(output="inherit" if how == "inherit" else "relay"),
    )
    ranks = WorkerRanks(local_rank=0, rank=0, role_rank=0)
    workers.start(StartWorkers(0, _assignment(ranks)))
    while not any(isinstance(event, WorkersExited) for event in workers.events(clock.now())):
        clock.wait(workers.wakes_at)
    workers.end_all()
    workers.flush(LAST_WORDS_S)
    print(time.monotonic() - began, _cpu() - cpu)


def _assignment(ranks: WorkerRanks) -> Assignment:
    return Assignment(
        round=0,
        group_rank=0,
        group_world_size=1,
        world_size=1,
        role="default",
        role_world_size=1,
        master_addr="localhost",
        master_port=0,
        workers=(ranks,),
        restart_count=0,
        max_restarts=0,
    )


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def order(command: list[str], pairs: int, pieces: int) -> tuple[int, int]:
    """The number of lines that are out of order, and the number of torn lines."""
    with tempfile.TemporaryDirectory() as folder:
        worker, log = Path(folder, "w.py"), Path(folder, "log")
        worker.write_text(PAIRS.format(pairs=pairs, pieces=pieces))
        with log.open("wb") as file:
            subprocess.run([*command, "--nproc-per-node=2", str(worker)], stdout=file, stderr=file, check=True)
        lines = log.read_bytes().splitlines()
    wrote = {b"%d %s %d" % (rank, name, i): (rank, 2 * i + at) for rank in (0, 1) for i in range(pairs)
             for at, name in enumerate((b"out", b"err"))}  # fmt: skip
    whole = [wrote[line] for line in lines if line in wrote]
    last, late = {0: -1, 1: -1}, 0
    for rank, number in whole:
        late += number < last[rank]
        last[rank] = max(last[rank], number)
    return late, len(wrote) - len(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "order"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3000, help="pairs of lines per rank")
    parser.add_argument("--as", nargs=2, dest="holds", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.holds:
        hold(*options.holds)
        return
    if options.only != "order":
        for name, script in (("1,000,000 lines", BUFFERED), ("300,000 lines, each flushed", FLUSHED)):
            took: dict[str, list[tuple[float, float]]] = {"direct": [], "inherit": [], "relay": []}
            for _ in range(options.repeats):
                for how, figures in took.items():
                    figures.append(cost(how, script))
            for how, figures in took.items():
                seconds, cpu = (statistics.median(column) for column in zip(*figures, strict=True))
                print(f"{name}, {how}: {seconds:.2f} s, {cpu:.2f} s of CPU beside the worker's")
    if options.only != "cost":
        for pieces in (1, 2):
            for name in ("reknit run", "torchrun"):
                program, *verb = name.split()
                results = [order([str(BIN / program), *verb], options.pairs, pieces) for _ in range(options.repeats)]
                late, torn = (statistics.median(column) for column in zip(*results, strict=True))
                how = f"of {4 * options.pairs} lines in {pieces} write{'s' * (pieces > 1)} each"
                print(f"{name}: {how} {late:g} out of order, {torn:g} torn")


if __name__ == "__main__":
    main()
