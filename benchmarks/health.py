"""What the health check server costs: reknit without it, with it, and while it is asked all the time.

    python benchmarks/health.py                    # about six minutes
    python benchmarks/health.py --repeats 3 --seconds 10

1. The three kinds of jobs take turns, so that other work of the machine disturbs them alike. Figures are medians.
2. While a server is asked, another process sends `--rate` requests for /healthz per second, and one for /metrics every
   second. It runs on the same machine, and needs a processor as well.
3. The last restart is that of a job which was asked for `--seconds` before.

Linux only, because processes are read from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import launch
from launch import BIN, OUR_HOST, Launcher, compile_ours, idle, ms, percent, rate
from launched import FAIL_ONCE, RETURN, SLEEP

PORT = 18_437
COMMAND = (str(BIN / "reknit"), "run", "--standalone")
OFF = Launcher("off", COMMAND, OUR_HOST)
ON = Launcher("on", ("env", f"TORCHELASTIC_HEALTH_CHECK_PORT={PORT}", *COMMAND), OUR_HOST)
KINDS = {"off": OFF, "on": ON, "asked": ON}
ASK = """
import http.client, json, sys, time
port, rate, took, failed = int(sys.argv[1]), float(sys.argv[2]), [], 0
print("ready", flush=True)
at = time.monotonic()
while True:
    page = "/metrics" if len(took) % int(rate) == int(rate) - 1 else "/healthz"
    begin = time.monotonic()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", page)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status == 200:
            took.append(time.monotonic() - begin)
    except ConnectionRefusedError:
        if took:
            break  # the job is over
    except OSError:
        failed += 1
    at += 1 / rate
    time.sleep(max(0.0, at - time.monotonic()))
print(json.dumps({"took": took, "failed": failed}))
"""


@contextlib.contextmanager
def asking(per_second: float) -> Iterator[dict[str, float]]:
    """A process that asks until the server is gone. What it has seen is in the dictionary afterwards."""
    seen: dict[str, float] = {}
    command = [sys.executable, "-c", ASK, str(PORT), str(per_second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise AssertionError("it has a pipe")
        try:
            process.stdout.readline()
            yield seen
            told = json.loads(process.stdout.readline())
            took = sorted(told["took"])
            seen |= {"answer": statistics.median(took), "slowest of 100": took[int(0.99 * len(took))]}
            seen |= {"answers": len(took), "failed": told["failed"]}
        finally:
            process.kill()


def restart(kind: str, lives_s: float, per_second: float) -> dict[str, float]:
    script = FAIL_ONCE.replace("time.sleep(1.5)", f"time.sleep({lives_s})")
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(asking(per_second)) if kind == "asked" else {}
        with KINDS[kind].job(script, workers=2, restarts=1) as job:
            job.wait_for("first", 2)
            begin, used = time.monotonic(), cpu_s(job.process.pid)
            job.wait_for("fails", 1)
            share = (cpu_s(job.process.pid) - used) / (time.monotonic() - begin)
            again = job.wait_for("first", 2, restart=1)
            took = max(line.at for line in again) - job.lines("fails")[0].at
    return {"restart": took, "processor": share, **seen}


def launched(kind: str) -> dict[str, float]:
    with KINDS[kind].job(RETURN, workers=2) as job:
        job.wait()
        return {"launch": max(line.at for line in job.wait_for("first", 2)) - job.started}


def answers_itself() -> dict[str, float]:
    """Memory before and after the first look at the metrics, which imports what makes them."""
    with ON.job(SLEEP, workers=2) as job:
        job.wait_for("first", 2)
        before = resident(job.process.pid)
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as answer:
            answer.read()
        return {"memory": before, "memory with metrics": resident(job.process.pid)}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return float(next(row.split()[1] for row in rows if row.startswith("Pss:"))) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="What the health check server costs.")
    parser.add_argument("--repeats", type=int, default=11, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the long job; default: %(default)s")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second; default: %(default)s")
    options = parser.parse_args()
    compile_ours()
    launch.PATIENCE_S += options.seconds  # a job that takes longer is killed
    samples: dict[tuple[str, str], list[float]] = {}

    def take(kind: str, found: dict[str, float]) -> None:
        for key, value in found.items():
            samples.setdefault((kind, key), []).append(value)

    for repeat in range(options.repeats):
        print(f"\r{repeat + 1} of {options.repeats}", end="", file=sys.stderr)
        for kind in KINDS if repeat % 2 else [*KINDS][::-1]:
            take(kind, restart(kind, 1.5, options.rate))
            if kind != "asked":
                take(kind, launched(kind))
    print("\r" + " " * 20, end="\r", file=sys.stderr)
    for kind in KINDS:
        take(f"{kind}, {options.seconds:g} s", restart(kind, options.seconds, options.rate))
    for kind, launcher in (("off", OFF), ("on", ON)):
        take(kind, {"idle": idle(launcher, 30.0)["idle"]})
    take("on", answers_itself())
    for (kind, key), values in sorted(samples.items(), key=lambda item: (item[0][1], item[0][0])):
        print(f"{key:20} {kind:12} {shown(key, statistics.median(values)):>12}   of {len(values)}")


def shown(key: str, value: float) -> str:
    if key in ("answers", "failed"):
        return f"{value:.0f}"
    if key.startswith("memory"):
        return f"{value:.1f} MiB"
    return percent(value) if key == "processor" else rate(value) if key == "idle" else ms(value)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as trouble:
        sys.exit(f"\n{trouble}")
