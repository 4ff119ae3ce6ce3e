"""A journal in torch's TCPStore: agents that share a rendezvous endpoint (--rdzv-backend=c10d). `keys` lists its keys.

1. A writer takes a slot with `add`, then fills it with `compare_set`. Readers wait until the key of a slot is there.
2. A slot that is taken and not filled is a *hole*: its writer may have died. No reader reads past a hole. After a while
   a reader fills the hole with a `Filler`, also by `compare_set`. Either the writer or the reader wins, and all readers
   see the same record.
3. A hole lasts at least one round trip of its writer, and a reader on the store's host cannot know how long that is. So
   a slow writer says it, in `pace`, before it takes a slot. A writer whose slot was filled by a reader says a longer
   time before it takes the next one.
4. A thousand nodes may join at once. So a reader waits for the slot with which it can act, and not for every slot.
5. Several readers may be far behind at the same time. The first of them to raise `claim` reads for all and publishes
   the fold, and the others wait for `done`. If the first reader is slow, the others stop waiting for it.
6. Each record says what its writer had read (`seen`). A reader that has read something else refuses the journal: the
   store has shown two agents different records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from reknit.adapters.journals.envelope import Envelope, number
from reknit.adapters.journals.folds import MANY, Unpublished
from reknit.adapters.journals.history import Prefix
from reknit.adapters.runtime.ports import Batch, Record, Refused
from reknit.core.job.entries import Entry, Filler, Node
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

from .client import StoreClient
from .connections import TIMEOUT_S, Connections, Replica
from .recovery import LARGEST, first_fold, is_veto, judged

_AHEAD = 8
"""Number of slots that a look asks for before it knows whether they are taken."""
_CHUNK = 512
"""Number of slots that are asked for in one request."""
_FEW = 4
"""A reader folds up to this number of entries after a published fold itself, and does not wait for a newer fold."""
HOLE_S = 1.0
"""A hole is not filled before this time is over. Seconds."""
_HOLE_ROUND_TRIPS = 3
"""A hole is not filled before this many of the longest round trip of any writer are over."""
_MOST_TAKEN = 100_000
"""A job has fewer nodes than this. So if more slots are taken and empty, no agent has taken them."""
SLOW_S = 0.25
"""A writer says its round trip if it is longer than this. Seconds."""
_SLOWEST_S = 30.0
"""A writer never says a longer round trip than this. Seconds."""
_CLAIMS = 3
"""How many claims a reader that is far behind makes at most."""
CLAIM_S = 0.5
"""How long the second reader that is far behind waits for the first. Later readers wait longer. Seconds."""
_DELAY_PER_ENTRY_S, _LONGEST_DELAY_S = 0.002, 1.5
"""Seconds that a reader waits for the last of several entries: per entry, and at most."""
_SHARED_S = 0.2
"""How long a beat waits for the connection of the appends, before it gets a connection of its own. Seconds."""
_opening = threading.Lock()
"""Held while a fold is decoded. Many agents of one process may get the same fold at once. The first decodes it, and the
others find it in the envelope's cache."""


