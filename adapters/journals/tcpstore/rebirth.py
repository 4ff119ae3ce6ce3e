"""Founding a journal again whose store has lost it. Rule 16 of docs/protocol.md says why this is safe.

The store of `c10d` lives as long as its host. When the host is back, the store is empty. Every other agent still has
the whole fold.

1. Each agent that finds no header offers what it has: its position, and the digest of all records before it. An agent
   that finds a young journal offers in the same way when it has made that journal void (`young`). The key `best` holds
   the best offer: the latest life, in it the highest position, and among equals the smallest name.
2. The agent with the best offer waits for the others: until as many agents have offered as nodes are live, or for
   `_OFFERS_S`. If one is missing, it is probably the host, and the wait is short. Only offers of the same journal are
   counted.
3. Then this agent writes its fold and the position into the keys of a new life, which nobody else writes to. At last it
   writes the header, with `compare_set`. The header names the journal, the life, the position and the digest.
4. The agent with the best offer renews it every second. An offer that stands still is that of a dead agent, and another
   agent puts its own in its place. Then it waits again, because a third agent may have a better offer, which the dead
   one has hidden.
5. Whoever writes the header first has decided: it puts the header where there was none, or in the place of the void
   one. Every agent checks the header against what it has read itself.
6. Agents may remember different journals: a store may be lost while a young journal is in it. Then an offer of a
   journal in which workers run is better than any other.
7. If the store may be at two endpoints, each agent also votes for the best offer, unless it has read what the agent
   with this offer has not. That agent waits for the votes of a majority (rule 17). Only votes for this very offer
   count, so the vote of an agent that has died counts for no later one. An agent that waits in vain takes its offer and
   its vote back, and looks at the other endpoint. How long it waits is drawn by lot. Otherwise two agents that are
   never at the same endpoint together would stay so for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from itertools import count
from math import inf
from random import uniform

from attrs import frozen

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.history import Life, chained, common, lives
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys, LifeKeys
from reknit.adapters.ports import Unavailable
from reknit.core.job.job import Job
from reknit.core.job.majority import missing, moved

_OFFERS_S = 1.5
"""How long the agent with the best offer waits for others. An agent that lost its store tries again every second."""
_ONE_MISSING_S = 0.3
_RENEW_S = 1.0
"""How often the best offer is renewed. One that stands still for `2 * _OFFERS_S` is that of a dead agent."""
LONGEST_STAY_S = 10.0
_STAY_S = (5.0, LONGEST_STAY_S)
"""How long an agent waits at one of two endpoints for a majority, at least and at most. Meanwhile it can take the place
of a dead agent with a better offer, and wait for others. Seconds."""
_POLL_S = 0.05
LARGEST = 4 << 20
"""Upper bound on a value in the store, in bytes. torch's server closes the connection at a value of 8 MiB. A larger
fold is published only where a life of the journal begins, in several values."""
_KeyOf = Callable[[str], str]
"""The key of an agent, by its nonce."""


@frozen
class Memory:
    """What an agent has read and folded."""

    position: int
    job: Job
    digest: str
    """Of all records before `position`."""
    life: Life = Life()
    """In which it has read them."""


@frozen
class Election:
    """An agent's part in founding a journal again whose store may be at two endpoints."""

    nonce: str
    """Names the agent, as in its `Joined`. Empty: it has no vote, because it has not joined, or has said goodbye."""
    life: Life
    position: int
    """The agent has read this life of the journal up to this position, and may not have folded all of it."""
    where: str
    """The endpoint, for messages."""


def found_again(
    client: Client,
    keys: Keys,
    envelope: Envelope,
    memory: Memory,
    void: bytes = b"",
    number: int = 1,
    election: Election | None = None,
) -> bytes:
    """Found the journal again, or wait until another agent has. Returns the header.

    `void`: the header of a journal that makes way for this one. Empty: the store has no header.
    `number`: of the new life (`Life.number`).
    `election`: the store may be at two endpoints, so a majority is needed. None: there is one endpoint.

    Raises `Unavailable` if there is no majority."""
    candidate = _Candidate(client, keys, envelope, memory, number, election)
    give_up_at = inf if election is None else time.monotonic() + uniform(*_STAY_S)
    candidate.come()
    while not (header := _awaited(client, keys, void)):
        if candidate.is_chosen():
            return _founded(client, keys, envelope, memory, candidate.life, void)
        if election is not None and time.monotonic() >= give_up_at:
            error = _too_few(election, candidate.count())
            candidate.withdraw()
            raise error
        candidate.look()
    return header


