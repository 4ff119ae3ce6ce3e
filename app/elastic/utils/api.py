"""Small helpers of torchelastic that programs use."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from string import Template
from typing import Any

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """The value of an environment variable. Raises `ValueError` if it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"the environment variable {env_name} is not set")
    return value


def get_socket_with_port() -> socket.socket:
    """A listening socket on a free port of this host. The caller closes it. Raises `RuntimeError` if there is none."""
    found = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
    errors = []
    for family, kind, protocol, _, _ in found:
        listener = None
        try:
            listener = socket.socket(family, kind, protocol)
            listener.bind(("localhost", 0))
            listener.listen(0)
            return listener
        except OSError as error:
            errors.append(str(error))
            if listener is not None:
                listener.close()
    raise RuntimeError(f"no free port on localhost: {'; '.join(errors)}")


class macros:  # noqa: N801  # torch's name
    """Names that are replaced in the arguments of an entrypoint."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """The arguments with `${local_rank}` replaced in each text. Other macros stay as they are."""
        return [Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg for arg in args]
