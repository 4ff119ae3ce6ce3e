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

TORCH = "torch:"
"""A backend name with this prefix asks for the handler that torch itself has registered under the rest of the name."""


_NO_NAME = "The rendezvous backend name must be a non-empty string."


class RendezvousParameters:
    """Where and how the nodes of a job meet. The same as torch's class, and not the same class: this one needs no
    torch.

    `backend`: the name of a handler in the registry.
    `endpoint`: usually `host:port`. Empty: the job has one node, for the backends of reknit.
    `run_id`: the name of the job.
    `min_nodes`, `max_nodes`: how many nodes a round may have. At least 1.
    `local_addr`: the address of this node for the others. None: the handler finds it out.
    Further keywords are settings of the backend. They stand in `config`.

    Raises `ValueError` for an empty backend, or for numbers of nodes that cannot be.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError(_NO_NAME)
        if min_nodes < 1:
            raise ValueError(f"The minimum number of rendezvous nodes ({min_nodes}) must be greater than zero.")
        if max_nodes < min_nodes:
            raise ValueError(
                f"The maximum number of rendezvous nodes ({max_nodes}) must be greater than or equal to the minimum"
                f" number of rendezvous nodes ({min_nodes})."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """The setting `key`, or `default` if it is not given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The setting `key` as a truth value: a bool, 0 or 1, or a word such as "true" or "no". None stays None. Raises
        `ValueError` for anything else."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            from reknit.app.input.readers import truth

            try:
                return truth(value)
            except ValueError:
                pass  # raised below, with the name of the setting
        raise ValueError(f"The rendezvous configuration option '{key}' does not represent a valid boolean value.")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The setting `key` as a whole number. None stays None. Raises `ValueError` if it is none."""
        value = self.get(key, default)
        if value is None:
            return value
        try:
            return int(value)
        except ValueError as error:
            said = f"The rendezvous configuration option '{key}' does not represent a valid integer value."
            raise ValueError(said) from error


RendezvousHandlerCreator = Callable[[RendezvousParameters], Any]
"""Makes a handler from parameters. The handler is torch's `RendezvousHandler`, or has the same methods."""


class RendezvousHandlerRegistry:
    """The handlers that can be asked for by the name of a backend."""

    def __init__(self, found: Callable[[str], RendezvousHandlerCreator | None] = lambda backend: None) -> None:
        """`found`: asked for the creator of a backend that is not registered. None: it does not know it either."""
        self._registry: dict[str, RendezvousHandlerCreator] = {}
        self._found = found

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Let `creator` make the handlers of `backend`. Raises `ValueError` if the backend has another creator."""
        if not backend:
            raise ValueError(_NO_NAME)
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


def _found(backend: str) -> RendezvousHandlerCreator | None:
    from . import registry

    return registry.found(backend)


rendezvous_handler_registry = RendezvousHandlerRegistry(_found)
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
