"""Calling methods that people override."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def called(method: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call `method` with as many of the positional arguments, and with those of the keywords, that it takes.

    Overrides that were written for older versions of torch take fewer: `_shutdown(self)` and
    `_shutdown(self, death_sig)`, or another one: `_stop_workers(self, worker_group, is_restart)`.
    """
    if not inspect.isroutine(method):
        return method(*args, **more)  # for example a mock, which takes everything
    parameters = inspect.signature(method).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        more = {name: value for name, value in more.items() if name in named}
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        room = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        args = args[:room]
    return method(*args, **more)
