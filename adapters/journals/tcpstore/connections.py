"""The connections of a journal in a TCPStore, and finding out which journal is there.

1. The reader has a connection, and the appends have one. Beats use that of the appends as well, until an append takes
   long. Every new connection first checks that the journal is the same.
2. The header is written once. Usually the agent that hosts the store writes it. What an agent does that finds no
   header, or another one, is decided in core/job/founding.py (`choice`), and carried out in `recovery`.
3. What the agent holds is what it has folded. It is told of another life of the journal until it has folded that.
"""

from __future__ import annotations

import threading
import time
from functools import partial

from attrs import evolve

from reknit.adapters.journals.envelope import Envelope, is_number, number
from reknit.adapters.journals.history import Prefix
from reknit.adapters.journals.tcpstore import recovery
from reknit.adapters.runtime.ports import NoJournal, Refused, Unavailable
from reknit.core.job.founding import Choice, Held, Origin, choice, has_sealed, overruled
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

from .client import StoreClient, endpoint
from .keys import OWNER, StoreKeys

TIMEOUT_S = 5.0
"""Usual upper bound on the wait for one answer of a store that is not far away. Seconds."""
_FIRST = 2
"""The first connection, and one after a connection that took too long, may take so many times `timeout_s`."""
_ROUND_TRIPS = 4
"""A call may take so many times as long as the answer to the greeting."""
VOID_S = 1.0
"""How long an agent that has read a void journal waits for the one that takes its place. Seconds."""


class Replica:
    """What an agent knows of one life of the journal. Each life that it enters has a new one.

    The attributes of the reader are used by the reader's thread alone, and those of the writer by the writer's."""

    def __init__(self, keys: StoreKeys, origin: Origin, header: bytes, *, is_anew: bool = False) -> None:
        """`is_anew`: the agent begins anew in this life (`Choice.ANEW`)."""
        self.origin = origin
        self.is_anew = is_anew
        self.header = header
        self.keys = keys.of(origin.life.name)
        self.prefix: Prefix | None = Prefix(origin.position, origin.digest)
        """What was read. None: reading began in the middle, so there is no digest."""
        self.seen = ""
        """`prefix` as it stands in records. The reader writes it, and the writer reads it."""
        # The reader's:
        self.crowd = 1
        """The largest number of entries that was waited for lately. As many may still be coming."""
        self.is_read = False
        """The last look found no entry after those that were read. So the next read waits at once, and does not look
        before."""
        self.known_taken = (0, 0.0)
        """A number of taken slots, and the monotonic time at which this reader first saw that number."""
        self.claims: set[int] = set()
        """Claims of this reader that it has not kept yet. Each is the position of the fold before."""
        # The writer's:
        self.taken: tuple[str, int, bytes] | None = None
        """The slot that this writer has taken and may not have filled yet: the token of the entry, the number of the
        slot, and the record that fills it. None: there is no such slot."""


