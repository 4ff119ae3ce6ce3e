"""A port on this host that stays free until torch's store binds it.

A socket that is bound and *does not listen* keeps the port from everybody else. torch's store sets SO_REUSEADDR, as
this socket does, so the store can bind the same port. It could not if the socket listened. So there is no gap between
choosing the port and using it.
"""

from __future__ import annotations

import socket
from collections.abc import Container

_TRIES = 64
"""So many ports are drawn at most, until one is found that was not used before. That is enough as long as a host has
twice as many ports as the job has rounds."""


class Reservation:
    """A bootstrap port: MASTER_PORT of a round. It is reserved until `release`."""

    def __init__(self, used: Container[int] = (), port: int = 0) -> None:
        """`port`: the port to reserve. Raises `OSError` if it is taken. 0: any free port.

        `used`: ports of earlier rounds. None of them is drawn again while there are others: a node that is cut off
        from the journal may still run an earlier round, and its workers still know the port of that round.
        """
        if port:
            self._socket: socket.socket | None = _bind_either(port)
            self.port: int = port
            """0: no port could be reserved."""
            return
        drawn: list[socket.socket] = []  # sockets stay open meanwhile, so that no port is drawn twice
        while (sock := _bound(socket.AF_INET6, "::") or _bound(socket.AF_INET, "0.0.0.0")) is not None:
            drawn.append(sock)
            if sock.getsockname()[1] not in used or len(drawn) == _TRIES:
                break
        self._socket = drawn.pop() if drawn else None
        self.port = self._socket.getsockname()[1] if self._socket else 0
        for refused in drawn:
            refused.close()

    def release(self) -> None:
        if self._socket:
            self._socket.close()


def _bind_either(port: int) -> socket.socket:
    try:
        return _bind(socket.AF_INET6, "::", port)
    except OSError:
        return _bind(socket.AF_INET, "0.0.0.0", port)


def _bound(family: int, address: str) -> socket.socket | None:
    try:
        return _bind(family, address, 0)
    except OSError:
        return None


def _bind(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)  # close-on-exec, as every descriptor that Python makes
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # torch's store listens for IPv4 and IPv6
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
