"""`reknit stacks` beside real workers, which run on."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from reknit.adapters.keeper.watchdog.thread_stacks import kernel_of, py_spy_for
from reknit.app.cli import stacks as verb
from tests.support import places
from tests.support.command import Run
from tests.support.nodes import Nodes, at_file
from tests.support.verbs import ask
from tests.support.waiting import is_alive, read_pids, until

needs_py_spy = pytest.mark.skipif(not py_spy_for(os.getpid()), reason="py-spy is not installed")
LOADS = """
    import os, sys, time
    import torch.distributed as dist
    def load():
        while not os.path.exists("go on"):
            time.sleep(0.01)
    dist.init_process_group("gloo")
    with open("pids", "a") as file:
        print(os.getpid(), file=file)
    if os.environ["RANK"] == "0":
        load()
    dist.barrier()
    os._exit(0)  # gloo aborts now and then when it is torn down
"""
"""Rank 0 loads, and the others wait for it in a barrier."""


def looked(job: Run, *argv: str) -> str:
    """The text, when all workers have come to their places."""
    read_pids(Path(job.base_env["TMPDIR"]) / "pids", 3)

    def told() -> str:
        status, out, err = ask(job, "stacks", *argv)
        assert (status, err) == (0, "")
        return out if "load (w.py" in out and "1-2: barrier (w.py" in out else ""

    return until(told, "the workers at their places")


@pytest.mark.slow
@needs_py_spy
def test_who_waits_for_whom(tmp_path: Path) -> None:
    """The slow one of many workers is seen at a glance, with one stack for those that only wait. All run on."""
    with Run(tmp_path, "--nproc-per-node=3", "--rdzv-id=digits", "w.py", script=LOADS) as job:
        out = looked(job)
        groups, *threads = re.split(r"\n\n(?=rank)", out)
        head, *places_of = groups.splitlines()
        assert head == f'job "digits", round 0, node {socket.gethostname()}:'
        assert len(places_of) == 2
        assert places_of[0].startswith("  rank 0: load (w.py:6)")
        assert places_of[1] == "  ranks 1-2: barrier (w.py:12)"
        pids = [int(text) for text in re.findall(r"^rank \d \(pid (\d+)\), innermost call first:$", out, re.M)]
        assert [text[:6] for text in threads] == ["rank 0", "rank 1"], "one of each group"
        assert set(pids) < set(read_pids(tmp_path / "pids", 3))
        assert re.search(r"^      load \(w\.py:6\)\n      <module> \(w\.py:11\)$", threads[0], re.M)
        assert re.search(r"^      barrier \(torch/distributed/distributed_c10d\.py:\d+\)$", threads[1], re.M)

        both = ask(job, "stacks", "--rank=1,2", "digits")[1]
        assert re.findall(r"^rank (\d) \(pid", both, re.M) == ["1", "2"]
        assert "rank 0" not in both
        (tmp_path / "go on").touch()
        assert job.end() == 0


def test_what_is_not_here(tmp_path: Path) -> None:
    """A wrong name and a wrong rank are two mistakes. What would be right is told."""
    waits = "import signal; open('up', 'w').close(); signal.pause()"
    with Run(tmp_path, "--nproc-per-node=2", "--rdzv-id=digits", "w.py", script=waits) as job:
        until((tmp_path / "up").exists, "a worker")
        until(lambda: ask(job, "stacks", "--rank=1")[0] == 0, "both workers to be known")
        for argv, line in (
            (("nosuch",), "no agent of job nosuch runs on this host; jobs that run here: digits"),
            (("--rank=7", "nosuch"), "no agent of job nosuch runs on this host; jobs that run here: digits"),
            (("--rank=7",), 'no worker of rank 7 runs on this host: job "digits" has ranks 0-1 here'),
            (("--rank=9,7", "digits"), 'no worker of ranks 7,9 runs on this host: job "digits" has ranks 0-1 here'),
        ):
            assert ask(job, "stacks", *argv) == (1, "", f"reknit: {line}\n")
    assert ask(job, "stacks") == (1, "", "reknit: no agent runs on this host\n")
    line = "reknit: no agent of job digits runs on this host; jobs that run here: none\n"
    assert ask(job, "stacks", "digits") == (1, "", line)


def test_an_agent_without_workers(tmp_path: Path) -> None:
    """It waits for other nodes, which is no mistake in the name of the job."""
    with Nodes(tmp_path, "--nnodes=2", *at_file(tmp_path)) as nodes:
        (a,) = nodes.start("a")
        a.says("waiting for nodes")
        line = 'reknit: no worker runs on this host: job "j" has no worker here\n'
        until(lambda: ask(a, "stacks", "j") == (1, "", line), "the agent to be seen")


@needs_py_spy
def test_a_worker_that_is_stopped_stays_stopped(tmp_path: Path) -> None:
    """py-spy must not wake it: somebody has stopped it, perhaps with a debugger."""
    script = "import os, signal; open('pids', 'w').write(f'{os.getpid()}\\n'); signal.pause()"
    with Run(tmp_path, "w.py", script=script) as job:
        (pid,) = read_pids(tmp_path / "pids", 1)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: kernel_of(pid).is_stopped, "the worker to stop")
        out = ask(job, "stacks")[1]
        assert out.splitlines()[1].startswith("  rank 0: ")
        assert out.splitlines()[1].endswith(", stopped by a signal")
        assert f"\n  its process {pid} is stopped by a signal: `kill -CONT {pid}` continues it\n" in out
        assert kernel_of(pid).is_stopped
        os.kill(pid, signal.SIGCONT)
        until(lambda: not kernel_of(pid).is_stopped, "the worker to go on")
        assert "is stopped by a signal" not in ask(job, "stacks")[1]


def test_without_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What the kernel knows is shown, and one line says what is missing."""
    places.move(monkeypatch, tmp_path)
    monkeypatch.setattr(verb, "py_spy_for", lambda pid: "")
    script = "import os, time; open('pids', 'w').write(f'{os.getpid()}\\n'); time.sleep(1000)"
    with Run(tmp_path, "--rdzv-id=digits", "w.py", script=script) as job:
        (pid,) = read_pids(tmp_path / "pids", 1)

        def told() -> str:
            status = verb.stacks([], {})
            out = capfd.readouterr().out
            return out if status == 0 and "nanosleep" in out else ""

        lines = until(told, "the worker to sleep").splitlines()
        assert lines[0] == f'job "digits", round 0, node {socket.gethostname()}:'
        assert lines[3:5] == [f"rank 0 (pid {pid}), innermost call first:", "  state S, waits in hrtimer_nanosleep"]
        assert re.fullmatch(
            r"no stacks: they are py-spy.s, and it (is not installed .*|may not look into the workers .*)", lines[-1]
        )
        assert is_alive(pid)
        assert is_alive(job.pid)
