"""Workers as real processes: started, watched, stopped, and nothing left of them."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.clock import Clock
from reknit.adapters.streams import StreamSettings
from reknit.adapters.workers.environment import arguments
from reknit.adapters.workers.processes import Processes
from reknit.core.commands import StartWorkers, StopWorkers
from reknit.core.entries import WorkerFailure
from reknit.core.events import Event, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.ranks import Assignment, WorkerRanks
from reknit.core.reasons import AllSucceeded
from tests.alone import ENV, ROOT, STUBBORN, command, run_alone
from tests.waiting import PATIENCE_S, is_alive, read_pids, until

FOR_EVER = 1e6


def assignment(count: int, round_: int = 0) -> Assignment:
    return Assignment(
        round=round_,
        group_rank=1,
        group_world_size=2,
        world_size=2 * count,
        role="trainer",
        role_world_size=2 * count,
        master_addr="node-a",
        master_port=4711,
        workers=tuple(WorkerRanks(local_rank=i, rank=count + i, role_rank=count + i) for i in range(count)),
        restart_count=1,
        max_restarts=3,
    )


def start(workers: Processes, count: int = 1, round_: int = 0) -> None:
    workers.start(StartWorkers(round_, assignment(count, round_)))


def stop(workers: Processes, grace_s: float = FOR_EVER, round_: int = 0, signum: int = signal.SIGTERM) -> None:
    workers.stop(StopWorkers(round_, signum, grace_s, AllSucceeded()))


def drive(workers: Processes, clock: Clock, kind: type[Event]) -> list[Event]:
    """Do as the driver does until an event of that kind has come; all that came."""
    seen: list[Event] = []
    give_up = clock.now() + PATIENCE_S
    while not any(isinstance(event, kind) for event in seen):
        assert clock.now() < give_up, f"waited in vain for {kind.__name__}, got {seen}"
        wakes_at = workers.wakes_at
        clock.wait(give_up if wakes_at is None else min(wakes_at, give_up))
        seen += workers.events(clock.now())
    return seen


def drive_exits(workers: Processes, clock: Clock, count: int) -> list[Event]:
    """The same until that many workers have exited."""
    seen: list[Event] = []
    while sum(len(event.exits) for event in seen if isinstance(event, WorkersExited)) < count:
        seen += drive(workers, clock, WorkersExited)
    return seen


def failures(seen: list[Event]) -> list[WorkerFailure]:
    exits = [exit_ for event in seen if isinstance(event, WorkersExited) for exit_ in event.exits]
    return [exit_.failure for exit_ in exits if exit_.failure]


def stopped(seen: list[Event]) -> WorkersStopped:
    (event,) = [event for event in seen if isinstance(event, WorkersStopped)]
    return event


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()


Make = Callable[..., Processes]


@pytest.fixture
def make(clock: Clock, tmp_path: Path) -> Iterator[Make]:
    """Makes `Processes` that run a script; the console is a file."""
    made: list[Processes] = []
    console = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def make(*argv: str, script: str = "", **settings: Any) -> Processes:
        settings = {"log_dir": str(tmp_path / "logs"), "env": os.environ, "run_id": "job", **settings}
        argv = argv or (sys.executable, "-c", textwrap.dedent(script))
        made.append(Processes(clock=clock, argv=argv, stdout=console, stderr=console, **settings))
        return made[-1]

    yield make
    for workers in made:
        workers.close()
    os.close(console)


# ---- starting ----


def test_the_start_path_imports_nothing_heavy() -> None:
    """What is imported before the first spawn is time that every job waits."""
    script = """
        import sys
        import reknit.adapters.warden, reknit.adapters.clock, reknit.adapters.journals.memory
        import reknit.adapters.workers.processes
        heavy = "subprocess socket selectors logging tempfile pathlib json shutil argparse multiprocessing asyncio"
        print(*sorted({*heavy.split(), "ctypes", "_ctypes", "string", "torch", "psutil", "termios"} & set(sys.modules)))
    """
    assert run_alone(script) == "\n"


def test_workers_run_and_succeed(make: Make, clock: Clock) -> None:
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


def test_the_environment_is_torchelastics(make: Make, clock: Clock, tmp_path: Path) -> None:
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


def test_each_worker_leads_a_group_and_has_default_signals(make: Make, clock: Clock, tmp_path: Path) -> None:
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
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int, exitcode: int
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
def test_programs_that_are_none(make: Make, clock: Clock, tmp_path: Path, kind: str) -> None:
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
        from tests.test_processes import *
        clock = Clock()
        resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
        os.setuid(54321)
        workers = Processes(clock=clock, argv=["sleep", "600"], env=dict(os.environ), run_id="job", own_children=True)
        start(workers, 8)
        (failure,) = failures(drive(workers, clock, WorkersExited))
        print(failure.exitcode, failure.message)
        stop(workers)
        assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()
        workers.close()
    """
    done = run_alone(script)
    assert done == "71 cannot start sleep: Resource temporarily unavailable\n"


