"""Metrics: a name and a number, in a group, at a time."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar, overload

from reknit.adapters.observe.destinations import told
from reknit.elastic.utils.logging import get_logger

P = ParamSpec("P")
R = TypeVar("R")
_DEFAULT_GROUP = "torchelastic"
_FAILED: set[type] = set()
"""The kinds of handlers that have failed."""
_logger = get_logger(__name__)


class MetricData(NamedTuple):
    """One metric."""

    timestamp: float
    """Seconds since 1970."""
    group_name: str
    name: str
    value: int


class MetricsConfig:
    """Parameters of a platform's handler."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(abc.ABC):
    """Takes every metric of the groups that it was configured for. Called by the thread that publishes the metric, so
    it must not take long."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one metric."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each metric on stdout."""

    def emit(self, metric_data: MetricData) -> None:
        """Print the metric."""
        print(f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}")


class NullMetricHandler(MetricHandler):
    """Drops each metric."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class MetricStream:
    """The metrics of one group."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Hand a metric to the handler. An error of the handler is logged once for each kind of handler. It must not
        end an agent, which publishes metrics between any two of its steps."""
        try:
            self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))
        except Exception as error:  # the handler is somebody else's
            kind = type(self.handler)
            if kind not in _FAILED:
                _FAILED.add(kind)
                _logger.warning("the metrics handler %s fails: %s", kind.__qualname__, told(error))


_metrics_map: dict[str, MetricHandler] = {}
"""By group: its handler, if it has one of its own."""
_default_metrics_handler: MetricHandler = NullMetricHandler()


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of a group. None: the handler of all groups that have none of their own."""
    if group is None:
        global _default_metrics_handler
        _default_metrics_handler = handler
    else:
        _metrics_map[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802  # torch's name
    """The metrics of `group`, with the handler that is configured for it."""
    return MetricStream(group, _metrics_map.get(group, _default_metrics_handler))


def put_metric(metric_name: str, metric_value: int, metric_group: str = _DEFAULT_GROUP) -> None:
    """Publish a metric. Names are usually words with dots: `workers.trainer.restarts`."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """`put_metric` with the arguments in the order of older versions."""
    put_metric(metric_name, metric_value, metric_group)


@overload
def prof(fn: Callable[P, R], group: str = ...) -> Callable[P, R]: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def prof(fn: Callable[P, R] | None = None, group: str = _DEFAULT_GROUP) -> object:
    """Decorator: publish how long each call takes (`<name>.duration.ms`), and 1 for `<name>.success` or
    `<name>.failure`. `<name>` is the qualified name of the function. Use it as `@prof` or `@prof(group="mine")`."""
    return _profiled(group) if fn is None else _profiled(group)(fn)


def profile(group: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`prof` as older versions have it."""
    return _profiled(_DEFAULT_GROUP if group is None else group)


def _profiled(group: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        name = _get_metric_name(fn)

        @wraps(fn)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.time()
            try:
                result = fn(*args, **kwargs)
            except Exception:
                put_metric(f"{name}.failure", 1, group)
                raise
            else:
                put_metric(f"{name}.success", 1, group)
                return result
            finally:
                put_metric(f"{name}.duration.ms", get_elapsed_time_ms(start), group)

        return measured

    return wrap


def _get_metric_name(fn: Callable[..., object]) -> str:
    """`Class.method`, or `module.function` with the last part of the module's name."""
    qualified = fn.__qualname__
    return qualified if "." in qualified else f"{fn.__module__.rpartition('.')[2]}.{qualified}"


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Milliseconds since `start_time_in_seconds`, a time of `time.time()`."""
    return int((time.time() - start_time_in_seconds) * 1000)
