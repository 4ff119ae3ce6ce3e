"""etcd's JSON gateway, version 3.4 or newer: transactions, and a stream that says when to look again.

`etcd3gw`, OpenStack's client, is maintained and plain HTTP: the others need grpc and protobuf or have no maintainer. Of
it we use single transactions; its watches know no timeout and start threads, so the stream is read here.

1. A transaction is tried once on each server, from the one that answered last, and is bounded in time.
2. What fails may have happened all the same: transactions are written so that repeating them does no harm.
3. One thread at a time: a requests session is not to be shared.
"""

from __future__ import annotations

import json
import re
import select
from base64 import b64decode, b64encode
from collections.abc import Sequence

from reknit.core.reasons import Refusal
from reknit.core.values import TYPE_CHECKING, frozen

from .ports import Refused, Unavailable

if TYPE_CHECKING:
    from typing import Any

    from etcd3gw.client import Etcd3Client

    Json = dict[str, Any]


@frozen
class Found:
    """A key that is there."""

    key: str
    value: bytes
    created: int
    """The revision at which it was put first."""
    version: int
    """How many times it was put."""


@frozen
class Range:
    found: tuple[Found, ...] = ()
    has_more: bool = False
    count: int = 0
    """Of all keys within, found or not."""


@frozen
class Answer:
    is_met: bool
    """The comparisons held: the answers are those to `then`, or else to `otherwise`."""
    revision: int
    """Of the store."""
    ranges: tuple[Range, ...]
    """One for each operation. To a put it is empty."""


# ---- what transactions are made of ----


def put(key: str, value: bytes) -> Json:
    return {"request_put": {"key": _b64(key), "value": _b64(value)}}


def get(key: str) -> Json:
    return {"request_range": {"key": _b64(key)}}


def below(prefix: str) -> Json:
    """All keys that begin with `prefix`."""
    return {"request_range": {"key": _b64(prefix), "range_end": _b64(_end(prefix))}}


def below_from(prefix: str, key: str) -> Json:
    """Those of them that are not before `key`."""
    return {"request_range": {**below(prefix)["request_range"], "key": _b64(key)}}


def count(prefix: str) -> Json:
    """Of the keys that begin with `prefix`."""
    return {"request_range": {**below(prefix)["request_range"], "count_only": True}}


def created_after(prefix: str, revision: int, limit: int) -> Json:
    """The first `limit` of the keys that begin with `prefix` and are younger than `revision`, the oldest first."""
    wanted = {"min_create_revision": str(revision + 1), "sort_target": "CREATE", "limit": str(limit)}
    return {"request_range": {**below(prefix)["request_range"], **wanted}}


def is_created(key: str, revision: int) -> Json:
    """The key was created at `revision`; 0: it is not there."""
    return {"key": _b64(key), "target": "CREATE", "create_revision": str(revision)}


