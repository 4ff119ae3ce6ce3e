"""Another function in the place of one of the core's: a policy that is tried."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

UNCHANGED = "reknit.app.testing"
"""What stands here goes on with the original. Otherwise a wrong rule would be checked by itself."""
_standing: dict[Callable[..., Any], list[Callable[..., Any]]] = {}
"""What stands in the place of a function now: the innermost block last."""


@contextmanager
def replaced(original: Callable[..., Any], mine: Callable[..., Any]) -> Iterator[None]:
    """Within the block, reknit calls `mine` wherever it calls `original` by its name.

    `original`: a function at the top level of a module of `reknit`, for example `reknit.core.job.restart.cost`. `mine`
    gets the same arguments, and must be as pure as `original`: no clock, no dice, nothing remembered. Blocks may be
    nested: the innermost one counts. They count for this process alone, and for all threads of it. `ValueError`:
    `original` is no such function, or `mine` cannot be called.
    """
    if not callable(mine):
        raise ValueError(f"{mine!r} cannot be called")
    if not isinstance(original, FunctionType):
        raise ValueError(f"{original!r} is no function of reknit")
    stack = _standing.setdefault(original, [original])
    if not _put(original.__name__, stack[-1], mine):
        raise ValueError(f"{original!r} is no function that reknit calls by its name")
    stack.append(mine)
    try:
        yield
    finally:
        stack.pop()
        _put(original.__name__, mine, stack[-1])  # also in modules that were imported meanwhile


def _put(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> int:
    """Put `new` wherever `old` stands. Returns in how many modules."""
    users = [module for module in _modules() if vars(module).get(name) is old]
    for user in users:
        setattr(user, name, new)
    return len(users)


def _modules() -> list[ModuleType]:
    return [
        module for key, module in [*sys.modules.items()] if key.startswith("reknit.") and not key.startswith(UNCHANGED)
    ]
