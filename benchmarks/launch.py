"""How long a launcher takes, and what it needs: reknit beside torchrun, measured from outside, in the same run.

    python benchmarks/launch.py                       # all figures, about fifteen minutes
    python benchmarks/launch.py --only launch --only restart --repeats 5

Run it with the Python of an environment that has both commands. Rules:

- The two launchers take turns, so that other work of the machine disturbs both alike. The figures are medians over the
  repeats.
- Both run the same scripts with the same environment, and their output goes to a file. The scripts import nothing,
  except for the DDP job. Each worker appends lines with the time to a second file, the report. CLOCK_MONOTONIC is the
  same clock for all processes of a machine.
- The agent is the process that was started. The keeper is the parent of the workers: with reknit a child of the agent,
  with torchrun the agent itself. Figures of memory and wake-ups are sums over all processes that are not workers.
- A worker that is to end calls `os._exit`. What the interpreter does at its end takes time that is not the launcher's.
- A worker that is to fail has lived for some time, because reknit restarts workers that die at once after a pause.

Linux only, because processes are read from /proc.
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
from functools import partial
from importlib import metadata
from pathlib import Path

from launched import FAIL_ONCE, LEAVE_BEHIND, OUR_HOST, RETURN, SLEEP, THEIR_HOST, TRAIN

BIN = Path(sys.executable).parent
MARK = "LAUNCH_BENCHMARK"
PATIENCE_S = 60.0  # a job that takes longer hangs, and is killed. The slowest one, DDP with a restart, takes about 7 s


@dataclass(frozen=True)
class Line:
    """A line of the report."""

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
    host: str
    """A program that runs an agent itself, and forks a child that lives on."""

    @contextlib.contextmanager
    def job(self, script: str, workers: int, restarts: int = 0, *, in_host: bool = False) -> Iterator[Job]:
        """A running job. Its processes that are left when the block ends are killed. `in_host`: the program `host` runs
        the agent, and not the command."""
        with tempfile.TemporaryDirectory() as folder:
            file, host, report, log = (Path(folder, name) for name in ("script.py", "host.py", "report", "log"))
            file.write_text(script)
            host.write_text(self.host)
            report.touch()
            mark = f"{MARK}={uuid.uuid4().hex}"
            command = [*self.command, f"--nproc-per-node={workers}", f"--max-restarts={restarts}", str(file)]
            if in_host:
                command = [sys.executable, str(host), str(workers), str(file)]
            environment = dict([mark.split("=")], REPORT=str(report), OMP_NUM_THREADS="1")
            with log.open("wb") as output:
                started = time.monotonic()
                process = subprocess.Popen(
                    command,
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
        ours = job.alive() - {line.pid for line in workers}
        before = switches(ours)
        time.sleep(seconds)
        after = switches(ours)
        woken = sum(count - before.get(thread, 0) for thread, count in after.items())
        memory = {pid: kibibytes(pid, "smaps_rollup", "Pss") / 1024 for pid in ours}
        agent = memory.pop(job.process.pid)
        return {
            "memory": agent + sum(memory.values()),
            "memory, agent": agent,
            "idle": woken / seconds,
        }


ORPHANS = {
    "agent": "SIGKILL of the agent",
    "keeper": "SIGKILL of the keeper",
    "both": "SIGKILL of both at once",
    "stopped": "SIGSTOP of the keeper, SIGKILL of the agent",
    "host": "SIGKILL of a host program that has forked",
}


def orphans(launcher: Launcher, case: str) -> dict[str, float]:
    """Two numbers of processes that are alive one second after the signals of this case: workers and their children,
    and daemons of workers. If the keeper is killed, only its own workers count, and not those of the next keeper."""
    with launcher.job(LEAVE_BEHIND, workers=2, in_host=case == "host") as job:
        keeper, agent = job.wait_for("first", 2)[0].parent, job.process.pid
        if keeper == agent and case not in ("agent", "host"):
            return {}  # there is no keeper
        job.wait_for("child", 2)
        daemons = {line.pid for line in job.wait_for("daemon", 2)}
        forked = {line.pid for line in job.wait_for("forked", 1)} if case == "host" else set()
        doomed = job.alive() - daemons - forked - ({agent} if case == "keeper" else set())
        if case == "stopped":
            os.kill(keeper, signal.SIGSTOP)
        if case in ("keeper", "both"):
            os.kill(keeper, signal.SIGKILL)
        if case != "keeper":
            os.kill(agent, signal.SIGKILL)
        give_up = time.monotonic() + 1
        while job.alive() & (doomed | daemons) and time.monotonic() < give_up:
            time.sleep(0.05)
        alive = job.alive()
        return {f"orphans, {case}": float(len(alive & doomed)), f"daemons, {case}": float(len(alive & daemons))}


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
    return f"{value:.2f} /s"


def number(value: float) -> str:
    return f"{value:.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


FIGURES = [
    Figure("launch, 2", "launch → first line of every worker, 2", ms, share=(1, 8)),
    Figure("launch, 8", "launch → first line of every worker, 8", ms, share=(1, 6)),
    Figure("exit, 2", "last worker's end → agent's exit, 2", ms, share=(1, 40)),
    Figure("exit, 8", "last worker's end → agent's exit, 8", ms, share=(1, 40)),
    Figure("restart, 2", "worker fails → all restarted, 2", ms, share=(1, 5)),
    Figure("restart, 8", "worker fails → all restarted, 8", ms, share=(1, 3)),
    Figure("memory", "resident memory (PSS) of agent and keeper", mib, most=24),
    Figure("memory, agent", "… of the agent alone", mib),
    Figure("idle", "wake-ups while idle, agent and keeper", rate, most=0.1),
    *(
        Figure(f"orphans, {case}", f"alive 1 s after {what}", number, most=0, fold=max)
        for case, what in ORPHANS.items()
    ),
    *(
        # Nothing outlives both and knows of a daemon. The next agent of the job finds it by its mark.
        Figure(f"daemons, {case}", f"… daemons: {what}", number, most=None if case == "both" else 0, fold=max)
        for case, what in ORPHANS.items()
    ),
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
        *(("orphans", options.kills, partial(orphans, case=case)) for case in ORPHANS),
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
    parser.add_argument("--kills", type=int, default=3, help="of each case of orphans; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=10, help="DDP jobs; default: %(default)s")
    parser.add_argument("--idle-seconds", type=float, default=30.0, help="default: %(default)s")
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
    launchers = [Launcher("reknit", tuple(shlex.split(options.ours)), OUR_HOST)]
    if not options.without_torchrun:
        launchers.append(Launcher("torchrun", tuple(shlex.split(options.theirs)), THEIR_HOST))
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
