"""What a launcher costs: reknit beside torchrun, measured from outside, in the same run.

    python benchmarks/launch.py                       # all figures, about ten minutes
    python benchmarks/launch.py --only launch --only restart --repeats 5

Run it with the Python of an environment that has both commands. Rules:

- The two take turns, so that what else the machine does falls on both. The figures are medians over the repeats.
- Both are driven alike: same scripts, same environment, output to a file. The workers' scripts load nothing (except
  for the DDP job) and report by appending lines to another: CLOCK_MONOTONIC is one clock for all of a machine.
- The agent is what is not a worker: the process that was started and its descendants down to the workers' parent.

Linux only: processes are looked at through /proc.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

BIN = Path(sys.executable).parent
MARK = "LAUNCH_BENCHMARK"
PATIENCE_S = 60.0  # a job that takes longer hangs (the slowest, DDP with a restart, takes about 7 s), and is killed

# ---- what the workers run. Each line of the report: what, seconds, rank, restart count, own pid, parent's pid --------

TELL = """\
import os, sys, time
def tell(what):
    e = os.environ
    line = f"{what} {time.monotonic()} {e['RANK']} {e['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {os.getppid()}\\n"
    report = os.open(e["REPORT"], os.O_WRONLY | os.O_APPEND)
    os.write(report, line.encode())
    os.close(report)
tell("first")
"""

RETURN = TELL

SLEEP = TELL + "time.sleep(600)\n"

FAIL_ONCE = (
    TELL
    + """\
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while os.environ["RANK"] == "0":
        with open(os.environ["REPORT"]) as report:
            if report.read().count("first ") == int(os.environ["WORLD_SIZE"]):
                time.sleep(0.3)  # every other worker is asleep by now, and so is the agent
                tell("fails")
                os._exit(1)
        time.sleep(0.01)
    time.sleep(600)
"""
)

DAEMONISE = (
    TELL
    + """\
import signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        tell("grandchild")
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
)

TRAIN = (
    TELL
    + """\
from datetime import timedelta
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    if step == 10 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
tell("trained")
dist.barrier()
# Tearing gloo down aborts now and then, with no launcher at all (6 of 14 runs): that is not what is measured.
os._exit(0)
"""
)


@dataclass(frozen=True)
class Line:
    what: str
    at: float
    rank: int
    restart: int
    pid: int
    parent: int


@dataclass(frozen=True)
class Launcher:
    name: str
    command: tuple[str, ...]

    @contextlib.contextmanager
    def job(self, script: str, workers: int, restarts: int = 0) -> Iterator[Job]:
        """A running job. Whatever is left of it when the block ends is killed."""
        with tempfile.TemporaryDirectory() as folder:
            file, report, log = (Path(folder, name) for name in ("script.py", "report", "log"))
            file.write_text(script)
            report.touch()
            mark = f"{MARK}={uuid.uuid4().hex}"
            arguments = [f"--nproc-per-node={workers}", f"--max-restarts={restarts}", str(file)]
            environment = dict([mark.split("=")], REPORT=str(report), OMP_NUM_THREADS="1")
            with log.open("wb") as output:
                started = time.monotonic()
                process = subprocess.Popen(
                    [*self.command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | environment,
                )
            job = Job(self, process, started, mark, report, log)
            watch = threading.Timer(PATIENCE_S, job.kill)
            watch.start()
            try:
                yield job
            finally:
                watch.cancel()
                job.kill()


@dataclass(frozen=True)
class Job:
    launcher: Launcher
    process: subprocess.Popen[bytes]
    started: float
    mark: str
    report: Path
    log: Path

    def lines(self, what: str, restart: int | None = None) -> list[Line]:
        rows = [row.split() for row in self.report.read_text().splitlines()]
        lines = [Line(row[0], float(row[1]), *map(int, row[2:])) for row in rows]
        return [line for line in lines if line.what == what and restart in (None, line.restart)]

    def wait(self) -> float:
        """The job's end, in seconds of the monotonic clock."""
        self.process.wait()
        return time.monotonic()

    def wait_for(self, what: str, count: int, restart: int | None = None) -> list[Line]:
        while len(lines := self.lines(what, restart)) < count:
            if self.process.poll() is not None:
                raise self.trouble(f"{count} lines {what!r} expected, not {len(lines)}")
            time.sleep(0.01)
        return lines

    def alive(self) -> set[int]:
        """The processes of this job, told by their environment, whoever their parent is now. Zombies are dead."""
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.mark in environment_of(pid)}

    def kill(self) -> None:
        deadline = time.monotonic() + 10
        while pids := self.alive():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            if time.monotonic() > deadline:
                raise self.trouble(f"cannot kill {sorted(pids)}")
            time.sleep(0.01)
        self.process.wait()

    def trouble(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self.launcher.name}: {what}\n{self.log.read_text(errors='replace')[-3000:]}")


