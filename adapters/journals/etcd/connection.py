"""A client of one etcd server, over HTTP with the standard library.

1. One connection per server is kept open and used again. If the server has closed it, a new one is opened.
2. One deadline covers the connection, the handshake, the request and the answer.
3. One thread at a time makes a request. Any thread may call `close`, which ends a call that waits.
   The thread may do other things between a request and its answer (`begin` and `finish`).
4. With a user, the client first gets a token and sends it with every request. When etcd no longer takes the token, the
   client gets a new one, once per request. A token expires, and a change of any user or role may make it invalid.
5. A user that etcd does not let in at first is refused. Once etcd has let the user in, a denial is an outage: somebody
   changes passwords or roles, and a job that runs need not end because of that.
"""

from __future__ import annotations

import json
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.runtime.ports import Refused
from reknit.core.job.reasons import Refusal

if TYPE_CHECKING:
    from typing import Any

_PART_BYTES = 1 << 16
_SHORTEST_TRY_S = 0.01
ROUND_TRIPS = 4
"""A call takes up to so many round trips: for the connection, for TLS, for a token and for the request."""
_AUTHENTICATE = "/v3/auth/authenticate"
_EXPIRED = ("invalid auth token", "revision in header is old", "revision of auth store is old")
"""Parts of etcd's messages. Each means that a new token is needed."""
_ADVICE = {
    "authentication failed": "check the user and the password",
    "authentication is not enabled": "it has no users; leave out the user",
    "permission denied": "grant one of its roles the keys of the job: etcdctl role grant-permission ROLE --prefix {}",
    "user name is empty": "it needs a user and a password",
    "CommonName of client": "with users, its JSON interface takes only a certificate without a common name",
}
"""By a part of etcd's message: what the operator of this node can do. Each message means that etcd denies the request.
Trying again helps only after somebody has changed the users of etcd, or what this client gives."""
_NO_SPACE = "database space exceeded"
"""A part of etcd's message when it has used up its quota. It then takes no writes until its alarm is disarmed."""


class Login:
    """The user in whose name the clients of a journal ask etcd. The clients share the token."""

    def __init__(self, user: str = "", password: str = "", file: str = "", needs: str = "readwrite ''") -> None:
        """`user`: empty if etcd needs no user. `file`: the file that holds the password, which is read for each token.
        So the password may change while a job runs. Empty: `password` is the password. `needs`: the permission that the
        user needs, in the words of etcdctl, for messages: its kind and the prefix of the keys."""
        self.user = user
        self.needs = needs
        self._password = password
        self._file = file
        self.token = ""
        """Empty: there is none yet."""
        self.was_let_in = False
        """etcd has answered a request of this user."""

    def password(self) -> str:
        """Raises ValueError if the file cannot be read."""
        if not self._file:
            return self._password
        try:
            with open(self._file, encoding="utf-8") as file:
                return file.read().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"the password cannot be read: {self._file}: {why(e)}") from None


@frozen
class Pace:
    """How long the answers of etcd take: their mean and mean deviation, in seconds. Newer answers count more. TCP
    follows its round trips in the same way (RFC 6298)."""

    mean_s: float
    deviation_s: float

    @property
    def late_s(self) -> float:
        """An answer that takes longer is late."""
        return ROUND_TRIPS * self.mean_s + 4 * self.deviation_s

    def after(self, took_s: float) -> Pace:
        """The pace after an answer that took so many seconds."""
        deviation_s = 0.75 * self.deviation_s + 0.25 * abs(took_s - self.mean_s)
        return Pace(0.875 * self.mean_s + 0.125 * took_s, deviation_s)


