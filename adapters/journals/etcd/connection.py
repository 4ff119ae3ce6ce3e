"""A client of one etcd server, over HTTP with the standard library.

1. One connection per server is kept open and used again. If the server has closed it, a new one is opened.
2. One deadline covers the connection, the handshake, the request and the answer.
3. One thread at a time makes a request. Any thread may call `close`, which ends a call that waits.
4. With a user, the client first gets a token and sends it with every request. When etcd says that the token has
   expired, the client gets a new one, once per request.
"""

from __future__ import annotations

import json
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from time import monotonic
from typing import TYPE_CHECKING

from reknit.adapters.ports import Refused
from reknit.core.job.reasons import Refusal

if TYPE_CHECKING:
    from typing import Any

_PART_BYTES = 1 << 16
_SHORTEST_TRY_S = 0.01
_UNAUTHORIZED = 401
_EXPIRED = ("invalid auth token", "revision in header is old")
_DENIED = (
    "authentication failed",
    "authentication is not enabled",
    "permission denied",
    "user name is empty",
)
"""Parts of etcd's messages. Each means that this user may not do what was asked. Trying again does not help."""


class Server:
    """One member of a cluster."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        """Does not connect yet. `timeout_s`: upper bound on each call, in seconds. `tls`: called for each connection,
        returns its TLS context. None: plain HTTP. `user`: empty if etcd needs no user."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._tls = tls
        self._user = user
        self._password = password
        name = f"[{host}]" if ":" in host else host
        self.authority = f"{name}:{port}"
        """Host and port, as in a URL."""
        self.url = f"{'https' if tls else 'http'}://{self.authority}"
        self._token = ""
        self._connection = HTTPConnection(host, port)
        self._socket: socket.socket | None = None
        """The socket of `_connection`. None: it is not connected."""
        self._busy = threading.Lock()
        """Held by the thread that makes a request."""
        self._changing = threading.Lock()
        """Held while `_socket` is replaced, closed or shut down. Otherwise `close` might shut down a descriptor whose
        number belongs to another file by then."""
        self._is_closed = False

    def ask(self, path: str, data: object) -> Any:
        """The answer to a request, decoded from JSON.

        Raises OSError, HTTPException or ValueError if no usable answer comes: `why` makes a text of the error. Raises
        `Refused` if etcd does not allow the request for this user."""
        try:
            with self._busy:
                return self._asked(path, data, monotonic() + self._timeout_s)
        finally:
            if self._is_closed:
                self._let_go()

    def opened(self, path: str, data: object) -> socket.socket:
        """A new connection of the caller's own, on which this request has been sent. Raises like `ask`."""
        sock = self._connected(monotonic() + self._timeout_s)
        try:
            connection = HTTPConnection(self._host, self._port)
            connection.sock = sock
            connection.request("POST", path, json.dumps(data).encode(), self._headers())
        except BaseException:
            sock.close()
            raise
        return sock

    @property
    def timeout_s(self) -> float:
        """The bound of one call, in seconds."""
        return self._timeout_s

    def close(self) -> None:
        """End the connection. A call that waits in another thread ends with an OSError."""
        self._is_closed = True
        with self._changing:
            if self._socket is not None:
                try:
                    # SSLSocket's own method would also remove the TLS layer, which another thread may be using.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:
                    pass  # the server was faster
        self._let_go()

    def _let_go(self) -> None:
        """Close the connection if no call is under way. `close` calls this, and each call that ends after it."""
        if self._busy.acquire(blocking=False):
            self._drop()
            self._busy.release()

    # ---- one request ----

    def _asked(self, path: str, data: object, give_up: float) -> Any:
        if self._user and not self._token:
            self._authenticate(give_up)
        status, text = self._posted(path, data, give_up)
        if self._token and (status == _UNAUTHORIZED or any(expired in text for expired in _EXPIRED)):
            self._authenticate(give_up)
            status, text = self._posted(path, data, give_up)
        return self._decoded(status, text)

    def _authenticate(self, give_up: float) -> None:
        self._token = ""
        login = {"name": self._user, "password": self._password}
        answer = self._decoded(*self._posted("/v3/auth/authenticate", login, give_up))
        token = answer.get("token") if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token:
            raise ValueError("not an answer of etcd: it has no token")
        self._token = token

    def _decoded(self, status: int, text: str) -> Any:
        if status == 200:
            return json.loads(text)
        message = _message(text)
        if any(denied in message for denied in _DENIED):
            whose = f"user {self._user}" if self._user else "a client without a user"
            raise Refused(Refusal.SETUP, f"etcd at {self.url} does not let {whose} in: {message}")
        raise ValueError(message if message else f"HTTP status {status}")

    def _posted(self, path: str, data: object, give_up: float) -> tuple[int, str]:
        """Status and text of the answer."""
        try:
            sock = self._kept(give_up)
            sock.settimeout(_left_s(give_up))
            self._connection.request("POST", path, json.dumps(data).encode(), self._headers())
            response = self._connection.getresponse()
            parts = []
            while True:
                sock.settimeout(_left_s(give_up))
                part = response.read1(_PART_BYTES)
                if not part:
                    break
                parts.append(part)
            response.close()  # without this, `read1` leaves the response open and the connection takes no request
            if response.will_close:
                self._drop()
            return response.status, b"".join(parts).decode(errors="replace")
        except BaseException:
            self._drop()  # a late answer may still arrive on this connection
            raise

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        return headers

    # ---- the connection ----

    def _kept(self, give_up: float) -> socket.socket:
        """The socket of the connection that is open, or of a new one."""
        if self._socket is not None and readable((self._socket.fileno(),), 0):
            self._drop()  # no request is under way, so this can only be the end of the stream
        if self._socket is None:
            sock = self._connected(give_up)
            with self._changing:
                self._socket = self._connection.sock = sock
        if self._is_closed:  # checked now that `close` can see the socket
            raise OSError("the connection was closed here")
        return self._socket

    def _drop(self) -> None:
        with self._changing:
            self._connection.close()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _connected(self, give_up: float) -> socket.socket:
        tls = self._tls() if self._tls else None
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        error = OSError("the name has no address")
        for tried, (family, kind, protocol, _, address) in enumerate(found):
            # An address that does not answer must leave time for the next one.
            share_s = max(_SHORTEST_TRY_S, _left_s(give_up) / (len(found) - tried))
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as e:
                error = e  # this host does not speak that protocol
                continue
            try:
                sock.settimeout(share_s)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return tls.wrap_socket(sock, server_hostname=self._host) if tls else sock
            except OSError as e:
                error = e
                sock.close()
            except BaseException:
                sock.close()
                raise
        raise error


