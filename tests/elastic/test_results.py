"""`reknit.elastic.agent.server.results`: the core's result, and what the workers of this node have done, as torch has
them."""

from __future__ import annotations

import sys

import pytest

from reknit.core.agent.commands import Result
from reknit.core.agent.reasons import RunEnd, SignalReceived, StoreLost, TermsDiffer
from reknit.core.agent.states import WorkerState as CoreState
from reknit.core.job.entries import Node, NodeId
from reknit.core.job.reasons import AbortedByOperator, AllSucceeded, BudgetSpent, TooFewNodes, Unstable, WorkerFailed
from reknit.core.job.workers import WorkerFailure
from reknit.elastic.agent.server import results
from reknit.elastic.agent.server.group import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from reknit.elastic.agent.server.results import RendezvousFailed, failed_result, failures_of, run_result
from reknit.elastic.multiprocessing.errors import ProcessFailure

ECHO, ROOT = WorkerFailure(0, 4, 1, message="connection reset"), WorkerFailure(1, 5, 3, message="ValueError: x")
SPENT = BudgetSpent(0, WorkerFailed(Node(NodeId("b")), ROOT))
DONE, ABORTED, TOLD = AllSucceeded(), AbortedByOperator("enough"), SignalReceived(15)
WELL = RunResult(WorkerState.SUCCEEDED, {0: "value"})
BADLY = RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, 999, 1, "")})


def ended(state: CoreState, why: RunEnd, *failures: WorkerFailure) -> Result:
    return Result(state, why, failures={failure.rank: failure for failure in failures})


@pytest.mark.parametrize(
    ("job", "last", "state"),
    [
        (ended(CoreState.SUCCEEDED, DONE), WELL, None),
        (ended(CoreState.SUCCEEDED, DONE), BADLY, WorkerState.SUCCEEDED),
        (ended(CoreState.SUCCEEDED, DONE), None, WorkerState.SUCCEEDED),
        (ended(CoreState.STOPPED, TOLD), WELL, None),
        (ended(CoreState.STOPPED, ABORTED), BADLY, None),
        (ended(CoreState.STOPPED, ABORTED), None, WorkerState.STOPPED),
        (ended(CoreState.FAILED, SPENT, ROOT), BADLY, None),
        (ended(CoreState.FAILED, TooFewNodes(1, 2)), BADLY, None),
        (None, WELL, None),
        (None, None, WorkerState.STOPPED),
    ],
)
def test_what_run_returns(job: Result | None, last: RunResult | None, state: WorkerState | None) -> None:
    """docs/agents.md#result. `state` is None where the very object that the subclass has returned comes back."""
    made = run_result(job, last)
    if state is None:
        assert made is last
    else:
        assert made == RunResult(state)


@pytest.mark.parametrize("last", [None, WELL])
def test_a_failure_elsewhere_is_shown_by_its_root(last: RunResult | None) -> None:
    """Also if the workers of this node have succeeded. The root is not the first that was reported."""
    made = run_result(ended(CoreState.FAILED, SPENT, ECHO, ROOT), last)
    assert made.is_failed()
    assert {rank: failure.exitcode for rank, failure in made.failures.items()} == {5: 3}
    assert run_result(ended(CoreState.FAILED, Unstable(1), ECHO, ROOT), last).failures.keys() == {5}


@pytest.mark.parametrize(
    ("why", "name"),
    [
        (TooFewNodes(1, 2), "RendezvousTimeoutError"),
        (StoreLost("gone"), "RendezvousConnectionError"),
        (TermsDiffer(()), "RendezvousStateError"),
        (Unstable(1), "RendezvousClosedError"),
    ],
)
def test_what_is_no_workers_failure_is_an_error(why: RunEnd, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's where its module is loaded, and otherwise reknit's own."""
    from torch.distributed.elastic.rendezvous import api as torchs

    with pytest.raises(getattr(torchs, name)):
        run_result(ended(CoreState.FAILED, why), None)
    monkeypatch.delitem(sys.modules, results._TORCHS_ERRORS)
    with pytest.raises(RendezvousFailed):
        run_result(ended(CoreState.FAILED, why), WELL)


@pytest.mark.parametrize("state", [WorkerState.FAILED, WorkerState.UNHEALTHY])
def test_a_failure_without_a_worker_gets_one(state: WorkerState) -> None:
    """Callers of torch ask for the first failure of a failed result."""
    group = WorkerGroup(WorkerSpec("trainer", 1, entrypoint="true"))
    group.workers = [Worker(0, 7)]
    said = RunResult(state, {7: "value"})
    made = failed_result(said, failures_of(said, group))
    assert (made.state, made.return_values, list(made.failures)) == (WorkerState.FAILED, {7: "value"}, [7])
    assert state.value in str(made.failures[7].message)
    unhealthy = RunResult(state, failures=BADLY.failures)
    assert failed_result(unhealthy, failures_of(unhealthy, group)) == BADLY