class TCPStoreJournal:
    """Implements `ports.Journal` and `ports.Remembers`."""

    def __init__(
        self,
        host: str,
        port: int,
        envelope: Envelope,
        *,
        exclusive: bool = True,
        founds: bool = True,
        has_elders: bool = False,
        reads_only: bool = False,
        timeout_s: float = TIMEOUT_S,
        on_slow: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Does not connect yet.

        `exclusive`: refuse a store that serves another job.
        `founds`: begin the journal if there is none. False: wait until another agent has begun it.
        `has_elders`: other agents may remember a journal that the store has lost. So this agent gives them some seconds
        to found it again before it begins another one.
        `reads_only`: nothing in the store is made or changed.
        `timeout_s`: upper bound, in seconds, on the wait for one answer of a store that is not far away.
        `on_slow`: called by the thread that appends, with the number of seconds that the store took for an answer, when
        this is more than 0.25 s and more than before."""
        self._envelope = envelope
        self._on_slow = on_slow
        self._reads_only = reads_only
        self._connections = Connections(
            host,
            port,
            envelope,
            exclusive=exclusive,
            founds=founds,
            has_elders=has_elders,
            reads_only=reads_only,
            timeout_s=timeout_s,
        )
        self._slowest_s = SLOW_S
        self._writing = threading.Lock()
        """Held while the connection of the role `writer` is in use."""
        self._is_shared = True
        """Beats go through that connection too. False: they have one of their own."""
        self._unpublished = Unpublished()

    # ---- the writer's calls ----

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        with self._writing:
            return self._append(token, entry, life)

    def _append(self, token: str, entry: Entry, life: Life) -> bool:
        client, replica = self._changing("writer")
        if life not in (Life(), replica.origin.life):
            return False
        while True:
            if replica.taken is None or replica.taken[0] != token:
                replica.taken = self._taken(client, replica, token, entry)
            _, slot, record = replica.taken
            began = time.monotonic()
            found = client.compare_set(replica.keys.slot(slot), b"", record)
            replica.taken = None
            if found == record:  # by this call, or by one whose answer was lost
                return True
            took_s = time.monotonic() - began
            self._say_pace(client, max(took_s, 2 * SLOW_S, 2e-3 * self._connections.pace_ms))

    def _taken(self, client: StoreClient, replica: Replica, token: str, entry: Entry) -> tuple[str, int, bytes]:
        self._say_pace(client, client.round_trip_s)
        began = time.monotonic()
        slot = client.add(replica.keys.head, 1) - 1
        took_s = min(time.monotonic() - began, client.round_trip_s)  # one slow answer does not tell how far it is
        if took_s > self._slowest_s:
            self._slowest_s = took_s
            self._on_slow(took_s)
        return token, slot, self._envelope.wrap(token, entry, replica.keys.place(slot), replica.seen)

    def _say_pace(self, client: StoreClient, round_trip_s: float) -> None:
        pace_ms = int(1e3 * min(round_trip_s, _SLOWEST_S))
        if round_trip_s > SLOW_S and pace_ms > self._connections.pace_ms:
            self._connections.pace_ms = pace_ms
            client.set(self._connections.keys.pace, b"%d" % pace_ms)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        # A server has a limited number of connections. With two for each node, and not three, it can serve more nodes.
        if self._is_shared and self._writing.acquire(timeout=_SHARED_S):
            try:
                return self._beat("writer", node, count, watch)
            finally:
                self._writing.release()
        self._is_shared = False  # appends are slow here, and a beat must not wait for them
        return self._beat("beater", node, count, watch)

    def _beat(self, role: str, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        client, replica = self._changing(role)
        nodes = (node, *watch)
        found = client.set_and_get(replica.keys.beat(node), b"%d" % count, [replica.keys.beat(n) for n in nodes])
        return {n: number(value) for n, value in zip(nodes, found, strict=True)}

    def _changing(self, role: str) -> tuple[StoreClient, Replica]:
        """A connection for a call that changes something."""
        if self._reads_only:
            where = self._connections.where
            raise Refused(Refusal.SETUP, f"{where}: the journal was opened for reading alone")
        return self._connections.client(role)

    # ---- the reader's calls ----

    def records(self, after: int) -> tuple[int, list[tuple[str, Record]]]:
        """The records after position `after` up to the first hole, each with its place, and the position at which the
        next call goes on. What was before a life of the journal is not in the store any more. Changes nothing."""
        client, replica = self._connections.client("reader")
        start = max(after, replica.origin.position)
        found = self._fetched(client, replica, start, number(client.get(replica.keys.head)))
        places = [replica.keys.place(start + i) for i in range(len(found))]
        opened = [self._envelope.unwrap(record, place) for record, place in zip(found, places, strict=True)]
        named = [(place, record or Record(Filler())) for place, record in zip(places, opened, strict=True)]
        return start + len(found), named

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        client, replica = self._connections.client("reader")
        if self._reads_only:
            # The entries before a later life of the journal are lost with their store. The fold of them is there.
            base = self._base(client, replica) if after < replica.origin.position else Batch(after)
            position, records = self.records(base.position)
            return Batch(position, tuple(record.entry for _, record in records), base.base)
        fold = self._unpublished.take()
        if self._connections.is_news(replica):
            batch = self._read(client, replica, 0, 0.0, 1)
            batch = evolve(batch, base=batch.base or Job(), is_anew=replica.is_anew)
        else:
            if replica.prefix is not None and after > replica.prefix.position:
                replica.prefix = None
            if fold is not None:
                self.publish(*fold)
            batch = self._read(client, replica, after, wait_s, least)
        if batch.entries or batch.base is not None:
            self._connections.give(replica)
        replica.seen = "" if replica.prefix is None else replica.prefix.seen
        batch = evolve(batch, life=replica.origin.life)
        return self._unpublished.found(batch, is_awaited=bool(replica.claims))

    def _read(self, client: StoreClient, replica: Replica, after: int, wait_s: float, least: int) -> Batch:
        if after < replica.origin.position:
            # With what follows: otherwise a newcomer would join a round that is long over, and give its port to it.
            base = self._base(client, replica)
            head = number(client.get(replica.keys.head))
            if head <= base.position:
                return base
            return evolve(self._batch(client, replica, base.position, head, []), base=base.base)
        head, fold_at = after, 0
        records: list[bytes] = []
        if wait_s <= 0 or not replica.is_read:
            head, fold_at, records = self._look(client, replica, after)
        if head - after < least and wait_s > 0:
            if self._wait(client, replica, after, head, wait_s, least) and least > MANY:
                head, fold_at = after + least, 0  # all readers that waited for that slot go on with this number
            else:
                head, fold_at, records = self._look(client, replica, after)
        if head - after > MANY:
            batch = self._far_behind(client, replica, after, head, fold_at)
        else:
            batch = self._batch(client, replica, after, head, records) if head > after else Batch(after)
        replica.is_read = batch.position >= head
        return batch

    def _wait(self, client: StoreClient, replica: Replica, after: int, head: int, wait_s: float, least: int) -> bool:
        """Wait until `least` entries are there. True if they are. If there is at least one, the wait is short."""
        replica.crowd = max(least, replica.crowd) if least > 1 else 1
        delay_s = min(_DELAY_PER_ENTRY_S * (replica.crowd - 1), _LONGEST_DELAY_S)
        # The time on the way is no waiting. Otherwise no answer could come in time over a slow link.
        way_s = client.round_trip_s
        is_enough = delay_s > 0 and client.wait([replica.keys.slot(after + least - 1)], delay_s + way_s)
        if not is_enough and head <= after:
            client.wait([replica.keys.slot(after)], max(0.0, wait_s - delay_s) + way_s)
        return is_enough

    def _look(self, client: StoreClient, replica: Replica, after: int) -> tuple[int, int, list[bytes]]:
        """How many slots are taken, how many of them a published fold holds, and the first few records."""
        keys = [replica.keys.fold_at, *(replica.keys.slot(after + i) for i in range(_AHEAD))]
        head, (fold_at, *found) = client.add_and_get(replica.keys.head, 0, keys)
        return head, number(fold_at), _up_to_a_hole(found[: max(0, head - after)])

    def _batch(self, client: StoreClient, replica: Replica, after: int, head: int, records: list[bytes]) -> Batch:
        """All entries from `after` up to `head` or the first hole, at least one. `records`: fetched already."""
        while True:
            records = records + self._fetched(client, replica, after + len(records), head)
            if records:
                if not after and not any(self._is_ours(record, replica, i) for i, record in enumerate(records)):
                    # An agent that took them all for `Filler` would open the job a second time, beside those who know.
                    raise self._connections.is_changed("the records")
                entries = tuple(self._opened(client, replica, record, after + i) for i, record in enumerate(records))
                return Batch(after + len(entries), entries)
            self._fill(client, replica, after, head)

    def _is_ours(self, record: bytes, replica: Replica, slot: int) -> bool:
        is_known = self._envelope.unwrap(record, replica.keys.place(slot)) is not None
        return is_known or is_veto(self._envelope, record, replica.keys, slot)

    def _opened(self, client: StoreClient, replica: Replica, record: bytes, slot: int) -> Entry:
        found, prefix = self._envelope.unwrap(record, replica.keys.place(slot)), replica.prefix
        if found is None and is_veto(self._envelope, record, replica.keys, slot):
            if judged(client, replica.keys, self._envelope, replica.origin, slot + 1):
                raise self._connections.made_way(client, replica)
        if prefix is not None and slot >= prefix.position:
            if found is not None and prefix.contradicts(found.seen):
                raise Refused(
                    Refusal.IDENTITY,
                    f"{self._connections.where}: {found.by} has read other records than this node before record "
                    f"{slot} of the journal of job {self._envelope.job}: the store was changed by somebody else, or is "
                    "damaged; start all agents of the job again",
                )
            prefix.extend(record, slot + 1)
        return Filler() if found is None else found.entry

    def _fetched(self, client: StoreClient, replica: Replica, start: int, head: int) -> list[bytes]:
        records: list[bytes] = []
        while start + len(records) < head:
            begin = start + len(records)
            slots = range(begin, min(head, begin + _CHUNK))
            found = _up_to_a_hole(client.multi_get([replica.keys.slot(slot) for slot in slots]))
            records += found
            if len(found) < len(slots):
                break
        return records

    def _fill(self, client: StoreClient, replica: Replica, hole: int, head: int) -> None:
        """Wait until the writer that took the slot has filled it. When it has had enough time, fill the slot with a
        `Filler`."""
        if head - hole > _MOST_TAKEN and not any(
            self._fetched(client, replica, at, at + 1) for at in (hole + 1, head - 1)
        ):
            raise self._connections.is_changed("the number of slots")
        if hole >= replica.known_taken[0]:
            replica.known_taken = head, time.monotonic()
        while True:
            pace_s = min(number(client.get(self._connections.keys.pace)) / 1e3, _SLOWEST_S)
            left_s = replica.known_taken[1] + max(HOLE_S, _HOLE_ROUND_TRIPS * pace_s) - time.monotonic()
            if left_s <= 0:
                break
            if client.wait([replica.keys.slot(hole)], left_s):
                return
        filler = self._envelope.wrap("", Filler(), replica.keys.place(hole))
        client.compare_set(replica.keys.slot(hole), b"", filler)

    # ---- folds ----

    def remember(self, position: int, job: Job) -> None:
        self._connections.remember(position, job)
        self._unpublished.folded(position, job)

    def take_back(self) -> None:
        self._connections.take_back()

    def publish(self, position: int, job: Job) -> None:
        """Offer the fold of everything before `position` to readers that are far behind, and tell those that wait.
        Called by the thread that reads."""
        client, replica = self._changing("reader")
        digest = replica.prefix.at(position) if replica.prefix is not None else ""
        # An older fold would make readers read more. Two agents that publish at the same time may still overwrite each
        # other's fold. That only costs readers time.
        if digest and position > number(client.get(replica.keys.fold_at)):
            record = self._envelope.wrap_job(position, job, digest)
            if len(record) < LARGEST:
                client.set(replica.keys.fold, record)
                client.set(replica.keys.fold_at, b"%d" % position)
        claims, replica.claims = replica.claims, set()
        for claim in sorted(claims):
            client.add(replica.keys.done(claim), 1)

    def _base(self, client: StoreClient, replica: Replica) -> Batch:
        """The fold that this life of the journal began with, or a later one."""
        batch = self._unfolded(replica, first_fold(client, replica.keys), replica.origin.position - 1)
        if batch.base is None:
            raise Refused(
                Refusal.IDENTITY,
                f"{self._connections.where}: the store was lost, and what was written there of the journal of job "
                f"{self._envelope.job} afterwards is damaged; start all agents of the job again",
            )
        return batch

    def _far_behind(self, client: StoreClient, replica: Replica, after: int, head: int, fold_at: int) -> Batch:
        record = b""
        for _ in range(_CLAIMS):
            # A reader that has read nothing so far takes an older fold as well. It reads the rest with its next call.
            if fold_at > after + MANY and (not after or head - fold_at <= _FEW):
                break
            # A claim names the published fold that all of them go on from. So one at a time reads for all.
            others = client.add(replica.keys.claim(fold_at), 1) - 1
            # The first reader may have died. Then the second takes its place after a while, then two more, then four.
            # So they never all begin at the same time.
            if not others or not client.wait([replica.keys.done(fold_at)], CLAIM_S * others.bit_length()):
                replica.claims.add(fold_at)
                break
            head, (position, record) = client.add_and_get(
                replica.keys.head, 0, [replica.keys.fold_at, replica.keys.fold]
            )
            fold_at = number(position)
        is_worth = fold_at > after + MANY
        fold = self._unfolded(replica, record or client.get(replica.keys.fold), after) if is_worth else Batch(after)
        if fold.base and (fold.position >= head or (not after and head - fold.position > _FEW)):
            return fold
        batch = self._batch(client, replica, fold.position, head, [])
        return evolve(batch, base=fold.base)

    def _unfolded(self, replica: Replica, record: bytes, after: int) -> Batch:
        """A published fold as a base. The batch has none if the fold cannot be used."""
        with _opening:
            opened = self._envelope.open_fold(record)
        if opened is None:
            return Batch(after)
        position, job, digest = opened
        if position <= after or not digest:
            return Batch(after)
        if replica.prefix is None or position > replica.prefix.position:
            replica.prefix = Prefix(position, digest)
        return Batch(position, base=job)

    def close(self) -> None:
        self._connections.close()


def _up_to_a_hole(records: list[bytes]) -> list[bytes]:
    return records[: records.index(b"")] if b"" in records else records