def tls_context(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """The context of a TLS connection. All files are in PEM.

    `ca`: the authorities that the server's certificate is checked against. None: those of the system. `certificate`
    and `key`: what this client identifies itself with. None: nothing. Raises `Refused` with the name of the file that
    cannot be used."""
    files = ca
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate:
            files = certificate if key in (None, certificate) else f"{certificate}, {key}"
            context.load_cert_chain(certificate, key)
    except OSError as e:
        raise Refused(Refusal.SETUP, f"the TLS files for etcd cannot be used ({files}): {why(e)}") from None
    return context


def readable(fds: Sequence[int], wait_s: float) -> list[int]:
    """Wait up to `wait_s` seconds until one of the descriptors can be read. Returns all that can."""
    poll = select.poll()  # `select.select` takes no descriptors above 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, wait_s) * 1000)]


def why(error: Exception) -> str:
    """The cause of a missing answer, in a few words for the operator."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLError):
        text = re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
        return f"TLS: {text}"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, HTTPException):
        return f"not an HTTP server ({type(error).__name__})"
    return str(error)[:200]


def _left_s(give_up: float) -> float:
    left_s = give_up - monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _message(text: str) -> str:
    """The message in etcd's answer, which is JSON. For another server: the first line of its answer."""
    try:
        data = json.loads(text)
        found = data.get("message") or data.get("error")
        if isinstance(found, str):
            return found
    except (AttributeError, ValueError):
        pass  # not etcd
    return text.strip().partition("\n")[0][:200]
