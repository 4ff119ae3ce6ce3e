"""`reknit.elastic.events`, and what agents record, with torch as the oracle."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.observe import destinations
from reknit.adapters.observe.destinations import UnusableHandler
from reknit.elastic import events
from reknit.elastic.agent.server.api import RunResult, WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.events import agents, handlers
from reknit.elastic.launcher.api import LaunchConfig, launch_agent
from reknit.elastic.multiprocessing import SignalException
from tests.elastic.agents import PlainAgent, spec
from tests.elastic.launched import Job, launched
from tests.support.handlers import Failing, Hung, Kept
from tests.support.leaks import nothing_left
from tests.support.waiting import until

ROUND = [("AGENT", "RENDEZVOUS"), ("AGENT", "ASSIGN_WORKER_RANKS"), ("WORKER", "START")]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """A handler for the destinations `mine` and `dynamic_rendezvous`."""
    handler = Kept()
    monkeypatch.setitem(handlers._log_handlers, "mine", handler)
    monkeypatch.setitem(handlers._log_handlers, "dynamic_rendezvous", handler)
    yield handler
    agents.flush()


# ---- what programs call ----


def test_an_event_goes_to_its_destination(kept: Kept) -> None:
    """A platform adds its own destination as with torch. A name that nobody added is an error and not silence. The
    handler has the event when the call returns."""
    event = events.Event("x", events.EventSource.AGENT)
    events.record(event, "mine")
    events.record(event)
    assert kept.lines == [event.serialize()]
    with pytest.raises(KeyError):
        events.record(event, "nowhere")


def test_a_rendezvous_event_names_who_tells_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults are the caller, this host and this process, as in torch. A failure brings its traceback."""
    from torch.distributed.elastic import events as theirs
    from torch.distributed.elastic.events import handlers as their_handlers

    oracle = Kept()
    monkeypatch.setitem(their_handlers._log_handlers, "dynamic_rendezvous", oracle)
    for package in (events, theirs):
        # Both packages use a logger of the same name, and each adds its handler.
        monkeypatch.setattr(destinations, "_LOGGERS", {})
        monkeypatch.setattr(theirs, "_events_loggers", {})
        monkeypatch.setattr(logging.getLogger("torchelastic-events-dynamic_rendezvous"), "handlers", [])
        for more in ({}, {"name": "step"}):
            try:
                raise ValueError("gone")
            except ValueError:
                package.construct_and_record_rdzv_event("job", "left", package.NodeState.FAILED, rank=2, **more)
    found = [json.loads(line) for line in kept.lines]
    assert found == [json.loads(line) for line in oracle.lines]
    assert found[0]["name"] == "test_events.py:test_a_rendezvous_event_names_who_tells_it"
    assert (found[0]["pid"], found[0]["rank"], found[0]["node_state"]) == (os.getpid(), 2, "FAILED")
    assert "ValueError: gone" in found[0]["error_trace"]


def test_a_rendezvous_event_costs_nothing_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the caller is slow, and the destination drops events by default."""
    monkeypatch.setattr(events, "record_rdzv_event", lambda event: pytest.fail("recorded"))
    events.construct_and_record_rdzv_event("job", "joined", events.NodeState.RUNNING)


def test_a_logger_has_the_handler_that_the_module_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of programs replace this function, as torch's own tests do."""
    monkeypatch.setattr(events, "get_logging_handler", lambda destination: logging.NullHandler())
    logger = events._get_or_create_logger("replaced")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]


# ---- what agents record, beside torch ----


def inner(event: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event["metadata"]["metadata"])
    return found


