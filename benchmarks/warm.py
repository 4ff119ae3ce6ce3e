"""What warm workers save: torchrun, cold workers and warm workers of reknit in turn, in the same run.

    python benchmarks/warm.py                    # all figures, about fifteen minutes
    python benchmarks/warm.py --only restart --workers 2 --repeats 3

The job is a DDP script with gloo. Its "first step" ends with a barrier, after the first `optimizer.step()`.
The figures are medians over the repeats. A worker ends by `os._exit`, because torch sometimes aborts at the end of a
process that has used gloo. Linux only.
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
from collections.abc import Iterator
from pathlib import Path

BIN = Path(sys.executable).parent
PATIENCE_S = 120.0
SCRIPT = """\
import os, sys, time
RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def tell(what):
    fd = os.open(os.environ["REPORT"], os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{what} {time.monotonic()} {RANK} {RESTART} {os.getpid()}\\n".encode())
    os.close(fd)
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def step():
    optimizer.zero_grad(); model(torch.ones(2, 8)).sum().backward(); optimizer.step(); dist.barrier()
step()
tell("step")
failures = int(os.environ["FAILURES"])
if RANK == 1 and RESTART < failures:
    time.sleep(1.2)
    tell("fails")
    os._exit(1)
while os.environ["STAYS"] == "1" or RESTART < failures:
    step()
    time.sleep(0.01)
tell("done")
dist.barrier()
os._exit(0)
"""
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun")],
    "cold": [str(BIN / "reknit"), "run"],
    "warm": [str(BIN / "reknit"), "run", "--warm=torch,torch.distributed,torch.nn.parallel,torch._dynamo"],
}


class Job:
    """One launch. `report` holds what its workers have told."""

    def __init__(self, folder: Path, command: list[str], *, failures: int = 0, stays: bool = False) -> None:
        self.script, self.report = folder / "script.py", folder / "report"
        self.script.write_text(SCRIPT)
        self.report.touch()
        told = {"REPORT": str(self.report), "FAILURES": str(failures), "STAYS": str(int(stays)), "OMP_NUM_THREADS": "1"}
        self.begun = time.monotonic()
        log = (folder / "log").open("ab")
        self.processes = [
            subprocess.Popen([*each, str(self.script)], env=os.environ | told, stdout=log, stderr=log, cwd=folder)
            for each in ([command] if isinstance(command[0], str) else command)
        ]
        self._log = folder / "log"

    def lines(self, what: str, restart: int) -> list[float]:
        rows = [line.split() for line in self.report.read_text().splitlines()]
        return [float(row[1]) for row in rows if row[0] == what and int(row[3]) == restart]

    def wait(self, what: str, restart: int, count: int) -> float:
        """Wait until so many workers have told this. Returns when the last one did."""
        give_up = time.monotonic() + PATIENCE_S
        while len(found := self.lines(what, restart)) < count:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{what} of restart {restart}:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.005)
        return max(found)

    def pids(self, restart: int) -> list[int]:
        rows = [line.split() for line in self.report.read_text().splitlines()]
        return [int(row[4]) for row in rows if row[0] == "step" and int(row[3]) == restart]


@contextlib.contextmanager
def job(command: list[str], **more: object) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        made = Job(Path(folder), command, **more)  # type: ignore[arg-type]  # its own keywords
        try:
            yield made
        finally:
            for process in made.processes:
                process.terminate()
            for process in made.processes:
                process.wait()


def restart_s(name: str, workers: int) -> float:
    """From the failure of a worker to the first step of the next round."""
    with job([*LAUNCHERS[name], f"--nproc-per-node={workers}", "--max-restarts=1"], failures=1) as running:
        running.wait("step", 1, workers)
        return running.wait("step", 1, workers) - running.wait("fails", 0, 1)


def launch_s(name: str, workers: int) -> float:
    with job([*LAUNCHERS[name], f"--nproc-per-node={workers}"]) as running:
        return running.wait("step", 0, workers) - running.begun


def private_mib(name: str, workers: int) -> float:
    """Memory that a worker shares with nobody, after its first step."""
    with job([*LAUNCHERS[name], f"--nproc-per-node={workers}"], stays=True) as running:
        running.wait("step", 0, workers)
        return statistics.median(_private_kib(pid) / 1024 for pid in running.pids(0))


def lost_node_s(name: str, workers: int) -> float:
    """From the death of one node of two, with all that runs on it, to the first step of the other one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    place = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=job", "--nnodes=1:2"]
    conf = "--rdzv-conf=heartbeat=0.5,last_call_timeout=1,is_host="
    node = [*LAUNCHERS[name], *place, "--max-restarts=3", f"--nproc-per-node={workers}"]
    nodes = [[*node, f"{conf}{'01'[i == 0]}", f"--node-id=n{i}"] for i in range(2)]
    with job(nodes, stays=True) as running:  # type: ignore[arg-type]
        running.wait("step", 0, 2 * workers)
        time.sleep(3)  # the zygotes of both nodes are ready, and the group has settled
        host = running.processes[0].pid
        victim = running.processes[1].pid
        before = time.monotonic()
        for pid in [victim, *_descendants(victim)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        give_up = before + PATIENCE_S
        while True:
            rows = [line.split() for line in running.report.read_text().splitlines()]
            after = [float(row[1]) for row in rows if row[0] == "step" and float(row[1]) > before]
            if len(after) >= workers:
                return max(after) - before
            if time.monotonic() > give_up:
                raise TimeoutError(f"{host} did not go on")
            time.sleep(0.005)


def growth(restarts: int) -> tuple[str, str]:
    """Memory and descriptors of keeper and zygote after the first restarts, and after many."""
    command = [*LAUNCHERS["warm"], "--nproc-per-node=2", f"--max-restarts={restarts}"]
    with job(command, failures=restarts) as running:
        said = []
        for at in (5, restarts - 1):
            running.wait("step", at, 2)
            (keeper,) = _children(running.processes[0].pid)
            zygote = min(_children(keeper))
            said.append(f"keeper {_state(keeper)}, zygote {_state(zygote)}")
        return said[0], said[1]


def _state(pid: int) -> str:
    return f"{_private_kib(pid) / 1024:.1f} MiB private, {len(os.listdir(f'/proc/{pid}/fd'))} descriptors"


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _descendants(pid: int) -> list[int]:
    found = _children(pid)
    return found + [other for child in found for other in _descendants(child)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=["restart", "launch", "memory", "lost", "growth"])
    parser.add_argument("--workers", type=int, action="append", help="default: 2 and 8")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    wanted = options.only or ["restart", "launch", "memory", "lost", "growth"]
    measures = {"restart": restart_s, "launch": launch_s, "memory": private_mib, "lost": lost_node_s}
    for what in (each for each in measures if each in wanted):
        for workers in options.workers or ([2, 8] if what in ("restart", "launch") else [2]):
            names = [name for name in LAUNCHERS if what != "lost" or name != "torchrun"]
            found: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(options.repeats):
                for name in names:
                    try:
                        found[name].append(measures[what](name, workers))
                    except TimeoutError as error:
                        print(f"{name}: {error}".splitlines()[0], file=sys.stderr)
            medians = {name: statistics.median(values) for name, values in found.items() if values}
            unit = "MiB" if what == "memory" else "s"
            row = "  ".join(f"{name} {value:.2f} {unit}" for name, value in medians.items())
            ratio = f"cold / warm {medians['cold'] / medians['warm']:.1f}" if len(medians) > 1 else ""
            print(f"{what}, {workers} workers: {row}  {ratio}", flush=True)
    if "growth" in wanted:
        print("growth over 50 restarts: {} → {}".format(*growth(50)))


if __name__ == "__main__":
    main()