class EtcdServer:
    """One member of a cluster."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
        login: Login | None = None,
    ) -> None:
        """Does not connect yet. `timeout_s`: upper bound on each call, in seconds. `tls`: called for each connection,
        returns its TLS context. None: plain HTTP. `login`: None if etcd needs no user."""
        self._host = host
        self._port = port
        self.timeout_s = timeout_s
        self._tls = tls
        self._login = login or Login()
        name = f"[{host}]" if ":" in host else host
        self.authority = f"{name}:{port}"
        """Host and port, as in a URL."""
        self.url = f"{'https' if tls else 'http'}://{self.authority}"
        self._connection = HTTPConnection(host, port)
        self._socket: socket.socket | None = None
        """The socket of `_connection`. None: it is not connected."""
        self._busy = threading.Lock()
        """Held by the thread that makes a request, until the answer was read or the request was dropped."""
        self._request: tuple[str, object, str] | None = None
        """Path, data and token of the request that was sent and has no answer yet. None: there is none."""
        self._changing = threading.Lock()
        """Held while `_socket` is replaced, closed or shut down. Otherwise `close` might shut down a descriptor whose
        number belongs to another file by then."""
        self._is_closed = False

    def ask(self, path: str, data: object, within_s: float = inf) -> Any:
        """The answer to a request, decoded from JSON. `within_s`: a shorter bound than `timeout_s`, in seconds. It does
        not hold for a new token, for which etcd computes long.

        Raises OSError, HTTPException or ValueError if no usable answer comes: `why` makes a text of the error. Raises
        `Refused` if etcd does not allow the request for this user."""
        give_up = monotonic() + min(self.timeout_s, within_s)
        self.begin(path, data, within_s)
        return self.finish(give_up - monotonic())

    def begin(self, path: str, data: object, within_s: float = inf) -> None:
        """Send a request. `finish` or `drop` must follow. Raises like `ask`, and then the request is dropped."""
        self._busy.acquire()
        try:
            give_up = monotonic() + min(self.timeout_s, within_s)
            if self._login.user and not self._login.token:
                self._authenticate(monotonic() + self.timeout_s)
            self._request = path, data, self._login.token
            self._send(path, data, give_up)
        except BaseException:
            self._end()
            raise

    def fileno(self) -> int:
        """The descriptor that can be read once the answer has begun. -1: there is none, because the connection was
        closed."""
        return self._socket.fileno() if self._socket is not None else -1

    def finish(self, within_s: float) -> Any:
        """The answer to the request that was begun. Raises like `ask`. Without an answer in time the request is
        dropped."""
        if self._request is None:
            raise AssertionError("an answer is asked for, and no request was begun")
        try:
            return self._answer(*self._request, monotonic() + within_s)
        finally:
            self._end()

    def drop(self) -> None:
        """Give up the request that was begun, and its connection. Does nothing if there is none."""
        if self._request is not None:
            self._drop()
            self._end()

    def opened(self, path: str, data: object) -> socket.socket:
        """A new connection of the caller's own, on which this request has been sent. Raises like `ask`."""
        sock = self._connected(monotonic() + self.timeout_s)
        try:
            connection = HTTPConnection(self._host, self._port)
            connection.sock = sock
            connection.request("POST", path, json.dumps(data).encode(), self._headers(path))
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """End the connection. A call that waits in another thread ends with an OSError."""
        self._is_closed = True
        with self._changing:
            if self._socket is not None:
                try:
                    # SSLSocket's own method would also remove the TLS layer, which another thread may be using.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:
                    pass  # the server has closed it already
        self._let_go()

    def _end(self) -> None:
        """The request is over."""
        self._request = None
        self._busy.release()
        if self._is_closed:
            self._let_go()

    def _let_go(self) -> None:
        """Close the connection if no call is under way. `close` calls this, and each call that ends after it."""
        if self._busy.acquire(blocking=False):
            self._drop()
            self._busy.release()

    # ---- one request ----

    def _answer(self, path: str, data: object, token: str, give_up: float) -> Any:
        login = self._login
        status, text = self._received(give_up)
        if status != 200 and any(expired in text for expired in _EXPIRED):
            if login.token == token:  # otherwise another client of the journal has got a new one already
                self._authenticate(monotonic() + self.timeout_s)
            status, text = self._posted(path, data, give_up)
        answer = self._decoded(status, text)
        login.was_let_in = True
        return answer

    def _authenticate(self, give_up: float) -> None:
        login = {"name": self._login.user, "password": self._login.password()}
        answer = self._decoded(*self._posted(_AUTHENTICATE, login, give_up))
        token = answer.get("token") if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token:
            raise ValueError("not an answer of etcd: it has no token")
        self._login.token = token

    def _decoded(self, status: int, text: str) -> Any:
        if status == 200:
            return json.loads(text)
        message = _message(text)
        if _NO_SPACE in message:
            message += ": compact and defragment etcd, then disarm its alarm (etcdctl alarm disarm)"
        if advice := next((advice for part, advice in _ADVICE.items() if part in message), ""):
            whose = f"user {self._login.user}" if self._login.user else "a client without a user"
            denial = f"does not let {whose} in: {message}; {advice.format(self._login.needs)}"
            if not self._login.was_let_in:
                raise Refused(Refusal.SETUP, f"etcd at {self.url} {denial}")
            message = f"etcd {denial}"
        if status == HTTPStatus.NOT_FOUND:
            message = "another program answers there, or etcd on a port that is not for clients (HTTP status 404)"
        raise ValueError(message if message else f"HTTP status {status}")

    def _posted(self, path: str, data: object, give_up: float) -> tuple[int, str]:
        """Status and text of the answer."""
        self._send(path, data, give_up)
        return self._received(give_up)

    def _send(self, path: str, data: object, give_up: float) -> None:
        try:
            sock = self._kept(give_up)
            sock.settimeout(_left_s(give_up))
            self._connection.request("POST", path, json.dumps(data).encode(), self._headers(path))
        except BaseException:
            self._drop()
            raise

    def _received(self, give_up: float) -> tuple[int, str]:
        """Status and text of the answer to what was sent."""
        try:
            sock = self._socket
            if sock is None:
                raise OSError("the connection was closed here")
            sock.settimeout(_left_s(give_up))
            response = self._connection.getresponse()
            parts = []
            # The end of the answer may close the socket, if the server has said that it will (Connection: close). From
            # Python 3.13 on this happens together with the last part. Before, it happens when nothing more is read.
            while not response.isclosed():
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

    def _headers(self, path: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._login.token and path != _AUTHENTICATE:
            headers["Authorization"] = self._login.token
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
