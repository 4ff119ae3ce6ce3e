"""What becomes of the workers' output: speed, whole lines and order, beside torchrun.

    python benchmarks/output.py                     # about three minutes
    python benchmarks/output.py --only order

Run it with the Python of an environment that has both commands. Rules:

- Apart: stdout and stderr go to two files. Each worker writes the same number of lines to stdout. Both launchers start
  Python without a buffer. A line is *torn* if no worker wrote it like this. torchrun relays output with `--tee 3` only,
  and puts a prefix before each line. The floor: the same workers without a launcher, each with a pipe that cat reads.
- Order: two ranks write pairs of numbered lines to one file, one to stdout and one to stderr. A line is written whole,
  or in two pieces, as `print` does in an unbuffered interpreter. A line is *out of order* if it comes after a line that
  the same rank wrote later.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
LINES = "import os\nfor i in range({lines}): print(os.environ['RANK'], 'a line of the worker', i)\n"
LAUNCHERS = {
    "reknit run": ["reknit", "run"],
    "reknit run --output=inherit": ["reknit", "run", "--output=inherit"],
    "torchrun": ["torchrun"],
    "torchrun --tee 3": ["torchrun", "--tee", "3"],
}
PAIRS = """\
import os
rank = os.environ["RANK"].encode()
for i in range({pairs}):
    for fd, name in ((1, b"out"), (2, b"err")):
        line = b"%s %s %d\\n" % (rank, name, i)
        for piece in (line,) if {pieces} == 1 else (line[:6], line[6:]):
            os.write(fd, piece)
"""


def apart(launcher: list[str], workers: int, lines: int) -> tuple[float, int]:
    """Lines per second, and the number of torn lines."""
    with tempfile.TemporaryDirectory() as folder:
        worker, out, err = Path(folder, "w.py"), Path(folder, "out"), Path(folder, "err")
        worker.write_text(LINES.format(lines=lines))
        command = [str(BIN / launcher[0]), *launcher[1:], f"--nproc-per-node={workers}", str(worker)]
        with out.open("wb") as to_out, err.open("wb") as to_err:
            began = time.monotonic()
            subprocess.run(command, stdout=to_out, stderr=to_err, check=True)
            took = time.monotonic() - began
        wrote = {b"%d a line of the worker %d" % (rank, i) for rank in range(workers) for i in range(lines)}
        whole = {line.rpartition(b"]:")[2] for line in out.read_bytes().splitlines()} & wrote
    return workers * lines / took, len(wrote) - len(whole)


def floor(workers: int, lines: int) -> float:
    """Lines per second that the workers write if somebody only reads them."""
    with tempfile.TemporaryDirectory() as folder:
        worker = Path(folder, "w.py")
        worker.write_text(LINES.format(lines=lines))
        began = time.monotonic()
        running = []
        for rank in range(workers):
            writer = subprocess.Popen(
                [sys.executable, "-u", worker], env=os.environ | {"RANK": str(rank)}, stdout=subprocess.PIPE
            )
            running += [writer, subprocess.Popen(["cat"], stdin=writer.stdout, stdout=subprocess.DEVNULL)]
            assert writer.stdout is not None
            writer.stdout.close()
        for process in running:
            process.wait()
    return workers * lines / (time.monotonic() - began)


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
    parser.add_argument("--only", choices=("apart", "order"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lines", type=int, default=200_000, help="lines per worker, with the streams apart")
    parser.add_argument("--pairs", type=int, default=3000, help="pairs of lines per rank, in order")
    options = parser.parse_args()
    if options.only != "order":
        figures: dict[str, list[tuple[float, int]]] = {name: [] for name in LAUNCHERS}
        floors = []
        for _ in range(options.repeats):
            floors.append(floor(options.workers, options.lines))
            for name, launcher in LAUNCHERS.items():
                figures[name].append(apart(launcher, options.workers, options.lines))
        print(f"floor: {statistics.median(floors):,.0f} lines per second")
        for name, found in figures.items():
            rate, torn = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"{name}: {rate:,.0f} lines per second, {torn:g} of {options.workers * options.lines:,} torn")
    if options.only != "apart":
        for pieces in (1, 2):
            for name in ("reknit run", "torchrun"):
                program, *verb = name.split()
                results = [order([str(BIN / program), *verb], options.pairs, pieces) for _ in range(options.repeats)]
                late, torn = (statistics.median(column) for column in zip(*results, strict=True))
                how = f"of {4 * options.pairs} lines in {pieces} write{'s' * (pieces > 1)} each"
                print(f"{name}: {how} {late:g} out of order, {torn:g} torn")


if __name__ == "__main__":
    main()
