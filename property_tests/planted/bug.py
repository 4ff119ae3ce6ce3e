"""A planted bug changes one line of one function.

The function is compiled again in the namespace of its own module. It then takes the place of the original wherever that
was imported. If the line is no longer there, the test fails and says so. Then the bug must be written anew.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import isclass
from typing import Any
from unittest import mock

from attrs import frozen

from reknit.app.testing.replacing import replaced


@frozen
class Bug:
    name: str
    rule: int
    """Of docs/protocol.md. 0: the bug breaks none of the numbered rules, but an invariant."""
    where: str
    """Module and function within the core, or `adapters.` and where in them. A method has its class before it."""
    old: str
    new: str
    check: str = ""
    """The rule of the check that should catch it, without the help of the oracle where that is possible. Empty: a law
    catches it, in the file that plants it."""
    hint: str = ""
    """Where to look first: a script, whose seed is varied. Empty as well in that case."""
    needs_oracle: bool = False
    """Every agent draws the same wrong conclusion, which harms nobody: only the second implementation knows."""


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """reknit with this bug in it."""
    owner, name = _place(bug.where)
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(bug.old) == 1, f"{bug.name}: {bug.old!r} is not once in {bug.where}: plant it anew"
    namespace: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(bug.old, bug.new)
    exec(compile(code, f"<{bug.name}>", "exec"), vars(sys.modules[original.__module__]), namespace)
    with mock.patch.object(owner, name, namespace[name]) if isclass(owner) else replaced(original, namespace[name]):
        yield


def _place(where: str) -> tuple[Any, str]:
    """The module or class that holds a function, and the name of the function."""
    full = f"reknit.{where}" if where.startswith("adapters.") else f"reknit.core.{where}"
    holder, _, name = full.rpartition(".")
    above, _, last = holder.rpartition(".")
    return (getattr(import_module(above), last) if last[0].isupper() else import_module(holder)), name
