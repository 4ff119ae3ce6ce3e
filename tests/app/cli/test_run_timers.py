"""Timers of real workers under `reknit run` and `reknit.launch`: who is ended, what follows, and what is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from reknit import JobFailed, launch
from reknit.app.report import HUNG
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.workers import TimerExpired
from tests.support import called
from tests.support.command import REKNIT, Run, run
from tests.support.leaks import nothing_left
from tests.support.nodes import Nodes, at_file, ended
from tests.support.stores import needs_torch
from tests.support.waiting import PATIENCE_S

ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
SETUP = """
    import os, sys, time
    from {package} import timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", os.environ["RANK"]
"""
OURS, TORCHS = "reknit.elastic", "torch.distributed.elastic"
HANGS = (
    SETUP
    + """
    for step in range(20):
        with timer.expires(after=60):
            pass
    if first and rank == {rank}:
        with timer.expires(after=0.2, scope="step 20"):
            time.sleep({patience})
    os.write(1, b"done " + rank.encode() + b"\\n")
"""
)


def failed(rank: int, why: str, text: str) -> bool:
    """`text` says that the worker with this rank has failed, and that this is why."""
    return re.search(rf"rank {rank} on node \S+ (failed|hung): {re.escape(why)}", text) is not None


def script(text: str, package: str = OURS, rank: str = "1") -> str:
    return text.replace("{package}", package).replace("{patience}", str(PATIENCE_S)).replace("{rank}", repr(rank))


# ---- a timer that expires ----


def test_an_expired_timer_is_a_failure_like_another(tmp_path: Path) -> None:
    """The agent survives, where torchrun's would be killed with its worker. All workers are started again."""
    status, job = run(tmp_path, "--nproc-per-node=2", "--max-restarts=1", "w.py", script=script(HANGS), env=ON)
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) in (["done 0", "done 0", "done 1"], ["done 0", "done 1"])
    assert failed(1, "the timer 'step 20' ran out (killed by SIG", job.err)
    assert "the job succeeded after 1 restart" in job.said
    assert not list(tmp_path.glob("reknit_scratch*"))


@pytest.mark.slow
def test_torchs_client_sets_timers_as_well(tmp_path: Path) -> None:
    """Scripts use it."""
    needs_torch()
    status, job = run(tmp_path, "w.py", script=script(HANGS, TORCHS, rank="0"), env=ON)
    assert status == HUNG
    assert failed(0, "the timer 'step 20' ran out (killed by SIG", job.err)


def test_the_report_names_the_timer(tmp_path: Path) -> None:
    """With the place at which the worker hung. Its own signal, SIGKILL, comes second if py-spy cannot see that place:
    then faulthandler shows it at SIGABRT."""
    status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=script(HANGS), env=ON)
    assert status == HUNG
    assert any("rank 1 failed first" in line and "the timer 'step 20' ran out" in line for line in job.said), job.err
    assert "w.py" in job.err, "the stacks name the script"


def test_one_of_two_workers_on_two_nodes(tmp_path: Path) -> None:
    """Every node has a pipe of its own. The failure restarts the workers of both."""
    argv = ("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", *at_file(tmp_path))
    with Nodes(tmp_path, *argv, script=script(HANGS), env=ON) as nodes:
        a, b = nodes.start("a", "b")
        assert ended(a, b) == [0, 0]
        assert any(failed(1, "the timer 'step 20' ran out (killed by SIG", each.err) for each in (a, b))
        for each in (a, b):
            assert "the job succeeded after 1 restart" in each.said


CHILD = (
    SETUP
    + """
    if first and rank == "0" and os.fork() == 0:
        os.setsid()
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], {signal}))
        with timer.expires(after=0.2, scope="loader"):
            {then}
    if first:
        time.sleep({until})
"""
)


def test_a_timer_of_a_data_loader_ends_its_worker(tmp_path: Path) -> None:
    """The worker waits for the loader, and would wait for ever. The loader itself ends with the round."""
    text = script(CHILD).replace("{signal}", "15").replace("{then}", "time.sleep(1000)").replace("{until}", "1000")
    status, job = run(tmp_path, "--nproc-per-node=2", "--max-restarts=1", "w.py", script=text, env=ON)
    assert status == 0, job.err
    assert failed(0, "the timer 'loader' ran out (killed by SIGTERM)", job.err)


def test_a_client_that_has_died_ends_nobody(tmp_path: Path) -> None:
    """A loader that is killed in the middle of its work leaves a timer behind."""
    text = script(CHILD).replace("{signal}", "9").replace("{then}", "os._exit(1)").replace("{until}", "1")
    status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=text, env=ON)
    assert status == 0, job.err
    assert "ran out" not in job.err


def test_a_timer_without_a_signal_is_only_said(tmp_path: Path) -> None:
    """As in torch: the worker goes on."""
    text = script(CHILD).replace("{signal}", "0").replace("{then}", "time.sleep(1000)").replace("{until}", "1")
    status, job = run(tmp_path, "w.py", script=text, env=ON)
    assert status == 0, job.err
    assert "a timer of rank 0 ran out ('loader'); nothing is done, because it names no signal" in job.said


GARBAGE = (
    SETUP
    + """
    pipe = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY)
    for _ in range(20):
        os.write(pipe, b"garbage\\n" + b"x" * 20_000)
        os.write(pipe, b'\\n[1]\\n{"version": 1, "pid": -1, "scope_id": "s", "expiration_time": 1, "signal": 9}\\n')
        foreign = b'{"version": 1, "pid": %d, "scope_id": "s", "expiration_time": 1, "signal": 9}\\n'
        os.write(pipe, foreign % os.getppid())
        os.write(pipe, b"half a line")
        with timer.expires(after=60):
            pass
    if first:
        with timer.expires(after=0.1, scope="last"):
            time.sleep({patience})
"""
)


