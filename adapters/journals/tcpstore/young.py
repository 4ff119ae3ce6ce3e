"""A young journal makes way for an older one. Rule 16 of docs/protocol.md says why this is safe.

A host that does not know that its store was lost begins a new journal. The agents that remember the old journal come
later, because they try again once a second. The new journal is *young* as long as no round was sealed in it: no agent
has started workers because of it. A young journal makes way, and the old one is founded again (`rebirth`).

1. An agent that remembers a sealed round, and finds another journal, writes a *veto* into the next slot of the new one.
   For agents that know nothing of vetoes, a veto is a `Filler`.
2. The order of the slots decides. If the veto comes before the entry that seals round 0, the new journal is void, for
   everybody who reads it. If the veto comes later, the new journal stays, and the agent that wrote the veto ends.
"""

from __future__ import annotations

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys, LifeKeys
from reknit.adapters.ports import Unavailable
from reknit.core.job.fold import fold
from reknit.core.job.job import Job

_CHUNK = 512
_HOLE_S = 2.0
"""How long an agent waits for a slot that is taken and not filled. The readers of the journal fill it. Seconds."""


def is_void_now(client: Client, keys: Keys, header: bytes, envelope: Envelope) -> bool:
    """Make the journal with this header void, in favour of the one that `envelope` has admitted. True if it is void.
    False if it stays. Raises `Refused` if an agent with other settings has written it."""
    found = envelope.another()
    life = found.admit(header)
    if life.name:
        return False  # founded again itself, so a round was sealed
    slots = keys.of("")
    end = client.add(slots.head, 0)
    while (is_void := judged(client, slots, found, end)) is None:
        slot = client.add(slots.head, 1) - 1
        client.compare_set(slots.slot(slot), b"", found.seal({"journal": envelope.journal}, _place(slot)))
        end = slot + 1
    return is_void


def is_veto(envelope: Envelope, record: bytes, slot: int) -> bool:
    return bool(envelope.unseal(record, _place(slot)))


def judged(client: Client, slots: LifeKeys, envelope: Envelope, end: int) -> bool | None:
    """Whether the journal whose first life lies in `slots` is void, by its first `end` records. None: nothing has
    decided that yet."""
    job, slot = Job(), 0
    while slot < end:
        for record in client.multi_get([slots.slot(i) for i in range(slot, min(end, slot + _CHUNK))]):
            if not record and not client.wait([slots.slot(slot)], _HOLE_S):
                raise Unavailable(f"slot {slot} of the journal of job {envelope.job} is not filled")
            record = record or client.get(slots.slot(slot))
            found = envelope.unwrap(record, str(slot))
            if found is not None:
                job = fold(job, found.entry)
            elif is_veto(envelope, record, slot):
                return True
            if job.members:
                return False
            slot += 1
    return None


def _place(slot: int) -> str:
    return f"{slot} veto"
