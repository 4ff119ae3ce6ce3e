"""What must hold of every value of the core."""

from __future__ import annotations

import pickle
from types import ModuleType

import attrs
import pytest

from reknit.core.agent import agent, commands, events, step
from reknit.core.agent import reasons as own_reasons
from reknit.core.agent import worker_words as own_workers
from reknit.core.agent.agent import NodeWorkers, Silence
from reknit.core.job import entries, job, reasons, workers
from reknit.core.job.entries import FORMAT, Joined, Left, Lost, Node, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job

A, B = Node(NodeId("a")), Node(NodeId("b"), 1)
MODULES = (agent, commands, entries, events, job, workers, own_workers, reasons, own_reasons, step)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_value_is_frozen_and_slotted(module: ModuleType) -> None:
    """States of the past are kept in traces and shared by agents in the simulator. None may be changed in place."""
    classes = [c for c in vars(module).values() if isinstance(c, type) and attrs.has(c)]
    assert classes
    for cls in classes:
        assert "__dict__" not in dir(cls), f"{cls.__name__} has no slots"
        assert cls.__setattr__ is not object.__setattr__, f"{cls.__name__} can be changed"


def test_a_value_refuses_to_be_changed() -> None:
    """The error comes where the mistake is made, not rounds later on another node."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        A.incarnation = 2  # type: ignore[misc]  # the mistake that is tested


def test_equal_entries_have_equal_hashes() -> None:
    """Entries are the keys of what an agent has said: one that is said again must be found there."""
    said = {Lost(A, B): 1.0, Joined(A, "x", 0, "a", 1): 2.0}
    assert said[Lost(Node(NodeId("a")), Node(NodeId("b"), 1))] == 1.0
    assert said[Joined(A, "x", 0, "a", 1)] == 2.0
    assert Lost(A, B) not in {Lost(B, A)}


def test_values_of_two_classes_are_never_equal() -> None:
    """The fold tells the kinds of entries apart by their class alone."""
    assert entries.LastCall(1) != entries.Admit(1)


@pytest.mark.parametrize(
    ("value", "field"),
    [(Job(), "live"), (Job(), "gone"), (Job(), "seats"), (NodeWorkers(), "exits"), (Silence(), "heard")],
)
def test_a_default_mapping_cannot_be_changed(value: object, field: str) -> None:
    """All values share it: one job's nodes would be in another's."""
    with pytest.raises(TypeError):
        getattr(value, field)["a"] = 1
    assert getattr(value, field) == {}


def test_the_defaults_are_those_of_the_documentation() -> None:
    """Users read them there, and two agents of one job must have the same."""
    policy = RestartPolicy()
    assert (policy.max_restarts, policy.max_unspent, policy.backoff_max_s, policy.steady_s) == (0, 1000, 60.0, 60.0)
    terms = Terms()
    assert (terms.min_nodes, terms.max_nodes, terms.join_timeout_s, terms.last_call_s) == (1, 1, 600.0, 30.0)
    assert (terms.settle_s, terms.beat_s, terms.silence_s, terms.format) == (1.0, 1.0, 4.0, FORMAT)
    ranks = workers.Assignment(0, 0, 1, 1, "trainer", 1, "host", 1, ())
    assert (Joined(A, "x", 0, "host", 1).seen, Left(A).seen, ranks.restart_count, ranks.max_restarts) == (-1, -1, 0, 0)


def test_values_can_be_pickled() -> None:
    """Embedders send what an agent wants done from one process to another."""
    value = commands.Append(Lost(A, B))
    assert pickle.loads(pickle.dumps(value)) == value


def test_values_are_matched_by_position() -> None:
    """`case Lost(node, by)` reads the fields in the order in which they are declared."""
    match Lost(A, B):
        case Lost(node, by):
            assert (node, by) == (A, B)
