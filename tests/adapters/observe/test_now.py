"""The agents of this host, seen from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from reknit.adapters.observe.now import Now, keeper_of, of_live
from reknit.core.text.doing import Doing, doing
from tests.support import places
from tests.support.command import Run
from tests.support.waiting import read_pids, until

WAITS = "import os, signal; open('pids', 'a').write(f'{os.getpid()}\\n'); signal.pause()"


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the agents of a test leave their traces."""
    places.move(monkeypatch, tmp_path)


def running(*jobs: str, round_: int = 0) -> Now:
    """Wait for the only agent to run this round."""

    def found() -> list[Now]:
        return [now for now in of_live(jobs) if (doing(now.agent), now.agent.job.round) == (Doing.RUNNING, round_)]

    (now,) = until(found, "the agent to run")
    return now


def test_an_agent_is_seen_as_it_was_in_its_last_step(tmp_path: Path) -> None:
    """Nothing is asked of it: one that is stopped is seen as well. One that has ended is not."""
    with Run(tmp_path, "--nproc-per-node=2", "--rdzv-id=j7", "w.py", "a", script=WAITS) as job:
        pids = read_pids(tmp_path / "pids", 2)
        running("j7")
        job.signal(signal.SIGSTOP)
        (now,) = of_live(["j7"])
        assert (now.about.agent.pid, now.about.job, now.about.command[-2:]) == (job.pid, "j7", ("w.py", "a"))
        assert (doing(now.agent), now.agent.workers.round, now.agent.spec.local_world_size) == (Doing.RUNNING, 0, 2)
        assert {one.pid for one in now.progress.values()} == set(pids)
        assert os.path.isdir(now.path)
        assert keeper_of(job.pid) == job.keeper
        assert list(of_live(["another"])) == []
        job.signal(signal.SIGCONT)
    assert list(of_live()) == []
    assert keeper_of(job.pid) == 0


def test_an_agent_that_was_killed_is_not_seen(tmp_path: Path) -> None:
    """It could not say that it ended. Its trace is still there, for `reknit explain`."""
    with Run(tmp_path, "w.py", script=WAITS) as job:
        now = running()
        job.signal(signal.SIGKILL)
        job.end()
        assert list(of_live()) == []
        assert os.listdir(now.path)


def test_how_long_it_has_done_what_it_does(tmp_path: Path) -> None:
    """A restart begins anew: it is the time of the new workers, and not of the agent."""
    with Run(tmp_path, "--max-restarts=1", "w.py", script=WAITS):
        (pid,) = read_pids(tmp_path / "pids", 1)
        began = running().about.began
        until(lambda: running().for_s > (time.time() - began) / 2, "the first workers to run")
        ran_s = running().for_s
        os.kill(pid, signal.SIGKILL)
        now = running(round_=1)
        assert now.for_s <= time.time() - began - ran_s
        until(lambda: running(round_=1).for_s > now.for_s, "time to pass")


def test_an_agent_between_two_keepers(tmp_path: Path) -> None:
    """Somebody looks at it just then: it is shown without workers, and nothing breaks."""
    with Run(tmp_path, "--max-restarts=1", "w.py", script=WAITS) as job:
        running()
        job.signal(signal.SIGSTOP)
        first = job.keeper
        os.kill(first, signal.SIGKILL)
        until(lambda: not keeper_of(job.pid), "the end of the keeper")
        (now,) = of_live()
        assert (doing(now.agent), now.progress) == (Doing.RUNNING, {})
        job.signal(signal.SIGCONT)
        assert set(running(round_=1).progress) == {0}
