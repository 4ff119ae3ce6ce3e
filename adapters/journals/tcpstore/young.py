"""A young journal makes way for an older one. Rule 16 of docs/protocol.md says why this is safe.

A host that does not know that its store was lost begins a new journal. The agents that remember the old journal come
later, because they try again once a second. The new journal is *young* as long as no round was sealed in it: no agent
has started workers because of it. A young journal makes way, and the old one is founded again (`rebirth`). A young
journal may have been founded again itself, if the store was lost a second time. It is young as long as its base, the
fold with which its life begins, has no sealed round either.

1. An agent that remembers a sealed round, and finds another journal, writes a *veto* into the next slot of the new one.
   For agents that know nothing of vetoes, a veto is a `Filler`.
2. The order of the slots decides. If the veto comes before the entry that seals round 0, the new journal is void, for
   everybody who reads it. If the veto comes later, the new journal stays, and the agent that wrote the veto ends.
"""

from __future__ import annotations

from reknit.adapters.journals.envelope import Envelope, number
from reknit.adapters.journals.history import Life
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys, LifeKeys
from reknit.adapters.journals.tcpstore.rebirth import base_of
from reknit.core.job.entries import Filler
from reknit.core.job.fold import fold
from reknit.core.job.job import Job

_CHUNK = 512
_HOLE_S, _HOLE_ROUND_TRIPS, _SLOWEST_S = 2.0, 6, 30.0
"""How long an agent waits for a slot that is taken and not filled: so many seconds, and so many of the longest round
trip of any writer, which counts for at most the third number of seconds. Usually the readers of the journal fill the
slot before. They may all be dead."""


def is_void_now(client: Client, keys: Keys, header: bytes, envelope: Envelope) -> bool:
    """Make the journal with this header void, in favour of the one that `envelope` has admitted. True if it is void.
    False if it stays. Raises `Refused` if an agent with other settings has written it."""
    found = envelope.another()
    life = found.admit(header)
    slots = keys.of(life.name)
    end = client.add(slots.head, 0)
    pace_s = min(number(client.get(keys.pace)) / 1e3, _SLOWEST_S)
    hole_s = max(_HOLE_S, _HOLE_ROUND_TRIPS * pace_s)
    while (verdict := judged(client, slots, found, life, end, hole_s)) is None:
        slot = client.add(slots.head, 1) - 1
        client.compare_set(slots.slot(slot), b"", found.seal({"journal": envelope.journal}, _place(life, slot)))
        end = slot + 1
    return verdict


def is_void(client: Client, keys: Keys, header: bytes, envelope: Envelope) -> bool | None:
    """Whether the journal with this header is void already. False: a round was sealed there first, so it stays. None:
    nothing has decided yet. Raises `Refused` like `is_void_now`."""
    found = envelope.another()
    life = found.admit(header)
    slots = keys.of(life.name)
    return judged(client, slots, found, life, client.add(slots.head, 0))


def is_veto(envelope: Envelope, record: bytes, life: Life, slot: int) -> bool:
    return bool(envelope.unseal(record, _place(life, slot)))


def judged(
    client: Client, slots: LifeKeys, envelope: Envelope, life: Life, end: int, hole_s: float = _HOLE_S
) -> bool | None:
    """Whether the journal is void, by its records before position `end`. `slots`: the keys of its life. `hole_s`: how
    many seconds a slot may stay taken and not filled. Then it is filled here. None: nothing has decided yet."""
    slot, job = base_of(client, slots, envelope) if life.name else (0, Job())
    if _has_sealed(job):
        return False
    while slot < end:
        for record in client.multi_get([slots.slot(i) for i in range(slot, min(end, slot + _CHUNK))]):
            if not record and not client.wait([slots.slot(slot)], hole_s):
                filler = envelope.wrap("", Filler(), life.place(slot))
                record = client.compare_set(slots.slot(slot), b"", filler)
            record = record or client.get(slots.slot(slot))
            found = envelope.unwrap(record, life.place(slot))
            if found is not None:
                job = fold(job, found.entry)
            elif is_veto(envelope, record, life, slot):
                return True
            if _has_sealed(job):
                return False
            slot += 1
    return None


def _has_sealed(job: Job) -> bool:
    """Whether a round was sealed. An epoch that is over counts as well: of that epoch, its fold does not tell."""
    return bool(job.members or job.epoch)


def _place(life: Life, slot: int) -> str:
    return f"{life.place(slot)} veto"
