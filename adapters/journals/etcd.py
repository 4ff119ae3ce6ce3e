"""A journal in etcd.

1. An entry is a key of its own, `/reknit/<job>/entries/<token>`, put if it is not there yet. The order is etcd's, that
   of revisions: no slots, no holes, and a call that is repeated finds its key.
2. A transaction holds only while the header is the one that was admitted: nothing is written into a store that has
   lost the journal. A read also demands that the last entry is still where it was: a store that was put back to an
   older state has lost it, or has another one there.
3. What is read is the answer to a linearizable range. The watch says when to look, and no more: one that is deaf, cut
   off or compacted costs the wait.
4. The counter of a node is the `version` of its key: etcd counts the puts.

Nothing is ever deleted. Each beat is a revision, which etcd keeps until it compacts (`--auto-compaction-retention`).
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Mapping, Sequence
from time import monotonic
from urllib.parse import quote, unquote

from reknit.adapters.gateway import Gateway, below, created_after, get, holds, is_created, put, readable
from reknit.adapters.link import MANY
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.reasons import Refusal
from reknit.core.values import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.adapters.envelope import Envelope
    from reknit.adapters.gateway import Answer, Found, Json, Range, Watch
    from reknit.core.entries import Entry, Node
    from reknit.core.job import Job

_PAGE = 1000
_MOST_KEYS = 100
"""Nodes whose counters are asked for one by one. etcd takes 128 operations in a transaction."""
_LARGEST = 1 << 20
"""Bytes. etcd refuses requests of 1.5 MiB."""
_PAUSE_S = 0.2
"""Between two looks while there is no watch."""


class EtcdJournal:
    """Implements `ports.Journal`."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        envelope: Envelope,
        *,
        protocol: str = "http",
        ca_cert: str | None = None,
        cert_cert: str | None = None,
        cert_key: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """`endpoints`: (host, port) of members of one cluster. A transaction is tried on each of them, within
        `timeout_s` in all. The certificates are files in PEM: the authority's, and this client's own with its key,
        which may lie in one file."""
        self._reader = Gateway(endpoints, timeout_s, protocol, ca_cert, cert_cert, cert_key)
        self._writer = Gateway(endpoints, timeout_s, protocol, ca_cert, cert_cert, cert_key)
        self._envelope = envelope
        self._root = f"/reknit/{_quoted(envelope.job)}/"
        self._header_key = f"{self._root}header"
        self._entries = f"{self._root}entries/"
        self._header = b""
        """As admitted."""
        self._last = (0, "")
        """Position and key of the entry that was read last."""
        self._watch: Watch | None = None
        self._reading = _thread.allocate_lock()
        self._is_closed = False
        self._pipe: tuple[int, ...] = os.pipe()
        """Readable once the journal is to be closed."""

    # ---- the writer's side ----

    def append(self, token: str, entry: Entry) -> None:
        key = self._entries + _quoted(token)
        self._greet(self._writer)  # a signature names the journal
        record = self._envelope.wrap(token, entry, _place(token))
        self._transact(self._writer, [put(key, record)], is_created(key, 0))

    def beat(self, node: Node, watch: Sequence[Node]) -> Mapping[Node, int]:
        beats = f"{self._root}beats/"
        keys = {n: f"{beats}{_quoted(n.id)}.{n.incarnation}" for n in (node, *watch)}
        wanted = [get(key) for key in keys.values()] if len(keys) <= _MOST_KEYS else [below(beats)]
        answer = self._transact(self._writer, [put(keys[node], b""), *wanted])
        counts = {found.key: found.version for r in (answer.ranges if answer else ()) for found in r.found}
        return {n: counts[key] for n, key in keys.items() if key in counts}

    def publish(self, position: int, job: Job) -> None:
        self._greet(self._writer)
        record = self._envelope.wrap_job(position, job)
        if len(record) <= _LARGEST:
            self._transact(self._writer, [put(f"{self._root}fold", record)])

    # ---- the reader's side ----

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        try:
            with self._reading:
                return self._read(after, monotonic() + wait_s)
        finally:
            if self._is_closed:
                self._let_go()

    def close(self) -> None:
        if not self._is_closed:
            os.write(self._pipe[1], b"x")  # first: a reader that sees the mark below closes the pipe
            self._is_closed = True
            self._let_go()

    def _read(self, after: int, until: float) -> Batch:
        is_heard = True
        while True:
            batch, revision = self._look(after)
            left_s = until - monotonic()
            if batch.position > after and not is_heard:
                self._drop_watch()  # it is deaf: its server went without a word, and came back
            if batch.position > after or left_s <= 0:
                return batch
            is_heard = self._wait(left_s, revision)

    def _look(self, after: int) -> tuple[Batch, int]:
        """All that there is, and the revision of the store at which it was found."""
        page, revision = self._page(after, MANY)
        found, (position, base) = list(page.found), self._fold(after) if page.has_more else (after, None)
        if base is not None:
            found.clear()
        while page.has_more:
            page, revision = self._page(found[-1].created if found else position, _PAGE)
            found += page.found
        entries = [self._opened(record) for record in found]
        if found:
            position = found[-1].created
            self._last = (position, found[-1].key)
        return Batch(position, tuple(entries), base), revision

    def _page(self, after: int, limit: int) -> tuple[Range, int]:
        known, key = self._last
        is_there = [is_created(key, known)] if known and known == after else []
        answer = self._transact(self._reader, [created_after(self._entries, after, limit)], *is_there)
        if answer is None:
            why = f"the journal of job {self._envelope.job} has lost entries: its store was put back to an older state"
            raise Refused(Refusal.IDENTITY, why)
        return answer.ranges[0], answer.revision

    def _fold(self, after: int) -> tuple[int, Job | None]:
        """The published fold, if it takes a reader further than `after`."""
        answer = self._transact(self._reader, [get(f"{self._root}fold")])
        opened = self._envelope.open_job(_value(answer.ranges[0])) if answer else None
        return opened if opened is not None and opened[0] > after else (after, None)

    def _opened(self, record: Found) -> Entry:
        token = unquote(record.key.removeprefix(self._entries), errors="surrogatepass")
        return self._envelope.open(record.value, _place(token))[1]

    # ---- waiting ----

    def _wait(self, left_s: float, revision: int) -> bool:
        """Until there may be something to read. False if the watch has had nothing to say."""
        watch = self._watch
        if watch is None or not self._reader.is_at(watch):
            self._drop_watch()
            self._watch = self._reader.watch(self._entries, revision + 1)
            if self._watch is None:
                self._pause(left_s)
            return True  # what came while it was being opened is to be looked for, not waited for
        if not watch.wait(left_s, self._pipe[0]):
            return False
        if not watch.take():
            self._drop_watch()
            self._pause(left_s)
        return True

    def _pause(self, left_s: float) -> None:
        readable(self._pipe[:1], min(left_s, _PAUSE_S))

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def _let_go(self) -> None:
        """Done by whoever is last: who closes, or a reader that was still at it."""
        if self._reading.acquire(blocking=False):
            self._drop_watch()
            for fd in self._pipe:
                os.close(fd)
            self._pipe = ()
            self._reader.close()
            self._writer.close()
            self._reading.release()

    # ---- transactions ----

    def _transact(self, gateway: Gateway, operations: Sequence[Json], *compare: Json) -> Answer | None:
        """None if `compare` does not hold."""
        if self._is_closed:
            raise Unavailable("the journal is closed")
        self._greet(gateway)
        header = self._header
        answer = gateway.transact([holds(self._header_key, header), *compare], operations, [get(self._header_key)])
        if answer.is_met:
            return answer
        self._admit(_value(answer.ranges[0]))
        if self._header != header:
            raise Unavailable(f"the header of job {self._envelope.job} was written anew")  # by hand, and it will do
        return None

    def _greet(self, gateway: Gateway) -> None:
        """Begin the journal, or see whose it is; once."""
        if not self._header:
            key, found = self._header_key, get(self._header_key)
            answer = gateway.transact([is_created(key, 0)], [put(key, self._envelope.header()), found], [found])
            self._admit(_value(answer.ranges[-1]))

    def _admit(self, header: bytes) -> None:
        if header != self._header or not header:
            self._envelope.admit(header)
            self._header = header


def _quoted(text: str) -> str:
    """No job's, node's or token's name reaches into another's keys."""
    return quote(text, safe="", errors="surrogatepass")


def _place(token: str) -> str:
    """Where an entry lies, for its signature."""
    return f"entry {token}"


def _value(found: Range) -> bytes:
    return found.found[0].value if found.found else b""
