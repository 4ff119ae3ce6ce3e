"""torchelastic's events of real jobs: `reknit run`, and agents that a program runs itself."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from reknit import Meeting, RestartPolicy, Settings, Terms
from reknit.adapters.observe.destinations import HANDLERS, RENDEZVOUS, UnusableHandler
from reknit.app.wiring import recording
from reknit.core.agent.states import WorkerState
from reknit.runtime import run
from tests.support.command import STUBBORN, Run, refusal
from tests.support.command import run as run_command
from tests.support.handlers import TO_A_FILE, Failing, Hung, Kept, install
from tests.support.leaks import nothing_left
from tests.support.waiting import read_pids

ROUND = [("AGENT", "RENDEZVOUS"), ("AGENT", "ASSIGN_WORKER_RANKS"), ("WORKER", "START")]
DONE = [*ROUND, ("WORKER", "SUCCEEDED"), ("AGENT", "SUCCEEDED")]


def told(lines: list[str]) -> list[tuple[str, str]]:
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [(event["source"], event["metadata"]["state"]) for event in events]


def installed(tmp_path: Path, source: str = TO_A_FILE, name: str = "ToAFile") -> dict[str, str]:
    """Variables with which `reknit run` finds an installed package that brings the handler `ours`."""
    install(tmp_path, "our_platform", source, ours=f"our_platform:{name}")
    return {"PYTHONPATH": str(tmp_path), "EVENTS": str(tmp_path / "events")}


# ---- reknit run ----


def test_events_on_the_console(tmp_path: Path) -> None:
    """What somebody tries first. The lines stand among reknit's own, and each is whole."""
    status, job = run_command(tmp_path, "--event-log-handler=console", "--max-restarts=1", "w.py", script="1 / 0")
    assert status == 1
    lines = job.err.splitlines()
    assert told(lines) == [*ROUND, *ROUND, ("WORKER", "FAILED"), ("AGENT", "SUCCEEDED")]
    failed = next(json.loads(line) for line in lines if '"FAILED"' in line)
    assert "ZeroDivisionError" in failed["metadata"]["raw_error"]
    assert failed["metadata"]["worker_id"] == str(json.loads(failed["metadata"]["metadata"])["worker_pid"])
    assert failed["timestamp"] > 1_700_000_000_000
    assert not lines[-1].startswith("{"), "the report comes last"


def test_without_a_handler_there_are_no_events(tmp_path: Path) -> None:
    """The default, and `null`, as in torchrun. Nothing of it is even imported before the workers run."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import os, sys\n"
        "from reknit.app.cli.main import main\n"
        "leave = os._exit\n"
        "os._exit = lambda status: (print(*sys.modules, sep='\\n'), sys.stdout.flush(), leave(status))\n"
        "main()\n"
    )
    for option in ([], ["--event-log-handler=null"]):
        argv = [sys.executable, str(launcher), "run", *option, "--no-python", "true"]
        status, job = run_command(tmp_path, *argv)
        assert (status, told(job.err.splitlines())) == (0, [])
        loaded = set(job.out.split())
        assert "reknit.app.cli.running" in loaded
        assert not loaded & {"logging", "queue", "importlib.metadata", "reknit.app.wiring.recording"}


def test_a_handler_of_an_installed_package(tmp_path: Path) -> None:
    """A platform installs its handler on the image, and sets the variable for all jobs."""
    env = {**installed(tmp_path), "PET_EVENT_LOG_HANDLER": "ours"}
    status, job = run_command(tmp_path, "--no-python", "true", env=env)
    assert (status, job.err.count("handler")) == (0, 0), job.err
    assert told((tmp_path / "events").read_text().splitlines()) == DONE


def test_a_handler_that_fails_costs_the_job_nothing_but_a_line(tmp_path: Path) -> None:
    """The platform's mistake is not the job's: one line, and the job goes on."""
    source = "import logging\nclass Fails(logging.Handler):\n    def emit(self, record): raise OSError('no\\nroute')"
    env = installed(tmp_path, source, "Fails")
    status, job = run_command(tmp_path, "--event-log-handler=ours", "--no-python", "true", env=env)
    assert status == 0
    assert [line for line in job.said if "handler" in line] == ["the event handler ours fails: OSError: no route"]
    assert "Traceback" not in job.err
    assert job.said[-1] == "the job succeeded"


def test_a_handler_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Neither a restart nor the end of the job waits for it, except for some seconds at the end."""
    source = """
        import logging, threading
        class Hangs(logging.Handler):
            def emit(self, record):
                threading.Event().wait()
    """
    env = installed(tmp_path, source, "Hangs")
    argv = ("--event-log-handler=ours", "--max-restarts=1", "--no-python", "false")
    status, job = run_command(tmp_path, *argv, env=env)
    assert status == 1
    lines = [line for line in job.said if "handler" in line]
    assert lines == ["the event handler ours has not taken 8 events"]


