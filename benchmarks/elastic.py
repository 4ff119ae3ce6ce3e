"""How long a job takes when nodes come and go: reknit beside torchrun, real agents on loopback, in the same run.

    python benchmarks/elastic.py                           # all figures, about ten minutes
    python benchmarks/elastic.py --only join --repeats 3

join    A second node is launched while the first one trains and has room for it. Measured: the time until every worker
        of both nodes has started with the new world size. It is shown beside the time of one `import torch`.
lost    One of three nodes vanishes: everything on it is killed at once. Measured: the time until every worker of the
        other two nodes has started again. Their workers notice nothing by themselves. This is done with the default
        heartbeat and with the shortest one.
rejoin  A node vanishes and comes back, 20 times in a row. Measured: the number of rounds and the time.

"Has started" is a worker's first line, before it imports anything. The nodes meet at a TCPStore that the first one
hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

BIN = Path(sys.executable).parent
MARK = "ELASTIC_BENCHMARK"
PATIENCE_S = 100.0
WORKERS = 2
"""Number of workers per node."""

WORKER = """\
import os, sys, time
e = os.environ
line = f"{time.monotonic()} {e['ELASTIC_NODE']} {e['RANK']} {e['WORLD_SIZE']} {e['MASTER_PORT']}\\n"
report = os.open(e["REPORT"], os.O_WRONLY | os.O_APPEND)
os.write(report, line.encode())
os.close(report)
time.sleep(600)
"""
"""A worker that SIGTERM ends at once."""

LAUNCHERS = {"reknit": (str(BIN / "reknit"), "run"), "torchrun": (str(BIN / "torchrun"),)}
FASTEST = "heartbeat=0.5"


@dataclass(frozen=True)
class Line:
    at: float
    node: str
    rank: int
    world: int


@dataclass
class Cluster:
    """Agents on this machine that form one job."""

    launcher: str
    folder: Path
    nodes: str
    conf: str = ""
    port: int = 0
    marks: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def launch(self, node: str) -> float:
        """Start a node's agent. Returns the time of the start."""
        mark = self.marks[node] = uuid.uuid4().hex
        settings = ",".join(filter(None, ("last_call_timeout=1", self.conf if self.launcher == "reknit" else "")))
        argv = [
            *LAUNCHERS[self.launcher],
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={WORKERS}",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=elastic",
            f"--rdzv-conf={settings}",
        ]
        if self.launcher == "reknit":
            argv.append(f"--node-id={node}")
        environment = {MARK: mark, "REPORT": str(self.report), "ELASTIC_NODE": node, "OMP_NUM_THREADS": "1"}
        started = time.monotonic()
        with (self.folder / f"log.{node}").open("ab") as log:
            self.processes[node] = subprocess.Popen(
                [*argv, str(self.folder / "worker.py")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
            )
        return started

    def launch_all(self, nodes: str) -> float:
        """Start the nodes. The first one hosts the store. Returns the time when it was launched."""
        started = self.launch(nodes[0])
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        for node in nodes[1:]:
            self.launch(node)
        return started

    def lines(self) -> list[Line]:
        rows = [row.split() for row in self.report.read_text().splitlines()]
        return [Line(float(at), node, int(rank), int(world)) for at, node, rank, world, _ in rows]

    def formed(self, nodes: list[str], since: float) -> float:
        """Wait for a round of exactly these nodes after the time `since`. Returns the time when its last worker had
        started."""
        size = len(nodes) * WORKERS
        give_up = time.monotonic() + PATIENCE_S
        while True:
            found = [line for line in self.lines() if line.at > since and line.world == size]
            if {line.rank for line in found} == set(range(size)) and {line.node for line in found} == set(nodes):
                return max(line.at for line in found)
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self.launcher}: no round of {', '.join(nodes)} in {PATIENCE_S:.0f} s")
            if all(process.poll() is not None for process in self.processes.values()):
                raise TimeoutError(f"{self.launcher}: everything has ended")
            time.sleep(0.005)

    def vanish(self, node: str) -> float:
        """Kill all processes of a node, as if its machine were gone. Returns the time of the kill."""
        mark = f"{MARK}={self.marks[node]}"
        at = time.monotonic()
        while pids := [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in environment_of(p)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)  # so that no process can act on the death of another one
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.processes[node].poll()
        self.processes[node].wait()
        return at


@contextlib.contextmanager
def cluster(launcher: str, nodes: str, conf: str = "") -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        made = Cluster(launcher, Path(folder), nodes, conf, probe.getsockname()[1])
        probe.close()
        (made.folder / "worker.py").write_text(WORKER)
        made.report.touch()
        try:
            yield made
        except TimeoutError as e:
            logs = "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in sorted(made.folder.glob("log.*")))
            e.add_note(logs)
            raise
        finally:
            for node in list(made.processes):
                made.vanish(node)


def environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


# ---- the figures ---------------------------------------------------------------------------------------------------


def join(launcher: str) -> float:
    with cluster(launcher, "1:2") as made:
        made.formed(["a"], made.launch("a"))
        started = made.launch("b")
        return made.formed(["a", "b"], started) - started


def lost(launcher: str, conf: str = "") -> float:
    with cluster(launcher, "2:3", conf) as made:
        made.formed(["a", "b", "c"], made.launch_all("abc"))
        time.sleep(2.0)  # let the nodes beat for a while, so that the kill comes at no special moment
        gone = made.vanish("c")
        return made.formed(["a", "b"], gone) - gone


def rejoin(launcher: str, times: int = 20) -> float:
    """Seconds for one disappearance and return: the mean of 20 in a row."""
    with cluster(launcher, "2:3", FASTEST) as made:
        made.formed(["a", "b", "c"], made.launch_all("abc"))
        begun = time.monotonic()
        for _ in range(times):
            gone = made.vanish("c")
            made.formed(["a", "b"], gone)
            made.formed(["a", "b", "c"], made.launch("c"))
        return (time.monotonic() - begun) / times


def import_torch() -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - begun


def tried(measure: Callable[[], float], repeats: int) -> str:
    taken = []
    for _ in range(repeats):
        try:
            taken.append(measure())
        except TimeoutError as e:
            return f"{e} ({len(taken)} went well)"
    return f"{statistics.median(taken):.2f} s (of {len(taken)}; {min(taken):.2f} to {max(taken):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("join", "lost", "rejoin"), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), action="append")
    options = parser.parse_args()
    launchers = options.launcher or list(LAUNCHERS)
    wanted = options.only or ["join", "lost", "rejoin"]
    print(f"one `import torch`: {statistics.median(import_torch() for _ in range(3)):.2f} s")
    for launcher in launchers:
        repeats = options.repeats if launcher == "reknit" else 1
        if "join" in wanted:
            print(f"{launcher:9} join: {tried(partial(join, launcher), repeats)}", flush=True)
        if "lost" in wanted:
            print(f"{launcher:9} lost, defaults: {tried(partial(lost, launcher), repeats)}", flush=True)
        if launcher == "reknit" and "lost" in wanted:
            print(f"{launcher:9} lost, {FASTEST}: {tried(partial(lost, launcher, FASTEST), repeats)}", flush=True)
        if launcher == "reknit" and "rejoin" in wanted:
            print(f"{launcher:9} rejoin: {tried(partial(rejoin, launcher), 1)}", flush=True)


if __name__ == "__main__":
    main()
