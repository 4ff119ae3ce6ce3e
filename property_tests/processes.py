"""Agent processes whose store is lost now and then, for the law of rule 16.

A process has the real journal of an agent. Which journal counts for it is decided there. What it wants to say is drawn:
whatever an agent could say that has read as much as this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import cast

from attrs import evolve, frozen

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.connections import Replica
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job import entries as said
from reknit.core.job.entries import Entry, Joined, Node, NodeId, Terms
from reknit.core.job.fold import fold
from reknit.core.job.founding import Life
from reknit.core.job.job import Closed, Gathering, Job, Running, can_open, can_seal
from reknit.core.job.workers import WorkerFailure

from .lossy import Client, Network, Reach, Store

JOB = "job"


@frozen
class Round:
    """A sealed round. Two rounds with the same number and the same agents are the same: the agents are in one group."""

    epoch: int
    number: int
    nonces: tuple[str, ...]
    """Of its members."""

    @staticmethod
    def of(job: Job) -> Round:
        """The round that was sealed last."""
        return Round(
            job.epoch, job.round - isinstance(job.phase, Gathering), tuple(member.nonce for member in job.members)
        )


class Late:
    """An entry that is on its way to the journal in which its speaker was."""

    def __init__(self, store: Store, replica: Replica, envelope: Envelope, entry: Entry) -> None:
        self.store, self.replica, self.envelope, self.entry = store, replica, envelope, entry

    def land(self) -> None:
        values, keys = self.store.values, self.replica.keys
        slot = int(values.get(keys.head, b"0"))
        values[keys.head] = b"%d" % (slot + 1)
        values[keys.slot(slot)] = self.envelope.wrap("late", self.entry, keys.place(slot))


class Process:
    """An agent process."""

    def __init__(
        self,
        dice: Random,
        network: Network,
        terms: Terms,
        name: str,
        nonce: str,
        *,
        founds: bool = False,
        has_elders: bool = False,
    ) -> None:
        """`founds`: it hosts the store. `has_elders`: so did its predecessor, and has not ended in order."""
        self.dice, self.network, self.terms, self.name, self.nonce = dice, network, terms, name, nonce
        self.reach = Reach()
        self.births = 0
        """How often it has begun anew."""
        self.envelope = Envelope(JOB, author=nonce)
        self.journal = TCPStoreJournal("endpoint", 0, self.envelope, founds=founds, has_elders=has_elders)
        self.job, self.position, self.life = Job(), 0, Life()
        """What it has read."""
        self.lives: set[Life] = set()
        """Lives of journals in which it has read something."""
        self.last: Joined | None = None
        """The last `Joined` that it has said since it has begun anew."""
        self.port = 0
        """The last port that it has offered. No other process has the same."""
        self.offered: tuple[Node, int] | None = None
        """For which node and round it has offered this port in this life of the journal. None: for none."""
        self.rounds: set[tuple[str, Round]] = set()
        """The rounds whose seals it has read, each with the nonce under which it has read the seal."""
        self.stores: set[tuple[tuple[str, int], Round]] = set()
        """The address and port of the store of each of these rounds."""
        self.has_workers = False
        self.was_left_behind = False
        """It has begun anew in another life of its own journal."""
        self.untaken: tuple[str, Entry, Life] | None = None
        """What it wanted to say last, if no journal has taken it. Its link says it again before it reads."""
        self.is_departing = False
        """It says nothing but goodbye."""
        self.is_acting = self.is_reading = False
        self.end = ""
        """Why it has ended. Empty: it has not."""

    @property
    def speaker(self) -> str:
        return f"{self.nonce}.{self.births}"

    # ---- reading ----

    def read(self) -> None:
        try:
            batch = self.journal.read(self.position, 0.0)
        except Unavailable:  # the connection has broken
            batch = self.journal.read(self.position, 0.0)
        if self.dice.randrange(10) == 0:  # the link drops it, because something could not be said meanwhile
            self.journal.take_back()
            return
        if self.is_reading and self.dice.randrange(6) == 0:
            self._linger()
        if self.life not in (Life(), batch.life):
            assert batch.base is not None or self.job == Job(), "another life begins with a fold"
            self.offered = self.untaken = None
            if batch.is_anew or batch.life.journal != self.life.journal:
                assert not self.has_workers, "an agent that may have workers never begins anew"
                self.births, self.last = self.births + 1, None
                self.was_left_behind = self.was_left_behind or batch.life.journal == self.life.journal
        self.life = batch.life
        self.lives.add(self.life)
        self.job = self.job if batch.base is None else batch.base
        self._note_round()
        for entry in batch.entries:
            self.job = fold(self.job, entry)
            self._note_round()
        self.position = batch.position
        self.journal.remember(self.position, self.job)
        known = self.known
        is_member = known is not None and known.node in self.job.member_nodes
        self.has_workers = isinstance(self.job.phase, Running) and is_member

    def _linger(self) -> None:
        """It has been given something, and has not folded it yet. Its other thread says something meanwhile."""
        self.is_reading = False
        if self.dice.randrange(3) == 0:
            self.network.lose()
        for _ in range(4):
            self.network.others_act()
            if (entry := self.wish()) is not None:
                try:
                    self.say(entry)
                except Unavailable:
                    pass

    def _note_round(self) -> None:
        if self.job.members and isinstance(self.job.phase, Running | Gathering):
            round, first = Round.of(self.job), self.job.members[0]
            self.rounds.add((self.speaker, round))
            self.stores.add(((first.address, first.port), round))

    @property
    def known(self) -> Joined | None:
        """Its `Joined`, if it is live as far as it has read. It has said no higher incarnation since."""
        joined = self.job.live.get(NodeId(self.name))
        if joined is None or joined.nonce != self.speaker:
            return None
        return joined if self.last is None or joined.node.incarnation >= self.last.node.incarnation else None

    # ---- saying ----

    def say(self, entry: Entry) -> list[Late]:
        """Say this entry so that it lands now, or later, or both. Returns what lands later."""
        if isinstance(entry, Joined):
            self.last = entry
        if isinstance(entry, Joined | said.Failed | said.Left):
            self.has_workers = False  # or not all of them
        self.is_departing = self.is_departing or isinstance(entry, said.Left | said.Leaving)
        draw, late = self.dice.randrange(12), []
        if draw < 3:
            client, replica = self.journal._changing("writer")
            if replica.origin.life == self.life:
                late.append(Late(cast(Client, client).store, replica, self.envelope, entry))
        if draw != 0:
            self._append(str(self.dice.random()), entry, self.life)
        return late

    def _append(self, token: str, entry: Entry, life: Life) -> None:
        self.untaken = token, entry, life
        self.journal.append(token, entry, life)
        self.untaken = None

    def wish(self, *, is_calm: bool = False) -> Entry | None:
        """What an agent could say that has read this. Mostly what the job waits for. `is_calm`: nothing else."""
        dice, job, known = self.dice, self.job, self.known
        if self.life == Life():
            return None  # it has read nothing
        epoch = job.epoch + (job.outcome is not None)
        if can_open(job, epoch) and dice.randrange(4):
            return said.Opened(self.terms, self.speaker, epoch)
        if self.is_departing or (isinstance(job.phase, Closed) and known is not None):
            return None if self.last is None else said.Left(self.last.node)
        if not is_calm and dice.randrange(8) == 0 and self.offered is not None:
            return self.last  # once more, in the same life of the journal
        if known is None:
            return self.joining()
        if job.is_expected(known.node) and dice.randrange(8):
            return self.joining()
        if isinstance(job.phase, Gathering) and dice.randrange(4):
            return said.LastCall(job.round, job.epoch) if can_seal(job) else self._missing(known.node)
        return self._news(known.node) if not is_calm and dice.randrange(2) else None

    def joining(self) -> Joined:
        joined = self._joining()
        if self.offered != (joined.node, joined.round):
            self.port, self.offered = self.network.free_port(), (joined.node, joined.round)
        return evolve(joined, port=self.port)

    def _joining(self) -> Joined:
        job, known = self.job, self.known
        if known is not None:
            return evolve(known, round=job.round)
        seen = job.highest_incarnation(NodeId(self.name))
        own = -1 if self.last is None else self.last.node.incarnation
        is_same = own > seen and self.dice.randrange(2)
        node = Node(NodeId(self.name), own if is_same else max(seen, own) + 1)
        round = job.round + isinstance(job.phase, Running)
        return Joined(node, self.speaker, round, f"{self.name}.net", 1, seen=seen)

    def _missing(self, me: Node) -> Entry | None:
        """The gathered round waits for an expected node, and nobody hears it."""
        expected = sorted(self.job.phase.expected) if isinstance(self.job.phase, Gathering) else []
        return said.Lost(self.dice.choice(expected), me) if expected else None

    def _news(self, me: Node) -> Entry:
        """Something that the job does not wait for."""
        dice, job = self.dice, self.job
        worked = job.round - isinstance(job.phase, Gathering)
        draw = dice.randrange(20)
        if draw < 8:
            return said.Failed(me, worked, (WorkerFailure(0, 0, 1),))
        if draw < 12:
            return said.Lost(dice.choice(list(job.live.values())).node, me)
        if draw < 16:
            return said.Left(me)
        others = (said.GaveUp(job.round, job.epoch), said.Admit(job.round + 1, job.epoch), said.Filler())
        return dice.choice((said.Leaving(me), said.Succeeded(me, worked), *others))

    # ---- acting ----

    def act(self, *, reads: bool, is_calm: bool = False) -> list[Late]:
        """Read, say something, or both. `reads`: it only reads. `is_calm`: as in `wish`. Returns what lands later."""
        draw = 0 if reads else 1 if is_calm else self.dice.randrange(6)
        try:
            with self.acting():
                if self.untaken is not None:
                    self._append(*self.untaken)
                if draw < 5:
                    self.is_reading = True
                    self.read()
                self.is_reading = False
                if draw and not self.end and (entry := self.wish(is_calm=is_calm)) is not None:
                    return self.say(entry)
        except Unavailable:
            pass
        except Refused as refused:
            self.end = str(refused)
        return []

    @contextmanager
    def acting(self) -> Iterator[None]:
        """From now on this process uses the network, until it waits."""
        reach, self.network.reach, self.is_acting = self.network.reach, self.reach, True
        try:
            yield
        finally:
            self.network.reach, self.is_acting, self.is_reading = reach, False, False

    def speak_meanwhile(self) -> list[Late]:
        """Its reader waits. The thread that writes has a connection of its own, and may still say something."""
        client = self.journal._connections._clients.get("writer")
        if not self.is_reading or client is None or client.is_closed:
            return []  # that thread waits as well
        if (entry := self.wish()) is None:
            return []
        try:
            return self.say(entry)
        except Unavailable:
            return []