def alike(event: dict[str, Any]) -> tuple[Any, ...]:
    """What is the same with torch and with reknit."""
    metadata = event["metadata"]
    if metadata["state"] == "RUNNING":
        # torch's watchdog has no duration. And whether the restart is counted when it stops is no promise.
        metadata = {**metadata, "duration_ms": None, "agent_restarts": 0}
    names = ("run_id", "global_rank", "role", "hostname", "state", "rdzv_backend", "agent_restarts")
    values = {name: value[0] if isinstance(value, list) else value for name, value in inner(event).items()}
    if event["source"] == "AGENT" and metadata["duration_ms"] is not None:
        values["group_world_size"] = None  # torch tells that of the round before
    pid = metadata["worker_id"] if values.get("worker_pid") is not None else None
    values["worker_pid"] = str(values.get("worker_pid")) == pid if pid else None
    has_error = metadata["raw_error"] is not None
    return event["name"], event["source"], sorted(metadata), [metadata[name] for name in names], has_error, values


JOBS = {
    "succeeds": Job("exit 0"),
    "fails": Job("exit $RANK"),
    "fails with a restart": Job("exit $RANK", max_restarts=1),
    "fails with a restart, and timers are watched": Job("exit $RANK", max_restarts=1, watches_timers=True),
    "succeeds after a restart": Job("exit $((1 - TORCHELASTIC_RESTART_COUNT))", max_restarts=2),
}


@pytest.mark.beside_torch
@pytest.mark.parametrize("name", JOBS)
def test_an_agent_records_what_torchs_agent_records(name: str) -> None:
    """The same events in the same order with the same fields: a platform need not learn anything."""
    theirs, ours = launched("torch.distributed", JOBS[name]), launched("reknit", JOBS[name])
    assert [alike(event) for event in ours.events] == [alike(event) for event in theirs.events]
    assert len(ours.events) >= 7
    assert ours.end == theirs.end


@pytest.mark.beside_torch
def test_what_is_better_than_with_torch() -> None:
    """The differences that docs/differences.md lists."""
    theirs, ours = launched("torch.distributed", JOBS["fails"]), launched("reknit", JOBS["fails"])
    assert {event["timestamp"] for event in theirs.events} == {0}
    times = [event["timestamp"] for event in ours.events]
    assert times == sorted(times)
    assert times[0] > 1_700_000_000_000
    assert inner(theirs.events[3])["local_rank"] == [1]
    assert inner(ours.events[3])["local_rank"] == 1
    assert theirs.events[0]["metadata"]["group_rank"] is None
    assert ours.events[0]["metadata"]["group_rank"] == 0


