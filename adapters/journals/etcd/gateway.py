"""A client of etcd's JSON gateway, version 3.4 or newer: transactions, and a stream that tells when to look again.

etcd speaks gRPC. Each of its servers takes the same requests as JSON over HTTP. For these the standard library is
enough.

1. A transaction is tried once on each server. The server that answered last comes first.
2. A transaction that failed may have been carried out all the same, or may be carried out later. So callers write
   transactions that do no harm when they are repeated.
3. A caller may ask for haste (`soon_s`). Then short tries come before those of rule 1. A short try asks the next server
   when an answer is late, compared with the answers before. So a leader that is lost costs little more than the
   election of the next one: until then each server forwards what it gets to the leader that is gone, and never answers.
4. The first answer of any server counts. A server that is late keeps its request until its turn comes again. So a
   cluster that has become slow costs a call no more than its answer takes, and one further request.
5. Short tries are made only while etcd answers as usual: not before the first answer, and not after a call that no
   server has answered. A cluster that has become slow makes an agent's answers late once. From then on they are usual.
6. One thread at a time uses a `Gateway`. Only `close` may come from another thread.
"""

from __future__ import annotations

import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from attrs import field, frozen

from reknit.adapters.runtime.ports import Unavailable

from .connection import ROUND_TRIPS, EtcdServer, Login, Pace, readable, tls_context, why

if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]


@frozen
class KeyValue:
    """A key that is there."""

    key: str
    value: bytes
    created: int
    """The revision at which it was put first."""
    version: int
    """How many times it was put."""


@frozen
class Range:
    found: tuple[KeyValue, ...] = ()
    has_more: bool = False
    count: int = 0
    """Number of all keys in the range, including those that are not in `found`."""


@frozen
class Answer:
    is_met: bool
    """True: all comparisons held, and `ranges` answers the operations in `then`. False: `ranges` answers those in
    `otherwise`."""
    revision: int
    """The revision of the store."""
    ranges: tuple[Range, ...]
    """One for each operation. It is empty for a put."""


_PART_BYTES = 1 << 16
_TRANSACT = "/v3/kv/txn"
_HASTE_S = 2.5
"""For so long a call makes short tries. Seconds. The members of etcd elect a leader within twice the time of its option
--election-timeout, which is 1 s by default. Until then no try can succeed."""
_ROUNDS = 5
"""Upper bound on the short tries of a call on one server. A server that refuses the connection takes no time, so
`_HASTE_S` would allow any number of them."""
_GROWTH = 1.5
"""A short try takes so many times as long as the one before on the same server. Without growth, no server that takes
longer than a round of short tries could answer one of them."""
_READ_S = 0.1
"""An answer that has begun to arrive may take so many seconds more, even if the time of its try is over."""


# ---- what transactions are made of ----


def put(key: str, value: bytes) -> Json:
    return {"request_put": {"key": _b64(key), "value": _b64(value)}}


def get(key: str) -> Json:
    return {"request_range": {"key": _b64(key)}}


def below(prefix: str) -> Json:
    """All keys that begin with `prefix`."""
    return {"request_range": {"key": _b64(prefix), "range_end": _b64(_end(prefix))}}


def below_from(prefix: str, key: str) -> Json:
    """All keys that begin with `prefix`, from `key` on."""
    return {"request_range": {**below(prefix)["request_range"], "key": _b64(key)}}


def first_from(prefix: str, key: str) -> Json:
    """The first key that begins with `prefix`, from `key` on, without its value."""
    return {"request_range": {**below_from(prefix, key)["request_range"], "limit": "1", "keys_only": True}}


def count(prefix: str) -> Json:
    """The number of keys that begin with `prefix`."""
    return {"request_range": {**below(prefix)["request_range"], "count_only": True}}


def created_after(prefix: str, revision: int, limit: int) -> Json:
    """The first `limit` keys that begin with `prefix` and were created after `revision`, the oldest first."""
    wanted = {"min_create_revision": str(revision + 1), "sort_target": "CREATE", "limit": str(limit)}
    return {"request_range": {**below(prefix)["request_range"], **wanted}}


def delete_below(prefix: str) -> Json:
    """Delete all keys that begin with `prefix`."""
    return {"request_delete_range": {"key": _b64(prefix), "range_end": _b64(_end(prefix))}}