# ---- the figures ---------------------------------------------------------------------------------------------------


def start_and_end(launcher: Launcher, workers: int) -> dict[str, float]:
    with launcher.job(RETURN, workers) as job:
        end = job.wait()
        last = max(line.at for line in job.wait_for("first", workers))
        return {f"launch, {workers}": last - job.started, f"exit, {workers}": end - last}


def restart(launcher: Launcher, workers: int) -> dict[str, float]:
    with launcher.job(FAIL_ONCE, workers, restarts=1) as job:
        again = job.wait_for("first", workers, restart=1)
        return {f"restart, {workers}": max(line.at for line in again) - job.lines("fails")[0].at}


def idle(launcher: Launcher, seconds: float) -> dict[str, float]:
    with launcher.job(SLEEP, workers=2) as job:
        workers = job.wait_for("first", 2)
        time.sleep(2)
        agent = job.alive() - {line.pid for line in workers}
        before = switches(agent)
        time.sleep(seconds)
        after = switches(agent)
        woken = sum(count - before.get(thread, 0) for thread, count in after.items())
        return {
            "memory": kibibytes(workers[0].parent, "status", "VmRSS") / 1024,
            "memory, all": sum(kibibytes(pid, "smaps_rollup", "Pss") for pid in agent) / 1024,
            "idle": woken / seconds,
        }


def orphans(launcher: Launcher, victim: str) -> dict[str, float]:
    """Processes alive one second after a SIGKILL to the first process (the user knows it) or to the workers' parent."""
    with launcher.job(DAEMONISE, workers=2) as job:
        worker = job.wait_for("first", 2)[0]
        job.wait_for("grandchild", 2)
        os.kill(job.process.pid if victim == "first process" else worker.parent, signal.SIGKILL)
        time.sleep(1)
        return {f"orphans, {victim}": float(len(job.alive()))}


def trains_again(launcher: Launcher) -> dict[str, float]:
    """1 if the first restart trains to the end."""
    with launcher.job(TRAIN, workers=2, restarts=1) as job:
        job.wait()
        return {"trains again": float(len(job.lines("trained", restart=1)) == 2 and job.process.returncode == 0)}


# ---- /proc ---------------------------------------------------------------------------------------------------------


def environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:  # gone, or not ours
        return []


def field_of(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name}:"))


def kibibytes(pid: int, file: str, name: str) -> int:
    return field_of(Path(f"/proc/{pid}/{file}"), name)


def switches(pids: set[int]) -> dict[str, int]:
    """How often each thread was put on a processor, of its own will or not."""
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return {thread.name: sum(field_of(thread / "status", name) for name in names) for thread in threads}


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    key: str
    title: str
    show: Callable[[float], str]
    most: float | None = None
    """The goal, an upper bound of our figure."""
    share: tuple[int, int] | None = None
    """The goal as a fraction of torchrun's figure."""
    least: float | None = None
    fold: Callable[[list[float]], float] = statistics.median

    def goal(self) -> str:
        if self.share:
            return f"≤ {self.share[0]}/{self.share[1]}"
        if self.most is not None:
            return f"≤ {self.show(self.most)}"
        return f"≥ {self.show(self.least)}" if self.least is not None else "–"

    def reached(self, ours: float, theirs: float | None) -> bool | None:
        if self.share:
            return None if theirs is None else ours <= theirs * self.share[0] / self.share[1]
        if self.most is not None:
            return ours <= self.most
        return ours >= self.least if self.least is not None else None


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def mib(value: float) -> str:
    return f"{value:.1f} MiB"


def rate(value: float) -> str:
    return f"{value:.1f} /s"


def number(value: float) -> str:
    return f"{value:.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


FIGURES = [
    Figure("launch, 2", "launch → first line of every worker, 2", ms, share=(1, 12)),
    Figure("launch, 8", "launch → first line of every worker, 8", ms, share=(1, 12)),
    Figure("exit, 2", "last worker's end → agent's exit, 2", ms, share=(1, 12)),
    Figure("exit, 8", "last worker's end → agent's exit, 8", ms, share=(1, 12)),
    Figure("restart, 2", "worker fails → next round started, 2", ms, share=(1, 4)),
    Figure("restart, 8", "worker fails → next round started, 8", ms, share=(2, 5)),
    Figure("memory", "resident memory of the agent", mib, most=28),
    Figure("memory, all", "… of all its processes, shared pages split", mib),
    Figure("idle", "wake-ups while idle, all its processes", rate, most=0.2),
    Figure("orphans, first process", "alive 1 s after SIGKILL to first process", number, most=0, fold=max),
    Figure("orphans, agent", "alive 1 s after SIGKILL to workers' parent", number, most=0, fold=max),
    Figure("trains again", "DDP: the first restart trains to the end", percent, least=1.0, fold=statistics.fmean),
]

