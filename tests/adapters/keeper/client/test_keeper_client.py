"""The client of a keeper that is killed, hangs or cannot be started: one clear line, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from reknit.adapters.keeper.client import keeper_client as client
from reknit.adapters.keeper.client import keeper_connection as connection
from reknit.adapters.keeper.client import keeper_states as standing
from reknit.adapters.keeper.client.start import Keeping
from reknit.adapters.keeper.process import keeper as process
from reknit.adapters.keeper.protocol.files import Sender
from reknit.adapters.keeper.protocol.stream import Stream
from reknit.adapters.runtime.ports import CannotStart
from reknit.core.agent.events import Started
from reknit.core.agent.worker_words import PortReserved, WorkersExited, WorkersStarted, WorkersStopped
from tests.support.alone import STUBBORN as STUBBORN_PROGRAM
from tests.support.alone import run_alone
from tests.support.interrupts import interrupted_after
from tests.support.keepers import SLEEP, STUBBORN, Kept, in_turn, killed_at_once, wait_gone, ways, worker_pids
from tests.support.processes import FOR_EVER, failures, start, stop, stopped
from tests.support.waiting import descriptors, is_alive, read_pids, until

Keep = Callable[..., Kept]
HOWS = ["exec", "fork"]


def exits(kept: Kept) -> list[int]:
    """Local ranks of the workers whose exit was reported, repetitions included."""
    return sorted(e.local_rank for event in kept.seen if isinstance(event, WorkersExited) for e in event.exits)


# ---- a keeper that is killed ----


@pytest.mark.parametrize("how", HOWS)
def test_a_keeper_killed_while_idle_is_replaced(keep: Keep, tmp_path: Path, how: str) -> None:
    """Nothing runs, so nothing has failed: one line, and the next round starts as if nothing had been."""
    kept = keep("sh", "-c", SLEEP, str(tmp_path / "pids"), how=how)
    first = kept.ready()
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive_until(lambda: kept.said)
    kept.run(2)
    assert exits(kept) == []
    pids = worker_pids(tmp_path / "pids", 2)
    answer = kept.stop()
    assert answer.port not in (0, first)
    wait_gone(pids, kept.mark)
    (line,) = kept.said
    assert "killed by SIGKILL" in line


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("state", ["running", "stopping"])
def test_a_keeper_killed_with_workers_fails_each_once(keep: Keep, tmp_path: Path, how: str, state: str) -> None:
    """Every worker is reported once, a stop is answered once, and the next round has a port that nobody knows yet."""
    pids = tmp_path / "pids"
    kept = keep("sh", "-c", STUBBORN, str(pids), how=how)
    first = kept.ready()
    kept.run(3)
    alive = worker_pids(pids, 3)
    if state == "stopping":
        stop(kept.keeper, FOR_EVER)
        kept.keeper.events(kept.clock.now())
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    assert exits(kept) == [0, 1, 2]
    assert {f.exitcode for f in failures(kept.seen)} == {-signal.SIGKILL}
    assert not any(f.is_of_worker for f in failures(kept.seen)), "nobody has seen how they ended"
    assert all("keeper" in f.message and "SIGKILL" in f.message for f in failures(kept.seen))
    if state == "running":
        stop(kept.keeper, FOR_EVER)
    kept.drive_until(lambda: any(isinstance(event, WorkersStopped) for event in kept.seen))
    wait_gone(alive, kept.mark)
    assert stopped(kept.seen).port not in (0, first)
    pids.unlink()
    kept.run(3, 1)
    kept.stop(0.0, 1)
    assert exits(kept) == [0, 1, 2], "not again"
    assert [e.round for e in kept.seen if isinstance(e, WorkersStopped)] == [0, 1]
    assert len(kept.said) == 1


def test_a_worker_without_an_environment_dies_with_its_keeper(keep: Keep, tmp_path: Path) -> None:
    """It has closed the guard pipe, and does not carry the mark. The next keeper knows it by its pid and start time."""
    closes = 'for n in $(seq 3 255); do eval "exec $n>&-"; done'
    kept = keep("env", "-i", "bash", "-c", f"{closes}; {SLEEP}", str(tmp_path / "pids"))
    kept.ready()
    kept.run(2)
    pids = worker_pids(tmp_path / "pids", 2)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    kept.stop()
    assert exits(kept) == [0, 1]
    assert not any(map(is_alive, pids))


def test_a_worker_that_ended_by_itself_is_not_reported_again(keep: Keep, tmp_path: Path) -> None:
    """It succeeded. The death of the keeper comes later and is no failure of that worker."""
    script = f'test "$LOCAL_RANK" = 0 && exit 0; {SLEEP}'
    kept = keep("sh", "-c", script, str(tmp_path / "pids"))
    kept.ready()
    kept.run(2)
    kept.drive_until(lambda: exits(kept) == [0])
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive_until(lambda: len(exits(kept)) > 1)
    assert exits(kept) == [0, 1]
    assert [f.local_rank for f in failures(kept.seen)] == [1]


def test_a_keeper_killed_between_two_spawns_leaves_no_worker(keep: Keep, tmp_path: Path) -> None:
    """Some workers run, others do not exist yet, and the keeper has told nobody how far it was."""
    pids = tmp_path / "pids"
    kept = keep("sh", "-c", SLEEP, str(pids))
    kept.ready()
    start(kept.keeper, 64)
    until(lambda: pids.exists() and pids.read_bytes())
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    kept.stop()
    assert exits(kept) == list(range(64))
    wait_gone([], kept.mark)


def test_what_left_the_workers_group_is_found_by_its_mark(keep: Keep, tmp_path: Path) -> None:
    """The guard of the killed keeper misses a daemon in a session of its own; the next keeper must not."""
    pids = tmp_path / "pids"
    kept = keep(sys.executable, STUBBORN_PROGRAM, str(pids), "ignore", "grandchild")
    kept.ready()
    kept.run(1)
    alive = read_pids(pids, 2)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    kept.stop()
    assert not any(map(is_alive, alive)), "gone before the stop is answered"


def test_a_second_stop_that_waits_for_a_new_keeper_is_not_answered_twice(keep: Keep, tmp_path: Path) -> None:
    """An operator presses Ctrl-C again while the keeper is replaced."""
    kept = keep("sh", "-c", STUBBORN, str(tmp_path / "pids"))
    kept.ready()
    kept.run(1)
    stop(kept.keeper, FOR_EVER)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    stop(kept.keeper, 0.0)
    stop(kept.keeper, 0.0)
    kept.drive_until(lambda: any(isinstance(e, WorkersStopped) for e in kept.seen))
    kept.run(1, 1)
    kept.stop(0.0, 1)
    assert [e.round for e in kept.seen if isinstance(e, WorkersStopped)] == [0, 1]


def test_a_port_that_was_asked_for_comes_although_the_keeper_dies(keep: Keep) -> None:
    """The agent joins no round before it has its port: without an answer it would wait for ever."""
    kept = keep("true")
    first = kept.ready()
    os.kill(kept.pid, signal.SIGSTOP)
    kept.keeper.renew_port()
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(PortReserved)
    (event,) = [e for e in kept.seen if isinstance(e, PortReserved)]
    assert event.port not in (0, first)


def test_a_flush_that_the_keeper_did_not_live_to_answer_is_asked_for_again(keep: Keep) -> None:
    """Otherwise no later flush would wait for anything, or each would wait in vain."""
    kept = keep("true")
    kept.ready()
    os.kill(kept.pid, signal.SIGSTOP)
    assert not kept.keeper.flush(0.0)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive_until(lambda: kept.said)
    kept.run(1)
    kept.keeper.say("after all")
    assert "after all" in kept.flushed()


def test_how_a_stop_has_ended_the_workers_is_told(keep: Keep, tmp_path: Path) -> None:
    """torch's contexts report the exit codes of workers that they have ended. The events do not hold them."""
    ready = tmp_path / "ready"
    scripts = {
        "0": "exit 3",
        "1": f"trap 'exit 7' TERM; touch {ready}; while true; do sleep 0.01; done",
        "2": f"echo > {ready}.2; exec sleep 1000",
    }
    kept = keep("sh", "-c", "case $LOCAL_RANK in " + " ".join(f"{k}) {v} ;;" for k, v in scripts.items()) + " esac")
    kept.ready()
    kept.run(3)
    kept.drive_until(lambda: exits(kept) == [0])
    until(lambda: ready.exists() and (tmp_path / "ready.2").exists())
    assert kept.keeper.told.exitcodes(0) == {}
    kept.stop(FOR_EVER)
    assert kept.keeper.told.exitcodes(0) == {0: 3, 1: 7, 2: -15}
    assert kept.keeper.told.exitcodes(1) == {}


