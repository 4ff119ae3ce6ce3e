"""Methods that people override, as the run of an agent calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from reknit.elastic.events import Event, EventSource

from .group import RunResult, WorkerGroup, WorkerState

_STATES = tuple(state.value for state in WorkerState)


class Hooks(Protocol):
    """The agent, as far as its run uses it: see `SimpleElasticAgent`."""

    _worker_group: WorkerGroup
    _least_interval_s: float

    def _initialize_workers(self, worker_group: WorkerGroup) -> None: ...
    def _restart_workers(self, worker_group: WorkerGroup) -> None: ...
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]: ...
    def _stop_workers(self, worker_group: WorkerGroup) -> None: ...
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult: ...
    def _exit_barrier(self) -> None: ...
    def _record_state(self, state: WorkerState) -> None: ...
    def _construct_event(self, state: str, source: EventSource) -> Event: ...


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


def started(agent: Hooks, group: WorkerGroup) -> Mapping[int, Any]:
    """What `_start_workers` returns. Raises `TypeError` if that is no mapping."""
    returned: object = agent._start_workers(group)
    if not isinstance(returned, Mapping):
        raise _wrong(agent, "_start_workers", returned, "a mapping from local ranks to names of the workers")
    return returned


def monitored(agent: Hooks, group: WorkerGroup) -> RunResult:
    """What `_monitor_workers` returns, which may be of torch's class. Raises `TypeError` if that is no result."""
    returned: Any = agent._monitor_workers(group)
    maps = (getattr(returned, name, None) for name in ("return_values", "failures"))
    if getattr(returned, "state", None) not in _STATES or not all(isinstance(each, Mapping) for each in maps):
        raise _wrong(agent, "_monitor_workers", returned, "a RunResult")
    result: RunResult = returned
    return result


def _wrong(agent: Hooks, method: str, returned: object, wanted: str) -> TypeError:
    return TypeError(f"{type(agent).__qualname__}.{method} has returned {returned!r}, and not {wanted}")
