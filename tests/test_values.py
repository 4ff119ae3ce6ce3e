"""`frozen` and `evolve` of the core: attrs' own, made cheap. What attrs promises must still hold."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

import reknit
from reknit.core import agent, commands, entries, events, job, ranks, reasons
from reknit.core.values import EMPTY, evolve, frozen

# No site-packages, where a .pth file may import anything.
BARE = {**os.environ, "PYTHONPATH": str(Path(reknit.__file__).parents[1])}


@frozen
class Nothing:
    """No field at all."""


@frozen
class One:
    only: int = 0


@frozen
class Two:
    left: int
    right: Mapping[str, int] = EMPTY


@frozen
class Twin:
    left: int
    right: Mapping[str, int] = EMPTY


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


def test_a_default_mapping_cannot_be_changed() -> None:
    """It is shared: one job's members would be in another's."""
    with pytest.raises(TypeError):
        Two(1).right["a"] = 1  # type: ignore[index]
    assert Two(1).right == {}


def test_attrs_takes_them_for_its_own() -> None:
    """`has`, `fields`, `evolve` and `asdict` are how others work with values, Hypothesis among them."""
    assert attrs.has(Two)
    assert [(a.name, a.default is attrs.NOTHING) for a in attrs.fields(Two)] == [("left", True), ("right", False)]
    assert attrs.evolve(Two(1), left=2) == Two(2)
    assert attrs.asdict(Two(1, {"a": 2})) == {"left": 1, "right": {"a": 2}}
    assert list(inspect.signature(Two).parameters) == ["left", "right"]


def test_an_agent_is_made_without_attrs() -> None:
    """It took half of the time before the first worker; so did the modules that it needs."""
    script = "import sys, reknit.app.run; print({'attr', 'attrs', 'typing', 're', 'inspect'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", script], env=BARE, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


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
