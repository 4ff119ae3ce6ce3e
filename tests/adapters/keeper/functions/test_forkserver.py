"""Functions as workers under forkserver: children of the keeper, which pay once for what they import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from reknit.adapters.keeper.client.function_workers import Function
from reknit.adapters.keeper.protocol.wire import variables
from reknit.core.agent.worker_words import WorkersExited, WorkersStarted
from tests.support import called, counted
from tests.support.calling import begin, call, queues_and_events_arrive
from tests.support.keepers import Kept, wait_gone
from tests.support.leaks import nothing_left
from tests.support.processes import drive_exits, failures
from tests.support.waiting import is_alive, until

Keep = Callable[..., Kept]


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import pytest: the module `__main__` of this process is an empty one."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


@pytest.fixture
def preload() -> Iterator[Callable[[list[str]], None]]:
    context = multiprocessing.get_context("forkserver")
    yield context.set_forkserver_preload
    context.set_forkserver_preload(["__main__"])


@pytest.fixture
def kept(keep: Keep) -> Kept:
    return keep("unused", start_method="forkserver")


def zygote_of(kept: Kept) -> int:
    """The pid of the zygote: the child of the keeper that is no worker."""
    workers = kept.keeper.pids(0).values()
    (pid,) = [child.pid for child in psutil.Process(kept.pid).children() if child.pid not in workers]
    return pid


def test_workers_are_children_of_the_keeper(kept: Kept) -> None:
    """So the keeper gets their exit status, and `multiprocessing` still sees the agent as the parent."""
    begin(kept, *[Function(called.ancestry)] * 2)
    assert failures(drive_exits(kept.keeper, kept.clock, 2)) == []
    for value in kept.keeper.values(0).values():
        parent, agent, _ = value  # type: ignore[misc]  # values are objects to mypy
        assert (parent, agent) == (kept.pid, os.getpid())


def test_the_workers_share_what_the_zygote_has_imported(kept: Kept, preload: Callable[[list[str]], None]) -> None:
    """In later rounds as well: the import is paid once."""
    preload(["tests.support.counted", "no.such.module"])
    begin(kept, *[Function(counted.imported_by)] * 2)
    assert failures(drive_exits(kept.keeper, kept.clock, 2)) == []
    assert "cold" not in (said := kept.flushed()), said
    zygote = zygote_of(kept)
    assert kept.keeper.values(0) == {0: zygote, 1: zygote}
    assert kept.stop().stuck == ()
    assert is_alive(zygote), "it is no stray"
    assert call(kept, counted.imported_by, round_=1) == zygote
    os.kill(zygote, signal.SIGKILL)
    until(lambda: not is_alive(zygote))
    kept.stop(round_=1)
    assert call(kept, counted.imported_by, round_=2) not in (zygote, None), "another one"


def test_a_worker_has_its_own_environment_streams_and_files(kept: Kept, tmp_path: Path) -> None:
    """As one that was started by exec."""
    both = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}
    assert call(kept, called.speak, "one", "two", **both) is None
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("one\n", "two\n")
    kept.stop()
    assert call(kept, called.told, "RANK", round_=1, env=variables({"RANK": "12"})) == ("12", 12, 0)
    kept.stop(round_=1)
    found = call(kept, called.descriptors, round_=2)
    sockets = [path for path in found.values() if path.startswith("socket")]
    assert not sockets, "the zygote's"
    assert sum(path.startswith("/memfd:reknit") for path in found.values()) == 1
    kept.stop(round_=2)
    ignored, handled, group, _ = call(kept, called.told_by_the_system, "", round_=3)
    assert (handled, group) == ([signal.SIGINT], 0)
    assert set(ignored) <= {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU}


def test_queues_and_events_can_be_arguments(kept: Kept) -> None:
    """As under spawn."""
    queues_and_events_arrive(kept, "forkserver")


def test_a_worker_that_is_killed_says_so(kept: Kept) -> None:
    """As one that was started by exec."""
    begin(kept, Function(called.pause))
    kept.drive(WorkersStarted)
    (pid,) = kept.keeper.pids(0).values()
    os.kill(pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    (failure,) = failures(kept.seen)
    assert failure.exitcode == -signal.SIGKILL


def test_an_interrupt_is_not_lost_on_a_worker_that_was_forked_just_now(
    keep: Keep, preload: Callable[[list[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python forgets at a fork which signals have come, and drops what a function raises that it calls after a fork."""
    (tmp_path / "lingers.py").write_text("""if True:
        import os, time
        ZYGOTE, GO = os.getpid(), os.path.join(os.path.dirname(__file__), "go")
        def linger():
            while os.getppid() != ZYGOTE and not os.path.exists(GO): time.sleep(0.001)
        os.register_at_fork(after_in_child=linger)
    """)
    monkeypatch.syspath_prepend(str(tmp_path))
    preload(["lingers"])
    kept = keep("unused", start_method="forkserver")
    begin(kept, Function(called.give))
    kept.drive(WorkersStarted)
    (pid,) = kept.keeper.pids(0).values()
    os.kill(pid, signal.SIGINT)
    (tmp_path / "go").touch()
    (failure,) = failures(drive_exits(kept.keeper, kept.clock, 1))  # type: ignore[arg-type]
    assert failure.exitcode == -signal.SIGINT or failure.message.startswith("KeyboardInterrupt")


def test_a_killed_keeper_leaves_neither_zygote_nor_worker(kept: Kept) -> None:
    """Each group has its guard pipe."""
    begin(kept, *[Function(called.pause)] * 2)
    kept.drive(WorkersStarted)
    pids = [zygote_of(kept), *kept.keeper.pids(0).values()]
    os.kill(kept.pid, signal.SIGKILL)
    wait_gone(pids)


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote ends with the keeper."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nothing_left():
        kept = Kept(tmp_path, "unused", start_method="forkserver")
        begin(kept, Function(called.give), Function(called.fail, ("plain",)), Function(called.pause))
        kept.drive(WorkersExited)
        kept.close()


def test_elsewhere_than_on_linux_it_spawns(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper could not adopt the workers there."""
    monkeypatch.setattr(sys, "platform", "darwin")
    kept = keep("unused", start_method="forkserver")
    parent, agent, _ = call(kept, called.ancestry)
    assert (parent, agent) == (kept.pid, os.getpid())
    assert [child.pid for child in psutil.Process(kept.pid).children()] == [*kept.keeper.pids(0).values()]