def test_reknit_run_records_the_same(tmp_path: Path) -> None:
    """Whichever way a job is run, its events are the same."""
    script = "kill -9 $$"
    argv = ["--max-restarts=1", "--nproc-per-node=2", "--role=trainer", "--rdzv-id=j", "--no-python", "sh", "-c"]
    command = [sys.executable, "-m", "reknit", "run", "--event-log-handler=console", *argv, script]
    env = os.environ | {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    expected = launched("reknit", Job(script, max_restarts=1, watches_timers=True)).events
    assert len(found) == len(expected) == 15
    for event in (*found, *expected):
        event["metadata"]["rdzv_backend"] = ""
    ends = (slice(0, 12), slice(14, 15))  # which of the two workers is seen first is chance
    for end in ends:
        assert [alike(event) for event in found[end]] == [alike(event) for event in expected[end]]
    assert {event["source"] for event in found[12:14]} == {"WORKER"}


def test_an_agent_records_why_a_worker_was_killed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as `reknit run`."""
    monkeypatch.setenv("PET_HANG_AFTER", "1")
    args = ("-c", "import signal, reknit; reknit.progress(7); signal.pause()")
    hangs = WorkerSpec("trainer", 1, entrypoint=sys.executable, args=args, max_restarts=0, event_log_handler="mine")
    assert LocalElasticAgent(hangs).run().is_failed()
    found = [event for event in kept.events() if "source" in event][3:]
    names = [event["name"].rpartition(".")[2] for event in found]
    assert names == ["no progress", "kill worker process", "FAILED"]
    assert inner(found[0])["step"] == 7
    assert re.search(r"no progress for [\d.]+ s after step 7", found[2]["metadata"]["raw_error"])


class Labelled(PlainAgent):
    """Adds to its events and metrics, as a platform does."""

    def _construct_event(self, *args: Any, **more: Any) -> events.Event:
        event = super()._construct_event(*args, **more)
        event.metadata["label"] = "ours"
        return event

    def _record_worker_events(self, result: RunResult) -> None:
        events.record(events.Event("end of workers", events.EventSource.AGENT), "mine")
        super()._record_worker_events(result)


def test_a_subclass_adds_to_what_is_recorded(kept: Kept) -> None:
    """The methods that record can be overridden, as in torch."""
    Labelled(spec("pass", event_log_handler="mine", local_world_size=1)).run()
    found = [event for event in kept.events() if "source" in event]
    assert [event["metadata"].get("label") for event in found if event["metadata"]] == ["ours"] * 4
    assert [event["name"] for event in found].count("end of workers") == 1


# ---- handlers in trouble ----


def agent(**more: Any) -> LocalElasticAgent:
    return LocalElasticAgent(WorkerSpec("trainer", 1, entrypoint="true", event_log_handler="mine", **more))


def test_an_agent_leaves_no_thread_and_has_told_all(kept: Kept, tmp_path: Path) -> None:
    """A program looks at its handler when `run` returns."""
    agent().run()
    kept.lines.clear()
    with nothing_left(tmp_path):
        agent().run()
        assert [(event["source"], event["metadata"]["state"]) for event in kept.events() if "source" in event] == [
            *ROUND,
            ("WORKER", "SUCCEEDED"),
        ]


def test_the_rendezvous_of_an_agent_is_told(kept: Kept) -> None:
    """To the destination of torch's own rendezvous, if somebody listens there."""
    agent().run()
    assert [event["name"] for event in kept.events() if "source" not in event] == [
        "reknit:join",
        "reknit:start",
        "reknit:end",
    ]


@pytest.mark.parametrize("kind", [Failing, Hung])
def test_a_handler_does_not_end_an_agent(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With torch the error of a handler ends the agent, and a handler that hangs stops it."""
    handler = kind()
    monkeypatch.setitem(handlers._log_handlers, "mine", handler)
    monkeypatch.setattr(agents, "FLUSH_S", 0.0 if kind is Hung else 60.0)
    monkeypatch.setattr(agents, "_deliveries", {})
    try:
        assert not agent().run().is_failed()
        assert launch_agent(LaunchConfig(1, 1, 1, event_log_handler="mine"), "true", []) == {0: None}
    finally:
        if kind is Hung:
            handler.come_back.set()
            until(lambda: not any(thread.name == "events mine" for thread in threading.enumerate()))
    said = [record.getMessage() for record in caplog.records if "event handler" in record.getMessage()]
    assert len(said) == (1 if kind is Failing else len(said)) > 0
    assert all(line.startswith("the event handler mine ") for line in said)


def test_an_unknown_handler_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """torch raises `KeyError` when the first event is recorded, which is after the rendezvous."""
    plain = PlainAgent(spec("pass", event_log_handler="nowhere"))
    with pytest.raises(UnusableHandler, match="no event handler is called 'nowhere'"):
        plain.run()
    assert plain.calls == []
    with pytest.raises(KeyError, match="no event handler is called 'nowhere'"):
        launch_agent(LaunchConfig(1, 1, 1, event_log_handler="nowhere"), "true", [])


class Signalling(Kept):
    """Sends SIGTERM to this process when a worker was started."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if '"START"' in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.alone
@pytest.mark.slow
def test_a_signal_ends_workers_and_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `reknit run` does it. torch tells the end of the agent alone."""
    monkeypatch.setitem(handlers._log_handlers, "mine", kept := Signalling())
    with pytest.raises(SignalException) as caught:
        launch_agent(LaunchConfig(1, 1, 1, event_log_handler="mine"), "/bin/sh", ["-c", "sleep 1000"])
    assert caught.value.sigval is signal.SIGTERM
    assert kept.told() == [*ROUND, ("WORKER", "TERMINATED"), ("AGENT", "FAILED")]
    assert "SignalException" in kept.events()[-1]["metadata"]["raw_error"]