GROUPS = ("launch", "restart", "idle", "orphans", "ddp")


def measurements(options: argparse.Namespace) -> list[tuple[str, int, Callable[[Launcher], dict[str, float]]]]:
    """What to measure: its group, how often, how."""
    return [
        ("launch", options.repeats, lambda launcher: start_and_end(launcher, 2)),
        ("launch", options.repeats, lambda launcher: start_and_end(launcher, 8)),
        ("restart", options.repeats, lambda launcher: restart(launcher, 2)),
        ("restart", options.repeats, lambda launcher: restart(launcher, 8)),
        ("idle", 1, lambda launcher: idle(launcher, options.idle_seconds)),
        ("orphans", options.kills, lambda launcher: orphans(launcher, "first process")),
        ("orphans", options.kills, lambda launcher: orphans(launcher, "agent")),
        ("ddp", options.jobs, trains_again),
    ]


def measure(launchers: list[Launcher], options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """All samples, by launcher and figure."""
    samples: dict[tuple[str, str], list[float]] = {}
    for group, repeats, take in measurements(options):
        if options.only and group not in options.only:
            continue
        for repeat in range(repeats):
            for launcher in launchers if repeat % 2 else launchers[::-1]:
                print(f"\r{group}: {repeat + 1} of {repeats}, {launcher.name:10}", end="", file=sys.stderr)
                for key, value in take(launcher).items():
                    samples.setdefault((launcher.name, key), []).append(value)
    print("\r" + " " * 40, end="\r", file=sys.stderr)
    return samples


def cells(figure: Figure, theirs: list[float], ours: list[float]) -> list[str]:
    reference, own = figure.fold(theirs) if theirs else None, figure.fold(ours) if ours else None
    row = [figure.title, "–" if reference is None else figure.show(reference), "–" if own is None else figure.show(own)]
    if own is None:
        return [*row, "–", figure.goal(), "–"]
    reached = {True: "yes", False: "NO", None: "–"}[figure.reached(own, reference)]
    return [*row, ratio(own, reference), figure.goal(), reached]


def ratio(own: float, reference: float | None) -> str:
    if not own or not reference:
        return "–"
    return f"1/{reference / own:.1f}" if own < reference else f"{own / reference:.1f}"


def print_table(samples: dict[tuple[str, str], list[float]]) -> None:
    rows = [["figure", "torchrun", "reknit", "ratio", "goal", "reached"]]
    for figure in FIGURES:
        theirs, ours = (samples.get((name, figure.key), []) for name in ("torchrun", "reknit"))
        if theirs or ours:
            rows.append(cells(figure, theirs, ours))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for at, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if at == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a launcher costs: reknit beside torchrun.")
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be given again")
    parser.add_argument("--repeats", type=int, default=11, help="of launch and restart; default: %(default)s")
    parser.add_argument("--kills", type=int, default=3, help="SIGKILLs to each process; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=10, help="DDP jobs; default: %(default)s")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--ours", default=f"{BIN / 'reknit'} run --standalone", help="default: %(default)s")
    parser.add_argument("--theirs", default=f"{BIN / 'torchrun'} --standalone", help="default: %(default)s")
    parser.add_argument("--without-torchrun", action="store_true", help="ours alone")
    return parser.parse_args()


def compile_ours() -> None:
    """pip compiles what it installs, torch included; an editable install it leaves to the first import, if at all."""
    for package in ("reknit", "reknit.core", "reknit.adapters", "reknit.app"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:  # compileall does not follow our links by itself
            compileall.compile_dir(spec.submodule_search_locations[0], quiet=2)


def main() -> None:
    options = parse_options()
    compile_ours()
    launchers = [Launcher("reknit", tuple(shlex.split(options.ours)))]
    if not options.without_torchrun:
        launchers.append(Launcher("torchrun", tuple(shlex.split(options.theirs))))
    samples = measure(launchers, options)
    print_table(samples)
    packages = {package.name: package.version for package in metadata.distributions()}
    versions = " · ".join(f"{name} {packages.get(name, '–')}" for name in ("reknit", "torch"))
    print(f"\n{versions} · Python {platform.python_version()} · {platform.system()} · {os.cpu_count()} cores · "
          f"medians of {options.repeats}, orphans the worst of {options.kills}, DDP {options.jobs} jobs")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as trouble:
        sys.exit(f"\n{trouble}")
