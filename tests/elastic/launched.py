"""One small job under torch's agent and under reknit's, each in a process of its own: what they record and measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from attrs import frozen

from tests.support.waiting import PATIENCE_S

_SCRIPT = """
import importlib, json, logging, sys

package, max_restarts, script = sys.argv[1:]
elastic = f"{package}.elastic"
launcher = "torch.distributed.launcher.api" if package.startswith("torch") else "reknit.elastic.launcher.api"
api = importlib.import_module(launcher)
handlers = importlib.import_module(f"{elastic}.events.handlers")
metrics = importlib.import_module(f"{elastic}.metrics")
told, measured = [], []

class Kept(logging.Handler):
    def emit(self, record):
        told.append(json.loads(record.getMessage()))

class Measured(metrics.MetricHandler):
    def emit(self, data):
        measured.append([data.group_name, data.name, data.value])

handlers._log_handlers["mine"] = Kept()
metrics.configure(Measured())
config = api.LaunchConfig(
    1, 1, 2, run_id="j", role="trainer", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    max_restarts=int(max_restarts), event_log_handler="mine",
)
end = "returned"
try:
    api.launch_agent(config, "/bin/sh", ["-c", script])
except Exception as error:
    end = type(error).__name__
print(json.dumps([end, told, measured]))
"""


@frozen
class Job:
    script: str
    """What each of the two workers runs, in a shell."""
    max_restarts: int = 0
    watches_timers: bool = False
    """The timers of the workers are watched."""


@frozen
class Launched:
    end: str
    """`returned`, or the name of the error."""
    events: list[dict[str, Any]]
    metrics: list[tuple[str, str, int]]
    """Group, name and value."""


@cache
def launched(package: str, job: Job) -> Launched:
    """`package`: `torch.distributed` or `reknit`."""
    argv = [sys.executable, "-c", _SCRIPT, package, str(job.max_restarts), job.script]
    env = os.environ | ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"} if job.watches_timers else {})
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, env=env)
    assert done.returncode == 0, done.stderr
    end, events, metrics = json.loads(done.stdout.splitlines()[-1])
    return Launched(end, events, [(group, name, value) for group, name, value in metrics])
