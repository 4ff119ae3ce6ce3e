"""Hung workers of every kind, from the watchdog of one keeper to jobs with several nodes. All processes are real."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from reknit import JobFailed, launch
from reknit.adapters.keeper.process.processes import Processes
from reknit.adapters.keeper.watchdog import thread_stacks as stacks
from reknit.adapters.keeper.watchdog.watchdog import Watchdog
from reknit.adapters.runtime.clock import SystemClock
from reknit.app.report import HUNG
from reknit.core.agent.worker_words import WorkersExited, WorkersStopped
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure
from tests.support import hanging
from tests.support.alone import ENV
from tests.support.command import Run
from tests.support.nodes import GOOD, NodeRun, Nodes, at_file, ended
from tests.support.processes import Make, ToldWatchdog, drive, failures, start, stop, stopped
from tests.support.waiting import is_alive, read_pids, until

needs_py_spy = pytest.mark.skipif(not stacks.py_spy_for(os.getpid()), reason="py-spy is not installed")
ways = pytest.mark.parametrize("has_py_spy", [pytest.param(True, marks=needs_py_spy), False], ids=["py-spy", "without"])
CAUSE = TimerExpired("t")
HUNG_AFTER_STEP_2 = r"rank [01] on node \S+ hung: no progress for [\d.]+ s after step 2, in .* \(killed by "


class Hanging:
    """A worker that calls one of the functions of `hanging`, and the watchdog that ends it."""

    def __init__(self, make: Make, clock: SystemClock, folder: Path, how: str, argv: tuple[str, ...] = ()) -> None:
        self.clock = clock
        self.watchdog = ToldWatchdog(clock)
        call = f"from tests.support import hanging; hanging.{how}({str(folder)!r})"
        command = argv or (sys.executable, "-c", call)
        self.workers: Processes = make(*command, env=ENV, watchdog=self.watchdog, own_children=False)
        start(self.workers)
        self.pids = read_pids(folder / "pids", 3 if how == "forks" else 1)
        if how == "stops":
            until(lambda: stacks.kernel_of(self.pids[0]).state == "T", "the worker to stop")

    def expire(self) -> WorkerFailure:
        self.watchdog.find(CAUSE, 0)
        (failure,) = failures(drive(self.workers, self.clock, WorkersExited))
        assert failure.cause == CAUSE
        return failure


@pytest.fixture(autouse=True)
def _py_spy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether py-spy is there, in tests that ask for both."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("has_py_spy") is False:
        monkeypatch.setattr(stacks, "py_spy_for", lambda pid: "")


@ways
@pytest.mark.parametrize(("how", "frame"), [("waits", "waits"), ("computes", "computes"), ("forks", "forks")])
def test_what_it_was_doing_is_told(
    make: Make, clock: SystemClock, tmp_path: Path, how: str, frame: str, has_py_spy: bool
) -> None:
    """Whatever it does: it sleeps, it computes with the interpreter's lock held, it has children."""
    failure = Hanging(make, clock, tmp_path, how).expire()
    assert failure.exitcode == -(signal.SIGKILL if has_py_spy else signal.SIGABRT)
    assert re.search(rf"^    {frame} \(hanging.py:\d+\)$", failure.traceback, re.M)
    assert "Fatal Python error" not in "\n".join(failure.stderr)


@ways
def test_a_worker_that_was_stopped(make: Make, clock: SystemClock, tmp_path: Path, has_py_spy: bool) -> None:
    """The report says so: nothing is wrong with its code."""
    failure = Hanging(make, clock, tmp_path, "stops").expire()
    assert failure.message == "it was stopped by a signal"
    assert "stops" in failure.traceback


