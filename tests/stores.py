"""torch's store for tests: served by a process as in production, or by a few lines that do as a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reknit.adapters.tcpstore.host import StoreHost, host_store

HOST = "127.0.0.1"


def free_port() -> int:
    """Nobody listens there now."""
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def hosted() -> Iterator[tuple[StoreHost, int]]:
    """A store of its own, and its port."""
    port = free_port()
    host = host_store(HOST, port)
    assert host is not None
    try:
        yield host, port
    finally:
        host.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does `answer` with the first connection, and then closes it; its port."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join()