# ---- lines ----


def test_no_line_overtakes_an_earlier_one_on_its_way_through_the_keeper(keep: Keep) -> None:
    """Agent and keeper write to one console. "exit status 73" must not stand before the job that was joined."""
    kept = keep("true")
    kept.has_said = False
    kept.keeper.say("first")
    kept.ready()
    kept.keeper.say("second")
    assert kept.said == ["first", "second"], "the first line is not written yet"
    kept.has_said = True
    kept.keeper.say("third")
    assert kept.flushed() == "third\n"
    assert kept.said == ["first", "second"]


# ---- a keeper that cannot be started, or does not answer ----


@pytest.mark.parametrize("how", HOWS)
def test_a_first_keeper_killed_before_its_hello_is_one_line(keep: Keep, how: str) -> None:
    """The operator learns what could not be started, and why."""
    kept = keep("true", how=killed_at_once(ways()[how]))
    with pytest.raises(CannotStart, match=r"^the keeper of this node's workers .*: killed by SIGKILL$"):
        kept.ready()


def test_a_later_keeper_killed_before_its_hello_is_tried_again(keep: Keep) -> None:
    """Memory may be short for a moment. One more attempt is cheaper than a lost round."""
    good = ways()["exec"]
    kept = keep("true", restart=in_turn([killed_at_once(good), good]))
    kept.ready()
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive_until(lambda: len(kept.said) == 2)
    kept.run(1)
    assert [f.exitcode for f in failures(kept.seen)] == []


