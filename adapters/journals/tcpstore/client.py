"""A client of torch's TCPStore: one connection, and the part of the wire protocol that the journal needs.

torch's own client needs `import torch`, asks for reverse DNS at each connect, never reconnects, and blocks every other
call while one call waits.

The protocol: the client sends a magic number first. All integers are little endian. A request is one byte for the kind,
then the arguments. A string is its length, then its bytes. Replies come in the order of the requests. Only the reply to
a WAIT comes when the keys are there.

1. After any failure the connection is closed, because a late reply may still arrive on it. The caller makes a new
   client.
2. One deadline covers all that a call sends and reads. The kernel limits each system call (SO_RCVTIMEO, SO_SNDTIMEO).
   Python's own timeouts call poll before each of them, which is twice the work.
3. torch's clients put a slash in front of each key. This client does the same, so that torch's clients can read the
   journal.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TypeVar

from reknit.adapters.runtime.clock import is_readable, is_writable
from reknit.adapters.runtime.ports import Unavailable

_VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _WAIT, _MULTI_GET, _CANCEL_WAIT, _PING = (
    bytes([number]) for number in (0, 1, 2, 3, 4, 6, 10, 12, 13)
)
_MAGIC = 0x3C85F7CE
_CANCELLED = b"\1"
_U32, _U64, _I64 = Struct("<I"), Struct("<Q"), Struct("<q")
_TIMEVAL = Struct("@ll")
_MOST_REPLIES_BYTES = 1 << 12
"""Size of a receive buffer when the length of the reply is not known yet. Python allocates it for each call."""
_MOST_BYTES = 1 << 28
"""A reply that claims to be longer does not come from a TCPStore."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_CLOSED_HERE = "the connection was closed here"
_NO_STORE = "answers, but not as a TCPStore: another program uses this port"

T = TypeVar("T")


