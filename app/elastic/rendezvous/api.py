"""The counterpart of `torch.distributed.elastic.rendezvous.api`, without torch as far as that is possible.

Ours: `RendezvousParameters` and the registry. Both are as torch's, and load nothing. Their errors have torch's words,
because programs look for these.

torch's own: the exceptions, `RendezvousHandler`, `RendezvousInfo` and `RendezvousStoreInfo`. Each is fetched from torch
when it is first asked for. So `except RendezvousClosedError` catches what torch raises, whichever of the two modules
the name was imported from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .elsewhere import creator_of
from .parameters import NO_NAME, TORCH, RendezvousHandlerCreator, RendezvousParameters

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import (
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


class RendezvousHandlerRegistry:
    """The handlers that can be asked for by the name of a backend."""

    def __init__(self, found: Callable[[str], RendezvousHandlerCreator | None] = lambda backend: None) -> None:
        """`found`: asked for the creator of a backend that is not registered. None: it does not know it either."""
        self._registry: dict[str, RendezvousHandlerCreator] = {}
        self._found = found

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Let `creator` make the handlers of `backend`. Raises `ValueError` if the backend has another creator."""
        if not backend:
            raise ValueError(NO_NAME)
        known = self._registry.setdefault(backend, creator)
        if known != creator:
            raise ValueError(
                f"The rendezvous backend '{backend}' cannot be registered with '{creator}' as it is already registered"
                f" with '{known}'."
            )

    def create_handler(self, params: RendezvousParameters) -> Any:
        """Make the handler for `params`. Raises `ValueError` if nobody has registered `params.backend`."""
        creator = self._registry.get(params.backend) or self._found(params.backend)
        if creator is None:
            raise ValueError(
                f"The rendezvous backend '{params.backend}' is not registered. Did you forget to call `register`?"
            )
        handler = creator(params)
        if handler.get_backend() != params.backend.removeprefix(TORCH):
            raise RuntimeError(
                f"The rendezvous backend '{handler.get_backend()}' does not match the requested backend"
                f" '{params.backend}'."
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry(creator_of)
"""The registry that the launcher uses."""


def __getattr__(name: str) -> Any:
    if name not in __all__:  # those that this module defines do not come here
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.distributed.elastic.rendezvous import api

    value = getattr(api, name)
    if name == "RendezvousHandler":
        from .handler import ReknitRendezvousHandler

        value.register(ReknitRendezvousHandler)  # so that `isinstance` says yes, although it needs no torch
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