def await_majority(
    client: Client, keys: Keys, envelope: Envelope, memory: Memory, header: bytes, election: Election
) -> None:
    """Wait until there are agents enough to found the journal again, in the place of the one with this header. Raises
    `Unavailable` if there are not.

    Each agent renews its objection, and counts the others whose objection it has seen to change. The header may stay
    for long, and so would the objection of an agent that has died."""
    give_up_at, choice = time.monotonic() + uniform(*_STAY_S), chained("", header)
    first: dict[str, bytes] = {}
    here: set[str] = set()
    """Whose objection has changed."""
    for renewals in count(1):
        _vote(client, keys.objection, envelope, election.nonce, choice, renewals)
        ballots = _ballots(client, keys.objection, envelope, memory.job, choice)
        here |= {nonce for nonce, ballot in ballots.items() if first.setdefault(nonce, ballot) != ballot}
        found = _counted(memory.job, {election.nonce, *(here & ballots.keys())})
        if found.is_majority:
            # Another agent may have seen only the last one of this agent. It must see a change as well.
            _vote(client, keys.objection, envelope, election.nonce, choice, renewals + 1)
            return
        if time.monotonic() >= give_up_at and renewals > 1:
            _withdraw(client, keys.objection, election)
            raise _too_few(election, found)
        time.sleep(_POLL_S)


class _Candidate:
    """An agent that offers to found the journal again."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        envelope: Envelope,
        memory: Memory,
        number: int,
        election: Election | None,
    ) -> None:
        self.life = Life(os.urandom(8).hex(), memory.position, memory.digest, number, memory.life.line)
        self._client, self._keys, self._envelope = client, keys, envelope
        self._job = memory.job
        self._number = memory.life.number
        """The number of the life that this agent has read last (`Life.number`). It may have come to a later life, and
        have read nothing there."""
        self._election = election
        self._renewals = 0
        self._offer = self._made()
        self._offers = 0
        """How many agents have offered here."""
        self._best = b""
        self._best_at = 0.0
        """When this agent's offer has become the best, or when another agent's best offer has last been seen to change.
        Monotonic time."""
        self._renewed_at = 0.0
        self._least_s = 0.0

    def come(self) -> None:
        self._see(_offered(self._client, self._keys, self._envelope, self._offer))
        self._client.add(self._keys.offers, 1)
        # Only now: whoever counts this offer must find it.
        self._offers = self._client.add(self._keys.offers_of(self._envelope.journal), 1)

    def look(self) -> None:
        """See which offer is the best now. Keep it, renew it, or put this agent's own in its place."""
        client, keys = self._client, self._keys
        self._offers, (best,) = client.add_and_get(keys.offers_of(self._envelope.journal), 0, [keys.best])
        is_dead = best == self._best != self._offer and self._waited_s() >= 2 * _OFFERS_S
        if is_dead:
            best = client.compare_set(keys.best, best, self._offer)
        is_better = _rank(self._envelope, self._offer) < _rank(self._envelope, best)
        if is_better:
            best = _offered(client, keys, self._envelope, self._offer)
        if is_dead or is_better:
            self._least_s = _OFFERS_S
        self._see(best)
        if best == self._offer and time.monotonic() - self._renewed_at >= _RENEW_S:
            self._renew()

    def is_chosen(self) -> bool:
        """Whether this agent is to found the journal."""
        waited_s = self._waited_s()
        if self._best != self._offer or waited_s < self._least_s or not self.count().is_enough(waited_s):
            return False
        # An agent that was counted may have come with a better offer. It has offered before it was counted.
        return self._client.get(self._keys.best) == self._offer

    def count(self) -> _Count:
        if self._election is None or not self._job.members:
            return _Count(self._offers, len(self._job.live))
        return _counted(self._job, _ballots(self._client, self._keys.vote, self._envelope, self._job, self.life.name))

    def withdraw(self) -> None:
        self._client.compare_set(self._keys.best, self._offer, b"")
        if self._election is not None:
            _withdraw(self._client, self._keys.vote, self._election)

    def _waited_s(self) -> float:
        return time.monotonic() - self._best_at - self._client.round_trip_s

    def _see(self, best: bytes) -> None:
        if best == self._best:
            return
        self._best, self._best_at = best, time.monotonic()
        if self._election is not None:
            choice = self._choice(best, self._election)
            _vote(self._client, self._keys.vote, self._envelope, self._election.nonce, choice)

    def _renew(self) -> None:
        before, self._renewals = self._offer, self._renewals + 1
        self._offer = self._made()
        self._renewed_at = time.monotonic()
        if self._client.compare_set(self._keys.best, before, self._offer) == self._offer:
            self._best = self._offer  # this agent waits no longer for that

    def _made(self) -> bytes:
        job, life = self._job, self.life
        fields = {"position": life.position, "digest": life.digest, "name": life.name, "number": self._number}
        more = {"before": life.before, "journal": self._envelope.journal, "renewals": self._renewals}
        has_workers = bool(job.members) and job.outcome is None
        return self._envelope.seal({**fields, **more, "has_workers": has_workers}, "offer")

    def _choice(self, offer: bytes, election: Election) -> str:
        """What this agent votes for when this offer is the best: the name of the life that the offer would found.
        Empty: for nothing, because that life would not hold all that this agent has read."""
        fields = self._envelope.unseal(offer, "offer")
        life = Life(str(fields.get("name")), _position(fields), before=lives(fields.get("before")))
        return life.name if common(election.life, life) >= election.position else ""