class Connections:
    """The connections of one agent to one journal, by the name of the thread that uses them."""

    def __init__(
        self,
        host: str,
        port: int,
        envelope: Envelope,
        *,
        exclusive: bool,
        founds: bool,
        timeout_s: float,
        has_elders: bool,
        reads_only: bool,
    ) -> None:
        """The parameters are those of `TCPStoreJournal`."""
        self.keys = StoreKeys(envelope.job)
        self.where = endpoint(host, port)
        """The endpoint, for messages."""
        self.pace_ms = 0
        """The longest round trip of any writer, as far as this agent knows. Milliseconds."""
        self._address = host, port
        self._timeout_s = timeout_s
        self._limit_s = _FIRST * timeout_s
        """How long the next connection may take. Any thread's connection shows how far away the store is. So a round
        trip of 6 s does no harm, with a limit of 5 s."""
        self._clients: dict[str, StoreClient] = {}
        self._is_closed = False
        self._envelope = envelope
        self._exclusive = exclusive
        self._founds = founds
        self._has_elders = has_elders
        self._reads_only = reads_only
        self._greeting = threading.Lock()
        """Held while this agent finds out which journal is there."""
        self._holding = threading.Lock()
        """Held while `_held`, `_given` or `_replica` change."""
        self._held: Held | None = None
        """What the agent has folded. None: nothing yet."""
        self._given: Replica | None = None
        """The agent was given something of this life that it has not folded yet. None: it has folded everything."""
        self._replica: Replica | None = None
        """Of the life that was found last. None: none was, or it was void."""
        self._is_founding = False
        """The agent has tried to found the journal again, from what it holds, and has not entered any life since. It is
        given nothing meanwhile: if the attempt succeeds, the life holds only that."""
        self._void = b""
        """The header of a young journal that has made way for another one. Empty: this agent has read none."""

    # ---- what the agent holds ----

    def give(self, replica: Replica) -> None:
        """The agent is about to be given something of this life. Raises `Unavailable` if another life was found
        meanwhile: that one may not hold the same."""
        with self._holding:
            if self._replica is not replica or self._is_founding:
                raise Unavailable(f"{self.where}: the journal has begun another life")
            self._held = evolve(self._held or Held(replica.origin, 0, Job()), has_unfolded=True)
            self._given = replica

    def remember(self, position: int, job: Job) -> None:
        """The agent has folded everything before `position`."""
        with self._holding:
            replica = self._given
            if replica is None:
                return  # the read was empty, or the journal has made way
            digest = "" if replica.prefix is None else replica.prefix.at(position)
            self._held, self._given = Held(replica.origin, position, job, digest), None

    def take_back(self) -> None:
        """What the agent was given last was dropped on its way."""
        with self._holding:
            if self._given is not None:
                self._given = None
                self._held = self._held and evolve(self._held, has_unfolded=False)

    def is_news(self, replica: Replica) -> bool:
        """The agent has folded something of another life than this one."""
        held = self._held
        return held is not None and held.origin.life != replica.origin.life

    def made_way(self, client: StoreClient, replica: Replica) -> Unavailable:
        """The error for an agent that has read that this journal is void. The agent goes on as if it had read nothing
        there."""
        with self._greeting, self._holding:
            if self._replica is replica:
                self._void, self._replica, self._given = replica.header, None, None
                if self._held is None or self._held.origin.life == replica.origin.life:
                    self._held = Held(replica.origin, 0, Job())
        self._close_all_but(None)
        return Unavailable(f"{self.where}: {recovery.makes_way(self._envelope.job)}", answers=True)

    # ---- connections ----

    def close(self) -> None:
        self._is_closed = True
        self._close_all_but(None)

    def client(self, role: str) -> tuple[StoreClient, Replica]:
        """The connection of one of the threads, and the life of the journal that it reaches."""
        client, replica = self._clients.get(role), self._replica
        if client is not None and replica is not None and not client.is_closed:
            return client, replica
        self._check_open()
        client = self._connected(role)
        try:
            with self._greeting:
                replica = self._found(client)
            self._check_open()
        except BaseException:
            client.close()
            raise
        return client, replica

    def _connected(self, role: str) -> StoreClient:
        limit_s, began = self._limit_s, time.monotonic()
        keys = [OWNER, self.keys.header, self.keys.begun, self.keys.pace]
        replica = self._replica
        keys.append((self.keys.of("") if replica is None else replica.keys).head)
        try:
            client = StoreClient(*self._address, limit_s, keys, partial(self._begun, role))
        except Unavailable:
            is_late = time.monotonic() - began >= limit_s
            self._limit_s = max(self._limit_s, _FIRST * self._timeout_s) if is_late else self._timeout_s
            raise
        self._limit_s = max(self._timeout_s, _ROUND_TRIPS * client.round_trip_s)
        client.limit(self._limit_s)
        return client

    def _begun(self, role: str, client: StoreClient) -> None:
        """This client is about to connect. From now on, `close` closes it."""
        self._clients[role] = client
        self._check_open()  # `close` may have been called before it could see this client

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"{self.where}: the journal was closed here")

    def _close_all_but(self, client: StoreClient | None) -> None:
        for other in list(self._clients.values()):
            if other is not client:
                other.close()

    # ---- which journal is there ----

    def _found(self, client: StoreClient) -> Replica:
        _, header, begun, pace, head = client.greeting
        self.pace_ms = max(self.pace_ms, number(pace))
        if begun and not header:
            raise self.is_changed("the header")
        if head and not is_number(head):
            # torch's server closes the connection of whoever adds to it.
            raise self.is_changed("the number of slots")
        replica = self._replica
        if replica is not None and header != replica.header:
            # The greeting may be old: another thread of this agent may have found the journal again since.
            header = client.get(self.keys.header)
        if replica is not None and header == replica.header:
            held = self._held
            if not head and held is not None and held.origin == replica.origin and held.position:
                raise self.is_changed("the number of slots")  # there was one
            return self._entered_again(replica)
        if self._reads_only:
            return self._entered(client, self._to_be_read(header), header, None)
        if header and header == self._void:
            header = recovery.replaced(client, self.keys, header, VOID_S)
            if not header:
                raise Unavailable(f"{self.where}: {recovery.makes_way(self._envelope.job)}", answers=True)
        return self._chosen(client, header)

    def _to_be_read(self, header: bytes) -> Origin:
        if not header and self._replica is None:
            raise NoJournal(f"{self.where}: there is no journal of job {self._envelope.job}")
        return self._envelope.admit(header)

    def _chosen(self, client: StoreClient, header: bytes) -> Replica:
        """Carry out what this agent has to do at this store, until it has entered a life of the journal."""
        while True:
            held = self._held
            found = self._read(header, held) if header else None
            what = choice(held, found, self._known(held, found))
            if what is Choice.OBJECT and held is not None and found is not None:
                is_void = recovery.is_void_now(client, self.keys, found, self._envelope.of(held.origin))
                what = Choice.FOUND if is_void else overruled(held)
            match what:
                case Choice.ENTER | Choice.ANEW if found is not None:
                    return self._entered(client, found, header, held, is_anew=what is Choice.ANEW)
                case Choice.FOUND if held is not None:
                    header = self._found_again(client, held, header)
                case Choice.WAIT:
                    raise Unavailable(f"{self.where}: this node is just reading what the store has lost")
                case Choice.END:
                    raise self._left_behind()
                case _:
                    header = self._begun_or_awaited(client)

    def _read(self, header: bytes, held: Held | None) -> Origin:
        try:
            return self._envelope.read_header(header)
        except Refused as refused:
            is_of_others = refused.refusal in (Refusal.SECRET, Refusal.FORMAT)
            if is_of_others and held is not None and has_sealed(held.job):
                # This agent may have workers, and somebody may only have started the host's agent in a wrong way.
                raise Unavailable(str(refused), answers=True) from None
            raise

    def _known(self, held: Held | None, found: Origin | None) -> str:
        """The digest of all records before the life that was found, as far as this agent knows it."""
        replica = self._replica
        if held is None or found is None or replica is None or replica.prefix is None:
            return ""
        return replica.prefix.at(found.position) if replica.origin.life == held.origin.life else ""

    def _begun_or_awaited(self, client: StoreClient) -> bytes:
        """The header of a journal that begins."""
        owner, job = client.greeting[0], self._envelope.job
        if self._founds:
            if self._exclusive:
                owner = client.compare_set(OWNER, b"", recovery.owner_of(job))
                recovery.check_owner(self.where, owner, job)
            return recovery.begun(client, self.keys, self._envelope, is_remembered=self._has_elders)
        if self._exclusive:
            recovery.check_owner(self.where, owner, job)
        owner, header = recovery.awaited(client, self.keys, self._timeout_s, exclusive=self._exclusive)
        if self._exclusive:
            recovery.check_owner(self.where, owner, job)
        if not header:
            hint = "if no agent hosts this store, give --rdzv-conf=is_host=false"
            why = f"waited {self._timeout_s:g} s for its host to begin the journal of job {job} ({hint})"
            raise Unavailable(f"{self.where}: {why}", answers=True)
        return header

    def _found_again(self, client: StoreClient, held: Held, void: bytes) -> bytes:
        """The header after the journal was founded again. `void`: the header that makes way. Empty: there is none."""
        job = self._envelope.job
        if self._exclusive:
            owner = client.compare_set(OWNER, b"", recovery.owner_of(job))
            try:
                recovery.check_owner(self.where, owner, job)
            except Refused as refused:
                # This agent may have workers, and somebody may only have started the wrong job there.
                raise Unavailable(str(refused), answers=True) from None
        with self._holding:
            if self._held is not held:
                return void  # the agent has folded more meanwhile
            self._is_founding = True
        number = 0 if self._replica is None else self._replica.origin.number
        # `_envelope` may be that of another journal to which the agent has come, and of which it has folded nothing.
        return recovery.found_again(client, self.keys, self._envelope.of(held.origin), held, number, void)

    def _entered(
        self, client: StoreClient, origin: Origin, header: bytes, held: Held | None, *, is_anew: bool = False
    ) -> Replica:
        """`held`: what the agent held when it was chosen to enter this life."""
        before = self._replica
        if before is not None and before.origin.life == origin.life:
            return self._entered_again(before)
        if before is None and self._exclusive and not self._reads_only:
            recovery.check_owner(self.where, client.greeting[0], self._envelope.job)
        with self._holding:
            if self._held is not held:
                # It was given more meanwhile, which this life may not hold.
                raise Unavailable(f"{self.where}: this node is just reading what the store has lost")
            self._is_founding = False
            self._envelope.take(origin)
            entered = self._replica = Replica(self.keys, origin, header, is_anew=is_anew)
        if before is not None:
            self._close_all_but(client)  # the others lead to the store that was lost
        return entered

    def _entered_again(self, replica: Replica) -> Replica:
        """The life that this agent has entered last is still there, or is there again."""
        with self._holding:
            self._is_founding = False
        return replica

    def is_changed(self, what: str) -> Refused:
        return Refused(
            Refusal.IDENTITY,
            f"{self.where}: another program has changed {what} in the journal of job {self._envelope.job}; start all "
            "agents of the job again",
        )

    def _left_behind(self) -> Refused:
        """The error for an agent that has read what the journal does not hold."""
        job = self._envelope.job
        return Refused(
            Refusal.LEFT_BEHIND,
            f"{self.where}: the store was lost, and the journal of job {job} is there again without something that "
            "this node has read; start this agent again, and it joins the job that is there",
        )
