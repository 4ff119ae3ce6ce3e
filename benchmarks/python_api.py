"""What torchelastic's Python API costs: reknit.elastic beside torch.distributed.elastic, in one run.

    python benchmarks/python_api.py                     # all figures, about eight minutes
    python benchmarks/python_api.py --only agent --repeats 5

agent   `LocalElasticAgent.run` of a program that does nothing, with 4 workers on one node. Everything is imported
        before. Each run has a new agent, and reknit starts a new keeper for it.
light   `elastic_launch` of a function with 4 workers and start method spawn. The function's module imports nothing.
heavy   The same, and the function's module imports torch.
fork    The same with start method fork. This process has imported torch.
import  A new interpreter that imports the modules of the agent, minus one that imports nothing.

Runs of both take turns, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

WORKERS = 4
MODULES = {"reknit": "reknit.elastic", "torch": "torch.distributed.elastic"}


def agent_of_reknit() -> Callable[[], object]:
    from reknit.elastic.agent.server.api import WorkerSpec
    from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from reknit.elastic.rendezvous import RendezvousParameters
    from reknit.elastic.rendezvous.registry import get_rendezvous_handler

    params = RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1)
    return LocalElasticAgent(WorkerSpec("bench", WORKERS, get_rendezvous_handler(params), entrypoint="true")).run


def agent_of_torch() -> Callable[[], object]:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    params = RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1)
    spec = WorkerSpec("bench", WORKERS, get_rendezvous_handler(params), entrypoint="true")
    return LocalElasticAgent(spec, DefaultLogsSpecs()).run


AGENTS = {"reknit": agent_of_reknit, "torch": agent_of_torch}


def agent(whose: str) -> float:
    """Seconds. The rendezvous handler is made before: torch's opens its store then."""
    run = AGENTS[whose]()
    begun = time.monotonic()
    result = run()
    taken = time.monotonic() - begun
    if str(getattr(result, "state", "")) != "WorkerState.SUCCEEDED":
        raise SystemExit(f"{whose}: {result}")
    return taken


def light(whose: str) -> float:
    return launched(whose, "spawn", "import os\n")


def heavy(whose: str) -> float:
    return launched(whose, "spawn", "import torch\n")


def fork(whose: str) -> float:
    return launched(whose, "fork", "import os\n")


def launched(whose: str, start_method: str, imports: str) -> float:
    """Seconds from the call of `elastic_launch` until the values of all workers are there."""
    launcher = importlib.import_module("reknit.elastic.launcher" if whose == "reknit" else "torch.distributed.launcher")
    fields = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": uuid.uuid4().hex}
    config = launcher.LaunchConfig(1, 1, WORKERS, start_method=start_method, monitor_interval=0.1, **fields)
    with tempfile.TemporaryDirectory() as folder:
        name = f"work_{uuid.uuid4().hex}"
        (Path(folder) / f"{name}.py").write_text(f"{imports}def work():\n    return 1\n")
        sys.path.insert(0, folder)
        work = importlib.import_module(name).work
        begun = time.monotonic()
        values = launcher.elastic_launch(config, work)()
        taken = time.monotonic() - begun
        sys.path.remove(folder)
    if values != dict.fromkeys(range(WORKERS), 1):
        raise SystemExit(f"{whose}: {values}")
    return taken


def importing(whose: str) -> float:
    return _interpreter(f"import {MODULES[whose]}.agent.server.local_elastic_agent") - _interpreter("pass")


def _interpreter(script: str) -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True)
    return time.monotonic() - begun


FIGURES = {"light": light, "heavy": heavy, "fork": fork, "agent": agent, "import": importing}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=tuple(FIGURES), action="append")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    for name in options.only or FIGURES:
        taken: dict[str, list[float]] = {whose: [] for whose in AGENTS}
        for whose in AGENTS:
            FIGURES[name](whose)  # what is imported or made once in a process does not count
        for _ in range(options.repeats):
            for whose, times in taken.items():
                times.append(FIGURES[name](whose))
        ours, theirs = (statistics.median(taken[whose]) for whose in ("reknit", "torch"))
        print(f"{name:7} reknit {ours * 1000:.0f} ms, torch {theirs * 1000:.0f} ms: {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
