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
"""

from __future__ import annotations

import os
import time

from attrs import frozen

from reknit.adapters.journals.envelope import Envelope, Life
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys, LifeKeys
from reknit.core.job.job import Job

_OFFERS_S = 1.5
"""How long the agent with the best offer waits for others. An agent that lost its store tries again every second."""
_ONE_MISSING_S = 0.3
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


def found_again(client: Client, keys: Keys, envelope: Envelope, memory: Memory, void: bytes = b"") -> bytes:
    """Found the journal again, or wait until another agent has. Returns the header.

    `void`: the header of a journal that makes way for this one. Empty: the store has no header."""
    life = Life(os.urandom(8).hex(), memory.position, memory.digest)
    fold = envelope.wrap_job(memory.position, memory.job, memory.digest)
    live = len(memory.job.live)
    offer = _offer(envelope, life, memory.job)
    began, least_s = time.monotonic(), 0.0
    best = _offered(client, keys, envelope, offer)
    client.add(keys.offers, 1)
    count = keys.offers_of(envelope.journal)
    offers = client.add(count, 1)  # only now: whoever counts this offer must find it
    while not (header := _awaited(client, keys, void)):
        waited_s = time.monotonic() - began - client.round_trip_s
        if best == offer and waited_s >= least_s and _are_enough(offers, live, waited_s):
            _write(client, keys.of(life.name), fold)
            client.set(keys.of(life.name).fold_at, b"%d" % life.position)
            client.set(keys.of(life.name).head, b"%d" % life.position)
            return client.compare_set(keys.header, void, envelope.header(life))
        if best != offer and waited_s >= 2 * _OFFERS_S:
            client.compare_set(keys.best, best, offer)  # the agent with that offer has died
            began, least_s = time.monotonic(), _OFFERS_S
        offers, (best,) = client.add_and_get(count, 0, [keys.best])
        if _rank(envelope, offer) < _rank(envelope, best):
            best = _offered(client, keys, envelope, offer)
            began, least_s = time.monotonic(), _OFFERS_S
    return header


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


def _are_enough(offers: int, live: int, waited_s: float) -> bool:
    if offers >= live - 1 and waited_s >= _ONE_MISSING_S:
        return True
    return offers >= live or waited_s >= _OFFERS_S


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
