"""A port on this host that stays free until torch's store binds it.

A socket that is bound and *does not listen* keeps the port from everybody else. torch's store sets SO_REUSEADDR, as
this socket does, so the store can bind the same port. It could not if the socket listened. So there is no gap between
choosing the port and using it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Container

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


class BootstrapPorts:
    """The bootstrap port of each round in turn.

    It is another one for each round, for two reasons. The kernel may keep the last port busy for a while. And workers
    of an earlier round, on a node that was cut off, must not reach the new round's store."""

    def __init__(self, used: Collection[int] = (), first: int = 0, always: int = 0) -> None:
        """`used`: ports that are not reserved again. `first`: the port to reserve first, if it is free. 0: any port.
        `always`: the port of every round. It is free again each time, because the worker that had it is gone. 0:
        another free port for each round."""
        self._used = set(used)
        self._always = always
        self._reservation: Reservation | None = None
        if first and not always:
            try:
                self._reservation = Reservation((), first)
            except OSError:
                pass  # another process has taken the port: if this node becomes group rank 0, its round fails

    def present(self) -> int:
        """The port that is reserved on this host, until `another` is called. 0: no port is free.

        Raises `OSError` if the port of every round is taken. Once that is reserved, it stays reserved.
        """
        if self._reservation is None:
            self._reservation = Reservation(self._used, self._always)
        return self._reservation.port

    def another(self) -> int:
        """The port of the next round."""
        if self._reservation is not None and not self._always:
            self._used.add(self._reservation.port)
            self.release()
        return self.present()

    def release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None


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
