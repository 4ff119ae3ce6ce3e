"""The counterpart of `torch.distributed.elastic.rendezvous.registry`: which handler a backend name stands for.

| name | handler |
|---|---|
| `c10d`, `file`, `etcd`, `static`, `reknit` | reknit's journal, as with `reknit run --rdzv-backend` |
| `torch:NAME` | the handler that torch has registered as NAME |
| a registered name | whatever its creator makes |
| another name | an entry point of the group `torchrun.handlers`, as in torch |
"""

from __future__ import annotations

from typing import Any

from .api import TORCH, RendezvousHandlerCreator, RendezvousParameters
from .api import rendezvous_handler_registry as handler_registry

__all__ = ["get_rendezvous_handler"]

_REKNITS = ("c10d", "file", "etcd", "etcd-v2", "static", "reknit")
"""Names that mean reknit's journal. `etcd-v2` is refused, with the reason."""
_GROUP = "torchrun.handlers"
"""The entry points under which packages offer their handlers to torchrun. Each loads a function that returns the
creator."""


def get_rendezvous_handler(params: RendezvousParameters) -> Any:
    """The handler for `params`. Raises `ValueError` if the parameters cannot be, or if no handler has that name."""
    return handler_registry.create_handler(params)


def reknit_for_torchrun() -> RendezvousHandlerCreator:
    """The entry point by which torchrun finds `--rdzv-backend=reknit`."""
    return _create_reknits


def found(backend: str) -> RendezvousHandlerCreator | None:
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


def _create_reknits(params: RendezvousParameters) -> Any:
    from .handler import ReknitRendezvousHandler

    return ReknitRendezvousHandler(params)


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


for _name in _REKNITS:
    handler_registry.register(_name, _create_reknits)