def test_an_unknown_handler_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A typing error is one line, and not a job without its events."""
    line = refusal(tmp_path, "--event-log-handler=cnosole", "--no-python", "touch", "ran")
    assert line.startswith("--event-log-handler=cnosole: no event handler is called 'cnosole'; there are console and")
    line = refusal(tmp_path, "--no-python", "touch", "ran", env={"PET_EVENT_LOG_HANDLER": "nowhere"})
    assert line.startswith("PET_EVENT_LOG_HANDLER=nowhere: ")
    line = refusal(tmp_path, "--event-log-handler=nowhere:x", "--no-python", "touch", "ran")
    why = "cannot be made: ModuleNotFoundError: No module named 'nowhere'"
    assert line == f"--event-log-handler: the event handler nowhere:x {why}"
    assert not (tmp_path / "ran").exists()


def test_a_signal_ends_workers_and_agent(tmp_path: Path) -> None:
    """A scheduler takes the node away: the platform reads that workers and agent were ended."""
    with Run(tmp_path, "--event-log-handler=console", STUBBORN, "pids", "wait") as job:
        read_pids(tmp_path / "pids", 1)
        job.signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
    assert told(job.err.splitlines()) == [*ROUND, ("WORKER", "TERMINATED"), ("AGENT", "FAILED")]


HANGS = "import signal, reknit; reknit.progress(7); signal.pause()"


def test_a_worker_that_hangs(tmp_path: Path) -> None:
    """Why it was killed is an event of its own, and stands in the worker's error as well."""
    argv = ("--event-log-handler=console", "--hang-after=1", "w.py")
    _, job = run_command(tmp_path, *argv, script=HANGS)
    events = [json.loads(line) for line in job.err.splitlines() if line.startswith("{")]
    assert [event["name"].rpartition(".")[2] for event in events[3:]] == [
        "no progress",
        "kill worker process",
        "FAILED",
        "SUCCEEDED",
    ]
    error = json.loads(events[5]["metadata"]["raw_error"])["message"]["message"]
    assert re.search(r"no progress for [\d.]+ s after step 7", error)


# ---- a program ----


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    handler = Kept()
    monkeypatch.setitem(HANDLERS, "mine", handler)
    return handler


def test_a_program_that_runs_an_agent(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same events as `reknit run`, and all of them when the agent is closed. Nothing is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run(Settings(command=("true",), event_handler="mine"))  # what is imported or made once in a process is no leak
    kept.lines.clear()
    with nothing_left(tmp_path):
        result = run(Settings(command=("true",), event_handler="mine", run_id="job42"))
    assert result.state is WorkerState.SUCCEEDED
    assert kept.told() == DONE
    for event in kept.events():
        assert event["name"] == f"torchelastic.worker.status.{event['metadata']['state']}"
        assert event["metadata"]["run_id"] == "job42"
        assert event["metadata"]["rdzv_backend"] == "reknit"


def test_what_goes_to_the_console_goes_where_the_other_lines_go() -> None:
    """A notebook shows the lines of the agent itself."""
    lines: list[str] = []
    run(Settings(command=("true",), event_handler="console"), say=lines.append)
    assert told(lines) == DONE


def test_a_function_has_its_name(kept: Kept, tmp_path: Path) -> None:
    """As in torch. And the backend is that of the meeting."""
    settings = Settings(
        function=os.getpid,
        terms=Terms(restarts=RestartPolicy(max_restarts=0)),
        meeting=Meeting("file", folder=str(tmp_path)),
        run_id="j",
        event_handler="mine",
    )
    run(settings)
    first = kept.events()[0]["metadata"]
    assert json.loads(first["metadata"])["entry_point"] == "getpid"
    assert first["rdzv_backend"] == "file"


def test_the_rendezvous_is_told_to_those_who_listen(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of its destination is torch's."""
    meetings = Kept()
    monkeypatch.setitem(HANDLERS, RENDEZVOUS, meetings)
    run(Settings(command=("true",), event_handler="mine"))
    assert [json.loads(line)["name"] for line in meetings.lines] == ["reknit:join", "reknit:start", "reknit:end"]
    assert {json.loads(line)["pid"] for line in meetings.lines} == {os.getpid()}
    assert kept.told() == DONE


@pytest.mark.parametrize("kind", [Failing, Hung])
def test_a_handler_in_trouble_does_not_end_a_job(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets its result, and one line of what was wrong."""
    handler, lines = kind(), []
    monkeypatch.setitem(HANDLERS, "mine", handler)
    monkeypatch.setattr(recording, "FLUSH_S", 0.0 if kind is Hung else 60.0)
    try:
        result = run(Settings(command=("true",), event_handler="mine"), say=lines.append)
    finally:
        if kind is Hung:
            handler.come_back.set()
    assert result.state is WorkerState.SUCCEEDED
    assert len([line for line in lines if line.startswith("reknit: the event handler mine ")]) == 1


def test_a_level_above_events_records_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOGLEVEL is torch's switch."""
    lines: list[str] = []
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    run(Settings(command=("true",), event_handler="console"), say=lines.append)
    assert told(lines) == []


def test_an_unknown_handler_of_a_program() -> None:
    """It raises before a worker runs, and leaves nothing."""
    with pytest.raises(UnusableHandler, match="no event handler is called 'nowhere'"):
        run(Settings(command=("true",), event_handler="nowhere"))
    with pytest.raises(ValueError, match=r"Settings\.event_handler must be a name"):
        Settings(command=("true",), event_handler="")
