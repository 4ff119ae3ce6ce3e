"""How a journal comes into a TCPStore: it begins there, it is founded again, or it makes way for an older one.

What an agent does is decided in core/job/founding.py. Here it is carried out. Rule 16 of docs/protocol.md says why it
is safe.

1. The host of the store begins the journal, by writing the header. Others wait for it. A host that finds signs of an
   earlier life waits for agents that remember the journal.
2. A journal is founded again under keys of its own, which nobody else uses. The header is written last, by
   `compare_set` against what was found. Whoever writes the header first has decided. Every agent compares it with what
   it has read itself.
3. A host that does not know that its store was lost begins another journal. This journal is *young* as long as no round
   was sealed in it. An agent that remembers an older journal, and may have workers, writes a *veto* into the next slot
   of the young one. For agents that know nothing of vetoes, a veto is a `Filler`. If the veto comes before the entry
   that seals round 0, the young journal is void for everybody who reads it, and the older one is founded again in its
   place. If the seal comes first, the veto means nothing.
4. A young journal may have been founded again itself, from a fold without a sealed round.
"""

from __future__ import annotations

import os
import time

from reknit.adapters.journals.envelope import Envelope, number
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job import founding
from reknit.core.job.entries import Filler
from reknit.core.job.founding import (
    TURNS,
    Candidate,
    FoundingMove,
    Held,
    Origin,
    has_sealed,
    looked,
    moved,
    next_life,
    offer_of,
    waits_s,
)
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

from .client import StoreClient
from .keys import OWNER, LifeKeys, StoreKeys

LARGEST = 4 << 20
"""Upper bound on a value in the store, in bytes. torch's server closes the connection at a value of 8 MiB. A larger
fold is published only where a life of the journal begins, in several values."""
_POLL_S = 0.05
"""The pause between two looks. Seconds."""
_GIVE_UP_S = 60.0
"""How long one call waits until the journal is founded again. Several agents with better offers may have died, one
after another. Seconds."""
_CHUNK = 512
"""Number of slots that are asked for in one request."""
HOLE_S = 2.0
"""How long an agent that writes a veto waits at least for a slot that is taken and not filled. Seconds. Usually the
readers of the journal fill the slot before. They may all be dead."""
_HOLE_ROUND_TRIPS = 6
"""The agent waits for such a slot at least this many of the longest round trip of any writer."""
_SLOWEST_S = 30.0
"""Seconds. A round trip that took longer is counted as if it had taken so long."""


# ---- the job that a store serves ----


def owner_of(job: str) -> bytes:
    """What stands at the key `OWNER` in a store that serves this job."""
    return job.encode(errors="surrogatepass")


def check_owner(where: str, owner: bytes, job: str) -> None:
    """Raises `Refused` if the store at this endpoint serves another job. `owner`: what stands at the key `OWNER`."""
    if owner not in (b"", owner_of(job)):
        other = owner.decode(errors="replace")
        why = f"{where} serves job {other}, not {job}: give --rdzv-id={other}, or another endpoint"
        raise Refused(Refusal.OTHER_JOB, why)


# ---- a journal begins ----


def begun(client: StoreClient, keys: StoreKeys, envelope: Envelope, *, is_remembered: bool) -> bytes:
    """The header, after this agent has begun the journal. Another agent may have been faster. `is_remembered`: as in
    `waits_s`."""
    came_at = time.monotonic()
    while True:
        has_offers = envelope.open_offer(client.get(keys.best)) is not None
        if time.monotonic() - came_at >= waits_s(is_remembered=is_remembered, has_offers=has_offers):
            return _header_written(client, keys, b"", envelope.header())
        if header := _header_after(client, keys, b""):
            return header


def awaited(client: StoreClient, keys: StoreKeys, wait_s: float, *, exclusive: bool) -> tuple[bytes, bytes]:
    """Owner of the store and header, which another agent writes within `wait_s` seconds. They are empty if it has
    not."""
    # The host appends its first entry at once. This agent waits for that entry as well, which saves an empty read.
    wanted = [keys.header, keys.of("").slot(0)]
    client.wait([OWNER, *wanted] if exclusive else wanted, wait_s)
    owner, header = client.multi_get([OWNER, keys.header])
    return owner, header


def _header_written(client: StoreClient, keys: StoreKeys, void: bytes, header: bytes) -> bytes:
    """The header that is there after this agent has tried to write its own in the place of `void`."""
    header = client.compare_set(keys.header, void, header)
    client.set(keys.begun, b"1")
    return header


def _header_after(client: StoreClient, keys: StoreKeys, void: bytes) -> bytes:
    """The header, if there is another than `void` within a moment. Empty: there is none."""
    if void:
        time.sleep(_POLL_S)
    else:
        client.wait([keys.header], _POLL_S)
    header = client.get(keys.header)
    return b"" if header == void else header


def replaced(client: StoreClient, keys: StoreKeys, void: bytes, wait_s: float) -> bytes:
    """The header that has taken the place of `void` within `wait_s` seconds. Empty: none has."""
    give_up_at = time.monotonic() + wait_s
    while not (header := _header_after(client, keys, void)) and time.monotonic() < give_up_at:
        pass
    return header


# ---- a journal is founded again ----


