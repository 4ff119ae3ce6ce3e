"""A journal in etcd.

    /reknit/<job>/header               what names this journal
    /reknit/<job>/segments/<n>         is there if the n-th segment, from 1 on, has begun
    /reknit/<job>/entries/<n>/<token>  one entry, in the n-th segment
    /reknit/<job>/beats/<id>.<inc>     a node's counter: etcd counts the puts of the key
    /reknit/<job>/fold                 the fold of all entries before a position
    /reknit/<job>/fold-at              that position

1. Each entry has a key of its own, which is put if it is not there yet. etcd's revisions are the order of the entries.
   So there are no slots and no holes, and a call that is repeated finds its key.
2. To find the new keys of a range, etcd looks through the whole range. So entries lie in segments. The agent that puts
   the `_SEGMENT`-th entry of a segment begins the next one. After that nothing is put into the older segments.
3. Each transaction demands that the header is the one that was admitted. So nothing is written into a store that has
   lost the journal. A read also demands that the last entry is still at its revision. This fails in a store that was
   put back to an older state.
4. Entries come from linearizable ranges only. The watch only tells when to look. It may miss a change, be cut off, or
   be compacted. Then the reader looks when its wait is over.
5. When a thousand nodes join at once, a watch would tell every node of every other node. So a reader that waits for
   many entries uses no watch, and looks again after a while.

Nothing is ever deleted. Each beat makes a revision. etcd keeps it until it compacts (`--auto-compaction-retention`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from attrs import evolve, frozen

from reknit.adapters.journals.envelope import number
from reknit.adapters.journals.etcd.connection import readable
from reknit.adapters.journals.etcd.gateway import (
    Gateway,
    Range,
    below,
    below_from,
    count,
    created_after,
    get,
    holds,
    is_created,
    is_there,
    put,
)
from reknit.adapters.link import MANY
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.job.reasons import Refusal

if TYPE_CHECKING:
    from reknit.adapters.journals.envelope import Envelope
    from reknit.adapters.journals.etcd.gateway import Answer, Cluster, Found, Json, Watch
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job

_SEGMENT = 250
"""Number of entries at which a segment ends. A server looks through so many in a millisecond."""
_PAGE = 1000
"""Number of entries that a reader which is far behind asks for in one request."""
_MOST_KEYS = 100
"""Upper bound on the keys that are asked for one by one. etcd takes 128 operations in a transaction."""
_LARGEST = 1 << 20
"""Upper bound on a fold that is published, in bytes. etcd refuses requests of 1.5 MiB."""
_DELAY_PER_ENTRY_S, _LONGEST_DELAY_S = 0.003, 1.5
"""Seconds that a reader which waits for many entries pauses before it looks: per entry, and at most."""
_PAUSE_S = 0.2
"""Seconds between two looks while there is no watch."""


@frozen
class _Page:
    """What a look at a segment has found."""

    revision: int
    entries: Range
    later: Range
    """The segments that have begun after this one."""
    fold_at: int
    """Position at which the published fold ends. 0: there is none."""
    fold: Range

    @property
    def is_not_all(self) -> bool:
        return self.entries.has_more or bool(self.later.found)

    @property
    def is_far_behind(self) -> bool:
        """More entries follow than were asked for, or a whole segment."""
        return self.entries.has_more or len(self.later.found) > 1


class EtcdJournal:
    """Implements `ports.Journal`."""

    def __init__(self, cluster: Cluster, envelope: Envelope, *, timeout_s: float = 5.0) -> None:
        """Does not connect yet. A transaction is tried on each member of the cluster, within `timeout_s` in all."""
        self._reader, self._writer = Gateway(cluster, timeout_s), Gateway(cluster, timeout_s)
        self._envelope = envelope
        self._root = f"/reknit/{_quoted(envelope.job)}/"
        self._header_key = f"{self._root}header"
        self._entries = f"{self._root}entries/"
        self._segments = f"{self._root}segments/"
        self._fold_key, self._fold_at_key = f"{self._root}fold", f"{self._root}fold-at"
        self._header = b""
        """The header that was admitted. Empty before the first call."""
        self._newest = 0
        """Number of the newest segment that this agent knows. Entries are put into it."""
        self._said = ("", 0)
        """The token of the last append, and the oldest segment in which its entry may lie."""
        self._reached = (0, 0)
        """The position up to which was read, and the segment in which it lies."""
        self._last = (0, "")
        """Position and key of the entry that was read last."""
        self._fold_at = 0
        """Position at which the published fold ended when the reader saw it last."""
        self._watch: Watch | None = None
        self._reading = threading.Lock()
        self._is_closed = False
        self._pipe: tuple[int, ...] = os.pipe()
        """Its read end is readable once the journal is to be closed. Empty: it is closed."""

    # ---- the writer's side ----

    def append(self, token: str, entry: Entry) -> None:
        self._greet(self._writer)  # the signature needs the id of the journal
        record, segment = self._envelope.wrap(token, entry, _place(token)), self._newest
        oldest = self._said[1] if self._said[0] == token else segment
        while True:
            self._said = token, oldest
            # etcd limits the operations of a transaction. So an append that is repeated a hundred segments later is not
            # recognised.
            keys = [self._entry_key(s, token) for s in range(max(oldest, segment - _MOST_KEYS + 1), segment + 1)]
            is_newest = [is_created(self._segment_key(segment + 1), 0)]
            if segment:
                is_newest.append(is_there(self._segment_key(segment)))
            answer = self._transact(
                self._writer,
                [put(keys[-1], record), count(self._entries_of(segment))],
                [*is_newest, *(is_created(key, 0) for key in keys)],
                [self._later(0), *map(get, keys)],
            )
            if answer.is_met:
                break
            later, *copies = answer.ranges
            if any(copy.found for copy in copies):
                return  # the answer to an earlier call was lost
            newest = _begun(later)
            if newest == segment:
                raise Unavailable(f"etcd's answers about the journal of job {self._envelope.job} contradict each other")
            segment, oldest = newest, min(oldest, newest)
        self._newest = max(self._newest, segment)
        if answer.ranges[1].count >= _SEGMENT:
            self._transact(self._writer, [put(self._segment_key(segment + 1), b"")], is_newest)

    def beat(self, node: Node, watch: Sequence[Node]) -> Mapping[Node, int]:
        beats = f"{self._root}beats/"
        keys = {n: f"{beats}{_quoted(n.id)}.{n.incarnation}" for n in (node, *watch)}
        wanted = [get(key) for key in keys.values()] if len(keys) <= _MOST_KEYS else [below(beats)]
        answer = self._transact(self._writer, [put(keys[node], b""), *wanted])
        counts = {found.key: found.version for r in answer.ranges for found in r.found}
        return {n: counts[key] for n, key in keys.items() if key in counts}

    def publish(self, position: int, job: Job) -> None:
        key, seen = self._fold_at_key, self._fold_at
        value = _value(self._transact(self._writer, [get(key)]).ranges[0])
        if number(value) != seen or seen >= position:
            return  # another agent has published a fold meanwhile: many may read the same entries at once
        record = self._envelope.wrap_job(position, job)
        if len(record) <= _LARGEST:
            is_same = holds(key, value) if value else is_created(key, 0)
            self._transact(self._writer, [put(self._fold_key, record), put(key, b"%d" % position)], [is_same])

    # ---- the reader's side ----

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        try:
            with self._reading:
                until = monotonic() + wait_s
                if wait_s > 0:
                    self._let_come(least)
                return self._read(after, until, least)
        finally:
            if self._is_closed:
                self._let_go()

    def close(self) -> None:
        if not self._is_closed:
            os.write(self._pipe[1], b"x")  # before `_is_closed` is set: a reader that sees it closes the pipe
            self._is_closed = True
            self._reader.close()
            self._writer.close()
            self._let_go()

    def _read(self, after: int, until: float, least: int) -> Batch:
        is_heard = True
        while True:
            batch, revision = self._look(after)
            left_s = until - monotonic()
            if batch.position > after and not is_heard:
                # The watch did not tell of these entries. Its server may have vanished without closing the connection.
                self._drop_watch()
            if batch.position > after or left_s <= 0:
                return batch
            if least > MANY:
                self._pause(left_s)
            else:
                is_heard = self._wait(left_s, revision)

    def _look(self, after: int) -> tuple[Batch, int]:
        """All entries after the position, and the revision of the store at which they were found."""
        known, segment = self._reached
        if after != known:
            segment = self._segment_of(after)
        page = self._page(segment, after, MANY)
        found, position, base = list(page.entries.found), after, None
        last = self._last
        if page.is_far_behind and page.fold_at > after:
            there = _begun(page.later, segment, page.fold_at)
            skipped = self._page(there, page.fold_at - 1, _PAGE, with_fold=True)
            place, fold = self._envelope.open_job(_value(skipped.fold)) or (0, None)
            ends = [entry.created for entry in skipped.entries.found]
            if place in ends:  # otherwise the fold was replaced by one that ends later
                found = list(skipped.entries.found)[ends.index(place) :]
                last, position, base, segment, page = (place, found.pop(0).key), place, fold, there, skipped
        while page.is_not_all:
            segment += not page.entries.has_more
            page = self._page(segment, found[-1].created if found else position, _PAGE)
            found += page.entries.found
        entries = tuple(map(self._opened, found))
        if found:
            position = found[-1].created
            last = position, found[-1].key
        self._last, self._reached, self._newest = last, (position, segment), max(self._newest, segment)
        return Batch(position, entries, base), page.revision

    def _page(self, segment: int, after: int, limit: int, *, with_fold: bool = False) -> _Page:
        entries = created_after(self._entries_of(segment), after, limit)
        wanted = [entries, self._later(segment), get(self._fold_at_key), *([get(self._fold_key)] if with_fold else [])]
        known, key = self._last
        answer = self._transact(self._reader, wanted, [is_created(key, known)] if known and known == after else [])
        if not answer.is_met:
            why = (
                f"the journal of job {self._envelope.job} has lost entries: its store was put back to an older state; "
                "use another --rdzv-id"
            )
            raise Refused(Refusal.IDENTITY, why)
        found, later, fold_at, *fold = answer.ranges
        self._fold_at = number(_value(fold_at))
        return _Page(answer.revision, found, later, self._fold_at, fold[0] if fold else Range())

    def _segment_of(self, position: int) -> int:
        return _begun(self._transact(self._reader, [self._later(0)]).ranges[0], 0, position) if position else 0

    def _opened(self, record: Found) -> Entry:
        token = unquote(record.key.rpartition("/")[2], errors="surrogatepass")
        return self._envelope.open(record.value, _place(token))[1]

    # ---- waiting ----

    def _let_come(self, least: int) -> None:
        if least > MANY:
            self._drop_watch()
        self._pause(min(_DELAY_PER_ENTRY_S * (least - 1), _LONGEST_DELAY_S))

    def _wait(self, left_s: float, revision: int) -> bool:
        """Wait until there may be new entries. False if the watch told of nothing in that time."""
        watch = self._watch
        if watch is None or not self._reader.is_at(watch):
            self._drop_watch()
            self._watch = self._reader.watch(self._entries, revision + 1)
            if self._watch is None:
                self._pause(min(left_s, _PAUSE_S))
            return True  # entries may have come before the watch was open, so the reader looks before it waits
        if not watch.wait(left_s, self._pipe[0]):
            return False
        if not watch.take():
            self._drop_watch()
            self._pause(min(left_s, _PAUSE_S))
        return True

    def _pause(self, wait_s: float) -> None:
        if not self._is_closed:
            readable(self._pipe[:1], wait_s)

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def _let_go(self) -> None:
        """Close everything if no read is under way. `close` calls this, and so does a read that ends after it."""
        if self._reading.acquire(blocking=False):
            self._drop_watch()
            for fd in self._pipe:
                os.close(fd)
            self._pipe = ()
            self._reading.release()

    # ---- keys ----

    def _segment_key(self, segment: int) -> str:
        return f"{self._segments}{segment:06}"

    def _later(self, segment: int) -> Json:
        """The segments that have begun after this one."""
        return below_from(self._segments, self._segment_key(segment + 1))

    def _entries_of(self, segment: int) -> str:
        return f"{self._entries}{segment}/"

    def _entry_key(self, segment: int, token: str) -> str:
        return self._entries_of(segment) + _quoted(token)

    # ---- transactions ----

    def _transact(
        self, gateway: Gateway, then: Sequence[Json], compare: Sequence[Json] = (), otherwise: Sequence[Json] = ()
    ) -> Answer:
        if self._is_closed:
            raise Unavailable("the journal is closed")
        self._greet(gateway)
        header = self._header
        compare, otherwise = [holds(self._header_key, header), *compare], [get(self._header_key), *otherwise]
        answer = gateway.transact(compare, then, otherwise)
        if answer.is_met:
            return answer
        self._admit(_value(answer.ranges[0]))
        if self._header != header:
            raise Unavailable(f"the header of the journal of job {self._envelope.job} was replaced")  # by an operator
        return evolve(answer, ranges=answer.ranges[1:])

    def _greet(self, gateway: Gateway) -> None:
        """Begin the journal, or check the header that is there. Once."""
        if not self._header:
            key, found = self._header_key, get(self._header_key)
            answer = gateway.transact([is_created(key, 0)], [put(key, self._envelope.header()), found], [found])
            self._admit(_value(answer.ranges[-1]))

    def _admit(self, header: bytes) -> None:
        if header != self._header or not header:
            self._envelope.admit(header)
            self._header = header


def _begun(later: Range, known: int = 0, by: int | None = None) -> int:
    """The last of these segments that had begun by position `by`. `known` if none had. `by` None: by any position."""
    begun = [segment.key for segment in later.found if by is None or segment.created <= by]
    return int(begun[-1].rpartition("/")[2]) if begun else known


def _quoted(text: str) -> str:
    """The name of a job, node or token as a part of a key. Different names have different keys."""
    return quote(text, safe="", errors="surrogatepass")


def _place(token: str) -> str:
    """The place of an entry, which its signature covers."""
    return f"entry {token}"


def _value(found: Range) -> bytes:
    return found.found[0].value if found.found else b""
