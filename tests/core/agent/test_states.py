"""The states of a node's workers keep torchelastic's names."""

from __future__ import annotations

import pytest

from reknit.core.agent.states import WorkerState


def test_the_names_are_torchelastics() -> None:
    """Users' dashboards and subclasses compare with them."""
    theirs = pytest.importorskip("torch.distributed.elastic.agent.server.api").WorkerState
    assert {s.name: s.value for s in WorkerState} == {s.name: s.value for s in theirs}


@pytest.mark.parametrize("state", list(WorkerState))
def test_running_means_what_torchelastic_means(state: WorkerState) -> None:
    """A group that is about to be torn down still runs."""
    theirs = pytest.importorskip("torch.distributed.elastic.agent.server.api").WorkerState
    assert state.is_running == theirs.is_running(theirs(state.value))
