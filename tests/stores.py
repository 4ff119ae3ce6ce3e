"""torch's store for tests: served by a process as in production, or by a few lines that do what a test wants."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reknit.adapters.journals.tcpstore.host import StoreHost, host_store

HOST = "127.0.0.1"


def free_port() -> int:
    """Nobody listens there now.

    It lies below the ports that the kernel hands out. Otherwise a process of another test that runs at the same time
    could get it before the caller uses it.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            end = int(file.read().split()[0])
    except OSError:
        end = 0  # this system is not Linux
    while True:
        # Not `random`: Hypothesis seeds it alike in all processes that run tests.
        port = end // 2 + secrets.randbelow(end // 2) if end > 8192 else 0
        try:
            with socket.create_server((HOST, port)) as free:
                return int(free.getsockname()[1])
        except OSError:
            continue  # somebody listens there


@contextmanager
def hosted() -> Iterator[tuple[StoreHost, int]]:
    """A new store. Gives its port."""
    port = free_port()
    host = host_store(HOST, port)
    assert host is not None
    try:
        yield host, port
    finally:
        host.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that calls `answer` with its first connection, and then closes it. Gives its port."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join()