def test_without_a_keeper_starts_fail_and_stops_are_answered(keep: Keep) -> None:
    """An agent that cannot have workers any more must say so to the others, not hang."""
    good = ways()["exec"]
    dead = killed_at_once(good)
    kept = keep("sh", "-c", "sleep 1000", how=good, restart=in_turn([dead] * 3 + [_no_process, good]))
    kept.ready()
    kept.run(2)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive_until(lambda: len(kept.said) == 4)
    assert kept.pid == 0
    assert exits(kept) == [0, 1]
    assert kept.stop().port == 0
    start(kept.keeper, 2, 1)
    kept.drive(WorkersExited)
    (failure,) = failures(kept.seen)[2:]
    assert failure.exitcode == 71
    assert "Resource temporarily unavailable" in failure.message
    assert kept.stop(round_=1).port == 0
    kept.run(2, 2)
    assert kept.stop(round_=2).port != 0, "the next round tries once more"


def _no_process() -> Keeping:
    raise OSError(11, "Resource temporarily unavailable")


def test_a_keeper_that_hangs_before_its_hello_is_given_up(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that hangs while Python starts must not hang the agent."""
    monkeypatch.setattr(standing, "HELLO_S", 0.3)

    def hangs() -> Keeping:
        keeping = ways()["exec"]()
        os.kill(keeping.pid, signal.SIGSTOP)
        return keeping

    kept = keep("true", how=hangs)
    pid = kept.pid
    with pytest.raises(CannotStart, match=r"it was not ready within 0.3 s"):
        kept.ready()
    assert not is_alive(pid)


def test_a_keeper_that_does_not_answer_a_stop_is_replaced(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers are ended all the same, and the stop is answered by the next keeper."""
    monkeypatch.setattr(client, "ANSWER_S", 1.0)
    # The keeper that is forked from this process stays stopped: it stands for one that hangs.
    monkeypatch.setattr(process, "continue_on_news", lambda fd: None)
    kept = keep("sh", "-c", SLEEP, str(tmp_path / "pids"), how="fork", restart=ways()["exec"])
    first = kept.ready()
    kept.run(2)
    pids = worker_pids(tmp_path / "pids", 2)
    os.kill(kept.pid, signal.SIGSTOP)
    stop(kept.keeper, 0.0)
    monkeypatch.setattr(client, "ANSWER_S", 60.0)
    kept.drive(WorkersStopped)
    wait_gone(pids, kept.mark)
    assert stopped(kept.seen).port not in (0, first)
    (line,) = kept.said
    assert "it did not answer" in line


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo nonsense; cat > /dev/null", "'nonsense' is no message"),
        ("""echo '{"kind":"Hello","version":999,"pid":1,"host":"h"}'; cat > /dev/null""", "999"),
        ("""echo '{"kind":"Hello","version":999,"much":"else"}'; cat > /dev/null""", "999"),
        ("printf half", "it has ended with status 0"),
        ("exit 5", "status 5"),
    ],
)
def test_what_is_no_keeper_of_this_version_is_refused_in_one_line(keep: Keep, script: str, why: str) -> None:
    """An operator who has installed another version on one host must be told that, not a traceback."""

    def start() -> Keeping:
        from reknit.adapters.keeper.remote.command import by_command

        keeping = by_command(["sh", "-c", script])
        keeping.stream._has_banner = "nonsense" not in script and "half" not in script
        return keeping

    kept = keep("true", how=start)
    with pytest.raises(CannotStart) as caught:
        kept.ready()
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_that_does_not_exist_is_named(keep: Keep) -> None:
    """`ssh` may not be installed: the line must say what is missing."""
    from reknit.adapters.keeper.remote.command import by_command

    with pytest.raises(CannotStart, match="no-such-ssh"):
        keep("true", how=lambda: by_command(["no-such-ssh", "host"]))


