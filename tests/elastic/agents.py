"""An agent as somebody writes it who extends `SimpleElasticAgent`: its workers are plain subprocesses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from reknit.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from reknit.elastic.multiprocessing.errors import ProcessFailure
from tests.support.waiting import PATIENCE_S


class PlainAgent(SimpleElasticAgent):
    """Its entrypoint is a Python script, as text. Every call of an overridden method is noted in `calls`."""

    def __init__(self, spec: WorkerSpec, **more: Any) -> None:
        super().__init__(spec, **more)
        self.name = ""
        """The agent among those of its job."""
        self.calls: list[str] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        spec = worker_group.spec
        for worker in worker_group.workers:
            environment = {
                "RANK": str(worker.global_rank),
                "WORLD_SIZE": str(worker.world_size),
                "LOCAL_RANK": str(worker.local_rank),
                "ROLE_RANK": str(worker.role_rank),
                "GROUP_RANK": str(worker_group.group_rank),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "MASTER_ADDR": str(worker_group.master_addr),
                "MASTER_PORT": str(worker_group.master_port),
                "RESTARTS_LEFT": str(self._remaining_restarts),
            }
            script = textwrap.dedent(str(spec.entrypoint))
            argv = [sys.executable, "-c", script, *map(str, spec.args)]
            self.processes[worker.local_rank] = subprocess.Popen(argv, env=os.environ | environment)
        return {rank: process.pid for rank, process in self.processes.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")
        self._end(signal.SIGTERM)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        if any(codes.values()):
            return RunResult(
                WorkerState.FAILED,
                failures={
                    worker_group.workers[rank].global_rank: ProcessFailure(rank, self.processes[rank].pid, code, "")
                    for rank, code in codes.items()
                    if code
                },
            )
        if all(code == 0 for code in codes.values()):
            values: dict[int, Any] = {worker.global_rank: f"of {worker.local_rank}" for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, values)
        return RunResult(WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self.calls.append("shutdown")
        self._end(death_sig)

    def _end(self, signum: int) -> None:
        for process in self.processes.values():
            process.send_signal(signum)
        for process in self.processes.values():
            process.wait(PATIENCE_S)
        self.processes.clear()


def spec(script: str, folder: Path | None = None, **more: Any) -> WorkerSpec:
    """`folder`: the first argument of the script."""
    given: dict[str, Any] = {"role": "trainer", "local_world_size": 2, "monitor_interval": 0.01, "max_restarts": 0}
    args = () if folder is None else (str(folder),)
    return WorkerSpec(entrypoint=script, args=args, **{**given, **more})


def now() -> float:
    return time.monotonic()