def found_again(
    client: StoreClient, keys: StoreKeys, envelope: Envelope, held: Held, number: int, void: bytes = b""
) -> bytes:
    """Found the journal again, or wait until another agent has. Returns the header.

    `number`: as in `next_life`. `void`: the header of a journal that makes way for this one. Empty: the
    store has no header. Raises `Unavailable` if no agent has founded it within a minute, and more over a slow link."""
    # A dead offer is replaced after some round trips (`founding.TURNS`). A new attempt would wait for it anew.
    give_up_at = time.monotonic() + _GIVE_UP_S + 2 * TURNS * client.round_trip_s
    name = os.urandom(8).hex()
    candidate, sealed = Candidate(offer_of(held, name)), b""
    while not (header := _header_after(client, keys, void)):
        if time.monotonic() >= give_up_at:
            raise Unavailable(f"waited in vain for the agents of job {envelope.job} to write its journal again")
        best = client.get(keys.best)
        candidate, move = looked(candidate, envelope.open_offer(best), time.monotonic(), client.round_trip_s)
        if move is FoundingMove.FOUND:
            return _founded(client, keys, envelope, held, next_life(held, name, number), void)
        if move is FoundingMove.OFFER:
            sealed = sealed or envelope.wrap_offer(candidate.offer)
            client.compare_set(keys.best, best, sealed)
    return header


def _founded(
    client: StoreClient, keys: StoreKeys, envelope: Envelope, held: Held, origin: Origin, void: bytes
) -> bytes:
    of_life = keys.of(origin.life.name)
    whole = envelope.wrap_job(held.position, moved(held.job), held.digest)
    first, *others = (whole[i : i + LARGEST] for i in range(0, len(whole), LARGEST))
    for part_number, part in enumerate(others, 1):
        client.set(of_life.part(part_number), part)
    client.set(of_life.fold, first)
    client.set(of_life.fold_at, b"%d" % origin.position)
    client.set(of_life.head, b"%d" % origin.position)
    return _header_written(client, keys, void, envelope.header(origin))


def first_fold(client: StoreClient, keys: LifeKeys) -> bytes:
    """The fold that was written when this life began. A later fold if one has been published since."""
    whole, part_number = client.get(keys.fold), 1
    while len(whole) == part_number * LARGEST and (part := client.get(keys.part(part_number))):
        whole, part_number = whole + part, part_number + 1
    return whole


# ---- a young journal makes way ----


def is_void_now(client: StoreClient, keys: StoreKeys, origin: Origin, envelope: Envelope) -> bool:
    """Make the journal with this origin void, in favour of the one that `envelope` has taken. True if it is void. False
    if it stays."""
    found, slots = envelope.of(origin), keys.of(origin.life.name)
    end = client.add(slots.head, 0)
    pace_s = min(number(client.get(keys.pace)) / 1e3, _SLOWEST_S)
    hole_s = max(HOLE_S, _HOLE_ROUND_TRIPS * pace_s)
    while (verdict := judged(client, slots, found, origin, end, hole_s)) is None:
        slot = client.add(slots.head, 1) - 1
        client.compare_set(slots.slot(slot), b"", found.seal({"journal": envelope.journal}, _veto(slots, slot)))
        end = slot + 1
    return verdict


def is_veto(envelope: Envelope, record: bytes, slots: LifeKeys, slot: int) -> bool:
    return bool(envelope.unseal(record, _veto(slots, slot)))


def judged(
    client: StoreClient, slots: LifeKeys, envelope: Envelope, origin: Origin, end: int, hole_s: float = HOLE_S
) -> bool | None:
    """Whether the journal is void, by its records before position `end`. None: nothing has decided yet. `slots`: the
    keys of its life. `hole_s`: how many seconds a slot may stay taken and not filled. Then it is filled here."""
    slot, job = _base_of(client, slots, envelope) if origin.life.name else (0, Job())
    verdict = False if has_sealed(job) else None
    while slot < end and verdict is None:
        for record in client.multi_get([slots.slot(i) for i in range(slot, min(end, slot + _CHUNK))]):
            if not record and not client.wait([slots.slot(slot)], hole_s):
                filler = envelope.wrap("", Filler(), slots.place(slot))
                record = client.compare_set(slots.slot(slot), b"", filler)
            record = record or client.get(slots.slot(slot))
            found = envelope.unwrap(record, slots.place(slot))
            entry = Filler() if found is None else found.entry
            is_against = found is None and is_veto(envelope, record, slots, slot)
            job, verdict = founding.judged(job, None if is_against else entry)
            if verdict is not None:
                return verdict
            slot += 1
    return verdict


def _base_of(client: StoreClient, slots: LifeKeys, envelope: Envelope) -> tuple[int, Job]:
    """The position and the fold with which this life begins. A later fold if a reader has published one since. No
    reader reads past a veto that counts, so all agents judge alike. Raises `Unavailable`."""
    found = envelope.open_fold(first_fold(client, slots))
    if found is None:
        raise Unavailable(f"the fold with which the journal of job {envelope.job} goes on is damaged")
    position, job, _ = found
    return position, job


def _veto(slots: LifeKeys, slot: int) -> str:
    return f"{slots.place(slot)} veto"


def makes_way(job: str) -> str:
    return f"the new journal of job {job} makes way for the one that other agents remember"
