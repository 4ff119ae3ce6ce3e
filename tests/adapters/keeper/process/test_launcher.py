"""Workers whose caller has worked out everything itself: `StartProcesses`, with a real keeper."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses, variables
from reknit.core.agent.worker_words import WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.entries import Joined, Node, NodeId
from reknit.core.job.ranks import Members, assign
from tests.support.keepers import Kept, wait_gone
from tests.support.processes import drive_exits, failures
from tests.support.waiting import is_alive, until

Keep = Callable[..., Kept]
HOWS = ["exec", "fork"]
TELLS = "import json, os, sys; json.dump([dict(os.environ), sys.argv], open(sys.argv[1], 'w'))"


def python(local_rank: int, script: str, *args: str, **more: Any) -> Process:
    return Process(local_rank, 10 + local_rank, (sys.executable, "-c", script, *args), **more)


def run(kept: Kept, *processes: Process, round_: int = 0) -> list[Any]:
    """Run these processes until all have ended. Returns the events."""
    kept.keeper.start(StartProcesses(round_, processes))
    return drive_exits(kept.keeper, kept.clock, len(processes))


@pytest.mark.parametrize("how", HOWS)
def test_each_process_has_what_the_caller_has_worked_out(keep: Keep, tmp_path: Path, how: str) -> None:
    """The caller knows the ranks. The keeper adds its own environment and nothing else."""
    kept = keep("unused", how=how, env=(("BASE", "of all"), ("RANK", "of all")))
    processes = [
        python(i, TELLS, str(tmp_path / f"{i}"), "${local_rank}", env=variables({"RANK": f"r{i}"})) for i in range(2)
    ]
    seen = run(kept, *processes)
    assert failures(seen) == []
    assert any(isinstance(event, WorkersStarted) for event in seen)
    for i in range(2):
        env, argv = json.loads((tmp_path / f"{i}").read_text())
        assert argv[2:] == ["${local_rank}"], "the caller's arguments are not changed"
        assert (env["BASE"], env["RANK"]) == ("of all", f"r{i}")
        assert not {"LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE"} & env.keys()
        assert env["REKNIT_NODE"] == kept.mark
    assert kept.stop().stuck == ()


def test_ranks_from_an_assignment(keep: Keep, tmp_path: Path) -> None:
    """The keeper makes variables and error file as for `StartWorkers`. What the caller gives goes on top of them."""
    kept = keep("unused")
    joined = Joined(Node(NodeId("n0")), nonce="x", round=0, address="127.0.0.1", port=29500, local_world_size=2)
    assignment = assign(Members([joined]), joined.node)
    processes = tuple(
        python(ranks.local_rank, TELLS, str(tmp_path / f"{ranks.rank}"), env=variables({"ROLE_NAME": "mine"}))
        for ranks in assignment.workers
    )
    kept.keeper.start(StartProcesses(0, processes, assignment))
    assert failures(drive_exits(kept.keeper, kept.clock, 2)) == []
    for rank in range(2):
        env, _ = json.loads((tmp_path / f"{rank}").read_text())
        assert (env["RANK"], env["MASTER_PORT"], env["ROLE_NAME"]) == (f"{rank}", "29500", "mine")
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/round_0/{rank}/error.json")


def test_the_pids_are_known_when_the_workers_run(keep: Keep) -> None:
    """torch's `PContext.pids()` is asked right after the start."""
    kept = keep("unused")
    assert kept.keeper.pids(0) == {}
    kept.keeper.start(
        StartProcesses(0, tuple(python(i, "import signal; signal.pause()", stdout="/dev/null") for i in (0, 3)))
    )
    kept.drive(WorkersStarted)
    pids = kept.keeper.pids(0)
    assert sorted(pids) == [0, 3]
    assert all(map(is_alive, pids.values()))
    assert kept.keeper.pids(1) == {}
    kept.stop()
    wait_gone([*pids.values()], kept.mark)


def test_a_process_that_cannot_start_has_no_pid(keep: Keep) -> None:
    """The others that run are named all the same, and the failure names the program of this process."""
    kept = keep("unused")
    kept.keeper.start(
        StartProcesses(0, (python(0, "import signal; signal.pause()"), Process(1, 11, ("/no/such/program",))))
    )
    kept.drive(WorkersExited)
    assert [*kept.keeper.pids(0)] == [0]
    (failure,) = failures(kept.seen)
    assert (failure.local_rank, failure.rank, failure.exitcode) == (1, 11, 127)
    assert failure.message == "cannot start /no/such/program: No such file or directory"


