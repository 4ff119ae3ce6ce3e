"""The counterpart of `torch.distributed.elastic.rendezvous`.

A backend *name* means reknit's journal, see `registry.py`. A handler *object* of torch is used as it is. torch is
imported only when one of its objects is asked for, see `api.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import registry as registry  # it registers the backends of reknit
from .api import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from .api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStateError,
        RendezvousStoreInfo,
        RendezvousTimeoutError,
    )

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    value = getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
