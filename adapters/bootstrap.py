"""A port on this host that stays free until torch's store wants it.

A socket that is bound and *does not listen* keeps the port from everybody else, and TCPStore, which sets SO_REUSEADDR
too, binds over it. (It fails over a listening socket.) So there is no gap between choosing the port and using it.
"""

from __future__ import annotations

import _socket


class Reservation:
    """A bootstrap port, kept until `release`."""

    def __init__(self) -> None:
        self._socket = _bound(_socket.AF_INET6, "::") or _bound(_socket.AF_INET, "0.0.0.0")
        self.port: int = self._socket.getsockname()[1] if self._socket else 0
        """0: there was none to be had."""

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
