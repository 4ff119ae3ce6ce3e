"""The keeper as a process: if any process is killed or stopped, nothing is left, and no other process is disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from reknit.adapters.keeper.protocol.wire import Configure, Fence
from reknit.core.agent.worker_words import StartWorkers, WorkersExited, WorkersStopped
from reknit.core.text.codec import encode
from tests.support.alone import ENV, ROOT, run_alone
from tests.support.keepers import STUBBORN, Kept, wait_gone, ways, with_console, worker_pids
from tests.support.processes import assignment
from tests.support.waiting import is_alive, processor_share, until

Keep = Callable[..., Kept]
HOWS = ["exec", "fork"]


class Host:
    """A program with a keeper and workers; see tests/support/hosting.py."""

    def __init__(self, folder: Path, how: str, count: int, *wishes: str) -> None:
        self.pids, self.mark = folder / "pids", f"test-{uuid.uuid4().hex}"
        argv = [sys.executable, "-m", "tests.support.hosting", how, str(count), str(self.pids), self.mark, *wishes]
        self.process = subprocess.Popen(argv, env=ENV, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.keeper, self.fork = map(int, self.process.stdout.readline().split())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for pid in (self.keeper, self.fork):
            if pid and is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def host(how: str, count: int, *wishes: str) -> Host:
        made.append(Host(tmp_path, how, count, *wishes))
        return made[-1]

    yield host
    for each in made:
        each.close()


# ---- who is killed ----


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("who", ["agent", "both at once", "agent, keeper stopped", "keeper, agent stopped"])
def test_whoever_is_killed_no_worker_is_left(host: Callable[..., Host], how: str, who: str) -> None:
    """Workers that outlive their agent hold the GPUs of the next job."""
    program = host(how, 2)
    agent, pids = program.process.pid, worker_pids(program.pids, 2)
    if who in ("both at once", "keeper, agent stopped"):
        os.kill(agent, signal.SIGSTOP)  # it has no time for anything
    if who in ("both at once", "agent, keeper stopped"):
        os.kill(program.keeper, signal.SIGSTOP)
    if "keeper," in who or "both" in who:
        os.kill(program.keeper, signal.SIGKILL)
    if "agent" in who.split(",", maxsplit=1)[0] or "both" in who:
        program.kill()
    gone = [program.keeper, *pids] if who != "keeper, agent stopped" else pids
    took = wait_gone(gone)
    print(f"{who}: gone after {took * 1000:.0f} ms")


@pytest.mark.parametrize("wish", ["forks", "clones"])
def test_a_fork_of_the_agent_does_not_hold_its_workers(host: Callable[..., Host], wish: str) -> None:
    """A data loader of the host program lives on and may hold the stream open: the agent is gone all the same."""
    program = host("exec", 2, wish, "bystander")
    program.kill()
    wait_gone([program.keeper, *worker_pids(program.pids, 2)], program.mark)
    assert is_alive(program.fork)


@pytest.mark.parametrize("how", HOWS)
def test_an_agent_that_becomes_another_program_is_gone(host: Callable[..., Host], how: str) -> None:
    """Its process lives, so only the end of the stream tells."""
    program = host(how, 2, "execs")
    wait_gone([program.keeper, *worker_pids(program.pids, 2)], program.mark)
    assert is_alive(program.process.pid)


def test_an_agent_killed_while_256_workers_start_leaves_none(host: Callable[..., Host]) -> None:
    """The keeper looks at its agent between two spawns, and does not first start all of them."""
    program = host("exec", 256, "early")
    until(lambda: program.pids.exists() and program.pids.read_bytes())
    program.kill()
    took = wait_gone([program.keeper], program.mark)
    print(f"256 workers: gone after {took * 1000:.0f} ms")


# ---- the fence ----


@pytest.mark.parametrize("how", HOWS)
def test_workers_are_killed_at_the_fence(keep: Keep, tmp_path: Path, how: str) -> None:
    """Their agent cannot run, or it would have put off the fence. Later it learns that no worker is left, which is no
    failure of theirs."""
    kept = keep("sh", "-c", STUBBORN, str(tmp_path / "pids"), how=how)
    kept.keeper.fence(kept.clock.now() - 1.0)  # before there are workers
    kept.ready()
    kept.keeper.fence(kept.clock.now() + 1000)
    kept.run(1)
    pids = worker_pids(tmp_path / "pids", 1)
    kept.keeper.fence(kept.clock.now() + 0.1)
    wait_gone(pids)
    kept.drive(WorkersStopped)
    assert not any(isinstance(event, WorkersExited) for event in kept.seen)
    assert "its keeper kills this node's workers" in kept.flushed()
    kept.run(1, round_=1)
    # The fence holds for this round as well. Its stop may have come together with its start.
    kept.drive_until(lambda: any(isinstance(event, WorkersStopped) and event.round == 1 for event in kept.seen))


def test_the_newest_fence_counts(tmp_path: Path) -> None:
    """A keeper that was suspended alone finds all times of the fence at once. Its workers may live on."""
    keeping = with_console(tmp_path / "console", ways()["exec"])()
    try:
        keeping.stream.send(Configure(("sh", "-c", "exit 7"), "job"))
        batch = StartWorkers(0, assignment(1)), Fence(time.monotonic() - 1.0), Fence(None)
        lines = [json.dumps(encode(message)).encode() + b"\n" for message in batch]
        os.write(keeping.stream.sink, b"".join(lines))
        told = list[object]()
        until(lambda: told.extend(keeping.stream.receive(0.0)) or any(isinstance(m, WorkersExited) for m in told))
        assert "exitcode=7" in str(told)
    finally:
        keeping.stream.close()
        if keeping.parcels is not None:
            keeping.parcels.close()
        os.waitpid(keeping.pid, 0)
        os.close(keeping.fd)


# ---- the host program keeps what is its own ----


def test_a_host_that_ignores_or_takes_all_exits_is_served_all_the_same() -> None:
    """It may ignore SIGCHLD, or wait for every child in a loop: the keeper's end must be seen without its status."""
    script = """
        import threading, tempfile
        from pathlib import Path
        from tests.support.processes import *
        from tests.support.keepers import *
        from tests.adapters.keeper.client.test_keeper_client import exits
        def takes_all():
            while True:
                try: os.waitpid(-1, 0)
                except ChildProcessError: time.sleep(0.001)
        if sys.argv[1] == "ignores": signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        else: threading.Thread(target=takes_all, daemon=True).start()
        with tempfile.TemporaryDirectory() as folder:
            kept = Kept(Path(folder), "sh", "-c", "exit 3")
            kept.ready(); kept.run(2); kept.drive_until(lambda: len(exits(kept)) == 2); kept.stop()
            assert [f.exitcode for f in failures(kept.seen)] == [3, 3], kept.seen
            os.kill(kept.pid, 9)
            kept.drive_until(lambda: kept.said)
            kept.run(2, 1); kept.stop(round_=1); pid = kept.pid; kept.close()
            assert not is_alive(pid)
        print("served")
    """
    for habit in ("ignores", "takes"):
        assert run_alone(script, habit) == "served\n"


