"""`LocalElasticAgent` with functions as workers, as the documentation's example has it."""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import WorkersExited, WorkersStarted
from reknit.core.job.workers import NoProgress
from reknit.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.rendezvous import RendezvousParameters
from reknit.elastic.rendezvous.handler import ReknitRendezvousHandler
from tests.elastic import worked
from tests.support import hanging
from tests.support.leaks import nothing_left
from tests.support.meeting import meet

METHODS = ("spawn", "fork", "forkserver")


def spec(entrypoint: Any, *args: Any, **more: Any) -> WorkerSpec:
    given: dict[str, Any] = {"role": "trainer", "local_world_size": 2, "max_restarts": 0, **more}
    return WorkerSpec(entrypoint=entrypoint, args=args, **given)


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    LocalElasticAgent(spec(worked.trainer, "x")).run()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    first()
    with nothing_left():
        yield


@pytest.mark.parametrize("start_method", METHODS)
def test_return_values(start_method: str) -> None:
    """By global rank, with every start method. The macro in the arguments is replaced for functions as well."""
    result = LocalElasticAgent(spec(worked.trainer, "${local_rank}"), start_method).run()
    assert not result.is_failed()
    assert result.return_values == {0: "do train 0 0", 1: "do train 1 1"}


@pytest.mark.parametrize("start_method", METHODS)
def test_a_function_that_fails_is_started_again(start_method: str) -> None:
    """The values are those of the round that succeeds."""
    result = LocalElasticAgent(spec(worked.flaky, "x", max_restarts=1), start_method).run()
    assert result.return_values == {0: "do train x 0", 1: "do train x 1"}


def test_a_forked_worker_has_the_memory_as_of_its_round() -> None:
    """As in torch. A program may note something between two rounds."""
    notes = ["at the start"]

    class Noting(LocalElasticAgent):
        def _restart_workers(self, worker_group: Any) -> None:
            notes[0] = "at the restart"
            super()._restart_workers(worker_group)

    result = Noting(spec(lambda: worked.flaky("x") and notes[0], max_restarts=1), "fork").run()
    assert set(result.return_values.values()) == {"at the restart"}


def test_the_exception_of_a_function_is_in_the_result() -> None:
    """Nobody has to decorate a function: its error is recorded."""
    result = LocalElasticAgent(spec(worked.flaky, "x")).run()
    assert result.is_failed()
    assert "ValueError: the first time" in str(next(iter(result.failures.values())).message)


def test_functions_of_two_agents_meet(tmp_path: Path) -> None:
    """Each agent returns the values of its own workers, under their global ranks."""
    agents = []
    for name in ("a", "b"):
        params = RendezvousParameters(
            "reknit", str(tmp_path), "job", 2, 2, local_addr="127.0.0.1", node_id=name, last_call_timeout=1
        )
        agents.append(LocalElasticAgent(spec(meet, rdzv_handler=ReknitRendezvousHandler(params), local_world_size=1)))
    results: list[RunResult] = []
    threads = [threading.Thread(target=lambda agent: results.append(agent.run()), args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert dict(sorted((results[0].return_values | results[1].return_values).items())) == {0: 3, 1: 3}


@pytest.mark.parametrize("start_method", METHODS)
def test_a_hung_function(start_method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PET_HANG_AFTER says when. The failure tells why, what it was doing, and that the agent has ended it."""
    monkeypatch.setenv("PET_HANG_AFTER", "6")
    hanging_spec = spec(hanging.waits, str(tmp_path), local_world_size=1)
    result = LocalElasticAgent(hanging_spec, start_method).run()
    assert result.state == WorkerState.FAILED
    (failure,) = result.failures.values()
    assert isinstance(failure.cause, NoProgress)
    assert failure.cause.since_start
    assert re.match(
        r"no progress for [\d.]+ s, and none since its start, in waits .*\(killed by SIG", failure.message["message"]
    )
    assert "waits" in failure.message["extraInfo"]["py_callstack"]


def test_functions_that_end_while_they_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent learns of the start and of the end at one look. That they did not return is a failure like another."""
    events = KeeperClient.events

    def late(keeper: KeeperClient, now: float) -> list[Event]:
        found = events(keeper, now)
        while any(isinstance(event, WorkersStarted) for event in found) and not any(
            isinstance(event, WorkersExited) for event in found
        ):
            found += events(keeper, now)
        return found

    monkeypatch.setattr(KeeperClient, "events", late)
    result = LocalElasticAgent(spec(worked.leaves, max_restarts=1), start_method="fork").run()
    assert result.state is WorkerState.FAILED
    assert {failure.exitcode for failure in result.failures.values()} == {1}
