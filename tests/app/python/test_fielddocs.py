"""What `help()` shows of the values that a program makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pydoc
import subprocess
import sys

import attrs
import pytest

import reknit
from reknit.app.python.fielddocs import FieldDocs
from reknit.elastic.agent.server import RunResult, WorkerSpec
from reknit.elastic.launcher import LaunchConfig


@pytest.mark.parametrize("kind", [reknit.Settings, reknit.Meeting, reknit.Terms, reknit.RestartPolicy])
def test_help_describes_every_field(kind: type) -> None:
    """A program's author has no other list of the fields at hand."""
    shown = pydoc.plain(pydoc.render_doc(kind))
    assert all(f" |  {field.name}\n |      " in shown for field in attrs.fields(kind))


@pytest.mark.parametrize("kind", [WorkerSpec, LaunchConfig, RunResult])
def test_help_describes_every_field_of_torchs_values(kind: type) -> None:
    """They are dataclasses."""
    shown = pydoc.plain(pydoc.render_doc(kind))
    assert all(f" |  {field.name}\n |      " in shown for field in dataclasses.fields(kind))


def test_help_works_without_a_source() -> None:
    """Some install archives of compiled modules only."""
    made = type("Made", (), {"__doc__": FieldDocs("What it is.")})
    assert made.__doc__ == "What it is."


def test_a_python_without_docstrings() -> None:
    """`python -OO` drops them. Whoever reads the docstring finds none."""
    subprocess.run([sys.executable, "-OO", "-c", "import reknit; exit(reknit.Settings.__doc__)"], check=True)


def test_a_value_is_shown_and_copied_as_before() -> None:
    """The docstring of its class is no text."""
    settings = reknit.Settings(command=("x",), run_id="j")
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings
    assert str(inspect.signature(reknit.Settings)).startswith("(*, command: ")