def test_a_worker_that_ignores_the_signal(
    make: Make, clock: SystemClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then only the kernel can say something."""
    monkeypatch.setattr(stacks, "py_spy_for", lambda pid: "")
    failure = Hanging(make, clock, tmp_path, "ignores").expire()
    assert failure.exitcode == -signal.SIGKILL
    assert failure.traceback.startswith("state ")


def test_no_core_is_written(make: Make, clock: SystemClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take as much disk as the worker has memory."""
    monkeypatch.setattr(stacks, "py_spy_for", lambda pid: "")
    failure = Hanging(make, clock, tmp_path, "would_leave_a_core").expire()
    assert "would_leave_a_core" in failure.traceback
    assert not [*tmp_path.glob("core*")]


def test_the_children_of_a_hung_worker_are_ended_by_the_stop(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Nothing else is special about the end of its round."""
    hung = Hanging(make, clock, tmp_path, "forks")
    hung.expire()
    assert len([pid for pid in hung.pids if is_alive(pid)]) == 2
    stop(hung.workers, 0)
    assert stopped(drive(hung.workers, clock, WorkersStopped)).stuck == ()
    until(lambda: not any(map(is_alive, hung.pids)), "the end of the children")


@ways
def test_a_shell_that_runs_python(make: Make, clock: SystemClock, tmp_path: Path, has_py_spy: bool) -> None:
    """The stacks are those of the Python, which the shell waits for."""
    call = shlex.join([sys.executable, "-c", f"from tests.support import hanging; hanging.waits({str(tmp_path)!r})"])
    failure = Hanging(make, clock, tmp_path, "waits", ("sh", "-c", f"{call}; exit $?")).expire()
    assert "waits" in failure.traceback
    assert failure.exitcode == 128 + (signal.SIGKILL if has_py_spy else signal.SIGABRT)


def test_a_wrapper_that_ends_with_a_status_of_its_own(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Its Python was ended, because it hung."""
    call = shlex.join([sys.executable, "-c", f"from tests.support import hanging; hanging.waits({str(tmp_path)!r})"])
    failure = Hanging(make, clock, tmp_path, "waits", ("sh", "-c", f"{call} || exit 1")).expire()
    assert failure.exitcode == 1
    assert "waits" in failure.traceback


def test_what_faulthandler_will_write_is_announced(
    make: Make, clock: SystemClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text says neither which rank writes, nor that reknit has asked for it."""
    monkeypatch.setattr(stacks, "py_spy_for", lambda pid: "")
    hung = Hanging(make, clock, tmp_path, "waits")
    hung.expire()
    hung.workers.flush(60)
    before, found, _ = (tmp_path / "console").read_text().partition("Fatal Python error")
    line = (
        f"reknit: rank 1 (pid {hung.pids[0]}): the timer 't' ran out; each gets SIGABRT, and shows its stacks on stderr"
    )
    assert found
    assert line in before


def test_a_py_spy_that_hangs_holds_up_nobody(
    make: Make, clock: SystemClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is ended without it, and nothing of it is left."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 1000000\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "py_spy_for", lambda pid: str(slow))
    hung = Hanging(make, clock, tmp_path, "waits")
    failure = hung.expire()
    assert failure.exitcode == -signal.SIGABRT
    assert "waits (hanging.py:" in failure.traceback
    assert hung.watchdog.children == []
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


# ---- no progress ----


def test_only_the_worker_that_reports_nothing_is_ended(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """The cause names its last step. The other one runs on until the round is stopped."""
    call = f"from tests.support import hanging; hanging.second_reports({str(tmp_path)!r})"
    env = {**ENV, "TORCHELASTIC_RESTART_COUNT": "0"}
    watchdog = Watchdog(clock, hang_after_s=4.0)
    prelude = "import os; os.environ.update(RANK=os.environ['LOCAL_RANK'], TORCHELASTIC_RESTART_COUNT='0')\n"
    workers = make(sys.executable, "-c", prelude + call, env=env, watchdog=watchdog)
    start(workers, 2)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert isinstance(failure.cause, NoProgress)
    assert (failure.local_rank, failure.cause.step, failure.cause.for_s >= 4.0) == (0, 2, True)
    assert is_alive(workers.pids[1])


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_functions_as_workers(tmp_path: Path, start_method: str) -> None:
    """They report by the same call, and a hang costs a restart."""
    said: list[str] = []
    values = launch(
        hanging.second_reports,
        (str(tmp_path),),
        nproc=2,
        max_restarts=1,
        start_method=start_method,
        hang_after_s=8.0,
        say=said.append,
    )
    assert values == {0: "done", 1: "done"}
    assert [line for line in said if re.search(HUNG_AFTER_STEP_2, line)]


def test_a_job_that_hangs_for_good_says_why(tmp_path: Path) -> None:
    """The error holds the stacks."""
    with pytest.raises(JobFailed, match="what it was doing") as failed:
        launch(hanging.waits, (str(tmp_path),), hang_after_s=4.0, say=lambda line: None)
    why = failed.value.result.why
    assert isinstance(why, BudgetSpent)
    cause = why.root.failure.cause
    assert isinstance(cause, NoProgress)
    assert cause.since_start
    assert cause.step is None
    assert "waits" in why.root.failure.traceback


# ---- the command ----


def test_a_stopped_worker_is_said_at_once(tmp_path: Path) -> None:
    """Without any option, and the end of the stop as well."""
    script = "import os; print(os.getpid(), file=open('pid', 'w', buffering=1)); open('go').read()"
    os.mkfifo(tmp_path / "go")
    with open(tmp_path / "err", "wb") as err, Run(tmp_path, "w.py", script=script, stderr=err) as job:
        (pid,) = read_pids(tmp_path / "pid", 1)
        for signum, what in ((signal.SIGSTOP, "was stopped by SIGSTOP"), (signal.SIGCONT, "was continued")):
            os.kill(pid, signum)
            line = f"reknit: rank 0 (pid {pid}) {what}\n"
            until(lambda line=line: line in (tmp_path / "err").read_text(), line)
        (tmp_path / "go").write_text("")
        assert job.end() == 0


def test_a_hang_of_a_stopped_worker_says_once_that_it_was_stopped(tmp_path: Path) -> None:
    """On each line that tells of it: said twice, it reads like two signals."""
    script = """
        import os, signal
        from reknit import progress
        progress(3)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
    """
    with Run(tmp_path, "--nproc-per-node=2", "--hang-after=6", "w.py", script=script) as job:
        assert job.end() == HUNG
    told = [line for line in job.err.splitlines() if "by a signal" in line]
    assert [line.count("stopped by a signal") for line in told] == [1] * len(told), job.err
    (failure,) = [line for line in told if "failed first" in line]
    assert re.search(r": no progress for [\d.]+ s after step 3, in .*, stopped by a signal \(killed by ", failure)


HANGS = """
    import os, threading, time
    from reknit import progress
    is_ready = threading.Event()
    def report():
        while not is_ready.wait(0.1):  # the import of torch may take longer than a worker may be silent
            progress()
    threading.Thread(target=report, daemon=True).start()
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    is_ready.set()
    for step in range(3):
        progress(step)
        if step == 2 and os.environ["RANK"] == "0":
            time.sleep(1e6)
        dist.all_reduce(torch.ones(1))
    os._exit(0)  # gloo aborts now and then when it is torn down
"""


@pytest.mark.slow
def test_a_collective_that_one_rank_never_joins(tmp_path: Path) -> None:
    """Every rank hangs. The stacks of each say where, with the calls of the real torch."""
    with Run(tmp_path, "--nproc-per-node=2", "--hang-after=8", "w.py", script=HANGS) as job:
        assert job.end() == HUNG
    assert re.search(HUNG_AFTER_STEP_2, job.err)
    assert "all_reduce" in job.err


def test_the_report_names_the_worker_that_is_behind(tmp_path: Path) -> None:
    """The others wait for it. They hang as well, and may be found first."""
    script = """
        import os, time
        from reknit import progress
        def waits_for_the_others():
            time.sleep(1e6)
        def is_behind():
            open("behind", "w").close()
            time.sleep(1e6)
        progress(3)
        if os.environ["RANK"] == "2":
            is_behind()
        while not os.path.exists("behind"):
            progress(3)
            time.sleep(0.01)
        progress(5)
        waits_for_the_others()
    """
    with Run(tmp_path, "--nproc-per-node=3", "--hang-after=8", "w.py", script=script) as job:
        assert job.end() == HUNG
    report = job.err.partition("reknit: the job failed")[2]
    assert re.search(r"rank 2 failed first \(.*\): no progress for [\d.]+ s after step 3, in is_behind", report), (
        job.err
    )
    assert re.search(r"rank 2: is_behind \(w.py:8\), not in a collective\n", report)
    assert re.search(r"ranks 0-1: waits_for_the_others \(w.py:5\), not in a collective\n", report)
    assert "probably rank 2 on node" in report
    assert report.count("Thread ") == 1, "the stacks of the others are not shown"


def test_a_hang_on_one_node_restarts_all(tmp_path: Path) -> None:
    """As any other failure does, and all nodes say why."""
    script = """
        import os, signal, time
        from reknit import progress
        ranks = "{RANK} {WORLD_SIZE} {GROUP_RANK} {TORCHELASTIC_RESTART_COUNT} {REKNIT_ROUND}"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        line = f"up {ranks} {{MASTER_ADDR}}:{{MASTER_PORT}}"
        os.write(1, f"{line.format(**os.environ)} {os.getpid()}\\n".encode())
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.pause()
        while not signal.sigtimedwait({signal.SIGUSR1}, 0.1):
            progress()
    """
    argv = ("--nnodes=2", "--max-restarts=1", "--hang-after=4", *at_file(tmp_path))
    with Nodes(tmp_path, *argv, script=script) as nodes:
        a, b = nodes.start("a", "b")
        first = nodes.formed(a, b)
        second = nodes.formed(a, b, after=first)
        assert [up.restart for up in second] == [1, 1]
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]
    for run in (a, b):
        assert re.search(r"rank 1 on node [ab] hung: no progress for [\d.]+ s", run.err)


BLAMED = """
    import os, time
    from datetime import timedelta
    from reknit import progress
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=float(os.environ["LIMIT_S"])))
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    def load():
        time.sleep(1e6)
    for step in range(4):
        progress(step)
        if is_first and step == 3 and rank == 1:
            time.sleep(1.5)
            progress(step)
            load()
        dist.all_reduce(torch.ones(1), group=group)
    os._exit(0)  # gloo aborts now and then when it is torn down
"""


STAND_IN = """
    import os, time
    calls = 0
    def init_process_group(backend):
        pass
    def new_group(timeout):
        pass
    def get_rank():
        return int(os.environ["RANK"])
    def all_reduce(tensor, group):
        global calls
        calls += 1
        while calls == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.1)
