"""A journal in etcd. Its keys are listed in keys.py.

1. Each entry has a key of its own, which is put if it is not there yet. etcd's revisions are the order of the entries.
   So there are no slots and no holes, and a call that is repeated finds its key.
2. To find the new keys of a range, etcd looks through the whole range. So entries lie in segments. The agent that puts
   the `SEGMENT`-th entry of a segment begins the next one. After that nothing is put into the older segments.
3. Each transaction demands that the header is the one that was admitted. So nothing is written into a store that has
   lost the journal. A read also demands that the last entry is still at its revision. This fails in a store that was
   put back to an older state.
4. Entries come from linearizable ranges only. The watch only tells when to look. It may miss a change, be cut off, or
   be compacted. Then the reader looks when its wait is over.
5. When a thousand nodes join at once, a watch would tell every node of every other node. So a reader that waits for
   many entries uses no watch, and looks again after a while.
6. An entry is put once. If its key was put twice, another program has changed it. If its key was deleted, the records
   after it show that, because each says what its writer had read (`Prefix`). An agent that finds one of the two refuses
   the journal.
7. Compaction takes nothing away. It forgets old values of keys, and the journal asks for the present ones only.

No agent deletes anything. Each beat makes a revision, which etcd keeps until it compacts. `pruning.py` removes the
journals of jobs that have ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from reknit.adapters.journals.envelope import number
from reknit.adapters.journals.folds import MANY, Unpublished
from reknit.adapters.journals.history import Prefix
from reknit.adapters.runtime.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Filler
from reknit.core.job.founding import Life
from reknit.core.job.reasons import Refusal

from .connection import readable
from .gateway import (
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
from .keys import EtcdKeys, place_of

if TYPE_CHECKING:
    from reknit.adapters.journals.envelope import Envelope
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job

    from .connection import EtcdServer
    from .gateway import Answer, Cluster, Json, KeyValue, KeyWatch

SEGMENT = 250
"""Number of entries at which a segment ends. A server looks through so many in a millisecond."""
_PAGE = 1000
"""Number of entries that a reader which is far behind asks for in one request."""
_MOST_KEYS = 100
"""Upper bound on the keys that are asked for one by one. etcd takes 128 operations in a transaction."""
_LARGEST = 1 << 20
"""Upper bound on a fold that is published, in bytes. etcd refuses requests of 1.5 MiB."""
_DELAY_PER_ENTRY_S, _LONGEST_DELAY_S = 0.003, 1.5
"""Seconds that a reader which waits for many entries pauses before it looks: per entry, and at most."""
_SOON_S = 0.2
"""The next server is asked after so many seconds at the earliest. A journal may repeat each of its transactions."""
_ANEW = "start all agents again with another --rdzv-id"
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
    """Implements `ports.Journal` and `ports.Remembers`."""

    def __init__(
        self,
        cluster: Cluster,
        envelope: Envelope,
        *,
        timeout_s: float = 5.0,
        on_slow: Callable[[float], None] = lambda _: None,
        on_read: Callable[[EtcdServer, str, int], object] = lambda *_: None,
    ) -> None:
        """Does not connect yet. A transaction is tried on each member of the cluster, within `timeout_s` in all.
        `on_slow`: called once by the thread that appends, with the number of seconds that etcd takes for an answer.
        `on_read`: called by the thread that reads: see `Doubts.look`."""
        self._on_slow, self._on_read = on_slow, on_read
        self._envelope = envelope
        self._keys = EtcdKeys(envelope.job)
        login = cluster.login(f"readwrite {self._keys.root}")
        self._reader, self._writer, self._beater = (Gateway(cluster, timeout_s, login, _SOON_S) for _ in range(3))
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
        self._prefix: Prefix | None = Prefix()
        """What was read. None: the reader has begun in the middle, so it does not know all entries before."""
        self._seen = ""
        """`_prefix` as it stands in records. The reader writes it, and the writer reads it."""
        self._fold_at = b""
        """Position at which the published fold ended when the reader saw it last, as it stands there. Empty: there was
        none."""
        self._unpublished = Unpublished()
        self._watch: KeyWatch | None = None
        self._reading = threading.Lock()
        self._is_closed = False
        self._pipe: tuple[int, ...] = os.pipe()
        """Its read end is readable once the journal is to be closed. Empty: it is closed."""

    # ---- the writer's side ----

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        self._greet(self._writer)  # the signature needs the id of the journal
        segment = self._newest
        record = self._envelope.wrap(token, entry, place_of(self._keys.entry(segment, token)), self._seen)
        oldest = self._said[1] if self._said[0] == token else segment
        while True:
            self._said = token, oldest
            # etcd limits the operations of a transaction. So an append that is repeated a hundred segments later is not
            # recognised.
            keys = [self._keys.entry(s, token) for s in range(max(oldest, segment - _MOST_KEYS + 1), segment + 1)]
            is_newest = [is_created(self._keys.segment(segment + 1), 0)]
            if segment:
                is_newest.append(is_there(self._keys.segment(segment)))
            answer = self._transact(
                self._writer,
                [put(keys[-1], record), count(self._keys.entries_of(segment))],
                [*is_newest, *(is_created(key, 0) for key in keys)],
                [self._later(0), *map(get, keys)],
            )
            if answer.is_met:
                break
            later, *copies = answer.ranges
            if any(copy.found for copy in copies):
                return True  # the answer to an earlier call was lost
            newest = _begun(later)
            if newest == segment:
                raise Unavailable(f"etcd's answers about the journal of job {self._envelope.job} contradict each other")
            segment, oldest = newest, min(oldest, newest)
        self._on_slow(self._writer.round_trip_s)
        self._on_slow = _heard
        self._newest = max(self._newest, segment)
        if answer.ranges[1].count >= SEGMENT:
            self._transact(self._writer, [put(self._keys.segment(segment + 1), b"")], is_newest)
        return True

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        keys = {n: self._keys.beat(n) for n in (node, *watch)}
        wanted = [get(key) for key in keys.values()] if len(keys) <= _MOST_KEYS else [below(self._keys.beats)]
        answer = self._transact(self._beater, [put(keys[node], b"%d" % count), *wanted])
        counts = {found.key: number(found.value) for r in answer.ranges for found in r.found}
        return {n: counts[key] for n, key in keys.items() if key in counts}

    # ---- the reader's side ----

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        try:
            with self._reading:
                if fold := self._unpublished.take():
                    self.publish(*fold)
                until = monotonic() + wait_s
                if wait_s > 0:
                    self._let_come(least)
                return self._unpublished.found(self._read(after, until, least))
        finally:
            if self._is_closed:
                self._let_go()

    def close(self) -> None:
        if not self._is_closed:
            os.write(self._pipe[1], b"x")  # before `_is_closed` is set: a reader that sees it closes the pipe
            self._is_closed = True
            for gateway in (self._reader, self._writer, self._beater):
                gateway.close()
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
        prefix = self._prefix
        if after != known:
            segment = self._segment_of(after)
            prefix = None if after else Prefix()
        page = self._page(segment, after, MANY)
        found, position, base = list(page.entries.found), after, None
        last = self._last
        if page.is_far_behind and page.fold_at > after:
            there = _begun(page.later, segment, page.fold_at)
            skipped = self._page(there, page.fold_at - 1, _PAGE, with_fold=True)
            place, fold, digest = self._envelope.open_fold(_value(skipped.fold)) or (0, None, "")
            ends = [entry.created for entry in skipped.entries.found]
            if place in ends:  # otherwise the fold was replaced by one that ends later
                found = list(skipped.entries.found)[ends.index(place) :]
                last, position, base, segment, page = (place, found.pop(0).key), place, fold, there, skipped
                prefix = Prefix(place, digest) if digest else None
        while page.is_not_all:
            segment += not page.entries.has_more
            page = self._page(segment, found[-1].created if found else position, _PAGE)
            found += page.entries.found
        entries = tuple(self._opened(record, prefix) for record in found)
        self._prefix, self._seen = prefix, prefix.seen if prefix else ""
        if found:
            position = found[-1].created
            last = position, found[-1].key
        self._last, self._reached, self._newest = last, (position, segment), max(self._newest, segment)
        self._on_read(self._reader.server, self._keys.header, page.revision)
        return Batch(position, entries, base), page.revision

    def _page(self, segment: int, after: int, limit: int, *, with_fold: bool = False) -> _Page:
        entries = created_after(self._keys.entries_of(segment), after, limit)
        wanted = [entries, self._later(segment), get(self._keys.fold_at)]
        wanted += [get(self._keys.fold)] if with_fold else []
        known, key = self._last
        answer = self._transact(self._reader, wanted, [is_created(key, known)] if known and known == after else [])
        if not answer.is_met:
            why = (
                f"the journal of job {self._envelope.job} has lost entries: its store was put back to an older state; "
                "use another --rdzv-id"
            )
            raise Refused(Refusal.IDENTITY, why)
        found, later, fold_at, *fold = answer.ranges
        self._fold_at = _value(fold_at)
        return _Page(answer.revision, found, later, number(self._fold_at), fold[0] if fold else Range())

    def _segment_of(self, position: int) -> int:
        return _begun(self._transact(self._reader, [self._later(0)]).ranges[0], 0, position) if position else 0

    def _opened(self, found: KeyValue, prefix: Prefix | None) -> Entry:
        what = f"the journal of job {self._envelope.job} was changed by another program"
        if found.version > 1:
            why = f"{what}: {found.key} was written {found.version} times, and agents write it once; {_ANEW}"
            raise Refused(Refusal.IDENTITY, why)
        record = self._envelope.unwrap(found.value, place_of(found.key))
        if prefix is not None:
            if record is not None and prefix.contradicts(record.seen):
                why = f"{what}: {record.by} has read other entries than this node; {_ANEW}"
                raise Refused(Refusal.IDENTITY, why)
            prefix.extend(found.value, found.created)
        return Filler() if record is None else record.entry

    # ---- folds ----

    def remember(self, position: int, job: Job) -> None:
        self._unpublished.folded(position, job)

    def take_back(self) -> None:
        """The journal keeps nothing of what it has returned."""

    def publish(self, position: int, job: Job) -> None:
        """Offer the fold of everything before `position` to readers that are far behind, unless another agent has
        published one since this reader looked. Called by the thread that reads."""
        key, seen, prefix = self._keys.fold_at, self._fold_at, self._prefix
        if number(seen) >= position:
            return
        record = self._envelope.wrap_job(position, job, prefix.at(position) if prefix else "")
        if len(record) > _LARGEST:
            return
        is_same = holds(key, seen) if seen else is_created(key, 0)
        try:
            self._transact(self._reader, [put(self._keys.fold, record), put(key, b"%d" % position)], [is_same])
        except Unavailable:
            pass  # for example because etcd has no space left. Readers read the entries instead

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
            self._watch = self._reader.watch(self._keys.entries, revision + 1)
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

    # ---- transactions ----

    def _later(self, segment: int) -> Json:
        """The segments that have begun after this one."""
        return below_from(self._keys.segments, self._keys.segment(segment + 1))

    def _transact(
        self, gateway: Gateway, then: Sequence[Json], compare: Sequence[Json] = (), otherwise: Sequence[Json] = ()
    ) -> Answer:
        if self._is_closed:
            raise Unavailable("the journal is closed")
        self._greet(gateway)
        header = self._header
        compare, otherwise = [holds(self._keys.header, header), *compare], [get(self._keys.header), *otherwise]
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
            key, found = self._keys.header, get(self._keys.header)
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


def _heard(round_trip_s: float) -> None:
    """Does nothing: somebody was told already how far away etcd is."""


def _value(found: Range) -> bytes:
    return found.found[0].value if found.found else b""
