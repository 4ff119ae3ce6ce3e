"""Founding a journal again whose store has lost it. Rule 16 of docs/protocol.md says why this is safe.

The store of `c10d` lives as long as its host. When the host is back, the store is empty. Every other agent still has
the whole fold.

1. Each agent that finds no header offers what it has: its position, and the digest of all records before it. An agent
   that finds a young journal offers in the same way when it has made that journal void (`young`). The key `best` holds
   the best offer: the highest position, and among equals the smallest name.
2. The agent with the best offer waits for the others: until as many agents have offered as nodes are live, or for
   `_OFFERS_S`. If one is missing, it is probably the host, and the wait is short. Only offers of the same journal are
   counted.
3. Then this agent writes its fold and the position into the keys of a new life, which nobody else writes to. At last it
   writes the header, with `compare_set`. The header names the journal, the life, the position and the digest.
4. If the agent with the best offer dies, another agent puts its own offer in its place. Then it waits again, because a
   third agent may have a better offer, which the dead one has hidden.
5. Whoever writes the header first has decided: it puts the header where there was none, or in the place of the void
   one. Every agent checks the header against what it has read itself.
6. Agents may remember different journals: a store may be lost while a young journal is in it. Then an offer of a
   journal in which workers run is better than any other.
7. If the store may be at two endpoints, each agent also offers the last `Joined` that it has said. The agent with the
   best offer waits for a majority of the agents that can go on from its fold (rule 17). An agent that waits in vain for
   `_STAY_S` takes its offers back, and looks at the other endpoint.
"""

from __future__ import annotations

import os
import time

from attrs import frozen

from reknit.adapters.journals.envelope import Envelope, Life
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys, LifeKeys
from reknit.adapters.ports import Unavailable
from reknit.core.job.entries import Joined
from reknit.core.job.job import Job
from reknit.core.job.majority import agreeing, is_majority, is_over
from reknit.core.job.moving import moved
from reknit.core.text.codec import CodecError, decode, encode

_OFFERS_S = 1.5
"""How long the agent with the best offer waits for others. An agent that lost its store tries again every second."""
_ONE_MISSING_S = 0.3
_STAY_S = 7.0
"""How long an agent waits at one of two endpoints for a majority. Meanwhile it can take the place of a dead agent with
a better offer, and wait for others. Seconds."""
_POLL_S = 0.05
LARGEST = 4 << 20
"""Upper bound on a value in the store, in bytes. torch's server closes the connection at a value of 8 MiB. A larger
fold is published only where a life of the journal begins, in several values."""


@frozen
class Memory:
    """What an agent has read and folded."""

    position: int
    job: Job
    digest: str
    """Of all records before `position`."""


@frozen
class Election:
    """An agent's part in founding a journal again whose store may be at two endpoints."""

    joined: Joined | None
    """The last `Joined` that the agent has said. None: it has said none."""
    number: int
    """Of the life that is to be founded. Offers for another one do not count: they are old."""
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
    life = Life(os.urandom(8).hex(), memory.position, memory.digest, number)
    offer = _offer(envelope, life, memory.job)
    entered = began = time.monotonic()
    least_s = 0.0
    best = _offered(client, keys, envelope, offer)
    _vote(client, keys, envelope, election)
    client.add(keys.offers, 1)
    offered = keys.offers_of(envelope.journal)
    offers = client.add(offered, 1)  # only now: whoever counts this offer must find it
    while not (header := _awaited(client, keys, void)):
        waited_s = time.monotonic() - began - client.round_trip_s
        if best == offer and waited_s >= least_s:
            count = _counted(client, keys, envelope, memory.job, offers, election)
            if count.is_enough(waited_s):
                return _founded(client, keys, envelope, memory, life, void)
        if election is not None and time.monotonic() - entered >= _STAY_S:
            count = _counted(client, keys, envelope, memory.job, offers, election)
            client.compare_set(keys.best, offer, b"")
            _withdraw(client, keys, election)
            raise _too_few(election, count)
        if best != offer and waited_s >= 2 * _OFFERS_S:
            client.compare_set(keys.best, best, offer)  # the agent with that offer has died
            began, least_s = time.monotonic(), _OFFERS_S
        offers, (best,) = client.add_and_get(offered, 0, [keys.best])
        if _rank(envelope, offer) < _rank(envelope, best):
            best = _offered(client, keys, envelope, offer)
            began, least_s = time.monotonic(), _OFFERS_S
    return header


def await_majority(client: Client, keys: Keys, envelope: Envelope, memory: Memory, election: Election) -> None:
    """Wait until there are agents enough to found the journal again. Raises `Unavailable` if there are not."""
    give_up_at = time.monotonic() + _STAY_S
    _vote(client, keys, envelope, election)
    while not (count := _counted(client, keys, envelope, memory.job, 0, election)).is_majority:
        if time.monotonic() >= give_up_at:
            _withdraw(client, keys, election)
            raise _too_few(election, count)
        time.sleep(_POLL_S)


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


def _vote(client: Client, keys: Keys, envelope: Envelope, election: Election | None) -> None:
    if election is not None and election.joined is not None:
        joined = election.joined
        fields = {"joined": encode(joined), "number": election.number}
        client.set(keys.offer(joined.nonce), envelope.seal(fields, _ballot(joined.nonce)))


def _withdraw(client: Client, keys: Keys, election: Election) -> None:
    if election.joined is not None:
        client.set(keys.offer(election.joined.nonce), b"")


def _counted(
    client: Client, keys: Keys, envelope: Envelope, job: Job, offers: int, election: Election | None
) -> _Count:
    """`offers`: how many agents have offered here."""
    if election is None or not job.members:
        return _Count(offers, len(job.live))
    base = moved(job)
    found = client.multi_get([keys.offer(member.nonce) for member in job.members])
    voters = zip((member.nonce for member in job.members), found, strict=True)
    nonces = {nonce for nonce, value in voters if _goes_on(envelope, base, nonce, value, election.number)}
    nodes = agreeing(base, nonces)
    return _Count(len(nodes), len(job.members), is_majority(job.members, nodes))


def _goes_on(envelope: Envelope, base: Job, nonce: str, value: bytes, number: int) -> bool:
    """Whether the agent with this offer can go on from this fold, with what it has said (`Places`)."""
    data = envelope.unseal(value, _ballot(nonce))
    try:
        joined = decode(data.get("joined"), Joined)
    except CodecError:
        return False  # there is no offer
    return data.get("number") == number and (base.live.get(joined.node.id) == joined or is_over(joined, base))


def _ballot(nonce: str) -> str:
    return f"offer of {nonce}"


def _too_few(election: Election, count: _Count) -> Unavailable:
    have = f"{count.have} of the {count.all} nodes of the last round can go on from here"
    return Unavailable(f"{election.where}: {have}, and more than half are needed")


def _offer(envelope: Envelope, life: Life, job: Job) -> bytes:
    has_workers = bool(job.members) and job.outcome is None
    fields = {"position": life.position, "digest": life.digest, "name": life.name}
    return envelope.seal({**fields, "journal": envelope.journal, "has_workers": has_workers}, "offer")


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


def _rank(envelope: Envelope, offer: bytes) -> tuple[int, int, str]:
    """The smaller, the better. What is no offer of a journal of this job is the worst. The order is the same for all
    agents, whichever journal they remember. Otherwise two of them would replace each other's offer for ever."""
    fields = envelope.of(offer).unseal(offer, "offer")
    position = fields.get("position")
    if type(position) is not int:
        return 2, 0, ""
    return 0 if fields.get("has_workers") is True else 1, -position, str(fields.get("name"))
