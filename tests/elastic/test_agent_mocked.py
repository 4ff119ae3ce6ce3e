"""An agent as its users' unit tests have it: no process, and methods that a mock has replaced."""

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest

from reknit.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from reknit.elastic.multiprocessing import SignalException
from reknit.elastic.multiprocessing.errors import ProcessFailure
from reknit.elastic.rendezvous import RendezvousParameters
from reknit.elastic.rendezvous.registry import get_rendezvous_handler

HEALTHY, SUCCEEDED, FAILED, UNHEALTHY = (
    RunResult(WorkerState.HEALTHY),
    RunResult(WorkerState.SUCCEEDED, {0: "value"}),
    RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, 999, 1, "<none>")}),
    RunResult(WorkerState.UNHEALTHY, failures={0: ProcessFailure(0, 999, 1, "<none>")}),
)


class FakeAgent(SimpleElasticAgent):
    """Its workers are their ranks."""

    starts = 0
    stops = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.starts += 1
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # Whoever stops workers may forget the round.
        worker_group.group_rank = worker_group.group_world_size = None
        self.stops += 1

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise NotImplementedError

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None: ...


def agent(max_restarts: int = 1, handler: Any = None) -> FakeAgent:
    return FakeAgent(
        WorkerSpec("role", 1, handler, entrypoint=print, max_restarts=max_restarts, monitor_interval=0.001)
    )


@pytest.mark.parametrize(
    ("looks", "state", "starts", "left"),
    [
        ([HEALTHY, HEALTHY, SUCCEEDED], WorkerState.SUCCEEDED, 1, 3),
        ([HEALTHY, FAILED, HEALTHY, SUCCEEDED], WorkerState.SUCCEEDED, 2, 2),
        ([UNHEALTHY, HEALTHY, UNHEALTHY, SUCCEEDED], WorkerState.SUCCEEDED, 3, 1),
        ([FAILED] * 4, WorkerState.FAILED, 4, 0),
    ],
)
def test_what_the_workers_do_decides(looks: list[RunResult], state: WorkerState, starts: int, left: int) -> None:
    """The counts that torch's own tests look at."""
    with (
        patch.object(FakeAgent, "_monitor_workers", side_effect=looks),
        patch.object(FakeAgent, "_record_metrics") as told,
    ):
        made = agent(max_restarts=3)
        result = made.run()
    told.assert_called_once_with(result)
    assert (result.state, made.starts, made.stops, made._remaining_restarts) == (
        state,
        starts,
        starts - (state is WorkerState.SUCCEEDED),
        left,
    )


def test_an_initialisation_that_fails() -> None:
    """The group stays as it was, and the error is the caller's."""
    with patch.object(FakeAgent, "_initialize_workers", side_effect=RuntimeError("no")):
        made = agent()
        with pytest.raises(RuntimeError, match="no"):
            made.run()
    assert made.get_worker_group().state is WorkerState.INIT


def test_a_signal_is_handed_to_shutdown() -> None:
    """As the first argument, once."""
    made = agent()
    with (
        patch.object(made, "_invoke_run", side_effect=SignalException("a signal", signal.SIGTERM)),
        patch.object(made, "_shutdown") as shutdown,
        pytest.raises(SignalException),
    ):
        made.run()
    assert shutdown.mock_calls == [call(signal.SIGTERM, timeout=30)]


def test_a_node_that_is_not_needed() -> None:
    """Wherever the handler has said so. torch returns None here, which no caller expects."""
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

    made = agent()
    with (
        patch.object(made, "_invoke_run", side_effect=RendezvousGracefulExitError),
        patch.object(made, "_shutdown") as end,
    ):
        assert made.run().state is WorkerState.STOPPED
    end.assert_called_once()


def test_a_handler_that_is_a_mock() -> None:
    """Somebody tests a subclass without any rendezvous. The methods of the agent are called alone."""
    handler = MagicMock()
    handler.get_run_id.return_value, handler.get_backend.return_value = "id", "mock"
    made = agent(handler=handler)
    assert made.get_event_succeeded().metadata["run_id"] == "id"
    with made.record_duration("MINE"):
        pass
    with patch("reknit.elastic.agent.server.api.put_metric") as put:
        made._record_flakiness_metric()
        made._record_flakiness_metric(is_failed=True)
    assert put.mock_calls == [call("workers.role.flakiness", 0), call("workers.role.flakiness", 100)]


@pytest.mark.parametrize("handler", [None, "c10d"])
def test_the_methods_of_a_round_alone(handler: str | None) -> None:
    """Each restart has a place of its own. The ids are those that the subclass gives."""
    parameters = RendezvousParameters("c10d", "localhost:0", "id", 1, 1)
    made = agent(handler=None if handler is None else get_rendezvous_handler(parameters))
    group = made.get_worker_group()
    try:
        for count in range(1, 4):
            made._restart_workers(group)
            assert (made.starts, made.stops, group.group_rank, group.group_world_size) == (count, count, 0, 1)
            assert group.workers[0].id == group.workers[0].global_rank == 0
            assert group.master_port
    finally:
        if handler is not None:
            group.spec.rdzv_handler.shutdown()
