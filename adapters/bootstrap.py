"""A port on this host that stays free until torch's store wants it.

A socket that is bound and *does not listen* keeps the port from everybody else, and TCPStore, which sets SO_REUSEADDR
too, binds over it. (It fails over a listening socket.) So there is no gap between choosing the port and using it.
"""

from __future__ import annotations

import _socket
from collections.abc import Container

_TRIES = 64
"""More than enough while a host has twice as many ports as a job has rounds."""


class Reservation:
    """A bootstrap port, kept until `release`."""

    def __init__(self, used: Container[int] = ()) -> None:
        """`used`: ports of earlier rounds, not to be had again while there are others.

        Whoever is cut off from the journal may still run an earlier round, and its workers still know that port.
        """
        drawn: list[_socket.socket] = []  # open meanwhile, so that none is drawn twice
        while (sock := _bound(_socket.AF_INET6, "::") or _bound(_socket.AF_INET, "0.0.0.0")) is not None:
            drawn.append(sock)
            if sock.getsockname()[1] not in used or len(drawn) == _TRIES:
                break
        self._socket = drawn.pop() if drawn else None
        self.port: int = self._socket.getsockname()[1] if self._socket else 0
        """0: there was none to be had."""
        for refused in drawn:
            refused.close()

    def release(self) -> None:
        if self._socket:
            self._socket.close()


def _bound(family: int, address: str) -> _socket.socket | None:
    try:
        sock = _socket.socket(family, _socket.SOCK_STREAM)  # close-on-exec, as every descriptor that Python makes
    except OSError:
        return None
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)  # torch's store takes both
        sock.bind((address, 0))
    except OSError:
        sock.close()
        return None
    return sock
