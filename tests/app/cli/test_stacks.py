"""`reknit stacks` beside real workers, which run on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from reknit.adapters.keeper.watchdog.thread_stacks import kernel_of, py_spy_for
from reknit.app.cli import stacks as verb
from tests.support import places
from tests.support.command import Run
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


@needs_py_spy
def test_who_waits_for_whom(tmp_path: Path) -> None:
    """The slow one of many workers is seen at a glance, with one stack for those that only wait. All run on."""
    with Run(tmp_path, "--nproc-per-node=3", "--rdzv-id=digits", "w.py", script=LOADS) as job:
        out = looked(job)
        groups, *threads = re.split(r"\n\n(?=rank)", out)
        head, *places_of = groups.splitlines()
        assert head == 'job "digits", round 0:'
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
        none = (1, "", "reknit: no such worker runs on this host\n")
        assert ask(job, "stacks", "--rank=3") == ask(job, "stacks", "another") == none
        (tmp_path / "go on").touch()
        assert job.end() == 0
        assert ask(job, "stacks") == none


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
        assert kernel_of(pid).is_stopped
        os.kill(pid, signal.SIGCONT)


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
        assert lines[0] == 'job "digits", round 0:'
        assert lines[3:5] == [f"rank 0 (pid {pid}), innermost call first:", "  state S, waits in hrtimer_nanosleep"]
        assert lines[-1].startswith("no stacks: is py-spy installed, and may it look into the workers")
        assert is_alive(pid)
        assert is_alive(job.pid)