class StoreClient:
    """One connection, for one thread. Every call may raise `Unavailable`, with the endpoint and what happened."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        keys: Sequence[str] = (),
        on_begin: Callable[[StoreClient], None] = lambda _: None,
    ) -> None:
        """Connects. `timeout_s`: upper bound, in seconds, on the wait for the connection after the name is resolved,
        and on the wait for each reply. `keys`: their values are fetched in the same round trip, into `greeting`.
        `on_begin`: called with this client before it connects, so that another thread can close it meanwhile."""
        self._where = endpoint(host, port)
        self._timeout_s = timeout_s
        self._buffer = b""
        self._busy = threading.Lock()
        self.is_closed = False
        self._begun: socket.socket | None = None
        """The socket, as soon as it connects."""
        on_begin(self)
        try:
            self._socket = self._connected(host, port)
        except BaseException:
            self.is_closed = True
            raise
        began = time.monotonic()
        self.greeting = self._call(lambda: self._greet(keys))
        """The values of `keys`, empty where there is no such key."""
        self.round_trip_s = time.monotonic() - began
        """The shortest time in which the server has answered. Seconds. A server that is still starting takes longer to
        answer the greeting than it takes for any later call."""

    def limit(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for each reply from now on."""
        self._timeout_s = timeout_s
        self._call(lambda: _limit(self._socket, timeout_s))

    # ---- what can be asked ----

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key. The server does not answer this request. It has carried it out before it answers the
        next one."""
        self._call(lambda: self._send(_SET + _key(key) + _bytes(value)))

    def get(self, key: str) -> bytes:
        """The value of the key. Empty if there is no such key."""
        return self._call(lambda: self._asked(_GET + _key(key), self._read_bytes))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the value if it is `expected`. An empty `expected` means that there is no such key yet. Returns the
        value that the key has afterwards."""
        request = _COMPARE_SET + _key(key) + _bytes(expected) + _bytes(desired)
        return self._call(lambda: self._asked(request, self._read_bytes))

    def add(self, key: str, amount: int) -> int:
        """Add to the number in a key. A missing key counts as 0. Returns the sum."""
        return self._call(lambda: self._asked(_add(key, amount), self._read_sum))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of the keys. The value of a missing key is empty."""
        return self._call(lambda: self._asked(_keys(_MULTI_GET, keys), lambda: self._read_values(len(keys))))

    def add_and_get(self, key: str, amount: int, keys: Sequence[str]) -> tuple[int, list[bytes]]:
        """`add`, then `multi_get`, in one round trip."""
        request = _add(key, amount) + _keys(_MULTI_GET, keys)
        return self._call(lambda: self._asked(request, lambda: (self._read_sum(), self._read_values(len(keys)))))

    def set_and_get(self, key: str, value: bytes, keys: Sequence[str]) -> list[bytes]:
        """`set`, then `multi_get`, in one round trip."""
        request = _SET + _key(key) + _bytes(value) + _keys(_MULTI_GET, keys)
        return self._call(lambda: self._asked(request, lambda: self._read_values(len(keys))))

    def wait(self, keys: Sequence[str], wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until all of these keys are there. True if they are."""
        return self._call(lambda: self._waited(keys, wait_s))

    def close(self) -> None:
        """Close the connection. Any thread may call this: a call that waits in another ends with `Unavailable`. So does
        a thread that is connecting, unless it still asks for the addresses of a name."""
        self.is_closed = True
        sock = self._begun
        if sock is None:
            return  # it is about to connect, and looks at `is_closed` when it has begun
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed, or the other side was faster
        # The shutdown wakes the thread that uses the descriptor. Before that thread has ended its call, the number must
        # not be given to another file.
        with self._busy:
            sock.close()

    # ---- connecting ----

    def _connected(self, host: str, port: int) -> socket.socket:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unavailable(f"{self._where}: cannot resolve the name: {_why(error)}") from None
        why = "the name has no address"
        self._give_up = time.monotonic() + self._timeout_s
        for tried, (family, kind, protocol, _, address) in enumerate(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                why = _why(error)  # this host does not speak that protocol
                continue
            try:
                with self._busy:
                    # An address that does not answer must leave time for the next one.
                    self._connect(sock, address, (self._give_up - time.monotonic()) / (len(found) - tried))
                    _set_up(sock, self._timeout_s)
                    return sock
            except TimeoutError:
                why = f"no answer for {self._timeout_s:g} s"
            except OSError as error:
                why = _why(error)
            sock.close()
            if self.is_closed:
                why = _CLOSED_HERE
                break
        raise Unavailable(f"{self._where}: {why}")

    def _connect(self, sock: socket.socket, address: tuple[object, ...], wait_s: float) -> None:
        sock.setblocking(False)
        begun = sock.connect_ex(address)
        # Only now: a socket that does not connect yet cannot be shut down, and would connect nevertheless.
        self._begun = sock
        if begun not in (0, errno.EINPROGRESS):
            raise OSError(begun, os.strerror(begun))
        if begun and not self.is_closed and not is_writable(sock.fileno(), max(0.01, wait_s)):
            raise TimeoutError
        if self.is_closed:
            raise ConnectionAbortedError
        if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))

    def _greet(self, keys: Sequence[str]) -> list[bytes]:
        ping = os.urandom(4)
        self._send(_VALIDATE + _U32.pack(_MAGIC) + _PING + ping + (_keys(_MULTI_GET, keys) if keys else b""))
        if self._take(4) != ping:
            raise Unavailable(f"{self._where} {_NO_STORE}")
        return self._read_values(len(keys))

    # ---- asking ----

    def _call(self, ask: Callable[[], T]) -> T:
        with self._busy:
            try:
                if self.is_closed:
                    raise Unavailable(f"{self._where}: {_CLOSED_HERE}")
                self._give_up = time.monotonic() + self._timeout_s
                return ask()
            except BaseException as error:
                was_closed, self.is_closed = self.is_closed, True
                self._socket.close()
                if not isinstance(error, OSError):
                    raise
                is_late = isinstance(error, TimeoutError | BlockingIOError)  # the kernel's timeouts raise the latter
                why = f"no answer for {self._timeout_s:g} s" if is_late else _why(error)
                raise Unavailable(f"{self._where}: {_CLOSED_HERE if was_closed else why}") from None

    def _asked(self, request: bytes, read: Callable[[], T]) -> T:
        began = time.monotonic()
        self._send(request)
        found = read()
        self.round_trip_s = min(self.round_trip_s, time.monotonic() - began)
        return found

    def _waited(self, keys: Sequence[str], wait_s: float) -> bool:
        self._send(_keys(_WAIT, keys))
        came = is_readable(self._socket.fileno(), wait_s)
        self._give_up = time.monotonic() + self._timeout_s
        if came:
            self._take(1)
            return True
        # The last key may come before the server reads this. Then there are two replies.
        self._send(_CANCEL_WAIT)
        if self._take(1) == _CANCELLED:
            return False
        self._take(1)
        return True

    def _read_bytes(self) -> bytes:
        (length,) = _U64.unpack(self._take(8))
        if length > _MOST_BYTES:
            raise Unavailable(f"{self._where} {_NO_STORE}")
        return self._take(length)

    def _read_sum(self) -> int:
        return int(_I64.unpack(self._take(8))[0])

    def _read_values(self, count: int) -> list[bytes]:
        return [self._read_bytes() for _ in range(count)]

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if time.monotonic() >= self._give_up:
                raise TimeoutError
            part = self._socket.recv(max(_MOST_REPLIES_BYTES, count - len(self._buffer)))
            if not part:
                raise ConnectionError("the connection was closed by the other side")
            self._buffer += part
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def endpoint(host: str, port: int) -> str:
    """Host and port as in a URL: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_up(sock: socket.socket, timeout_s: float) -> None:
    sock.settimeout(None)
    _limit(sock, timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():  # a host that vanishes does not close its connections
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _limit(sock: socket.socket, timeout_s: float) -> None:
    limit = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _why(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].lower() + text[1:]


def _key(key: str) -> bytes:
    return _bytes(b"/" + key.encode(errors="surrogatepass"))


def _bytes(data: bytes) -> bytes:
    return _U64.pack(len(data)) + data


def _keys(what: bytes, keys: Sequence[str]) -> bytes:
    return what + _U64.pack(len(keys)) + b"".join(map(_key, keys))


def _add(key: str, amount: int) -> bytes:
    return _ADD + _key(key) + _I64.pack(amount)