def is_created(key: str, revision: int) -> Json:
    """The key was created at `revision`. 0: the key is not there."""
    return {"key": _b64(key), "target": "CREATE", "create_revision": str(revision)}


def is_there(key: str) -> Json:
    return {"key": _b64(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}


def holds(key: str, value: bytes) -> Json:
    return {"key": _b64(key), "target": "VALUE", "value": _b64(value)}


def is_untouched_since(prefix: str, revision: int) -> Json:
    """No key that begins with `prefix` was put after `revision`."""
    until = {"target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}
    return {"key": _b64(prefix), "range_end": _b64(_end(prefix)), **until}


# ---- servers ----


@frozen
class Cluster:
    """Where the members of an etcd cluster are, and how they are spoken to."""

    endpoints: Sequence[tuple[str, int]]
    """Host and port of each member."""
    protocol: str = "http"
    """"http" or "https". The files below count with "https" only."""
    ca_cert: str | None = None
    """The file, in PEM, with the certificate of the authority. None: those that the system trusts."""
    cert_cert: str | None = None
    """The file, in PEM, with this client's own certificate. None: it has none."""
    cert_key: str | None = None
    """The file, in PEM, with the key of this certificate. None: the key is in the file of the certificate."""
    user: str = ""
    """Empty: etcd asks for no user."""
    password: str = field(default="", repr=False)
    password_file: str = ""
    """The file that holds the password. Empty: `password` is the password."""

    def login(self, needs: str) -> Login:
        """For clients that share a token. `needs`: see `Login`."""
        return Login(self.user, self.password, self.password_file, needs)


class _Call:
    """One transaction, on as many servers as it takes."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self.began: dict[EtcdServer, float] = {}
        """The servers that have the request and have not answered yet. For each: when it was sent."""
        self.late: set[EtcdServer] = set()
        """The servers that were too late: nothing is expected of them any more."""
        self.reasons: dict[str, str] = {}
        """By URL: why the server has given no usable answer."""
        self.has_refusal = False
        """A server has answered, and its answer cannot be used."""
        self.answer: Answer | None = None

    def ask(self, server: EtcdServer, within_s: float) -> None:
        """Send the request. It takes the place of the one that the server may have already."""
        self._forget(server)
        now = monotonic()
        try:
            server.begin(_TRANSACT, self._request, within_s)
            self.began[server] = now
        except (OSError, HTTPException, ValueError) as e:
            self._failed(server, e)

    def take(self, server: EtcdServer, within_s: float) -> None:
        """Read the answer, which has begun to arrive."""
        del self.began[server]
        try:
            self.answer = _answer(server.finish(within_s))
        except (OSError, HTTPException, ValueError) as e:
            self._failed(server, e)

    def end(self) -> None:
        """Give up all requests that have no answer."""
        for server in list(self.began):
            self._forget(server)

    def _forget(self, server: EtcdServer) -> None:
        if self.began.pop(server, None) is not None:
            server.drop()
        self.late.discard(server)

    def _failed(self, server: EtcdServer, error: Exception) -> None:
        self.has_refusal = self.has_refusal or isinstance(error, ValueError)
        if isinstance(error, TimeoutError):
            self.late.add(server)
            self.reasons.setdefault(server.url, f"{server.url}: {why(error)}")  # not in place of how long it had
        else:
            self.reasons[server.url] = f"{server.url}: {why(error)}"


class Gateway:
    """The members of a cluster, as one thread sees them."""

    def __init__(self, cluster: Cluster, timeout_s: float, login: Login | None = None, soon_s: float = inf) -> None:
        """Does not connect yet. `timeout_s` is shared by the endpoints: a server that is silent costs its part. A call
        may take longer if the answers show that the servers are far away, and by `_HASTE_S` with `soon_s`.
        `login`: shared with other gateways. None: one for this gateway alone.
        `soon_s`: the least limit of a short try, in seconds (rule 3 above). inf: there are no short tries."""
        self._soon_s = soon_s
        self._pace: Pace | None = None
        """None: nothing was answered yet, or the last call failed."""
        self._least_s = timeout_s / len(cluster.endpoints)
        self._cluster = cluster
        self._context: ssl.SSLContext | None = None
        tls = self._tls if cluster.protocol == "https" else None
        login = login or cluster.login("readwrite ''")
        self._servers = [EtcdServer(host, port, self._least_s, tls, login) for host, port in cluster.endpoints]
        self._current = 0
        """Index of the server that answered last."""
        self.round_trip_s = inf
        """The shortest time that an answer has taken so far, in seconds. The first answers need a connection, and one
        slow answer does not tell how far away a server is."""
        self._is_closed = False

    def transact(self, compare: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json]) -> Answer:
        """Do the operations in `then` if all comparisons hold, else those in `otherwise`.

        Raises `Unavailable`, whose text names the error of each server. Raises `Refused` if etcd does not let this
        client in."""
        call = _Call({"compare": compare, "success": then, "failure": otherwise})
        try:
            for within_s in self._limits():
                if self._is_closed:
                    raise Unavailable("the connection to etcd was closed here")
                self._try(call, within_s)
                if call.answer is not None:
                    return call.answer
        finally:
            call.end()
        self._pace = None
        if self._is_closed:
            raise Unavailable("the connection to etcd was closed here")
        what = "no server of etcd can be used" if call.has_refusal else "no server of etcd has answered"
        raise Unavailable(f"{what}: {'; '.join(call.reasons.values())}", answers=call.has_refusal)

    def _try(self, call: _Call, within_s: float) -> None:
        """Ask the next server, and wait until it or one that was asked before has answered."""
        server = self.server
        limit_s = min(server.timeout_s, within_s)
        until = monotonic() + limit_s
        call.ask(server, limit_s)
        while True:
            waits = {waiting.fileno(): waiting for waiting in call.began}
            ready = readable(tuple(waits), until - monotonic() if server in call.began else 0)
            for fd in ready:
                began = call.began[waits[fd]]
                call.take(waits[fd], max(_READ_S, until - monotonic()))
                if call.answer is not None:
                    self._current = self._servers.index(waits[fd])
                    self._note(waits[fd], monotonic() - began)
                    return
            if not ready:
                break
        if server in call.began or server in call.late:
            call.reasons[server.url] = f"{server.url}: no answer within {limit_s:g} s"
            if self.round_trip_s == inf:
                # Nobody knows yet whether a silent server is far away. The limit does not grow in an outage: otherwise
                # some nodes would notice the end of the outage much later than others, and would be taken for dead.
                server.timeout_s = min(2 * server.timeout_s, ROUND_TRIPS * self._least_s)
        self._current = (self._current + 1) % len(self._servers)

    def _limits(self) -> Iterator[float]:
        """The limit of each try of a call, in seconds: the short tries, then one on each server with its whole time."""
        late_s = max(self._soon_s, self._pace.late_s if self._pace else inf)
        if late_s < self._least_s and len(self._servers) > 1:
            until = monotonic() + _HASTE_S
            for number in range(_ROUNDS * len(self._servers)):
                if monotonic() < until:
                    yield late_s * _GROWTH ** (number // len(self._servers))
        for _ in self._servers:
            yield inf

    def _note(self, server: EtcdServer, took_s: float) -> None:
        """The server has answered after so many seconds."""
        self._pace = self._pace.after(took_s) if self._pace else Pace(took_s, took_s / 2)
        self.round_trip_s = min(self.round_trip_s, took_s)
        server.timeout_s = max(self._least_s, ROUND_TRIPS * self.round_trip_s)

    def watch(self, prefix: str, revision: int) -> KeyWatch | None:
        """Watch the keys that begin with `prefix` from `revision` on, on the server that answered last. None if that
        fails. The next transaction then finds out why."""
        try:
            return KeyWatch(self.server, prefix, revision)
        except (OSError, HTTPException, ValueError):
            return None

    @property
    def server(self) -> EtcdServer:
        """The server that answered last."""
        return self._servers[self._current]

    def is_at(self, watch: KeyWatch) -> bool:
        """True if the watch is on the server that answered last."""
        return watch.server is self.server

    def close(self) -> None:
        """End all connections. Any thread may call this, and more than once. A transaction that waits ends with
        `Unavailable`."""
        self._is_closed = True
        for server in self._servers:
            server.close()

    def _tls(self) -> ssl.SSLContext:
        """The TLS context. It is made for the first connection and kept, so that the files are read once."""
        if self._context is None:
            cluster = self._cluster
            self._context = tls_context(cluster.ca_cert, cluster.cert_cert, cluster.cert_key)
        return self._context


class KeyWatch:
    """A stream on which something arrives when a key has changed.

    A range that the reader asks for afterwards holds that change. So the reader needs to know only that something has
    arrived, and not what."""

    def __init__(self, server: EtcdServer, prefix: str, revision: int) -> None:
        """Open a connection of its own, and wait until etcd says that the watch is created. Raises OSError,
        HTTPException or ValueError."""
        self.server = server
        wanted = {"key": _b64(prefix), "range_end": _b64(_end(prefix)), "start_revision": str(revision)}
        self._socket = server.opened("/v3/watch", {"create_request": wanted})
        self._stream = _Stream()
        try:
            give_up = monotonic() + server.timeout_s
            while not self._stream.has_begun:
                left_s = give_up - monotonic()
                if left_s <= 0 or not self.take():
                    raise ValueError(f"no watch at {server.url}")
                if not self._stream.has_begun:
                    readable((self._socket.fileno(),), left_s)
        except BaseException:
            self._socket.close()
            raise

    def wait(self, wait_s: float, gate: int) -> bool:
        """Wait until something has arrived or the descriptor `gate` can be read. False if neither happened."""
        return bool(readable((self._socket.fileno(), gate), wait_s))

    def take(self) -> bool:
        """Read all that has arrived, without waiting. False if nothing more will arrive. Then etcd has cancelled the
        watch, for example after a compaction, or the connection is gone."""
        try:
            self._socket.settimeout(0)
            while data := self._socket.recv(_PART_BYTES):
                if not self._stream.takes(data):
                    return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return True  # everything was read
        except (OSError, ValueError):
            pass
        return False

    def close(self) -> None:
        self._socket.close()


class _Stream:
    """The answer to a watch: HTTP in chunks, in which each line is a message in JSON."""

    def __init__(self) -> None:
        self._data = b""
        """Bytes that are not decoded yet: the head of the answer, or the beginning of a chunk."""
        self._line = b""
        """The beginning of a message whose end has not arrived."""
        self._has_head = False
        self.has_begun = False
        """The first message has arrived: the watch is created."""

    def takes(self, data: bytes) -> bool:
        """Decode more bytes. False if the watch has ended. Raises ValueError if the bytes are no answer of etcd."""
        self._data += data
        if not self._has_head:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return True
            if head.split(b" ", 2)[1:2] != [b"200"] or b"transfer-encoding: chunked" not in head.lower():
                raise ValueError("no stream")
            self._has_head, self._data = True, rest
        *lines, self._line = (self._line + b"".join(self._chunks())).split(b"\n")
        for line in lines:
            if not line.startswith(b'{"result"') or b'"canceled":true' in line:
                return False
            self.has_begun = True
        return True

    def _chunks(self) -> Iterator[bytes]:
        """The content of the chunks that have arrived whole."""
        while True:
            size, end, rest = self._data.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16) if end else 0
            if not end or len(rest) < length + 2:
                return
            yield rest[:length]
            self._data = rest[length + 2 :]


# ---- JSON ----


def _answer(data: Any) -> Answer:
    """Raises ValueError if the data are no answer of etcd, because another program listens there."""
    try:
        ranges = tuple(_range(next(iter(a.values()))) for a in data.get("responses", ()))
        return Answer(data.get("succeeded", False), int(data["header"]["revision"]), ranges)
    except (AttributeError, KeyError, StopIteration, TypeError) as e:
        raise ValueError(f"not an answer of etcd: {json.dumps(data)[:100]}") from e


def _range(data: Json) -> Range:
    return Range(tuple(map(_found, data.get("kvs", ()))), data.get("more", False), int(data.get("count", 0)))


def _found(data: Json) -> KeyValue:
    value = b64decode(data.get("value", ""))
    return KeyValue(b64decode(data["key"]).decode(), value, int(data["create_revision"]), int(data["version"]))


def _b64(data: str | bytes) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode()


def _end(prefix: str) -> str:
    """The first key after all keys that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