# ---- the end ----


@pytest.mark.parametrize("state", ["new", "ready", "running", "stopping", "killed", "stopped"])
def test_close_leaves_nothing_whatever_the_state(
    keep: Keep, tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host goes on without reknit, and has no use for what it left."""
    before = descriptors()
    kept = keep("sh", "-c", STUBBORN, str(tmp_path / "pids"))
    pids = []
    if state != "new":
        kept.ready()
    if state in ("running", "stopping", "killed", "stopped"):
        kept.run(2)
        pids = worker_pids(tmp_path / "pids", 2)
    if state == "stopping":
        stop(kept.keeper, FOR_EVER)
    if state == "killed":
        os.kill(kept.pid, signal.SIGKILL)
    if state == "stopped":
        monkeypatch.setattr(client, "CLOSE_S", 0.3)
        os.kill(kept.pid, signal.SIGSTOP)
    keeper = kept.pid
    kept.close()
    kept.close()
    assert not psutil.pid_exists(keeper), "reaped"
    wait_gone(pids, kept.mark)
    assert descriptors() <= before


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (connection, "signal_process"),
        (connection, "is_readable"),
        (connection, "_reaped"),
        (connection.KeeperConnection, "_await_end"),
        (connection.KeeperConnection, "_close_fd"),
        (connection.KeeperConnection, "end"),
        (Stream, "close"),
        (Stream, "receive"),
        (Sender, "close"),
        (client.KeeperClient, "_let_go"),
    ],
)
def test_an_interrupted_close_can_be_repeated(keep: Keep, tmp_path: Path, owner: object, method: str) -> None:
    """Ctrl-C may come after any call that it makes. The pidfd was lost if it came while the keeper was being ended."""
    before = descriptors()
    kept = keep("sh", "-c", SLEEP, str(tmp_path / "pids"))
    kept.ready()
    kept.run(2)
    pids, keeper = worker_pids(tmp_path / "pids", 2), kept.pid
    interrupted_after(owner, method, kept.keeper.close)
    kept.keeper.close()
    assert not psutil.pid_exists(keeper), "reaped"
    wait_gone(pids, kept.mark)
    kept.close()
    assert descriptors() <= before


@pytest.mark.slow
def test_thirty_clients_leave_nothing(tmp_path: Path) -> None:
    """A service that opens an agent per job runs for months: no thread, descriptor, child or file may add up."""
    script = """
        import psutil, threading
        from tests.support.processes import *
        from pathlib import Path
        from tests.support.keepers import *
        from tests.adapters.keeper.client.test_keeper_client import exits
        from tests.support.waiting import descriptors
        folder = Path(sys.argv[1]); os.environ["TMPDIR"] = str(folder)
        def runs(kept):
            kept.run(2); kept.drive_until(lambda: exits(kept) == [0, 1]); kept.stop(); kept.close()
        one = Kept(folder, "true"); one.ready(); runs(one)
        before = descriptors()
        handlers = [signal.getsignal(s) for s in signal.valid_signals()]
        environ, files = dict(os.environ), set(os.listdir(folder))
        for i in range(20):
            kept = Kept(folder, "true", how="exec" if i % 5 == 0 else "fork"); kept.ready(); runs(kept)
        many = [Kept(folder, "true", how=("exec", "fork")[i % 2]) for i in range(10)]
        for kept in many: kept.ready()
        for kept in many: runs(kept)
        assert descriptors() <= before, descriptors() - before
        assert psutil.Process().children(recursive=True) == []
        assert threading.active_count() == psutil.Process().num_threads() == 1
        assert [signal.getsignal(s) for s in signal.valid_signals()] == handlers
        assert (dict(os.environ), set(os.listdir(folder))) == (environ, files)
        print("nothing")
    """
    (tmp_path / "t").mkdir()
    assert run_alone(script, str(tmp_path / "t")) == "nothing\n"


def test_events_arrive_on_the_agents_own_time(keep: Keep) -> None:
    """The keeper may run where the clock shows something else."""
    kept = keep("true")
    before = kept.clock.now()
    kept.ready()
    kept.run(1)
    for event in kept.seen:
        if isinstance(event, Started | WorkersStarted):
            assert before <= event.at <= kept.clock.now()
