"""How far the workers of a real keeper are, seen from another process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from reknit.adapters.observe.now import keeper_of
from reknit.adapters.observe.progress_seen import Progress, progress_of, with_progress
from tests.support.command import Run
from tests.support.waiting import read_pids, until

REPORTS = """
    import os, signal, reknit
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    if os.environ["RANK"] == "1":
        reknit.progress(7)
    fd = os.open("pids", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"%d\\n" % os.getpid())
    signal.sigwait([signal.SIGUSR1])
    reknit.progress()
    signal.pause()
"""
RETURNS = """
import os, signal
from reknit import launch, progress

def work():
    progress(5)
    if os.environ["RANK"] == "1":
        signal.pause()

if __name__ == "__main__":
    launch(work, nproc=2)
"""


def test_a_worker_that_reports_and_one_that_does_not(tmp_path: Path) -> None:
    """Also without --hang-after: nobody knows before a hang that one will ask."""
    with Run(tmp_path, "--nproc-per-node=2", "w.py", script=REPORTS) as job:
        pids = read_pids(tmp_path / "pids", 2)
        first = progress_of(job.keeper)
        assert [(one.step, one.ago_s is None) for one in first.values()] == [(None, True), (7, False)]
        assert {one.pid for one in first.values()} == set(pids)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        until(lambda: all(one.ago_s is not None for one in progress_of(job.keeper).values()), "progress of both")
        until(lambda: progress_of(job.keeper)[1].step is None, "progress without a step")
        assert not any(one.is_waiting for one in progress_of(job.keeper).values())
        keeper = job.keeper
    assert progress_of(keeper) == progress_of(0) == progress_of(os.getpid()) == {}


def test_a_worker_that_only_waits_for_the_others(tmp_path: Path) -> None:
    """A function that has returned is not slow, however long the others take."""
    (tmp_path / "program.py").write_text(RETURNS)
    with Run(tmp_path, sys.executable, str(tmp_path / "program.py")) as job:

        def seen() -> list[bool]:
            found = progress_of(keeper_of(job.pid))
            return [found[rank].is_waiting for rank in sorted(found)]

        until(lambda: seen() == [True, False], "rank 0 to return")


def test_it_is_added_to_what_is_told_of_a_worker() -> None:
    """A worker that is not seen has none."""
    told = with_progress([{"local_rank": 0}, {"local_rank": 1}], {0: Progress(5, 7, 0.12345, is_stopped=True)})
    assert told == [
        {"local_rank": 0, "pid": 5, "step": 7, "progress_s": 0.123, "waiting": False, "stopped": True},
        {"local_rank": 1, "pid": None, "step": None, "progress_s": None, "waiting": False, "stopped": False},
    ]
