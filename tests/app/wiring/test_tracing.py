"""The traces that real agents leave: where they are, and what is not in them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from reknit import Settings
from reknit.adapters.observe.traces import below
from reknit.runtime import run as run_agent
from tests.support import places, traces
from tests.support.command import Run, run
from tests.support.waiting import until

FAILS_ONCE = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"


def test_every_run_leaves_a_trace_that_replays(tmp_path: Path) -> None:
    """Without an option. It names the job and the workers' command."""
    status, _ = run(tmp_path, "--max-restarts=1", "--rdzv-id=job7", "w.py", script=FAILS_ONCE)
    assert status == 0
    assert traces.check(tmp_path) > 10
    (trace,) = traces.left(tmp_path)
    assert trace.about is not None
    assert (trace.about.job, trace.about.command[-1]) == ("job7", "w.py")


@pytest.mark.parametrize("option", ["--log-dir=logs", "--redirects=3"])
def test_it_is_with_the_logs(tmp_path: Path, option: str) -> None:
    """They are kept together, and the host knows where."""
    status, _ = run(tmp_path, option, "w.py", script="pass")
    assert status == 0
    (trace,) = traces.left(tmp_path)
    assert os.path.basename(trace.path) == "trace"
    assert not trace.path.startswith(str(places.below(tmp_path)))
    assert traces.check(tmp_path) > 3
    if "logs" in option:
        assert [found.path for found in below(str(tmp_path / "logs"))] == [trace.path]


@pytest.mark.parametrize("how", ["option", "variable"])
def test_none_is_kept_if_none_is_wanted(tmp_path: Path, how: str) -> None:
    """By an option, or by a variable for all jobs of a host."""
    argv = ["--no-trace"] * (how == "option")
    status, _ = run(tmp_path, *argv, "w.py", script="pass", env={"PET_NO_TRACE": "1"} if how == "variable" else {})
    assert status == 0
    assert not (places.below(tmp_path) / "traces").exists()


def test_a_killed_agent_has_left_all_that_it_did(tmp_path: Path) -> None:
    """The start of the workers is in the trace before they run."""
    with Run(tmp_path, "w.py", script="import signal; open('up', 'w').close(); signal.pause()") as job:
        until((tmp_path / "up").exists, "the worker")
        job.signal(signal.SIGKILL)
    assert traces.check(tmp_path) > 3
    (trace,) = traces.left(tmp_path)
    assert '"StartWorkers"' in Path(trace.parts[0]).read_text()


def test_the_secret_of_the_store_is_not_in_it(tmp_path: Path) -> None:
    """Whoever gets a trace, for example with a report of a bug, cannot join the job."""
    meeting = ("--nnodes=1:2", "--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/jobs", "--rdzv-id=j")
    argv = (*meeting, "--rdzv-conf=last_call_timeout=0", "w.py")
    status, job = run(tmp_path, *argv, script="pass", env={"REKNIT_RDZV_SECRET": "sesame-4711"})
    assert status == 0, job.err
    (trace,) = traces.left(tmp_path)
    assert not any("sesame" in Path(part).read_text() for part in trace.parts)


def test_a_program_that_runs_an_agent_has_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it says no."""
    places.move(monkeypatch, tmp_path)
    for wants in (False, True):
        assert run_agent(Settings(command=(sys.executable, "-c", ""), trace=wants), say=lambda line: None)
        assert (traces.check(tmp_path) > 0) is wants
