"""The HTTP server for pages that say how an agent is: that of the standard library, with bounds.

1. The thread that accepts connections sleeps until somebody connects. There is no tick.
2. Each client has a thread of its own, so a client that is slow, or a page that waits, holds up nobody else. A client
   that is silent for some seconds is cut off. If there are too many clients, the one that came first is cut off. Its
   thread may still be busy with a page that waits. If there are too many threads, new clients are turned away.
3. Clients must not use up the descriptors of the process: without one the agent cannot reach its store or start a
   keeper. So some are left for the agent. A client that would take one of these is turned away, and the client that
   came first is cut off.
4. In a forked child of the program, the copies of the sockets are closed. A program that is executed inherits none.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from attrs import frozen

from reknit.adapters.host.children import abandon_in_forks
from reknit.adapters.runtime.threads import Thread

TEXT = "text/plain; charset=utf-8"
_MOST_CLIENTS = 64
_MOST_THREADS = 2 * _MOST_CLIENTS
_LEFT = 12
"""Number of descriptors that are left for the agent: for a new keeper it needs seven, and for the store three. The
others are for files that are open for a moment."""
_SILENCE_S = 5.0
"""A client that neither sends nor takes anything for so many seconds is cut off."""
_PAUSE_S = 1.0
"""Pause after a connection could not be accepted, because the process has no descriptor left. Seconds."""
END_S = 5.0
"""Time for the threads to end. Only a page that hangs needs longer. Seconds."""


@frozen
class Response:
    """What a page says. `status`: of HTTP."""

    status: int
    text: str
    kind: str = TEXT
    """The type of the text, as in the header `Content-Type`."""


Page = Callable[[Mapping[str, str]], Response]
"""Gets the parameters of the query. Several threads may call it at the same time. It may wait. An exception becomes
status 500."""


def line(status: int, text: str) -> Response:
    """An answer of one line."""
    return Response(status, f"{text}\n")


class PageServer:
    """Listens from the beginning, and serves from `start` on."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        """`host`: the numeric address at which the server listens. `port`: 0 takes a free one. `pages`: by path. Raises
        `OSError` if the server cannot listen there, and `OverflowError` or `UnicodeError` for what is no port or no
        address."""
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]  # the port is not given here: the C library takes 70000 for 4464
        self._owner = os.getpid()
        self._listener = _Listener(family, (str(address[0]), port, *address[2:]), pages)
        self._thread: Thread | None = None
        self.host, self.port = self._listener.socket.getsockname()[:2]
        abandon_in_forks(self)

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Serve, in a thread. Raises `RuntimeError` if there is no thread to be had. Close the server then, too."""
        self._thread = Thread(self._listener.serve, name=f"reknit health {self.port}")
        self._thread.start()

    def close(self) -> None:
        """Cut off all clients, end the threads and close the sockets. May be repeated. Does nothing in a forked child.

        Bounded in time: a page that hangs keeps its thread until it returns."""
        if os.getpid() != self._owner:
            return
        self._listener.stop()
        if self._thread is not None:
            self._thread.wait(END_S)
        self._listener.server_close()
        self._listener.cut_off()

    def abandon(self) -> None:
        """In a forked child: close the copies of the sockets."""
        self._listener.abandon()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, family: int, address: tuple[Any, ...], pages: Mapping[str, Page]) -> None:
        self.address_family = family
        self.pages = pages
        self._is_stopped = threading.Event()
        self._clients: dict[socket.socket, bool] = {}
        """The clients that have a thread, in the order in which they came. True: the client was cut off."""
        self._changed = threading.Condition()
        """Guards `_clients`, and tells when one has gone."""
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)  # without the look-up of the host's name that the library makes

    def serve(self) -> None:
        while not self._is_stopped.is_set():
            self.handle_request()  # `serve_forever` would look twice a second whether it is to end

    def stop(self) -> None:
        self._is_stopped.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def cut_off(self) -> None:
        """End every connection, and wait for the threads."""
        with self._changed:
            for client in self._clients:
                _shut(client)
            self._changed.wait_for(lambda: not self._clients, END_S)

    def abandon(self) -> None:
        self.socket.close()
        for client in [*self._clients]:  # without the lock: a thread that the child does not have may hold it
            os.close(client.detach())  # `close` would wait for the files that a handler has made of the socket

    # ---- what the standard library's server calls ----

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left. The listener stays readable: without a pause this thread would spin.
            self._is_stopped.wait(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        is_low = _is_low(request.fileno())
        with self._changed:
            present = [client for client, is_cut_off in self._clients.items() if not is_cut_off]
            is_welcome = len(self._clients) < _MOST_THREADS and not is_low
            if present and (is_low or (is_welcome and len(present) >= _MOST_CLIENTS)):
                _shut(present[0])
                self._clients[present[0]] = True
            if is_welcome:
                self._clients[request] = False
        if is_welcome:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._clients.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client has gone, or there is no thread for it. The connection is closed, and nobody needs to know."""


def _is_low(fd: int) -> bool:
    """Whether this descriptor, which was opened last, is one of the last `_LEFT`. The system gives the lowest number
    that is free."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and fd >= most - _LEFT


def _shut(client: socket.socket) -> None:
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENCE_S
    server_version, sys_version = "reknit", ""
    server: _Listener

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        answer = self._asked()
        body = answer.text.encode("utf-8", "surrogateescape")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _asked(self) -> Response:
        try:
            parts = urlsplit(self.path)
            query = dict(parse_qsl(parts.query))
        except ValueError:
            return line(400, "this is no address of a page")
        page = self.server.pages.get(parts.path)
        if page is None:
            return line(404, f"there is no such page; the pages are {', '.join(self.server.pages)}")
        try:
            return page(query)
        except Exception as error:  # a bug, which the client is told of
            return line(500, f"the page has failed: {type(error).__name__}: {error}")

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: nobody wants a line for each."""
