"""How an agent that has read nothing comes to the journal: it begins a new one, or waits for the one that does.

A host that finds a sign of an earlier life waits for the agents that remember it, before it begins a new journal. A
sign is an offer in the store, what the caller knows (`has_elders`), and a note or an offer at the second of two
endpoints. While agents make offers, at either endpoint, the host begins no journal.
"""

from __future__ import annotations

import time

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import OWNER, Keys
from reknit.adapters.journals.tcpstore.lines import Lines
from reknit.adapters.journals.tcpstore.places import ELDERS_S, Places, check_owner, owner_of
from reknit.adapters.journals.tcpstore.rebirth import header_within
from reknit.adapters.ports import Unavailable

_OFFERED_S = 6.0
"""How much longer such a host waits if an agent has offered to found the journal again by then. That agent may wait for
others, one after another, and its way to the store may be long. Seconds."""
_SECOND_S = 1.0
"""How often it looks at the second endpoint meanwhile. Seconds."""
_VOID_S, _POLL_S = 1.0, 0.05
"""How long an agent that has read a void journal waits for another one, and the pause between two looks. Seconds."""


class Beginning:
    """The way of one agent to a journal of which it has read nothing."""

    def __init__(
        self, lines: Lines, keys: Keys, envelope: Envelope, places: Places | None, *, exclusive: bool, has_elders: bool
    ) -> None:
        """The parameters are those of `TCPStoreJournal`."""
        self.void = b""
        """The header of a journal that has made way for another one. Empty: this agent has read none."""
        self._lines = lines
        self._keys = keys
        self._envelope = envelope
        self._places = places
        self._exclusive = exclusive
        self._has_elders = has_elders
        self._owner = owner_of(envelope.job)

    def claim(self, client: Client) -> None:
        """The store serves this job from now on. Raises `Refused` if it serves another one."""
        if self._exclusive:
            self.check_owner(client.compare_set(OWNER, b"", self._owner))

    def check_owner(self, owner: bytes) -> None:
        if self._exclusive:
            check_owner(self._lines.where, owner, self._envelope.job)

    def begun(self, client: Client) -> tuple[bytes, bytes]:
        """Owner and header. This agent writes them if they are missing. It writes no header into the store of another
        job."""
        owner, header, offers, _ = client.greeting
        if header and header == self.void:
            header = self._replaced(client)
        if self._exclusive:
            owner = owner or client.compare_set(OWNER, b"", self._owner)
            if owner != self._owner:
                return owner, b""
        is_remembered = False
        if not header and self._places is not None:
            self._places.check_first()
            is_remembered = self._places.is_remembered(self._keys, self._envelope)
        if not header and (self._has_elders or offers or is_remembered):
            header = header_within(client, self._keys, ELDERS_S)
            if not header and self._places is not None:
                header = self._with_elders(client, self._places)
            elif not header and client.get(self._keys.offers):
                header = header_within(client, self._keys, _OFFERED_S)
        return owner, header or self._begun_here(client)

    def _with_elders(self, client: Client, places: Places) -> bytes:
        """At one of two endpoints: the header, if agents that remember the journal have founded it again. Empty: there
        are no such agents. Raises `Unavailable` while they live, and have not founded it."""
        give_up_at = time.monotonic() + places.wait_for_elders_s(self._lines.timeout_s)
        keys = self._keys.offers, self._keys.best
        here, there = client.multi_get(keys), places.offers(self._keys, self._envelope)
        look_at = 0.0
        while (now := time.monotonic()) < give_up_at:
            if header := header_within(client, self._keys, _POLL_S):
                return header
            has_changed = client.multi_get(keys) != here
            if now >= look_at:
                look_at = now + _SECOND_S
                has_changed = has_changed or places.offers(self._keys, self._envelope) != there
            if has_changed:
                raise Unavailable(
                    f"{self._lines.where}: agents of the job are here or at the second endpoint, and wait for a "
                    "majority of the nodes of the last round; an agent that was started again, as this one, does not "
                    "count",
                    answers=True,
                )
        return b""

    def _begun_here(self, client: Client) -> bytes:
        header = self._envelope.header()
        if self._places is None:
            return client.compare_set(self._keys.header, b"", header)
        self._places.reserve(self._keys, self._envelope, header)
        found = client.compare_set(self._keys.header, b"", header)
        if found != header:
            self._places.note_again(self._keys, self._envelope, found, self._envelope.elsewhere(header))
        return found

    def awaited(self, client: Client) -> tuple[bytes, bytes]:
        """Owner and header, which another agent writes. They are empty if it has not written them in time."""
        owner, header, _, _ = client.greeting
        if header and header == self.void:
            header = self._replaced(client)
        is_begun = header and (owner or not self._exclusive)
        if is_begun or (self._exclusive and owner not in (b"", self._owner)):
            return owner, header
        # The host appends its first entry at once. This agent waits for that entry as well, which saves an empty read.
        keys = [self._keys.header, self._keys.of("").slot(0)]
        client.wait([OWNER, *keys] if self._exclusive else keys, self._lines.timeout_s)
        owner, header = client.multi_get([OWNER, self._keys.header])
        return owner, header or header_within(client, self._keys, _POLL_S)

    def _replaced(self, client: Client) -> bytes:
        """The header of the journal that has taken the place of the void one."""
        give_up_at = time.monotonic() + _VOID_S
        while (header := client.get(self._keys.header)) == self.void:
            if time.monotonic() >= give_up_at:
                raise Unavailable(f"{self._lines.where}: {makes_way(self._envelope.job)}", answers=True)
            time.sleep(_POLL_S)
        return header


def makes_way(job: str) -> str:
    return f"the new journal of job {job} makes way for the one that other agents remember"
