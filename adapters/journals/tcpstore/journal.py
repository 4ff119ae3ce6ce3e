"""A journal in torch's TCPStore: agents that share a rendezvous endpoint (--rdzv-backend=c10d).

    /reknit/owner                   the job that the store serves
    /reknit/<job>/header            what names this journal
    /reknit/<job>/head              how many slots are taken
    /reknit/<job>/slot/<n>          one record; n is a position
    /reknit/<job>/beat/<inc>/<id>   a node's counter
    /reknit/<job>/fold              the fold of all entries before a position
    /reknit/<job>/fold-at           that position
    /reknit/<job>/claim/<n>         how many readers that are far behind have claimed to fold the slots up to n · MANY
    /reknit/<job>/done/<n>          set when the first of these readers has published the fold

1. A writer takes a slot with `add`, then fills it with `compare_set`. Readers wait until the key of a slot is there.
2. A slot that is taken and not filled is a *hole*: its writer may have died. No reader reads past a hole. After
   `_HOLE_S` seconds a reader fills the hole with a `Filler`, also by `compare_set`. Either the writer or the reader
   wins, and all readers see the same record.
3. The header is written once. If a later connection finds no header, the store has lost everything.
4. A thousand nodes may join at once. So a reader waits for the slot with which it can act, and not for every slot.
5. Several readers may be far behind at the same time. The first of them to raise `claim` reads and folds for all, and
   the others wait for `done`. If the first reader is slow, the others stop waiting for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from attrs import evolve

from reknit.adapters.journals.envelope import Envelope, number
from reknit.adapters.journals.tcpstore.client import Client, endpoint
from reknit.adapters.link import MANY
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Entry, Filler, Node
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

_AHEAD = 8
"""Number of slots that a look asks for before it knows whether they are taken."""
_CHUNK = 512
"""Number of slots that are asked for in one request."""
_FEW = 4
"""A reader folds up to this number of entries after a published fold itself, and does not wait for a newer fold."""
_LARGEST = 4 << 20
"""Upper bound on a fold that is published, in bytes. torch's server closes the connection at a value of 8 MiB."""
_HOLE_S = 1.0
"""Seconds after which a hole is filled."""
_CLAIMS, _CLAIM_S = 3, 0.5
"""How many claims a reader that is far behind makes at most, and how many seconds the second reader waits for the
first. Later readers wait longer."""
_DELAY_PER_ENTRY_S, _LONGEST_DELAY_S = 0.002, 1.5
"""Seconds that a reader waits for the last of several entries: per entry, and at most."""
_OWNER = "reknit/owner"
_opening = threading.Lock()
"""Held while a fold is decoded. Many agents of one process may get the same fold at once. The first decodes it, and the
others find it in the envelope's cache."""