def _founded(client: Client, keys: Keys, envelope: Envelope, memory: Memory, life: Life, void: bytes) -> bytes:
    of_life = keys.of(life.name)
    _write(client, of_life, envelope.wrap_job(memory.position, moved(memory.job), memory.digest))
    client.set(of_life.fold_at, b"%d" % life.position)
    client.set(of_life.head, b"%d" % life.position)
    return client.compare_set(keys.header, void, envelope.header(life))


# ---- who has come ----


@frozen
class _Count:
    """How many agents have offered."""

    have: int
    all: int
    is_majority: bool = True

    def is_enough(self, waited_s: float) -> bool:
        if not self.is_majority:
            return False
        if self.have >= self.all - 1 and waited_s >= _ONE_MISSING_S:
            return True
        return self.have >= self.all or waited_s >= _OFFERS_S


def _vote(client: Client, key: _KeyOf, envelope: Envelope, nonce: str, choice: str, renewals: int = 0) -> None:
    """`key`: the key of a nonce. `choice`: what this agent votes for, by its name. Empty: for nothing."""
    if nonce:
        ballot = envelope.seal({"choice": choice, "renewals": renewals}, _ballot(nonce))
        client.set(key(nonce), ballot if choice else b"")


def _withdraw(client: Client, key: _KeyOf, election: Election) -> None:
    if election.nonce:
        client.set(key(election.nonce), b"")


def _ballots(client: Client, key: _KeyOf, envelope: Envelope, job: Job, choice: str) -> Mapping[str, bytes]:
    """The votes for this choice of agents of the last two rounds, by nonce."""
    nonces = list({member.nonce for member in job.members} | set(job.former))
    votes = zip(nonces, client.multi_get([key(nonce) for nonce in nonces]), strict=True)
    return {nonce: vote for nonce, vote in votes if envelope.unseal(vote, _ballot(nonce)).get("choice") == choice}


def _counted(job: Job, voters: Collection[str]) -> _Count:
    """How many agents of the last round have voted, and whether they can go on from this fold. `voters`: nonces."""
    lack = missing(moved(job), voters)
    if lack is None:
        return _Count(sum(member.nonce in voters for member in job.members), len(job.members))
    return _Count(lack.have, lack.members, is_majority=False)


def _ballot(nonce: str) -> str:
    return f"vote of {nonce}"


def _too_few(election: Election, count: _Count) -> Unavailable:
    have = f"{count.have} of the {count.all} nodes of the last round can go on from here"
    return Unavailable(
        f"{election.where}: {have}, and more than half are needed; an agent that was started again does not count: if "
        "the others stay away, start all agents of the job again",
        answers=True,
    )


def _awaited(client: Client, keys: Keys, void: bytes) -> bytes:
    """The header, if there is another than `void` soon. Empty: there is none."""
    if not void:
        return client.get(keys.header) if client.wait([keys.header], _POLL_S) else b""
    time.sleep(_POLL_S)
    header = client.get(keys.header)
    return b"" if header == void else header


def _write(client: Client, keys: LifeKeys, fold: bytes) -> None:
    first, *others = (fold[i : i + LARGEST] for i in range(0, len(fold), LARGEST))
    for number, part in enumerate(others, 1):
        client.set(keys.part(number), part)
    client.set(keys.fold, first)


def first_fold(client: Client, keys: LifeKeys) -> bytes:
    """The fold that was written when this life began. A later fold if one has been published since."""
    fold, number = client.get(keys.fold), 1
    while len(fold) == number * LARGEST and (part := client.get(keys.part(number))):
        fold, number = fold + part, number + 1
    return fold


def base_of(client: Client, keys: LifeKeys, envelope: Envelope) -> tuple[int, Job]:
    """The position and the fold with which this life begins. A later fold if a reader has published one since. No
    reader reads past a veto that counts (`young`), so all agents judge alike. Raises `Unavailable`."""
    found = envelope.open_fold(first_fold(client, keys))
    if found is None:
        raise Unavailable(f"the fold with which the journal of job {envelope.job} goes on is damaged")
    position, job, _ = found
    return position, job


def _offered(client: Client, keys: Keys, envelope: Envelope, offer: bytes) -> bytes:
    """Put this offer in place if it is the best. Returns the best."""
    best = client.compare_set(keys.best, b"", offer)
    while _rank(envelope, offer) < _rank(envelope, best):
        best = client.compare_set(keys.best, best, offer)
    return best


def _rank(envelope: Envelope, offer: bytes) -> tuple[int, int, int, str]:
    """The smaller, the better. What is no offer of a journal of this job is the worst. The order is the same for all
    agents, whichever journal they remember. Otherwise two of them would replace each other's offer for ever."""
    fields = envelope.of(offer).unseal(offer, "offer")
    position, number = _position(fields), fields.get("number")
    if position < 0 or type(number) is not int:
        return 2, 0, 0, ""
    return 0 if fields.get("has_workers") is True else 1, -number, -position, str(fields.get("name"))


def _position(offer: Mapping[str, object]) -> int:
    """-1: there is none."""
    position = offer.get("position")
    return position if type(position) is int else -1
