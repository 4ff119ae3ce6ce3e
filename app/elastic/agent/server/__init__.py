"""The counterpart of `torch.distributed.elastic.agent.server`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .api import (
        ElasticAgent,
        RunResult,
        SimpleElasticAgent,
        Worker,
        WorkerGroup,
        WorkerSpec,
        WorkerState,
    )
    from .local_elastic_agent import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "local_elastic_agent" if name.startswith("TORCHELASTIC") else "api"
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
