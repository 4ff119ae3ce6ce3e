"""Workers as real processes: they are started, watched and stopped, and nothing of them is left."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from reknit.adapters.keeper.common.bootstrap import Reservation
from reknit.adapters.keeper.common.environment import arguments
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.worker_words import PortReserved, StartWorkers, WorkersExited, WorkersStarted, WorkersStopped
from tests.support.alone import ENV, ROOT, command, run_alone
from tests.support.processes import Make, assignment, drive, drive_exits, failures, start, stop, stopped

# ---- starting ----


def test_the_start_path_imports_nothing_heavy() -> None:
    """What is imported before the first spawn is time that every job waits."""
    script = """
        import sys
        import reknit.adapters.keeper.process.keeper
        heavy = "subprocess logging tempfile pathlib shutil argparse multiprocessing asyncio string termios"
        print(*sorted({*heavy.split(), "torch", "psutil"} & set(sys.modules)))
    """
    assert run_alone(script) == "\n"


def test_workers_run_and_succeed(make: Make, clock: SystemClock) -> None:
    """The life of a healthy round, event by event."""
    workers = make("true")
    start(workers, 3)
    seen = drive_exits(workers, clock, 3)
    assert isinstance(seen[0], WorkersStarted)
    assert seen[0].round == 0
    exits = [exit_ for event in seen if isinstance(event, WorkersExited) for exit_ in event.exits]
    assert sorted(exit_.local_rank for exit_ in exits) == [0, 1, 2]
    assert failures(seen) == []
    assert workers.wakes_at is None
    stop(workers)
    assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()
    assert workers.events(clock.now()) == []


def test_a_port_that_was_asked_for_is_that_of_every_round(make: Make, clock: SystemClock) -> None:
    """It is never let go of between two rounds, when somebody else might take it."""
    free = Reservation()
    port = free.port
    free.release()
    workers = make("true", master_port=port)
    assert workers.reserve_port() == port
    start(workers, 1)
    stop(workers)
    assert stopped(drive(workers, clock, WorkersStopped)).port == port
    workers.renew_port()
    assert [event.port for event in workers.events(clock.now()) if isinstance(event, PortReserved)] == [port]


def test_a_port_that_is_taken_is_an_error(make: Make) -> None:
    """The wiring turns it into one line."""
    with socket.create_server(("", 0)) as other:
        workers = make("true", master_port=other.getsockname()[1])
        with pytest.raises(OSError, match="Address already in use"):
            workers.reserve_port()


def test_the_environment_is_torchelastics(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Scripts written for torchrun read these, and only these."""
    script = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w'))"
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "7", "RANK": "stale"}
    workers = make(script=script, env=env)
    start(workers, 2, 5)
    drive_exits(workers, clock, 2)
    stop(workers, round_=5)
    drive(workers, clock, WorkersStopped)
    told = json.loads((tmp_path / "3").read_text())
    told.pop("LC_CTYPE", None)
    assert re.fullmatch(r"/proc/\d+/fd/\d+:1", told.pop("REKNIT_PROGRESS"))
    assert told == {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "7",
        "LOCAL_RANK": "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "logs/round_5/1/error.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "REKNIT_ROUND": "5",
    }


def test_local_rank_is_substituted_in_arguments() -> None:
    """As torchrun does it; but what does not ask for it stays as it is."""
    argv = ["${local_rank}", "a${local_rank}b", "$local_rank", "${other}", "pa$$word", "${local_rank}${x}"]
    assert arguments(argv, 3) == ["${local_rank}", "a3b", "3", "${other}", "pa$$word", "3${x}"]


