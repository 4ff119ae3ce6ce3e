"""The examples of the Elastic Agent's documentation, as they are written there. Only the imports have reknit's name.

`...<OTHER_PARAMS...>` and names that the page leaves open are filled in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WAIT_S = 120

USAGE = """
from reknit.elastic.agent.server import WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent

def trainer():
    import os
    return "out" + os.environ["RANK"]

def main():
    spec = WorkerSpec(role="default", local_world_size=2, entrypoint=trainer, rdzv_handler=None)
    agent = LocalElasticAgent(spec)

    group_result = agent.run()
    if group_result.is_failed():
        # workers failed
        failure = group_result.failures[0]
        print(f"worker 0 failed with exit code : {failure.exit_code}")
    else:
        return group_result.return_values[0]  # return rank 0's results

if __name__ == "__main__":
    print(main())
"""

FUNCTION = """
import multiprocessing
from reknit.elastic.agent.server import WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent

nproc_per_process = 2

def trainer(args) -> str:
    return "do train"

def main():
    start_method="spawn"
    shared_queue= multiprocessing.get_context(start_method).Queue()
    spec = WorkerSpec(
                role="trainer",
                local_world_size=nproc_per_process,
                entrypoint=trainer,
                args=("foobar",),
                rdzv_handler=None)
    agent = LocalElasticAgent(spec, start_method)
    results = agent.run()

    if results.is_failed():
        print("trainer failed")
    else:
        print(f"rank 0 return value: {results.return_values[0]}")
        # prints -> rank 0 return value: do train

if __name__ == "__main__":
    main()
"""

BINARY = """
import sys
from reknit.elastic.agent.server import WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent

nproc_per_process = 2

def main():
    spec = WorkerSpec(
                role="trainer",
                local_world_size=nproc_per_process,
                entrypoint=sys.argv[1],
                args=("--trainer-args", "foobar"),
                rdzv_handler=None)
    agent = LocalElasticAgent(spec)
    results = agent.run()

    if not results.is_failed():
        print("binary launches do not have return values")

main()
"""

WATCHDOG = """
import os, time
from reknit.elastic import timer
from reknit.elastic.agent.server import WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent

def trainer():
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        pass
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with timer.expires(after=0.1):
            time.sleep(1000)
    return os.environ["TORCHELASTIC_TIMER_FILE"]

def main():
    os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    os.environ["TORCHELASTIC_TIMER_FILE"] = "unique"
    spec = WorkerSpec(role="default", local_world_size=2, entrypoint=trainer, max_restarts=1, rdzv_handler=None)
    print(LocalElasticAgent(spec).run().return_values)

if __name__ == "__main__":
    main()
"""
"""The page has no program for its section on the watchdog. This one does what the section says."""

FAILING = USAGE.replace('return "out" + os.environ["RANK"]', "os._exit(7)").replace(
    "local_world_size=2", "local_world_size=1"
)


def shown(tmp_path: Path, program: str, *args: str) -> str:
    """What the program prints. It must end by itself, and well."""
    script = tmp_path / "program.py"
    script.write_text(program)
    found = subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (USAGE, "out0\n"),
        pytest.param(FAILING, "worker 0 failed with exit code : 7\nNone\n", marks=pytest.mark.slow),
        (FUNCTION, "rank 0 return value: do train\n"),
    ],
    ids=["usage", "usage-failed", "function"],
)
def test_functions(tmp_path: Path, program: str, line: str) -> None:
    """torch's own example of a function raises an error, because a parameter is missing on the page. Here it runs."""
    assert shown(tmp_path, program) == line


def test_a_binary(tmp_path: Path) -> None:
    """The program gets its arguments as the page gives them."""
    trainer = tmp_path / "trainer"
    trainer.write_text('#!/bin/sh\n[ "$*" = "--trainer-args foobar" ]\n')
    trainer.chmod(0o755)
    assert shown(tmp_path, BINARY, str(trainer)) == "binary launches do not have return values\n"


@pytest.mark.slow
def test_the_watchdog(tmp_path: Path) -> None:
    """Both variables, as the page has them. The agent survives what torch's would not, and the restart succeeds."""
    pipe = f"{tmp_path}/unique"
    assert shown(tmp_path, WATCHDOG) == f"{ {0: pipe, 1: pipe} }\n"
    assert not (tmp_path / "unique").exists()