def test_folders_that_cannot_be_made(make: Make, clock: Clock, tmp_path: Path) -> None:
    """A log folder on a full or missing disk is a failure with a name, not a crash of the agent."""
    (tmp_path / "file").write_text("")
    workers = make("true", log_dir=str(tmp_path / "file"), streams=StreamSettings(redirects=1))
    start(workers)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    assert failure.exitcode == 71
    assert failure.message == f"cannot write to {tmp_path}/file/round_0: Not a directory"


def test_a_folder_that_nobody_needs_may_be_missing(make: Make, clock: Clock, tmp_path: Path) -> None:
    """/tmp is full: no error file, and the job goes on."""
    (tmp_path / "file").write_text("")
    workers = make("true", log_dir=str(tmp_path / "file"))
    start(workers)
    assert failures(drive(workers, clock, WorkersExited)) == []


# ---- failing ----


def test_a_failure_is_told_with_all_that_is_known(make: Make, clock: Clock, tmp_path: Path) -> None:
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


def test_an_error_file_is_believed_before_stderr(make: Make, clock: Clock) -> None:
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


def test_a_worker_killed_by_a_signal_is_not_blamed_for_an_old_exception(make: Make, clock: Clock) -> None:
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
    assert (failure.exitcode, failure.message) == (-9, "")
    assert "ZeroDivisionError: division by zero" in failure.stderr


def test_all_that_died_by_the_time_of_one_look_are_told_together(make: Make, clock: Clock) -> None:
    """Which was first is not known, and must not be guessed from the order of events."""
    workers = make("false")
    start(workers, 3)
    pids = [leader.pid for leader in workers._round.leaders] if workers._round else []
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    seen = workers.events(clock.now())
    assert [failure.local_rank for failure in failures(seen)] == [0, 1, 2]
    assert sum(isinstance(event, WorkersExited) for event in seen) == 1


def test_a_worker_that_died_before_the_stop_is_still_told(make: Make, clock: Clock) -> None:
    """The cause of a failure may be seen a moment after its echo."""
    workers = make("false")
    start(workers)
    assert workers._round
    os.waitid(os.P_PID, workers._round.leaders[0].pid, os.WEXITED | os.WNOWAIT)
    stop(workers)
    seen = drive(workers, clock, WorkersStopped)
    assert [type(event) for event in seen] == [WorkersStarted, WorkersExited, WorkersStopped]


def test_a_worker_reaped_by_somebody_else_is_not_a_success(make: Make, clock: Clock) -> None:
    """An embedder may wait for any child; the exit code is lost then, not zero."""
    workers = make("true")
    start(workers)
    assert workers._round
    os.waitpid(workers._round.leaders[0].pid, 0)
    (failure,) = failures(workers.events(clock.now()))
    assert failure.exitcode == 255
    stop(workers)
    drive(workers, clock, WorkersStopped)


# ---- stopping ----


def test_a_stop_ends_workers_and_answers_once(make: Make, clock: Clock, tmp_path: Path) -> None:
    """`WorkersStopped` is what lets the next round start: exactly one, and when nothing is left."""
    pids = tmp_path / "pids"
    workers = make(sys.executable, STUBBORN, str(pids))
    start(workers, 2)
    alive = read_pids(pids, 2)
    stop(workers)
    seen = drive(workers, clock, WorkersStopped)
    assert not any(map(is_alive, alive))
    assert failures(seen) == [], "who was told to end has not failed"
    assert workers.events(clock.now()) == []
    assert workers.wakes_at is None


def test_a_worker_that_ignores_the_signal_is_killed_after_the_grace(make: Make, clock: Clock, tmp_path: Path) -> None:
    """Training code often catches SIGTERM for ever."""
    pids = tmp_path / "pids"
    workers = make(sys.executable, STUBBORN, str(pids), "ignore")
    start(workers)
    read_pids(pids, 1)
    before = clock.now()
    stop(workers, 0.2)
    workers.events(clock.now())
    assert workers.wakes_at is not None
    assert workers.wakes_at >= before + 0.2
    drive(workers, clock, WorkersStopped)
    assert clock.now() >= before + 0.2


def test_a_second_stop_only_shortens_the_grace(make: Make, clock: Clock, tmp_path: Path) -> None:
    """Whoever presses Ctrl-C again wants it faster; a later, longer grace must not undo that."""
    pids = tmp_path / "pids"
    workers = make(sys.executable, STUBBORN, str(pids), "ignore")
    start(workers)
    read_pids(pids, 1)
    stop(workers, FOR_EVER)
    workers.events(clock.now())
    assert workers.wakes_at is not None
    assert workers.wakes_at > clock.now() + FOR_EVER / 2
    stop(workers, 0.0)
    stop(workers, FOR_EVER)
    drive(workers, clock, WorkersStopped)