"""
"""Stands in for `torch.distributed`, with the names of its files and functions, and without the seconds of its import.
Ranks that come to step 3 wait in a collective."""


def three_over_two_nodes(nodes: Nodes) -> list[NodeRun]:
    (a,) = nodes.start("a", argv=("--nproc-per-node=1", "--node-rank=0"))
    (b,) = nodes.start("b", argv=("--nproc-per-node=2", "--node-rank=1"))
    return [a, b]


def test_the_rank_that_holds_up_the_others_is_blamed_over_all_nodes(tmp_path: Path) -> None:
    """All ranks report the same step, and rank 1 reports it last. The restart succeeds."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("ones = int\n")
    (tmp_path / "torch" / "distributed" / "__init__.py").write_text("from .distributed_c10d import *\n")
    (tmp_path / "torch" / "distributed" / "distributed_c10d.py").write_text(textwrap.dedent(STAND_IN))
    argv = ("--nnodes=2", "--max-restarts=1", "--hang-after=5", *at_file(tmp_path))
    with Nodes(tmp_path, *argv, script=BLAMED, env={"LIMIT_S": "60"}) as nodes:
        a, b = three_over_two_nodes(nodes)
        assert ended(a, b) == [0, 0]
    for run in (a, b):
        _, _, news = run.err.partition("the workers of all nodes that hung:\n")
        assert "  rank 1: load (w.py:10), not in a collective\n" in news, run.err
        assert "  ranks 0,2: all_reduce (w.py:17)\n" in news
        assert "  rank 1 on node b holds up the others\n" in news


@pytest.mark.slow
def test_the_rank_that_holds_up_the_others_is_blamed_although_gloo_ends_them(tmp_path: Path) -> None:
    """The limit of a collective may be shorter than that of reknit, and the ranks that wait end first."""
    argv = ("--nnodes=2", "--hang-after=5", "--start-timeout=120", *at_file(tmp_path))
    with Nodes(tmp_path, *argv, script=BLAMED, env={"LIMIT_S": "3"}) as nodes:
        a, b = three_over_two_nodes(nodes)
        assert ended(a, b) == [HUNG, HUNG]
    for run in (a, b):
        # On a busy machine a rank that gloo has ended is still there when the hang is found. Then both are shown.
        alone = re.search(r"rank 1 failed first \(node b, .*\): no progress .* in load \(w.py:10\)", run.err)
        assert alone or "  rank 1 on node b holds up the others\n" in run.err, run.err
