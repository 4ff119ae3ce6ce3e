"""How real worker processes are stopped: each stop is answered once, in time, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import MOST_AWAITED, WorkersExited, WorkersStarted, WorkersStopped
from tests.support.alone import STUBBORN, run_alone
from tests.support.processes import FOR_EVER, Make, drive, failures, start, stop, stopped
from tests.support.waiting import PATIENCE_S, is_alive, read_pids, until

# ---- stopping ----


def test_a_stop_ends_workers_and_answers_once(make: Make, clock: SystemClock, tmp_path: Path) -> None:
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


def test_a_worker_that_ignores_the_signal_is_killed_after_the_grace(
    make: Make, clock: SystemClock, tmp_path: Path
) -> None:
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
    answer = stopped(drive(workers, clock, WorkersStopped))
    assert clock.now() >= before + 0.2
    assert answer.killed == (1,), "its rank"
    assert answer.grace_s == pytest.approx(0.2)


def test_only_workers_that_had_a_grace_are_told_as_killed(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """The operator learns which ranks did not obey. A stop without a grace gives them no time to."""
    script = f'[ "$LOCAL_RANK" = 0 ] || set -- ignore; exec {sys.executable} {STUBBORN} {tmp_path}/pids "$@"'
    workers = make("sh", "-c", script)
    start(workers, 3)
    read_pids(tmp_path / "pids", 3)
    stop(workers, 0.2)
    assert stopped(drive(workers, clock, WorkersStopped)).killed == (4, 5)
    start(workers, 3, 1)
    read_pids(tmp_path / "pids", 6)
    stop(workers, 0.0, round_=1)
    assert stopped(drive(workers, clock, WorkersStopped)).killed == ()


MOVES = """
    import os, signal, sys, time
    child = os.fork()
    if child:
        # Into the group of the process that holds the workers, as a shell with job control does with its jobs.
        os.setpgid(0, os.getpgid(os.getppid()))
    else:
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "ignore" else signal.SIG_DFL)
    open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
    while True: signal.pause()
"""


@pytest.mark.parametrize("wish", ["obey", "ignore"])
def test_a_worker_that_leaves_its_group_is_ended_too(make: Make, clock: SystemClock, tmp_path: Path, wish: str) -> None:
    """Its old group is empty: SIGTERM and SIGKILL must reach the worker itself, and what descends from it."""
    workers = make(sys.executable, "-c", textwrap.dedent(MOVES), str(tmp_path / "pids"), wish)
    start(workers)
    pids = read_pids(tmp_path / "pids", 2)
    stop(workers, 0.0 if wish == "ignore" else FOR_EVER)
    assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()
    until(lambda: not any(map(is_alive, pids)), "their end")


def test_a_second_stop_only_shortens_the_grace(make: Make, clock: SystemClock, tmp_path: Path) -> None:
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


ENDS = 'while ! test -e "$0/$LOCAL_RANK"; do sleep 0.01; done; exit $((LOCAL_RANK + 3))'
"""A worker that ends by itself when a file says so."""


def test_each_exit_lets_the_signal_wait_anew(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Many workers on few cores end one after another, and all together take long."""
    workers = make("sh", "-c", ENDS, str(tmp_path))
    start(workers, 2)
    stop(workers, await_exits_s=FOR_EVER / 2)
    workers.events(clock.now())
    first = workers.wakes_at
    (tmp_path / "0").touch()
    drive(workers, clock, WorkersExited)
    assert first is not None
    assert workers.wakes_at is not None
    assert workers.wakes_at > first
    stop(workers)
    drive(workers, clock, WorkersStopped)


