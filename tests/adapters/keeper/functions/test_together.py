"""Functions that have returned wait for the others of their node, and for nothing else."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from reknit.adapters.keeper.client.function_workers import Function
from reknit.adapters.keeper.protocol.wire import variables
from reknit.adapters.keeper.watchdog.page import Page, seen
from reknit.core.agent.worker_words import WorkersExited, WorkersStarted, WorkersStopped
from tests.support import called
from tests.support.calling import begin
from tests.support.keepers import Kept
from tests.support.processes import drive_exits, failures, stop
from tests.support.waiting import is_alive

METHODS = ("spawn", "fork", "forkserver")
Keep = Callable[..., Kept]


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import pytest: the module `__main__` of this process is an empty one."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


class Returned:
    """A worker of a keeper that has returned, with local rank 0, beside one that has not."""

    def __init__(self, kept: Kept, folder: Path, *, ignores: bool = False, **more: object) -> None:
        self._kept = kept
        self._stacks = folder / "stacks"
        self.release = folder / "release"
        os.mkfifo(self.release)
        functions = (
            Function(called.shows_its_stack, (str(self._stacks), ignores)),
            Function(called.reads, (self.release,)),
        )
        begin(kept, *functions, **more)
        kept.drive(WorkersStarted)
        kept.drive_until(lambda: kept.keeper.values(0).keys() == {0})
        self.pid = kept.keeper.pids(0)[0]

    def wait(self) -> None:
        """Until it waits for the other one. It shows its stack when it gets SIGUSR2."""

        def waits() -> bool:
            assert is_alive(self.pid), "it has ended before the other one has returned"
            os.kill(self.pid, signal.SIGUSR2)
            return "together.py" in self._stacks.read_text()

        self._kept.drive_until(waits)
        assert not any(isinstance(event, WorkersExited) for event in self._kept.seen)


@pytest.mark.parametrize("start_method", METHODS)
def test_a_worker_that_has_returned_stays_until_all_have(keep: Keep, start_method: str, tmp_path: Path) -> None:
    """The end of a process closes its connections. torch sometimes aborts another worker that still uses one."""
    kept = keep("unused", start_method=start_method)
    returned = Returned(kept, tmp_path)
    returned.wait()
    returned.release.write_text("go")
    assert failures(drive_exits(kept.keeper, kept.clock, 2)) == []
    assert kept.keeper.values(0) == {0: "shown", 1: "go"}


@pytest.mark.slow
def test_many_that_return_at_once(keep: Keep) -> None:
    """Two of them must never take the same byte. Then none would be the last one, and all would wait for ever."""
    kept = keep("unused", start_method="fork")
    for round_ in range(5):
        begin(kept, *(Function(called.give, (i,)) for i in range(40)), round_=round_)
        assert failures(drive_exits(kept.keeper, kept.clock, 40)) == []
        kept.stop(round_=round_)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("start_method", METHODS)
def test_a_stop_ends_the_wait_at_once(keep: Keep, start_method: str, signum: int, tmp_path: Path) -> None:
    """Also if the function has ignored the signal. The grace of this stop never ends. SIGUSR1 is one of the signals
    that this job hands on to its workers."""
    env = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"}
    kept = keep("unused", start_method=start_method)
    Returned(kept, tmp_path, ignores=True, env=variables(env)).wait()
    stop(kept.keeper, signum=signum)
    kept.drive(WorkersStopped)
    assert kept.keeper.told.exitcodes(0) == {0: 0, 1: -signum}


@pytest.mark.parametrize("start_method", METHODS)
def test_a_failure_is_told_while_others_wait(keep: Keep, start_method: str, tmp_path: Path) -> None:
    """The agent then stops the round."""
    kept = keep("unused", start_method=start_method)
    returned = Returned(kept, tmp_path)
    returned.wait()
    os.kill(kept.keeper.pids(0)[1], signal.SIGKILL)
    (failure,) = failures(drive_exits(kept.keeper, kept.clock, 1))
    assert (failure.local_rank, failure.exitcode) == (1, -signal.SIGKILL)
    assert is_alive(returned.pid)
    kept.stop()
    assert not is_alive(returned.pid)


def test_who_waits_is_not_hung(keep: Keep, tmp_path: Path) -> None:
    """It has said that it will report no more progress. A page of an outer agent still awaits that."""
    outer, kept = Page(), keep("unused")
    returned = Returned(kept, tmp_path, env=variables(outer.variables(0, {})))
    returned.wait()
    assert seen(kept.keeper.pid)[0].at == inf
    assert outer.read(0)[0] == 0
    outer.close()