def test_a_stopped_process_is_continued(make: Make, clock: Clock, tmp_path: Path) -> None:
    """A worker under SIGSTOP cannot obey SIGTERM: it would cost the whole grace."""
    pids = tmp_path / "pids"
    workers = make(sys.executable, STUBBORN, str(pids))
    start(workers)
    (pid,) = read_pids(pids, 1)
    os.kill(pid, signal.SIGSTOP)
    stop(workers)
    drive(workers, clock, WorkersStopped)


def test_the_group_is_signalled_although_its_leader_is_dead(make: Make, clock: Clock, tmp_path: Path) -> None:
    """torchelastic skips these, so that the data loaders of a crashed worker keep its memory."""
    pids = tmp_path / "pids"
    script = f"{sys.executable} {STUBBORN} {pids} & while ! test -s {pids}; do sleep 0.01; done; exit 3"
    workers = make("sh", "-c", script)
    start(workers)
    (failure,) = failures(drive(workers, clock, WorkersExited))
    (helper,) = read_pids(pids, 1)
    assert failure.exitcode == 3
    assert is_alive(helper)
    stop(workers)
    until(lambda: not is_alive(helper))
    drive(workers, clock, WorkersStopped)


def test_a_stop_with_nothing_alive_is_answered(make: Make, clock: Clock) -> None:
    """The agent waits for that answer before it joins again."""
    workers = make("true")
    port = workers.reserve_port()
    stop(workers, round_=3)
    assert workers.wakes_at == 0.0
    (event,) = workers.events(clock.now())
    assert event == WorkersStopped(event.at, 3, port)


def test_rounds_follow_each_other_and_leak_nothing(make: Make, clock: Clock, tmp_path: Path) -> None:
    """A job may restart a thousand times."""
    workers = make("sh", "-c", "exit 1", streams=StreamSettings(tee=1, redirects=0))
    counts = []
    for round_ in range(12):
        start(workers, 2, round_)
        drive(workers, clock, WorkersExited)
        stop(workers, round_=round_)
        assert stopped(drive(workers, clock, WorkersStopped)).round == round_
        assert workers._streams.finish(PATIENCE_S)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[3]
    assert sorted(os.listdir(tmp_path / "logs")) == sorted(f"round_{i}" for i in range(12)), "logs are kept"


STRAYS = """
    import sys
    from tests.test_processes import *
    from reknit.adapters.children import become_subreaper, children
    assert become_subreaper()
    clock = Clock()
    pids, wishes, grace = sys.argv[1], sys.argv[2].split(), float(sys.argv[3])
    workers = Processes(clock=clock, argv=[sys.executable, STUBBORN, pids, *wishes], env=dict(os.environ), run_id="job",
                        own_children=True)
    start(workers, 2)
    everybody = read_pids(pids, 4)
    if "die" in wishes or "exit0" in wishes:
        drive_exits(workers, clock, 2)
    stop(workers, grace)
    event = stopped(drive(workers, clock, WorkersStopped))
    assert event.stuck == () and children() == [] and not any(map(is_alive, everybody))
    print("clean")
    workers.close()
"""


@pytest.mark.parametrize(
    ("wishes", "grace"),
    [
        *((wishes, "0.0") for wishes in ("grandchild", "grandchild die", "grandchild exit0", "grandchild ignore")),
        *((wishes, "0.3") for wishes in ("grandchild die", "grandchild ignore")),
        *((wishes, "1000") for wishes in ("grandchild", "grandchild exit0")),
    ],
)
def test_daemons_of_workers_do_not_outlive_their_round(tmp_path: Path, wishes: str, grace: str) -> None:
    """S2: no process of a round lives when the next begins, however well it hid; and success ends with a sweep, too."""
    assert run_alone(STRAYS, str(tmp_path / "pids"), wishes, grace) == "clean\n"


def test_adopted_processes_that_end_are_reaped_while_the_round_runs(tmp_path: Path) -> None:
    """Zombies would pile up for days: a worker that calls a daemonising tool each step makes thousands."""
    script = """
        from tests.test_processes import *
        from reknit.adapters.children import become_subreaper, children
        assert become_subreaper()
        clock = Clock()
        script = "for i in 1 2 3 4 5; do (true &) ; done; echo x >> $0; exec sleep 600"
        workers = Processes(clock=clock, argv=["sh", "-c", script, sys.argv[1]], env=dict(os.environ), run_id="job",
                            own_children=True)
        start(workers)
        until(lambda: os.path.exists(sys.argv[1]))
        until(lambda: workers.events(clock.now()) is not None and len(children()) == 1)
        print("reaped")
        workers.close()
    """
    assert run_alone(script, str(tmp_path / "file")) == "reaped\n"