def test_garbage_in_the_pipe_breaks_nothing(tmp_path: Path) -> None:
    """Every process of the user can write there. One line of each kind says so, and the timers count as before."""
    status, job = run(tmp_path, "--max-restarts=1", "w.py", script=script(GARBAGE), env=ON)
    assert status == 0, job.err
    assert failed(0, "the timer 'last' ran out", job.err)
    kinds = [line.split(": ")[1] for line in job.said if line.startswith("the pipe for timers: ")]
    assert sorted(kinds) == [
        "a line is no timer request",
        "a line is too long for a timer request",
        "a process that is no worker here sets a timer",
    ]


STEPS = (
    SETUP
    + """
    until = time.monotonic() + 3
    while time.monotonic() < until:
        with timer.expires(after=60, scope="step"):
            time.sleep(0.1)
    if first:
        time.sleep({patience})
"""
)


def test_a_timer_counts_as_progress(tmp_path: Path) -> None:
    """A script that sets timers need not call `reknit.progress`. When it sets no more, it is found to hang."""
    options = ("--hang-after=1.5", "--max-restarts=1", "w.py")
    status, job = run(tmp_path, *options, script=script(STEPS), env=ON)
    assert status == 0, job.err
    assert len([line for line in job.said if failed(0, "no progress for ", line)]) == 1, job.err


# ---- the variable, and what is left ----

SHOWS = "import os; print(os.environ.get('TORCHELASTIC_TIMER_FILE'))"


def test_the_path_that_the_user_has_chosen(tmp_path: Path) -> None:
    """It may be relative: workers may change their folder. What lies there is not removed."""
    status, job = run(tmp_path, "w.py", script=SHOWS, env={**ON, "TORCHELASTIC_TIMER_FILE": "pipe"})
    assert (status, job.out) == (0, f"{tmp_path}/pipe\n")
    assert not (tmp_path / "pipe").exists()
    (tmp_path / "pipe").write_text("precious")
    status, job = run(tmp_path, "w.py", script=SHOWS, env={**ON, "TORCHELASTIC_TIMER_FILE": "pipe"})
    assert status == 2
    (line,) = job.said
    assert line.endswith(f"{tmp_path}/pipe: it is there already, and no pipe; remove it, or choose another path")
    assert (tmp_path / "pipe").read_text() == "precious"


def test_without_the_watchdog_workers_get_no_path(tmp_path: Path) -> None:
    """A client with a path at which nobody reads fails. Without a path, scripts know that there is no watchdog."""
    status, job = run(tmp_path, "w.py", script=SHOWS, env={"TORCHELASTIC_TIMER_FILE": "pipe"})
    assert (status, job.out) == (0, "None\n")


INNER = """
    import os, subprocess, sys
    script = "import os; print(os.environ['TORCHELASTIC_TIMER_FILE'])"
    with open("inner.py", "w") as file:
        file.write(script)
    print(os.environ["TORCHELASTIC_TIMER_FILE"], flush=True)
    sys.exit(subprocess.call([sys.argv[1], "run", "inner.py"]))
"""


def test_an_agent_below_an_agent_has_a_pipe_of_its_own(tmp_path: Path) -> None:
    """It inherits both variables. In torch it takes the pipe of the agent above away."""
    status, job = run(tmp_path, "w.py", REKNIT, script=INNER, env={**ON, "TORCHELASTIC_TIMER_FILE": "pipe"})
    assert status == 0, job.err
    outer, inner = job.out.split()
    assert outer == f"{tmp_path}/pipe"
    assert inner != outer
    assert (
        f"TORCHELASTIC_TIMER_FILE={outer} is a pipe of another agent; the workers of this node get {inner}" in job.err
    )


@pytest.mark.parametrize("path", ["", "pipe"])
def test_what_a_killed_keeper_leaves_is_taken_over(tmp_path: Path, path: str) -> None:
    """A new keeper makes the pipe again, and the workers of the next round find it."""
    env = {**ON, **({"TORCHELASTIC_TIMER_FILE": path} if path else {})}
    text = script(
        SETUP
        + """
    with timer.expires(after=1000):
        os.write(1, b"set\\n")
        if first:
            time.sleep({patience})
    """
    )
    with Run(tmp_path, "--nproc-per-node=2", "--max-restarts=1", "w.py", script=text, env=env, bufsize=0) as job:
        assert job.process.stdout is not None
        assert [job.process.stdout.readline() for _ in range(2)] == [b"set\n"] * 2
        os.kill(job.keeper, signal.SIGKILL)
        assert job.end() == 0, job.err
    assert job.out == "set\n" * 2
    assert not (tmp_path / "pipe").exists()


# ---- functions ----


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_the_timer_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_method: str) -> None:
    """`launch` reads the variables of its program, as torch's agent does. Each start method has its own way to a
    worker."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    with nothing_left(tmp_path), pytest.raises(JobFailed) as error:
        launch(called.outlives_its_timer, nproc=2, start_method=start_method, say=lambda line: None)
    why = error.value.result.why
    assert isinstance(why, BudgetSpent)
    assert why.root.failure.cause == TimerExpired("call")
    assert "the timer 'call' ran out" in str(error.value)