def test_another_child_of_the_host_keeps_its_status(keep: Keep) -> None:
    """An embedder's own `Popen` is none of reknit's business."""
    other = subprocess.Popen(["sh", "-c", "exit 7"])
    kept = keep("true")
    kept.ready()
    kept.run(2)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive_until(lambda: kept.said)
    kept.close()
    assert other.wait() == 7


def test_a_host_without_the_protection_from_sigpipe_survives_its_keeper() -> None:
    """Command-line programs often restore the default action of SIGPIPE: a dead keeper must not kill them."""
    script = """
        import tempfile
        from pathlib import Path
        from tests.support.processes import *
        from tests.support.keepers import *
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with tempfile.TemporaryDirectory() as folder:
            kept = Kept(Path(folder), "true"); kept.ready()
            os.kill(kept.pid, 9)
            wait_gone([kept.pid])
            start(kept.keeper, 1); kept.drive(WorkersExited); kept.close()
        print("alive")
    """
    assert run_alone(script) == "alive\n"


# ---- signals ----


@pytest.mark.parametrize("how", HOWS)
def test_signals_to_the_keeper_change_nothing(keep: Keep, tmp_path: Path, how: str) -> None:
    """A scheduler signals every process of a job. The agent decides what that means."""
    kept = keep("sh", "-c", 'until test -e "$0"; do sleep 0.01; done', str(tmp_path / "go"), how=how)
    kept.ready()
    kept.run(1)
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "TSTP", "TTOU", "PIPE", "WINCH"):
        os.kill(kept.pid, getattr(signal, f"SIG{name}"))
    (tmp_path / "go").touch()
    kept.drive_until(lambda: "WorkersExited" in str(kept.seen))
    assert "exits=(WorkerExit(local_rank=0, failure=None),)" in str(kept.seen)
    assert not kept.said


