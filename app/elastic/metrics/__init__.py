"""The counterpart of `torch.distributed.elastic.metrics`: numbers that agents and programs publish.

    from reknit.elastic import metrics
    metrics.configure(metrics.ConsoleMetricHandler(), group="my_program")
    metrics.put_metric("batches", 3, "my_program")

Without a handler for its group, a metric goes to the default handler, which drops it.
"""

from .api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    prof,
    profile,
    publish_metric,
    put_metric,
)

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Does nothing, as in torch: a platform may put its own function in this place."""
