"""The counterpart of `torch.distributed.elastic.rendezvous.registry`: which handler a backend name stands for.

| name | handler |
|---|---|
| `c10d`, `file`, `etcd`, `static`, `reknit` | reknit's journal, as with `reknit run --rdzv-backend` |
| `torch:NAME` | the handler that torch has registered as NAME |
| `etcd-v2` | none: it is refused, with the reason |
| a registered name | whatever its creator makes |
| another name | an entry point of the group `torchrun.handlers`, as in torch |
"""

from __future__ import annotations

from typing import Any

from .api import rendezvous_handler_registry as handler_registry
from .parameters import RendezvousHandlerCreator, RendezvousParameters

__all__ = ["get_rendezvous_handler"]


def get_rendezvous_handler(params: RendezvousParameters) -> Any:
    """Make the handler for `params`. The top of this module lists the names that `params.backend` may have.

    Raises `ValueError` if no handler has that name, or if another parameter is wrong. Parameters that only serve to
    meet other nodes are not checked for a job with one node.
    """
    return handler_registry.create_handler(params)


def reknit_for_torchrun() -> RendezvousHandlerCreator:
    """The entry point by which torchrun finds `--rdzv-backend=reknit`."""
    return _create_reknits


def _create_reknits(params: RendezvousParameters) -> Any:
    from .handler import ReknitRendezvousHandler

    return ReknitRendezvousHandler(params)


_create_c10d_handler = _create_static_handler = _create_reknits
_create_etcd_handler = _create_etcd_v2_handler = _create_reknits


def _register_default_handlers() -> None:
    """Called when this module is imported. With a registry in the place of `handler_registry`, a program can fill it by
    another call."""
    handler_registry.register("c10d", _create_c10d_handler)
    handler_registry.register("static", _create_static_handler)
    handler_registry.register("etcd", _create_etcd_handler)
    handler_registry.register("etcd-v2", _create_etcd_v2_handler)
    for name in ("file", "reknit"):
        handler_registry.register(name, _create_reknits)


_register_default_handlers()