@pytest.mark.parametrize("how", HOWS)
def test_workers_find_the_signals_as_the_agent_found_them(keep: Keep, tmp_path: Path, how: str) -> None:
    """Ignored ones stay ignored (nohup), and none that only the keeper ignores or blocks reaches a worker that way."""
    status = tmp_path / "status"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        kept = keep("cp", "/proc/self/status", str(status), how=how)
        kept.ready()
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    kept.run(1)
    kept.drive_until(lambda: "WorkersExited" in str(kept.seen))
    fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
    kept_ignored = {signal.SIGUSR1, signal.SIGTTOU}
    assert int(fields["SigIgn"], 16) & 0x7FFFFFFF == sum(1 << (s - 1) for s in kept_ignored)
    assert int(fields["SigBlk"], 16) == 0


# ---- descriptors and processes run out ----


@pytest.mark.parametrize("how", HOWS)
def test_an_agent_without_descriptors_says_so_and_goes_on(how: str) -> None:
    """However few are left: one line, no second copy of the program, and nothing that stays."""
    script = """
        import tempfile
        from pathlib import Path
        from tests.support.processes import *
        from tests.support.keepers import *
        from reknit.adapters.runtime.ports import CannotStart
        from reknit.adapters.keeper.client.keeper_client import KeeperClient
        from reknit.adapters.keeper.protocol.wire import Configure
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        clock, said = SystemClock(), []
        for left in range(12):
            taken = []
            while True:
                try: taken.append(os.open(os.devnull, os.O_RDONLY))
                except OSError: break
            for fd in taken[:left]: os.close(fd)
            try:
                keeper = KeeperClient(clock, Configure(argv=("true",), run_id="job"), "nonce", ways()[sys.argv[1]])
                drive(keeper, clock, Started); keeper.close(); said.append("ready")
            except CannotStart as error: said.append(str(error)); assert "\\n" not in str(error)
            for fd in taken[left:]: os.close(fd)
        assert psutil.Process().children() == [] and said[-1] == "ready", said
        assert "Too many open files" in said[0], said
        print("once")
    """
    assert run_alone(script, how) == "once\n"


@pytest.mark.parametrize("limit", [*range(14, 22, 2), 24, 32])
def test_a_keeper_without_descriptors_is_no_bug(
    keep: Keep, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain limit of the operator's: the worker that cannot be started fails, with the reason."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n {limit}\nexec {sys.executable} "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(limited))
    kept = keep("sleep", "1000")
    kept.ready()
    kept.run(8)
    kept.stop()
    assert not kept.said, kept.console.read_text()
    shown = str(kept.seen)
    assert "exitcode=70" not in shown
    assert "Too many open files" in shown


def test_without_processes_the_reason_is_given() -> None:
    """`ulimit -u` is a limit of the operator's, not a bug in reknit."""
    if os.getuid():
        pytest.skip("only root can become a user who has no other process")
    script = """
        import tempfile, traceback, shutil
        from pathlib import Path
        from tests.support.processes import *
        from tests.support.keepers import *
        from reknit.adapters.keeper.process import keeper as process
        from reknit.adapters.runtime.ports import CannotStart
        folder = Path(tempfile.mkdtemp(dir="/tmp")); folder.chmod(0o777); os.environ["TMPDIR"] = str(folder)
        limit = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        os.setuid(1_234_567)
        try:
            kept = Kept(folder, "sleep", "1000", how="fork"); kept.ready(); start(kept.keeper, 4)
            kept.drive(WorkersExited); print(failures(kept.seen)[0].message); kept.stop(); kept.close()
        except CannotStart as error: print(error)
        shutil.rmtree(folder, ignore_errors=True)
    """
    assert "keeper" in (shown := run_alone(script, "1"))
    assert "Resource temporarily unavailable" in shown


def test_an_idle_keeper_sleeps(keep: Keep) -> None:
    """A training job has better uses for a core."""
    kept = keep("sleep", "1000")
    kept.ready()
    kept.run(2)
    keeper = psutil.Process(kept.pid)
    until(lambda: keeper.status() == psutil.STATUS_SLEEPING)
    assert processor_share(kept.pid) < 0.5
    kept.flushed()


@pytest.mark.parametrize("how", HOWS)
def test_a_keeper_collects_its_garbage(how: str) -> None:
    """The collector is off while modules are imported. A keeper that left it off would grow with its job."""
    script = """
        import gc, os, sys
        from reknit.adapters.keeper.process import boot
        from reknit.adapters.keeper.process import keeper as process
        from reknit.adapters.keeper.client import start
        class Told:
            def __init__(self, *args): pass
            def serve(self): os.write(1, b"collects" if gc.isenabled() else b"does not collect")
        process.Keeper = Told
        if sys.argv[1] == "fork":
            gc.disable()
            os.waitpid(start.by_fork().pid, 0)
        else:
            sys.argv[1:] = ["", str(os.dup(0)), "0", "-"]
            boot.main()
    """
    assert run_alone(script, how) == "collects"