@pytest.mark.parametrize("own_children", [False, True])
def test_what_survives_sigkill_is_reported_and_left(tmp_path: Path, own_children: bool) -> None:
    """A process that hangs in the kernel must not hang the agent, nor the next round."""
    script = """
        from tests.test_processes import *
        from reknit.adapters.children import become_subreaper
        from reknit.adapters.workers import leaders, processes, strays
        become_subreaper()
        clock = Clock()
        pids, own_children = sys.argv[1], sys.argv[2] == "True"
        processes.STUCK_AFTER_S = strays.STUCK_AFTER_S = 0.2
        leaders.signal_group = strays.signal_process = lambda pid, signum: None  # as if no signal did anything
        workers = Processes(clock=clock, argv=[sys.executable, STUBBORN, pids, "grandchild"], env=dict(os.environ),
                            run_id="job", own_children=own_children)
        start(workers)
        grandchild, worker = read_pids(pids, 2)
        stop(workers, 0.1)
        event = stopped(drive(workers, clock, WorkersStopped))
        assert event.stuck == ((worker, grandchild) if own_children else (worker,)), event
        workers._argv = ("true",)
        start(workers, 1, 1)
        drive(workers, clock, WorkersExited)
        stop(workers, 0.1, 1)
        assert stopped(drive(workers, clock, WorkersStopped)).stuck == (), "not again"
        for pid in (grandchild, worker):
            os.kill(pid, 9)
        print("left")
    """
    assert run_alone(script, str(tmp_path / "pids"), str(own_children)) == "left\n"


# ---- the end ----


@pytest.mark.parametrize("state", ["new", "running", "stopping", "ended"])
@pytest.mark.parametrize("own_children", [False, True])
def test_close_leaves_nothing_whatever_the_state(tmp_path: Path, state: str, own_children: bool) -> None:
    """The agent's crash path: there is no time and no event loop any more."""
    script = """
        from tests.test_processes import *
        from reknit.adapters.children import become_subreaper, children
        become_subreaper()
        clock = Clock()
        pids, state, own_children = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
        wishes = ["ignore", *(["grandchild"] if own_children else [])]
        workers = Processes(clock=clock, argv=[sys.executable, STUBBORN, pids, *wishes], env=dict(os.environ),
                            run_id="job", own_children=own_children)
        if state != "new":
            start(workers, 2)
            read_pids(pids, 2 * len(wishes))
        if state in ("stopping", "ended"):
            stop(workers, FOR_EVER if state == "stopping" else 0.0)
            workers.events(clock.now())
        if state == "ended":
            drive(workers, clock, WorkersStopped)
        workers.close()
        workers.close()
        assert children() == [], children()
        print("closed")
    """
    assert run_alone(script, str(tmp_path / "pids"), state, str(own_children)) == "closed\n"


# ---- stdin ----


def test_stdin_is_inherited_unless_it_is_a_terminal(tmp_path: Path) -> None:
    """`reknit run … < data` works; a background group that reads a terminal would be stopped: a hang without a word."""
    script = f"""
        from tests.test_processes import *
        clock = Clock()
        workers = Processes(clock=clock, argv=["sh", "-c", "cat > {tmp_path}/stdin"], env=dict(os.environ),
                            run_id="job")
        start(workers)
        assert failures(drive(workers, clock, WorkersExited)) == []
        workers.close()
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


def test_each_round_has_another_port_and_the_last_one_is_free_again(make: Make, clock: Clock) -> None:
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


def test_torchs_store_binds_over_the_reservation(make: Make, clock: Clock) -> None:
    """The reason to keep the socket: nobody else gets the port, and rank 0 does."""
    script = """
        import os
        from torch.distributed import TCPStore
        port = int(os.environ["PORT"])
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        other = TCPStore("127.0.0.1", port, is_master=False)
        assert other.get("key") == b"value"
    """
    workers = make(script=script)
    workers._env["PORT"] = str(workers.reserve_port())
    start(workers)
    assert failures(drive(workers, clock, WorkersExited)) == []


def test_no_ipv6_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Containers often have none."""
    from reknit.adapters import bootstrap

    real = bootstrap._bound
    monkeypatch.setattr(bootstrap, "_bound", lambda family, address: None if ":" in address else real(family, address))
    assert make("true").reserve_port() > 0
    monkeypatch.setattr(bootstrap, "_bound", lambda family, address: None)
    assert make("true").reserve_port() == 0


def test_a_process_without_descriptors_left_reports_it(make: Make, clock: Clock) -> None:
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
