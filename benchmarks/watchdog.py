"""What the watch for hung workers costs, and how fast it is, beside a job without it.

1. `call`: one call of `reknit.progress`, without an agent and with a page.
2. `restart`: two workers hang. The time from the moment at which this counts as a hang (`--hang-after` after the last
   progress) until the first line of both successors. `py-spy`: the stacks are taken that way. `abort`: by SIGABRT, as
   if py-spy was not installed. The baseline `fails`: one worker ends with status 1. Its time contains the pause of
   0.2 s for workers that fail at once.
3. `idle`: how often agent and keeper wake up per second while two workers report progress a hundred times a second.

Each figure is a median.

    python benchmarks/watchdog.py [--times 5] [--seconds 10]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import psutil

from reknit.adapters.keeper.watchdog import progress as client
from reknit.adapters.keeper.watchdog.page import Page
from reknit.adapters.keeper.watchdog.thread_stacks import py_spy_for

HANG_AFTER_S = 2.0
WITHOUT_PY_SPY = """
import sys
import reknit.adapters.keeper.watchdog.thread_stacks as stacks
stacks.py_spy_for = lambda pid: ""
from reknit.app.cli.main import main
sys.exit(main())
"""
HANGS = """
import json, os, sys, time
begin = time.monotonic()
from reknit import progress
folder, how, restart = sys.argv[1], sys.argv[2], os.environ["TORCHELASTIC_RESTART_COUNT"]
def note(at):
    with open(f"{folder}/{restart}.{os.environ['RANK']}", "w") as file:
        json.dump(at, file)
if restart == "1":
    note(begin)
    sys.exit()
for step in range(3):
    progress(step)
note(time.monotonic())
if how == "fails" and os.environ["RANK"] == "0":
    sys.exit(1)
time.sleep(1e6)
"""
REPORTS = """
import time
from reknit import progress
while True:
    progress()
    time.sleep(0.01)
"""


def call_ns() -> dict[str, float]:
    """Nanoseconds per call."""

    def per_call() -> float:
        times = timeit.repeat("progress(7)", globals={"progress": client.progress}, number=10_000, repeat=101)
        return statistics.median(times) / 10_000 * 1e9

    without = per_call()
    page = Page()
    os.environ.update(page.variables(0))
    client._forget()
    with_page = per_call()
    if page.read(0)[1] != 7:
        raise AssertionError("the calls have not reached the page")
    return {"without an agent": without, "with a page": with_page}


def command(how: str, *argv: str) -> list[str]:
    launcher = ["-c", WITHOUT_PY_SPY] if how == "abort" else ["-m", "reknit"]
    return [sys.executable, *launcher, "run", *argv]


def restart_s(how: str) -> float:
    """`how`: fails, py-spy or abort."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "worker.py")
        script.write_text(HANGS)
        argv = ["--nproc-per-node=2", "--max-restarts=1"]
        if how != "fails":
            argv.append(f"--hang-after={HANG_AFTER_S}")
        # A Python that sleeps ends at SIGTERM at once, so the grace does not count.
        whole = command(how, *argv, str(script), folder, how)
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        signal = {"fails": "exit code", "abort": "(killed by SIGABRT)", "py-spy": "(killed by SIGKILL)"}[how]
        if signal not in done.stderr:
            raise AssertionError(f"{how}: {done.stderr}")
        noted = {path.name: json.loads(path.read_text()) for path in Path(folder).glob("?.?")}
    ended = [noted["0.0"]] if how == "fails" else [noted["0.0"], noted["0.1"]]
    due = min(ended) + (0 if how == "fails" else HANG_AFTER_S)
    return float(max(noted["1.0"], noted["1.1"]) - due)


def switches(pid: int) -> int:
    """How often the threads of a process have gone to sleep by themselves so far."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt"))
        count += int(line.split()[1])
    return count


def wakes_per_s(seconds: float, *argv: str) -> float:
    """Wake-ups of agent and keeper together, per second."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "worker.py")
        script.write_text(REPORTS)
        job = subprocess.Popen(command("", "--nproc-per-node=2", *argv, str(script)), stderr=subprocess.DEVNULL)
        try:
            time.sleep(3)  # the start is over
            agent = psutil.Process(job.pid)
            pids = [agent.pid, agent.children()[0].pid]
            before = sum(map(switches, pids))
            time.sleep(seconds)
            return (sum(map(switches, pids)) - before) / seconds
        finally:
            job.terminate()
            job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    for name, ns in call_ns().items():
        print(f"call     {name:24} {ns:8.0f} ns")
    ways = ["fails", "abort", *(["py-spy"] if py_spy_for(os.getpid()) else [])]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.times):
        for way in ways:
            found[way].append(restart_s(way))
    for way, times in found.items():
        print(f"restart  {way:24} {statistics.median(times):8.3f} s   ({min(times):.3f} to {max(times):.3f})")
    for argv in ((), ("--hang-after=60",), ("--hang-after=1",)):
        print(f"idle     {' '.join(argv) or 'not watched':24} {wakes_per_s(args.seconds, *argv):8.2f} wake-ups/s")


if __name__ == "__main__":
    main()