def test_each_worker_leads_a_group_and_has_default_signals(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Ctrl-C must not reach workers twice, and `yes | head` inside a worker must end."""
    script = f"""
        grep -E '^Sig(Blk|Ign)' /proc/self/status > {tmp_path}/state
        ps -o pid=,pgid= -p $$ >> {tmp_path}/state
    """
    workers = make("sh", "-c", script)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        start(workers)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    drive(workers, clock, WorkersExited)
    blocked, ignored, ids = (tmp_path / "state").read_text().splitlines()
    assert int(blocked.split()[1], 16) == 0
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0
    pid, group = ids.split()
    assert pid == group


@pytest.mark.parametrize(
    ("number", "exitcode"),
    [(errno.EAGAIN, 71), (errno.ENOMEM, 71), (errno.ENOEXEC, 126), (errno.EACCES, 126), (errno.ENOENT, 127)],
)
def test_a_spawn_that_fails_is_a_failure_of_that_worker(
    make: Make, clock: SystemClock, monkeypatch: pytest.MonkeyPatch, number: int, exitcode: int
) -> None:
    """Nothing is raised, those before it run on until they are stopped, those after it never exist."""
    spawn, calls = os.posix_spawnp, []

    def second_fails(*args: Any, **kwargs: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number), args[0])
        return spawn(*args, **kwargs)

    monkeypatch.setattr(os, "posix_spawnp", second_fails)
    workers = make("sleep", "600")
    start(workers, 3)
    seen = drive(workers, clock, WorkersExited)
    assert isinstance(seen[0], WorkersStarted)
    (failure,) = failures(seen)
    assert (failure.local_rank, failure.rank, failure.exitcode) == (1, 4, exitcode)
    assert failure.message == f"cannot start sleep: {os.strerror(number)}"
    assert len(calls) == 2
    stop(workers)
    assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()


@pytest.mark.parametrize("kind", ["missing", "forbidden", "binary", "folder", "null"])
def test_programs_that_are_none(make: Make, clock: SystemClock, tmp_path: Path, kind: str) -> None:
    """A wrong path is the most common mistake of all: it must say so, and not hang."""
    program = tmp_path / "program"
    if kind == "folder":
        program.mkdir()
    elif kind != "missing":
        program.write_bytes(b"\x7fELF garbage")
        program.chmod(0o644 if kind == "forbidden" else 0o755)
    workers = make(str(program) + ("\0" if kind == "null" else ""))
    start(workers, 2)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.exitcode == {"missing": 127, "null": 71}.get(kind, 126)
    assert failure.message.startswith(f"cannot start {program}")
    stop(workers)
    drive(workers, clock, WorkersStopped)


def test_a_process_limit_is_reported(tmp_path: Path) -> None:
    """The real thing: RLIMIT_NPROC, as another user, because root has no limit."""
    if os.getuid() != 0:
        pytest.skip("needs root to become a user without processes")
    script = """
        import os, resource, signal
        from tests.support.processes import *
        clock = SystemClock()
        resource.setrlimit(resource.RLIMIT_NPROC, (4, 4))
        os.setuid(54321)
        workers = make_processes(clock, "sleep", "600", own_children=True)
        start(workers, 8)
        (failure,) = failures(drive(workers, clock, WorkersExited))
        print(failure.exitcode, failure.message)
        stop(workers)
        assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()
        workers.end_all()
    """
    done = run_alone(script)
    assert done == "71 cannot start sleep: Resource temporarily unavailable\n"


def test_folders_that_cannot_be_made(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """A log folder on a full or missing disk is a failure with a name, not a crash of the agent."""
    (tmp_path / "file").write_text("")
    workers = make("true", log_dir=str(tmp_path / "file"), streams=StreamSettings(redirects=1))
    start(workers)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.exitcode == 71
    assert failure.message == f"cannot write to {tmp_path}/file/round_0: Not a directory"


def test_a_folder_that_nobody_needs_may_be_missing(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """/tmp is full: no error file, and the job goes on."""
    (tmp_path / "file").write_text("")
    workers = make("true", log_dir=str(tmp_path / "file"))
    start(workers)
    assert failures(drive(workers, clock, WorkersExited)) == []


# ---- failing ----


def test_a_failure_is_told_with_all_that_is_known(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """This is what a user sees of a crash: exit code, exception, last lines, where the output is."""
    script = """
        import sys
        for i in range(50):
            print("line", i, file=sys.stderr)
        raise ValueError("no")
    """
    workers = make(script=script, streams=StreamSettings(tee=3))
    start(workers)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.local_rank, failure.rank, failure.exitcode) == (0, 1, 1)
    assert failure.pid > 0
    assert failure.message == "ValueError: no"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert len(failure.stderr) == 20
    assert failure.stderr[-1] == "ValueError: no"
    assert failure.log == str(tmp_path / "logs/round_0/0")


def test_an_error_file_is_believed_before_stderr(make: Make, clock: SystemClock) -> None:
    """Workers with `@record` know best; a file of an earlier run in the same folder is not theirs."""
    write = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"mine\"}')"
    workers = make(script=write + "; raise ValueError('other')")
    start(workers)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.message == "mine"
    assert failure.log == "", "there is no output file"
    again = make(script="raise ValueError('other')")
    start(again)
    (failure,) = failures(drive(again, clock, WorkersExited))
    assert failure.message == "ValueError: other"


def test_a_worker_killed_by_a_signal_is_not_blamed_for_an_old_exception(make: Make, clock: SystemClock) -> None:
    """An exception that was logged and survived has nothing to do with the out-of-memory killer."""
    script = """
        import os, traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        os.kill(os.getpid(), 9)
    """
    workers = make(script=script)
    start(workers)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert (failure.exitcode, failure.message) == (-9, "but not by the kernel for lack of memory")
    assert "ZeroDivisionError: division by zero" in failure.stderr


def test_all_that_died_by_the_time_of_one_look_are_told_together(make: Make, clock: SystemClock) -> None:
    """Which was first is not known, and must not be guessed from the order of events."""
    workers = make("false")
    start(workers, 3)
    for pid in workers.pids.values():
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    seen = workers.events(clock.now())
    assert [failure.local_rank for failure in failures(seen)] == [0, 1, 2]
    assert sum(isinstance(event, WorkersExited) for event in seen) == 1


def test_a_worker_that_died_before_the_stop_is_still_told(make: Make, clock: SystemClock) -> None:
    """The cause of a failure may be seen a moment after its echo."""
    workers = make("false")
    start(workers)
    os.waitid(os.P_PID, workers.pids[0], os.WEXITED | os.WNOWAIT)
    stop(workers)
    seen = drive(workers, clock, WorkersStopped)
    assert [type(event) for event in seen] == [WorkersStarted, WorkersExited, WorkersStopped]


def test_a_worker_reaped_by_somebody_else_is_not_a_success(make: Make, clock: SystemClock) -> None:
    """An embedder may wait for any child; the exit code is lost then, not zero."""
    workers = make("true")
    start(workers)
    os.waitpid(workers.pids[0], 0)
    (failure,) = failures(workers.events(clock.now()))
    assert failure.exitcode == 255
    stop(workers)
    drive(workers, clock, WorkersStopped)


# ---- stdin ----


def test_stdin_is_inherited_unless_it_is_a_terminal(tmp_path: Path) -> None:
    """`reknit run … < data` works; a background group that reads a terminal would be stopped: a hang without a word."""
    script = f"""
        from tests.support.processes import *
        clock = SystemClock()
        workers = make_processes(clock, "sh", "-c", "cat > {tmp_path}/stdin")
        start(workers)
        assert failures(drive(workers, clock, WorkersExited)) == []
        workers.end_all()
    """
    argv = command(script)
    subprocess.run(argv, input=b"data", check=True, timeout=240, env=ENV, cwd=ROOT)
    assert (tmp_path / "stdin").read_bytes() == b"data"
    master, slave = os.openpty()
    subprocess.run(argv, stdin=slave, start_new_session=True, check=True, timeout=240, env=ENV, cwd=ROOT)
    assert (tmp_path / "stdin").read_bytes() == b""
    os.close(master)
    os.close(slave)


# ---- the port ----


def test_each_round_has_another_port_and_the_last_one_is_free_again(make: Make, clock: SystemClock) -> None:
    """A fresh store every round: nothing of an earlier round can be read by a later one."""
    workers = make("true")
    first = workers.reserve_port()
    assert workers.reserve_port() == first, "it was said in `Joined`: it stays"
    start(workers)
    drive(workers, clock, WorkersExited)
    stop(workers)
    second = stopped(drive(workers, clock, WorkersStopped)).port
    assert second not in (0, first)
    assert workers.reserve_port() == second


def test_another_port_on_demand(make: Make, clock: SystemClock) -> None:
    """A round was sealed with the last one, and is over before it began here."""
    workers = make("true")
    first = workers.reserve_port()
    workers.renew_port()
    (event,) = drive(workers, clock, PortReserved)
    assert isinstance(event, PortReserved)
    assert event.port == workers.reserve_port()
    assert event.port not in (0, first)


def test_a_port_of_an_earlier_round_never_comes_back() -> None:
    """Workers of a node that was cut off may still know it: they would meet another round's store there."""
    first = Reservation()
    used = [port for port in range(1 << 16) if port % 4 == first.port % 4]  # half of those that there are
    later = [Reservation(used) for _ in range(50)]
    assert 0 not in (ports := {reservation.port for reservation in later})
    assert not ports & set(used)
    last = Reservation(range(1 << 16))
    assert last.port > 0, "better an old one than none"
    for reservation in (first, *later, last):
        reservation.release()


@pytest.mark.slow
def test_torchs_store_binds_over_the_reservation(make: Make, clock: SystemClock) -> None:
    """The reason to keep the socket: nobody else gets the port, and rank 0 does."""
    script = """
        import os
        from torch.distributed import TCPStore
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        other = TCPStore("127.0.0.1", port, is_master=False)
        assert other.get("key") == b"value"
    """
    workers = make(script=script)
    workers.start(StartWorkers(0, evolve(assignment(1), master_port=workers.reserve_port())))
    assert failures(drive(workers, clock, WorkersExited)) == []


def test_no_ipv6_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Containers often have none."""
    workers, without, made = [make("true"), make("true")], {socket.AF_INET6}, socket.socket

    def refused(family: int = socket.AF_INET, *kind: int) -> socket.socket:
        if family in without:
            raise OSError(errno.EAFNOSUPPORT, "no such protocol here")
        return made(family, *kind)

    monkeypatch.setattr(socket, "socket", refused)
    assert workers[0].reserve_port() > 0
    without.add(socket.AF_INET)
    assert workers[1].reserve_port() == 0


def test_a_process_without_descriptors_left_reports_it(make: Make, clock: SystemClock) -> None:
    """A leak elsewhere in the process must not crash the agent."""
    workers = make("true")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    try:
        start(workers)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.exitcode == 71
    assert "Too many open files" in failure.message
