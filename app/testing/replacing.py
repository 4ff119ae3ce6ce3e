"""Another function in the place of one of the core's: a policy that is tried."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

CHECKS = "reknit.app.testing"
"""What stands here goes on with the original. Otherwise a wrong rule would be checked by itself."""


@contextmanager
def replaced(original: Callable[..., Any], mine: Callable[..., Any]) -> Iterator[None]:
    """Within the block, reknit calls `mine` wherever it calls `original`.

    `original`: a function at the top level of a module of `reknit`, for example `reknit.core.job.restart.cost`. `mine`
    gets the same arguments, and must be as pure as `original`: no clock, no dice, nothing remembered.
    The block counts for this process alone, and for all threads of it. `ValueError`: no module of `reknit` has
    `original` at its top level.
    """
    name = original.__name__
    modules = [module for key, module in [*sys.modules.items()] if key.startswith("reknit.") and module is not None]
    users = [module for module in modules if vars(module).get(name) is original]
    if not users:
        raise ValueError(f"{original!r} is no function of reknit")
    with ExitStack() as stack:
        for user in users:
            if not user.__name__.startswith(CHECKS):
                stack.enter_context(mock.patch.object(user, name, mine))
        yield