class TCPStoreJournal:
    """Implements `ports.Journal`."""

    def __init__(
        self,
        host: str,
        port: int,
        envelope: Envelope,
        *,
        exclusive: bool = True,
        founds: bool = True,
        timeout_s: float = 5.0,
    ) -> None:
        """Does not connect yet. `exclusive`: refuse a store that serves another job. `founds`: begin the journal if
        there is none. False: wait until another agent has begun it. `timeout_s`: upper bound, in seconds, on the wait
        for one answer."""
        self._host = host
        self._port = port
        self._envelope = envelope
        self._exclusive = exclusive
        self._founds = founds
        self._timeout_s = timeout_s
        self._root = f"reknit/{envelope.job.replace('%', '%25').replace('/', '%2F')}/"
        self._owner = envelope.job.encode(errors="surrogatepass")
        self._header = self._root + "header"
        self._fold = self._root + "fold"
        self._fold_at = self._root + "fold-at"
        self._clients: dict[str, Client] = {}
        self._greeting = threading.Lock()
        self._was_greeted = False
        self._is_closed = False
        # The writer's:
        self._taken: tuple[str, int] | None = None
        """A token, and the slot that was taken for it and may not be filled yet. None: there is no such slot."""
        self._claims: set[int] = set()
        """Claims of this reader whose fold the writer has not published yet."""
        # The reader's:
        self._crowd = 1
        """The largest number of entries that was waited for lately. As many may still be coming."""
        self._is_read = False
        """The last look found no entry after those that were read. So the next read waits at once, and does not look
        before."""
        self._known_taken = (0, 0.0)
        """A number of taken slots, and the monotonic time at which this reader first saw that number."""

    # ---- the writer's calls ----

    def append(self, token: str, entry: Entry) -> None:
        client = self._client("writer")
        while True:
            if self._taken is None or self._taken[0] != token:
                self._taken = token, client.add(self._root + "head", 1) - 1
            slot = self._taken[1]
            record = self._envelope.wrap(token, entry, str(slot))
            found = client.compare_set(self._slot(slot), b"", record)
            self._taken = None
            if found == record:  # by this call, or by one whose answer was lost
                return

    def beat(self, node: Node, watch: Sequence[Node]) -> Mapping[Node, int]:
        client = self._client("writer")
        count, found = client.add_and_get(self._beat(node), 1, [self._beat(n) for n in watch])
        return {n: number(value) for n, value in zip(watch, found, strict=True)} | {node: count}

    def publish(self, position: int, job: Job) -> None:
        client = self._client("writer")
        # An older fold would make readers read more. Two agents that publish at the same time may still overwrite each
        # other's fold. That only costs readers time.
        if position > number(client.get(self._fold_at)):
            record = self._envelope.wrap_job(position, job)
            if len(record) <= _LARGEST:
                client.set(self._fold, record)
                client.set(self._fold_at, b"%d" % position)
        for claim in list(self._claims):
            client.add(f"{self._root}done/{claim}", 1)
            self._claims.discard(claim)

    # ---- the reader's calls ----

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        client = self._client("reader")
        head, fold_at, records = self._look(client, after) if wait_s <= 0 or not self._is_read else (after, 0, [])
        if head - after < least and wait_s > 0:
            if self._wait(client, after, head, wait_s, least) and least > MANY:
                head, fold_at = (
                    after + least,
                    0,
                )  # all readers that waited for that slot go on with this number
            else:
                head, fold_at, records = self._look(client, after)
        if head - after > MANY:
            batch = self._far_behind(client, after, head, fold_at)
        else:
            batch = self._batch(client, after, head, records) if head > after else Batch(after)
        self._is_read = batch.position >= head
        return batch

    def _wait(self, client: Client, after: int, head: int, wait_s: float, least: int) -> bool:
        """Wait until `least` entries are there. True if they are. If there is at least one, the wait is short."""
        self._crowd = max(least, self._crowd) if least > 1 else 1
        delay_s = min(_DELAY_PER_ENTRY_S * (self._crowd - 1), _LONGEST_DELAY_S)
        is_enough = delay_s > 0 and client.wait([self._slot(after + least - 1)], delay_s)
        if not is_enough and head <= after:
            client.wait([self._slot(after)], max(0.0, wait_s - delay_s))
        return is_enough

    def _look(self, client: Client, after: int) -> tuple[int, int, list[bytes]]:
        """How many slots are taken, how many of them a published fold holds, and the first few records."""
        keys = [self._fold_at, *(self._slot(after + i) for i in range(_AHEAD))]
        head, (fold_at, *found) = client.add_and_get(self._root + "head", 0, keys)
        return head, number(fold_at), _up_to_a_hole(found[: max(0, head - after)])

    def _batch(self, client: Client, after: int, head: int, records: list[bytes]) -> Batch:
        """All entries from `after` up to `head` or the first hole, at least one. `records`: fetched already."""
        while True:
            records = records + self._fetched(client, after + len(records), head)
            if records:
                entries = [self._envelope.open(record, str(after + i))[1] for i, record in enumerate(records)]
                return Batch(after + len(entries), tuple(entries))
            self._fill(client, after, head)

    def _fetched(self, client: Client, start: int, head: int) -> list[bytes]:
        records: list[bytes] = []
        while start + len(records) < head:
            begin = start + len(records)
            slots = range(begin, min(head, begin + _CHUNK))
            found = _up_to_a_hole(client.multi_get([self._slot(slot) for slot in slots]))
            records += found
            if len(found) < len(slots):
                break
        return records

    def _fill(self, client: Client, hole: int, head: int) -> None:
        """Wait until the writer that took the slot has filled it. After `_HOLE_S` fill the slot with a `Filler`."""
        if hole >= self._known_taken[0]:
            self._known_taken = head, time.monotonic()
        left_s = self._known_taken[1] + _HOLE_S - time.monotonic()
        if left_s <= 0 or not client.wait([self._slot(hole)], left_s):
            client.compare_set(self._slot(hole), b"", self._envelope.wrap("", Filler(), str(hole)))

    def _far_behind(self, client: Client, after: int, head: int, fold_at: int) -> Batch:
        is_awaited, record = False, b""
        for _ in range(_CLAIMS):
            # A reader that has read nothing so far takes an older fold as well. It reads the rest with its next call.
            if fold_at > after + MANY and (not after or head - fold_at <= _FEW):
                break
            claim = head // MANY
            others = client.add(f"{self._root}claim/{claim}", 1) - 1
            # The first reader may have died. Then the second takes its place after a while, then two more, then four.
            # So they never all begin at the same time.
            if not others or not client.wait([f"{self._root}done/{claim}"], _CLAIM_S * others.bit_length()):
                self._claims.add(claim)
                is_awaited = True
                break
            head, (position, record) = client.add_and_get(self._root + "head", 0, [self._fold_at, self._fold])
            fold_at = number(position)
        is_worth = fold_at > after + MANY
        fold = self._unfolded(record or client.get(self._fold), after) if is_worth else Batch(after)
        if fold.base and (fold.position >= head or (not after and head - fold.position > _FEW)):
            return evolve(fold, is_awaited=is_awaited)
        batch = self._batch(client, fold.position, head, [])
        return evolve(batch, base=fold.base, is_awaited=is_awaited)

    def _unfolded(self, record: bytes, after: int) -> Batch:
        with _opening:
            opened = self._envelope.open_job(record)
        return Batch(opened[0], base=opened[1]) if opened and opened[0] > after else Batch(after)

    # ---- connections ----

    def close(self) -> None:
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()

    def _client(self, role: str) -> Client:
        """The connection of one of the two threads. A new one first checks that the journal is the same."""
        client = self._clients.get(role)
        if client is not None and not client.is_closed:
            return client
        self._check_open()
        client = self._clients[role] = Client(self._host, self._port, self._timeout_s, (_OWNER, self._header))
        try:
            with self._greeting:
                self._greet(client)
            self._check_open()  # `close` may have been called before it could see this client
        except BaseException:
            client.close()
            raise
        return client

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"{endpoint(self._host, self._port)}: the journal was closed here")

    def _greet(self, client: Client) -> None:
        owner, header = client.greeting
        if self._was_greeted:
            header = header or client.get(self._header)  # the other thread may have begun the journal meanwhile
        else:
            owner, header = self._founded(client) if self._founds else self._awaited(client)
            where = endpoint(self._host, self._port)
            if self._exclusive and owner not in (b"", self._owner):
                job = owner.decode(errors="replace")
                raise Refused(
                    Refusal.OTHER_JOB, f"{where} serves job {job}, not {self._envelope.job}; choose another endpoint"
                )
            if not header:
                why = f"waited {self._timeout_s:g} s for its host to begin the journal of job {self._envelope.job}"
                raise Unavailable(f"{where}: {why} (if no agent hosts this store, give --rdzv-conf=is_host=false)")
        self._envelope.admit(header)
        self._was_greeted = True

    def _founded(self, client: Client) -> tuple[bytes, bytes]:
        """Owner and header. This agent writes them if they are missing. It writes no header into the store of another
        job."""
        owner, header = client.greeting
        if self._exclusive:
            owner = owner or client.compare_set(_OWNER, b"", self._owner)
            if owner != self._owner:
                return owner, b""
        return owner, header or client.compare_set(self._header, b"", self._envelope.header())

    def _awaited(self, client: Client) -> tuple[bytes, bytes]:
        """Owner and header, which another agent writes. They are empty if it has not written them in time."""
        owner, header = client.greeting
        is_begun = header and (owner or not self._exclusive)
        if is_begun or (self._exclusive and owner not in (b"", self._owner)):
            return owner, header
        # The host appends its first entry at once. This agent waits for that entry as well, which saves an empty read.
        keys = [self._header, self._slot(0)]
        client.wait([_OWNER, *keys] if self._exclusive else keys, self._timeout_s)
        owner, header = client.multi_get([_OWNER, self._header])
        return owner, header

    # ---- keys ----

    def _slot(self, number: int) -> str:
        return f"{self._root}slot/{number}"

    def _beat(self, node: Node) -> str:
        return f"{self._root}beat/{node.incarnation}/{node.id}"


def _up_to_a_hole(records: list[bytes]) -> list[bytes]:
    return records[: records.index(b"")] if b"" in records else records