def test_workers_that_end_before_the_signal_are_told(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """They have failed by themselves. The answer comes as soon as the last one has ended, however long the wait is."""
    workers = make("sh", "-c", ENDS, str(tmp_path))
    start(workers, 3)
    (tmp_path / "1").touch()
    seen = drive(workers, clock, WorkersExited)
    stop(workers, await_exits_s=FOR_EVER)
    for rank in (0, 2):
        (tmp_path / str(rank)).touch()
        seen += drive(workers, clock, WorkersExited)
    seen += drive(workers, clock, WorkersStopped) if not any(isinstance(e, WorkersStopped) for e in seen) else []
    assert [(failure.local_rank, failure.exitcode) for failure in failures(seen)] == [(1, 4), (0, 3), (2, 5)]


def test_the_wait_for_exits_is_bounded(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Workers that end one by one could put the signal off for ever. Their agent knows when SIGKILL comes at the
    latest."""
    workers = make("sh", "-c", ENDS, str(tmp_path))
    start(workers, MOST_AWAITED + 2)
    drive(workers, clock, WorkersStarted)
    stop(workers, await_exits_s=FOR_EVER)
    before, seen = clock.now(), list[Event]()
    for rank in range(MOST_AWAITED):
        (tmp_path / str(rank)).touch()
        at = before + 0.9 * (rank + 1) * FOR_EVER
        seen += until(partial(workers.events, at), f"the end of worker {rank}")
    latest = before + MOST_AWAITED * FOR_EVER
    assert workers.wakes_at is not None
    assert workers.wakes_at <= latest
    seen += until(partial(workers.events, latest), "the end of the others")
    assert stopped(seen)
    assert [failure.local_rank for failure in failures(seen)] == [*range(MOST_AWAITED)]


def test_the_grace_begins_with_the_signal(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """Most workers wait in a collective, and never end by themselves."""
    pids = tmp_path / "pids"
    workers = make(sys.executable, STUBBORN, str(pids), "ignore")
    start(workers)
    read_pids(pids, 1)
    before = clock.now()
    stop(workers, 0.2, await_exits_s=0.1)
    seen = drive(workers, clock, WorkersStopped)
    assert (failures(seen), stopped(seen).killed) == ([], (1,))
    assert clock.now() >= before + 0.3


@pytest.mark.parametrize("hurry", ["second stop", "SIGKILL", "fence"])
def test_the_wait_for_exits_ends_early(make: Make, clock: SystemClock, tmp_path: Path, hurry: str) -> None:
    """Whoever presses Ctrl-C twice, or is fenced, waits for nobody."""
    workers = make("sh", "-c", ENDS, str(tmp_path))
    start(workers)
    if hurry == "SIGKILL":
        stop(workers, signum=signal.SIGKILL, await_exits_s=FOR_EVER)
    else:
        stop(workers, await_exits_s=FOR_EVER)
        assert not any(isinstance(event, WorkersStopped) for event in workers.events(clock.now()))
    if hurry == "second stop":
        stop(workers)
    elif hurry == "fence":
        workers.fence(clock.now())
        workers.events(clock.now())
    assert failures(drive(workers, clock, WorkersStopped)) == []


def test_a_stopped_process_is_continued(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """A worker under SIGSTOP cannot obey SIGTERM: it would cost the whole grace."""
    pids = tmp_path / "pids"
    workers = make(sys.executable, STUBBORN, str(pids))
    start(workers)
    (pid,) = read_pids(pids, 1)
    os.kill(pid, signal.SIGSTOP)
    stop(workers)
    drive(workers, clock, WorkersStopped)


def test_the_group_is_signalled_although_its_leader_is_dead(make: Make, clock: SystemClock, tmp_path: Path) -> None:
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


def test_a_stop_with_nothing_alive_is_answered(make: Make, clock: SystemClock) -> None:
    """The agent waits for that answer before it joins again."""
    workers = make("true")
    port = workers.reserve_port()
    stop(workers, round_=3)
    assert workers.wakes_at == 0.0
    (event,) = workers.events(clock.now())
    assert event == WorkersStopped(event.at, 3, port)


def test_rounds_follow_each_other_and_leak_nothing(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """A job may restart a thousand times."""
    workers = make("sh", "-c", "exit 1", streams=StreamSettings(tee=1, redirects=0))
    counts = []
    for round_ in range(12):
        start(workers, 2, round_)
        drive(workers, clock, WorkersExited)
        stop(workers, round_=round_)
        assert stopped(drive(workers, clock, WorkersStopped)).round == round_
        assert workers.flush(PATIENCE_S)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[3]
    assert sorted(os.listdir(tmp_path / "logs")) == sorted(f"round_{i}" for i in range(12)), "logs are kept"


STRAYS = """
    import sys
    from tests.support.processes import *
    from reknit.adapters.host.children import become_subreaper, children
    assert become_subreaper()
    clock = SystemClock()
    pids, wishes, grace = sys.argv[1], sys.argv[2].split(), float(sys.argv[3])
    workers = make_processes(clock, sys.executable, STUBBORN, pids, *wishes, own_children=True)
    start(workers, 2)
    everybody = read_pids(pids, 4)
    if "die" in wishes or "exit0" in wishes:
        drive_exits(workers, clock, 2)
    stop(workers, grace)
    event = stopped(drive(workers, clock, WorkersStopped))
    assert event.stuck == () and children() == [] and not any(map(is_alive, everybody))
    print("clean")
    workers.end_all()
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


@pytest.mark.parametrize("way", ["stop", "close"])
def test_daemons_are_found_without_a_free_descriptor(tmp_path: Path, way: str) -> None:
    """The list of children is a file. A keeper that cannot open it would die, and leave the daemons to others."""
    script = """
        from tests.support.processes import *
        from reknit.adapters.host.children import become_subreaper, children
        assert become_subreaper()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        clock = SystemClock()
        argv = [sys.executable, STUBBORN, sys.argv[1], "grandchild", "ignore"]
        workers = make_processes(clock, *argv, own_children=True)
        start(workers)
        everybody = read_pids(sys.argv[1], 2)
        taken = []
        while True:
            try: taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError: break
        if sys.argv[2] == "stop":
            stop(workers, 0.0)
            assert stopped(drive(workers, clock, WorkersStopped)).stuck == ()
        else:
            workers.end_all()
        for fd in taken: os.close(fd)
        assert children() == [] and not any(map(is_alive, everybody))
        workers.end_all()
        print("clean")
    """
    assert run_alone(script, str(tmp_path / "pids"), way) == "clean\n"


def test_adopted_processes_that_end_are_reaped_while_the_round_runs(tmp_path: Path) -> None:
    """Zombies would pile up for days: a worker that calls a daemonising tool each step makes thousands."""
    script = """
        from tests.support.processes import *
        from reknit.adapters.host.children import become_subreaper, children
        assert become_subreaper()
        clock = SystemClock()
        script = "for i in 1 2 3 4 5; do (true &) ; done; echo x >> $0; exec sleep 600"
        workers = make_processes(clock, "sh", "-c", script, sys.argv[1], own_children=True)
        start(workers)
        until(lambda: os.path.exists(sys.argv[1]))
        until(lambda: workers.events(clock.now()) is not None and len(children()) == 1)
        print("reaped")
        workers.end_all()
    """
    assert run_alone(script, str(tmp_path / "file")) == "reaped\n"


@pytest.mark.parametrize("own_children", [False, True])
def test_what_survives_sigkill_is_reported_and_left(tmp_path: Path, own_children: bool) -> None:
    """A process that hangs in the kernel must not hang the agent, nor the next round."""
    script = """
        from tests.support.processes import *
        from reknit.adapters.host.children import become_subreaper
        from reknit.adapters.keeper.common import spawn
        from reknit.adapters.keeper.process import processes
        from reknit.adapters.keeper.process import strays
        from reknit.adapters.keeper.protocol.wire import Process, StartProcesses
        become_subreaper()
        clock = SystemClock()
        pids, own_children = sys.argv[1], sys.argv[2] == "True"
        processes.STUCK_AFTER_S = strays.STUCK_AFTER_S = 0.2
        spawn.signal_group = strays.signal_process = lambda pid, signum: None  # as if no signal did anything
        workers = make_processes(clock, sys.executable, STUBBORN, pids, "grandchild", own_children=own_children)
        start(workers)
        grandchild, worker = read_pids(pids, 2)
        stop(workers, 0.1)
        event = stopped(drive(workers, clock, WorkersStopped))
        assert event.stuck == ((worker, grandchild) if own_children else (worker,)), event
        workers.start(StartProcesses(1, (Process(0, 0, ("true",)),)))
        drive(workers, clock, WorkersExited)
        stop(workers, 0.1, 1)
        assert stopped(drive(workers, clock, WorkersStopped)).stuck == (), "not again"
        for pid in (grandchild, worker):
            os.kill(pid, 9)
        print("left")
    """
    assert run_alone(script, str(tmp_path / "pids"), str(own_children)) == "left\n"


# ---- the end ----


@pytest.mark.parametrize("state", ["new", "running", "stopping", "stopped"])
@pytest.mark.parametrize("own_children", [False, True])
def test_the_end_leaves_nothing_whatever_the_state(tmp_path: Path, state: str, own_children: bool) -> None:
    """The agent's crash path: there is no time and no event loop any more."""
    script = """
        from tests.support.processes import *
        from reknit.adapters.host.children import become_subreaper, children
        become_subreaper()
        clock = SystemClock()
        pids, state, own_children = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
        wishes = ["ignore", *(["grandchild"] if own_children else [])]
        workers = make_processes(clock, sys.executable, STUBBORN, pids, *wishes, own_children=own_children)
        if state != "new":
            start(workers, 2)
            read_pids(pids, 2 * len(wishes))
        if state in ("stopping", "stopped"):
            stop(workers, FOR_EVER if state == "stopping" else 0.0)
            workers.events(clock.now())
        if state == "stopped":
            drive(workers, clock, WorkersStopped)
        workers.end_all()
        workers.end_all()
        assert children() == [], children()
        print("ended")
    """
    assert run_alone(script, str(tmp_path / "pids"), state, str(own_children)) == "ended\n"
