"""Handlers that other packages offer: torch's own, and those of entry points."""

from __future__ import annotations

from typing import Any

from .parameters import TORCH, RendezvousHandlerCreator, RendezvousParameters

_GROUP = "torchrun.handlers"
"""The entry points under which packages offer their handlers to torchrun. Each loads a function that returns the
creator."""


def creator_of(backend: str) -> RendezvousHandlerCreator | None:
    """The creator of a backend that is not registered here. None: nobody knows it. Raises `ValueError` if its entry
    point cannot be loaded."""
    if backend.startswith(TORCH):
        return _create_torchs
    from importlib.metadata import entry_points

    for entry in entry_points(group=_GROUP, name=backend):
        try:
            creator: RendezvousHandlerCreator = entry.load()()
        except Exception as error:
            raise ValueError(
                f"the rendezvous backend {backend!r} of {entry.value} cannot be loaded: {error}"
            ) from error
        return creator
    return None


def _create_torchs(params: RendezvousParameters) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters
    from torch.distributed.elastic.rendezvous import registry

    asked = TorchParameters(
        params.backend.removeprefix(TORCH),
        params.endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        **params.config,
    )
    return registry.get_rendezvous_handler(asked)
