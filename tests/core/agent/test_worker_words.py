"""core/job/workers.py and core/agent/worker_words.py: the words of the core that a keeper needs."""

from __future__ import annotations

from reknit.core.agent.worker_words import StartWorkers, WorkerExit, WorkersExited
from reknit.core.job.workers import Assignment, WorkerFailure, WorkerRanks
from reknit.core.text.codec import dumps, loads
from tests.support.alone import run_alone


def test_a_keeper_imports_no_other_words_of_the_core() -> None:
    """Each class of values takes a fraction of a millisecond to make, and the core has a hundred. A keeper that is
    started by exec makes its classes before the first worker can start."""
    script = """
        import sys
        import reknit.adapters.keeper.process.keeper
        print(*(name for name in sorted(sys.modules) if name.startswith("reknit.core.") and name.count(".") > 2))
    """
    assert run_alone(script).split() == [
        "reknit.core.agent.worker_words",
        "reknit.core.job.workers",
        "reknit.core.text.codec",
    ]


def test_the_words_are_the_same_after_a_way_over_the_wire() -> None:
    """The keeper reads with the codec what the agent has written, and the agent what the keeper has."""
    ranks = Assignment(1, 0, 1, 2, "r", 2, "host", 29400, (WorkerRanks(0, 0, 0), WorkerRanks(1, 1, 1)))
    failure = WorkerFailure(1, 1, 3, pid=12, message="ValueError: no", stderr=("one", "two"))
    start = StartWorkers(1, ranks)
    exits = WorkersExited(2.5, 1, (WorkerExit(0), WorkerExit(1, failure)))
    assert (loads(dumps(start), StartWorkers), loads(dumps(exits), WorkersExited)) == (start, exits)


def test_a_failure_with_a_pid_is_a_workers_own() -> None:
    """Without a pid, reknit has chosen the exit code: no process was seen to end with it."""
    assert WorkerFailure(0, 0, 3, pid=12).is_of_worker
    assert not WorkerFailure(0, 0, 127, message="cannot start it").is_of_worker