def is_there(key: str) -> Json:
    return {"key": _b64(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}


def holds(key: str, value: bytes) -> Json:
    return {"key": _b64(key), "target": "VALUE", "value": _b64(value)}


# ---- servers ----


class Gateway:
    """The members of a cluster, as one thread sees them."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        timeout_s: float,
        protocol: str = "http",
        ca_cert: str | None = None,
        cert_cert: str | None = None,
        cert_key: str | None = None,
    ) -> None:
        """`timeout_s` is shared by the endpoints: a silent one costs its part. The certificates are files in PEM."""
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s / len(self._endpoints)
        self._protocol = protocol
        self._ca_cert = ca_cert
        self._cert_cert = cert_cert
        self._cert_key = cert_key or cert_cert  # it may lie in the same file
        self._clients: list[Etcd3Client] = []
        self._current = 0

    def transact(self, compare: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json]) -> Answer:
        reasons = []
        request = {"compare": compare, "success": then, "failure": otherwise}
        for _ in self._endpoints:
            client = self._client()
            from etcd3gw.exceptions import Etcd3Exception
            from requests import RequestException

            try:
                return _answer(client.transaction(request))
            except (Etcd3Exception, RequestException, ValueError) as e:
                reasons.append(f"{client.base_url}: {_why(e)}")
                self._current = (self._current + 1) % len(self._endpoints)
            except OSError as e:
                raise Refused(Refusal.SETUP, f"etcd at {client.base_url}: {e}") from None  # no such certificate
        raise Unavailable(f"etcd does not answer within {self._timeout_s:g} s each: {'; '.join(reasons)}")

    def watch(self, prefix: str, revision: int) -> Watch | None:
        """Watch the keys below `prefix` from `revision` on, on the server that answered last. None if it cannot be."""
        try:
            return Watch(self._client(), prefix, revision)
        except (OSError, ValueError):
            return None  # the next transaction finds out what is wrong

    def is_at(self, watch: Watch) -> bool:
        """Is it of the server that answered last?"""
        return watch.client is self._client()

    def close(self) -> None:
        for client in self._clients:
            client.session.close()

    def _client(self) -> Etcd3Client:
        if not self._clients:
            self._clients = [self._made(host, port) for host, port in self._endpoints]
        return self._clients[self._current]

    def _made(self, host: str, port: int) -> Etcd3Client:
        try:
            from etcd3gw.client import Etcd3Client
        except ImportError as e:
            raise Refused(Refusal.SETUP, f"etcd needs a client library, pip install 'reknit[etcd]': {e}") from None
        client = Etcd3Client(
            host,
            port,
            self._protocol,
            ca_cert=self._ca_cert,
            cert_cert=self._cert_cert,
            cert_key=self._cert_key,
            timeout=self._timeout_s,
            api_path="/v3/",
        )
        client.session.trust_env = False  # no proxy stands between a node and its store, and looking for one takes time
        return client


class Watch:
    """A stream on which something arrives when a key has changed.

    What arrived before a range was asked for is in its answer. So nothing need be understood, and what is left in a
    buffer holds no news."""

    def __init__(self, client: Etcd3Client, prefix: str, revision: int) -> None:
        self.client = client
        wanted = {"key": _b64(prefix), "range_end": _b64(_end(prefix)), "start_revision": str(revision)}
        url, timeout_s = client.get_url("/watch"), client.timeout
        self._response = client.session.post(url, json={"create_request": wanted}, stream=True, timeout=timeout_s)
        self._chunks = self._response.iter_content(chunk_size=None)
        if not self._next():  # the first says that it was created
            self._response.close()
            raise ValueError(f"no watch at {url}")
        self._fd = self._response.raw.fileno()

    def wait(self, wait_s: float, gate: int) -> bool:
        """Until something has arrived, or `gate` can be read. False if nothing has."""
        return bool(readable((self._fd, gate), wait_s))

    def take(self) -> bool:
        """Take in what has arrived, if anything. False if nothing more will: it is compacted, or cut off."""
        return self._next() if readable((self._fd,), 0) else True

    def close(self) -> None:
        self._response.close()

    def _next(self) -> bool:
        try:
            chunk = next(self._chunks, b"")
        except (OSError, ValueError):
            return False
        return b'"result"' in chunk and b'"canceled":true' not in chunk


def readable(fds: Sequence[int], wait_s: float) -> list[int]:
    """Those of them that can be read, after up to `wait_s` seconds."""
    poll = select.poll()  # which, unlike `select.select`, takes descriptors above 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(wait_s * 1000)]


# ---- JSON ----


def _answer(data: Any) -> Answer:
    """Raises ValueError if it is none: something else listens there."""
    try:
        ranges = tuple(_range(next(iter(a.values()))) for a in data.get("responses", ()))
        return Answer(data.get("succeeded", False), int(data["header"]["revision"]), ranges)
    except (AttributeError, KeyError, StopIteration, TypeError) as e:
        raise ValueError(f"not an answer of etcd: {json.dumps(data)[:100]}") from e


def _range(data: Json) -> Range:
    return Range(tuple(map(_found, data.get("kvs", ()))), data.get("more", False), int(data.get("count", 0)))


def _found(data: Json) -> Found:
    value = b64decode(data.get("value", ""))
    return Found(b64decode(data["key"]).decode(), value, int(data["create_revision"]), int(data["version"]))


def _b64(data: str | bytes) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode()


def _end(prefix: str) -> str:
    """The first key after all that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _why(error: Exception) -> str:
    """In a few words. etcd's own reasons are JSON; those of requests a wrapped wrapper, whose last words count."""
    text = getattr(error, "detail_text", None) or str(error)
    for pattern in (r"\[Errno -?\d+\] ([^'\")]+)", r'"message":\s*"([^"]+)"', r"(certificate verify failed[^(]*)"):
        if match := re.search(pattern, text):
            return match[1].strip()
    if "timed out" in text.lower():
        return "no answer"
    quoted = re.findall(r"'([^']{8,})'", text)
    return (quoted[-1] if quoted else text)[:200]
