"""Ports, and the store that torch makes for a program (`create_c10d_store`, which is torch's own)."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from .api import get_socket_with_port

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]  # noqa: F822  # the first one is lazy


def get_free_port() -> int:
    """A port that is free now. Another process may take it before the caller does."""
    with closing(get_socket_with_port()) as listener:
        port: int = listener.getsockname()[1]
        return port


def __getattr__(name: str) -> Any:
    if name == "create_c10d_store":
        from torch.distributed.elastic.utils.distributed import create_c10d_store

        return create_c10d_store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