def test_each_stream_goes_to_its_own_file_or_where_the_settings_say(keep: Keep, tmp_path: Path) -> None:
    """torch's `LogsSpecs` names a file per stream and worker. A stream without a file is shown."""
    writes = "import sys; print('out', sys.argv[1]); print('err', sys.argv[1], file=sys.stderr); sys.exit(3)"
    kept = keep("unused")
    both = {"stdout": str(tmp_path / "0.out"), "stderr": str(tmp_path / "0.err")}
    (tmp_path / "0.out").write_text("of an earlier run, and longer than what comes now")
    seen = run(kept, python(0, writes, "0", **both), python(1, writes, "1", stdout=str(tmp_path / "1.out")))
    assert [path.read_text() for path in sorted(tmp_path.glob("?.*"))] == ["err 0\n", "out 0\n", "out 1\n"]
    assert kept.flushed() == "err 1\n"
    told = {failure.local_rank: failure for failure in failures(seen)}
    assert (told[0].stderr, told[1].stderr) == (("err 0",), ("err 1",))
    assert told[0].log == str(tmp_path)


def test_a_stream_without_a_file_goes_beside_the_error_file_if_the_settings_want_files(
    keep: Keep, tmp_path: Path
) -> None:
    """The keeper's settings hold for whatever the caller left open."""
    kept = keep("unused", streams=StreamSettings(tee=1), log_base=str(tmp_path))
    (tmp_path / "w").mkdir()
    run(kept, python(0, "print(7)", error_file=str(tmp_path / "w/error.json"), env=(("ROLE_NAME", "eve"),)))
    assert kept.flushed() == "[eve0]:7\n"
    assert (tmp_path / "w/stdout.log").read_text() == "7\n"


def test_a_file_that_cannot_be_written_fails_its_worker(keep: Keep) -> None:
    """The failure names the file, and the round ends like any other."""
    kept = keep("unused")
    (failure,) = failures(run(kept, python(0, "print(7)", stdout="/no/such/folder/out")))
    assert failure.message == "cannot write to /no/such/folder/out: No such file or directory"
    kept.stop()


def test_the_error_file_is_the_workers_variable_and_explains_it(keep: Keep, tmp_path: Path) -> None:
    """A decorated script writes there, and nothing is read that another worker has written."""
    script = """
import json, os, sys
json.dump({"message": {"message": "E: told", "extraInfo": {}}}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(5)
"""
    kept = keep("unused", env=(("TORCHELASTIC_ERROR_FILE", "/of/the/agent"),))
    (failure,) = failures(run(kept, python(0, script, error_file=str(tmp_path / "error.json"))))
    assert (failure.exitcode, failure.message) == (5, "E: told")


def test_a_round_after_a_round_and_a_stop_by_grace(keep: Keep) -> None:
    """The same keeper serves every round, as it does for `StartWorkers`."""
    kept = keep("unused")
    for round_ in range(3):
        assert failures(run(kept, python(0, "pass"), round_=round_)) == []
        assert kept.stop(round_=round_).round == round_
    kept.run(1, 3)  # `StartWorkers` to the same keeper, which has no such program
    assert kept.keeper.pids(3) == {}
    kept.stop(round_=3)


def test_a_killed_keeper_fails_these_workers_too(keep: Keep) -> None:
    """Each worker is reported with its own rank."""
    kept = keep("unused")
    kept.keeper.start(
        StartProcesses(0, (python(0, "import signal; signal.pause()"), python(4, "import signal; signal.pause()")))
    )
    kept.drive(WorkersStarted)
    os.kill(kept.pid, 9)
    kept.drive(WorkersExited)
    assert [(f.local_rank, f.rank, f.exitcode) for f in failures(kept.seen)] == [(0, 10, -9), (4, 14, -9)]
    until(lambda: not any(map(is_alive, kept.keeper.pids(0).values())))
    assert isinstance(kept.stop(), WorkersStopped)
