"""`frozen` and `evolve` of the core: attrs' own, made cheap. What attrs promises must still hold."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import attrs
import pytest
from attrs import field

from reknit.core import agent, commands, entries, events, job, ranks, reasons
from reknit.core.values import evolve, frozen


@frozen
class Nothing:
    """No field at all."""


@frozen
class One:
    only: int = 0


@frozen
class Two:
    left: int
    right: Mapping[str, int] = field(factory=dict)


@frozen
class Twin:
    left: int
    right: Mapping[str, int] = field(factory=dict)


def test_equal_are_values_of_one_class_with_equal_fields() -> None:
    """The agents' agreement is checked by comparing jobs."""
    assert Nothing() == Nothing()
    assert One(1) == One(1)
    assert One(1) != One(2)
    assert Two(1, {"a": 1}) == Two(1, {"a": 1})
    assert Two(1) != Twin(1)
    assert One(1) != (1,)


def test_equal_values_have_equal_hashes() -> None:
    """Entries are keys of what was said, and members of sets."""
    assert len({Nothing(), Nothing(), One(1), One(1), One(2)}) == 3
    assert hash(entries.Lost(entries.Node(entries.NodeId("a")), entries.Node(entries.NodeId("b"))))
    with pytest.raises(TypeError):
        hash(Two(1))


def test_a_value_never_changes() -> None:
    """States of the past are kept in traces, and shared between agents in the simulator."""
    value = Two(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.left = 2  # type: ignore[misc]
    with pytest.raises((AttributeError, attrs.exceptions.FrozenInstanceError)):
        value.other = 2  # type: ignore[attr-defined]


def test_a_changed_copy_leaves_the_original() -> None:
    """Every step makes one."""
    value = Two(1, {"a": 1})
    copy = evolve(value, left=2)
    assert (value.left, copy.left) == (1, 2)
    assert copy.right is value.right
    assert evolve(value) == value


def test_a_copy_with_a_field_that_is_none_is_refused() -> None:
    """A misspelt field would be lost silently."""
    with pytest.raises((KeyError, TypeError)):
        evolve(One(1), onyl=2)


def test_defaults_are_made_for_each_value() -> None:
    """A shared mapping would be one job's members in another's."""
    assert Two(1).right is not Two(1).right


def test_a_value_is_shown_as_it_is_written() -> None:
    """A failed assertion or a trace must say what it holds."""
    assert repr(Nothing()) == "Nothing()"
    assert repr(Two(1, {"a": 2})) == "Two(left=1, right={'a': 2})"


def test_values_are_matched_by_position() -> None:
    """`case Lost(node, by)` reads the fields in their order."""
    match Two(1, {}):
        case Two(left, right):
            assert (left, right) == (1, {})


def test_values_can_be_pickled() -> None:
    """Embedders send them between processes."""
    value = commands.Append(entries.Succeeded(entries.Node(entries.NodeId("n0"), 1), 2))
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("module", [agent, commands, entries, events, job, ranks, reasons])
def test_every_value_of_the_core_is_frozen_and_slotted(module: object) -> None:
    """One that is not would be changed in place some day."""
    classes = [c for c in vars(module).values() if isinstance(c, type) and attrs.has(c)]
    assert classes
    for cls in classes:
        assert "__dict__" not in dir(cls), f"{cls.__name__} has no slots"
        assert cls.__setattr__ is not object.__setattr__, f"{cls.__name__} can be changed"
