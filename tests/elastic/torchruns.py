"""A node of plain torchrun: a real process, whose worker prints what it is and ends when a test tells it to."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.support.command import Run
from tests.support.waiting import PATIENCE_S, until

WORKER = """
    import os, signal, sys
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    names = "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"
    line = " ".join(["up", *(os.environ[name] for name in names), str(os.getpid())])
    os.write(1, f"{line}\\n".encode())
    sys.exit(signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}) == signal.SIGUSR2)
"""
GOOD, BAD = signal.SIGUSR1, signal.SIGUSR2


class Up(NamedTuple):
    """What a worker has printed about itself."""

    rank: int
    world: int
    restart: int
    master: str
    pid: int


class NodeRun(Run):
    """One node, with its output in files."""

    def __init__(self, path: Path, name: str, *command: str, script: str = WORKER) -> None:
        """`command`: what Python runs."""
        self.out_path, self.err_path = path / f"{name}.out", path / f"{name}.err"
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            super().__init__(path, sys.executable, *command, script=script, stdout=out, stderr=err)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None or self.process.poll() is None:
            self.process.kill()
            for pid in self.left_over():  # workers outlive a torchrun that is killed
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        super().__exit__(kind, error, tb)

    def ups(self) -> list[Up]:
        found = re.findall(r"^up (\d+) (\d+) (\d+) (\S+) (\d+) (\d+)$", self.out_path.read_text(), re.M)
        return [Up(int(r), int(w), int(n), f"{a}:{p}", int(pid)) for r, w, n, a, p, pid in found]

    def up(self, count: int) -> Up:
        """Wait for the worker of the node's round number `count`, counted from 1."""
        return until(lambda: self.ups()[count - 1 : count], f"round {count}: {self.err_path.read_text()[-2000:]}")[0]

    def tell(self, signum: int) -> None:
        os.kill(self.ups()[-1].pid, signum)

    def ends(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)


def torchrun(
    path: Path, name: str, backend: str, endpoint: str, nodes: str, *argv: str, script: str = WORKER
) -> NodeRun:
    """A node of torchrun with one worker."""
    own = f"node_id={name},heartbeat=4,settle=0.2," if backend == "reknit" else ""
    where = (f"--nnodes={nodes}", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=j")
    conf = f"--rdzv-conf={own}last_call_timeout=1,join_timeout=50"
    return NodeRun(path, name, "-m", "torch.distributed.run", *where, conf, *argv, "w.py", script=script)
