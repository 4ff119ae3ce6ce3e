"""The two endpoints at which the store of a job may be. Rule 16 of docs/protocol.md says why this is safe.

1. The journal begins at the first endpoint. The host begins it only when the second one refuses connections, or answers
   that it has no journal of the job. An endpoint that does not answer may serve the job for others.
2. An agent that cannot reach the store for a while tries the present endpoint and then the other one, again and again.
   The agent to which the other endpoint leads starts a server there.
3. An agent that comes to the job looks at both.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from reknit.adapters.journals.tcpstore.client import Client, endpoint
from reknit.adapters.journals.tcpstore.rebirth import Memory, Vote
from reknit.adapters.ports import Unavailable
from reknit.core.job.entries import Joined

_LOOK_S = 1.0
"""How long an agent waits for an endpoint that may have the journal. Seconds."""
_PAUSE_S = 0.5
"""After both endpoints were tried in vain, no thread of the agent tries again for so long. Seconds."""
_SILENCES = 2
"""An agent goes to the other endpoint when it could not reach the store for so many silence limits, and the time that a
call may take."""


class Stores(Protocol):
    """The stores that this agent hosts, one at a time."""

    def host_at(self, host: str, port: int) -> None:
        """Host a store at this endpoint if it leads to this host, nobody else serves there, and this agent hosts no
        other. May take some seconds."""
        ...

    def settle(self, host: str, port: int) -> None:
        """The journal is at this endpoint. A server of this agent at another one ends."""
        ...

    def is_at(self, host: str, port: int) -> bool:
        """Whether this agent hosts the store at this endpoint."""
        ...

    def renew(self) -> None:
        """Renew the lease of the server."""
        ...


class Places:
    """The endpoints of one agent's journal. All methods but `reached` and `said` are called with `moving` held."""

    def __init__(self, first: tuple[str, int], second: tuple[str, int], stores: Stores | None) -> None:
        self.moving = threading.Lock()
        self.stores = stores
        self.home = 0
        """The endpoint at which this agent has found the journal last: 0 or 1."""
        self._endpoints = first, second
        self._place = 0
        self._reached_at = time.monotonic()
        self._failed_at, self._why = float("-inf"), ""
        self._joined: tuple[Joined, int] | None = None
        """The last `Joined` that this agent has said, and where."""

    def reached(self) -> None:
        """The store has answered."""
        self._reached_at = time.monotonic()

    def said(self, joined: Joined) -> None:
        """This agent is about to say this at `home`. It has no connection to another endpoint then."""
        self._joined = joined, self.home

    @property
    def is_host(self) -> bool:
        """This agent hosts the store in which the journal is."""
        return self.stores is not None and self.stores.is_at(*self._endpoints[self.home])

    # ---- finding the journal ----

    def check_pause(self) -> None:
        if time.monotonic() - self._failed_at < _PAUSE_S:
            raise Unavailable(self._why)

    def order(self, timeout_s: float, memory: Memory | None) -> Sequence[int]:
        """The endpoints that an agent tries that has read the journal. Without a sealed round there is no quorum."""
        if memory is None or not memory.job.members:
            return (self.home,)
        away_s = timeout_s + _SILENCES * memory.job.terms.silence_s
        return (self.home, 1 - self.home) if time.monotonic() - self._reached_at >= away_s else (self.home,)

    def order_of_a_newcomer(self, keys: Sequence[str], *, founds: bool) -> Sequence[int]:
        """The endpoint at which the journal is, or else the first. `keys`: of owner, header and offers. Raises
        `Unavailable`."""
        if (looked := self._look(0, keys)) is not None and looked[1]:
            return (0,)
        second = self._look(1, keys)
        if second is not None and second[1]:
            return (1,)
        if founds and (second is None or second[2]):
            what = "does not answer" if second is None else "has offers to found it again"
            raise self.failed(f"{endpoint(*self._endpoints[1])} {what}, so the job may go on there")
        return (0,)

    def point(self, place: int) -> tuple[str, int]:
        self._place = place
        return self._endpoints[place]

    def host(self) -> None:
        if self.stores is not None:
            self.stores.host_at(*self._endpoints[self._place])

    def settle(self) -> None:
        """The journal was found where this agent looks now."""
        if self.stores is not None:
            self.stores.settle(*self._endpoints[self._place])

    def found(self) -> None:
        self.home = self._place
        self._failed_at = float("-inf")
        self.reached()

    def failed(self, why: str) -> Unavailable:
        self._failed_at, self._why = time.monotonic(), why
        return Unavailable(why)

    def vote(self) -> Vote:
        if self._joined is None:
            return Vote(None, -1)
        joined, place = self._joined
        return Vote(joined.node.id, -1 if place == self._place else joined.round)

    def _look(self, place: int, keys: Sequence[str]) -> list[bytes] | None:
        """The values of the keys at an endpoint. Empty where no server listens. None: it does not answer."""
        try:
            client = Client(*self._endpoints[place], _LOOK_S, keys)
        except Unavailable:
            return [b""] * len(keys) if self._is_refused(place) else None
        client.close()
        return client.greeting

    def _is_refused(self, place: int) -> bool:
        try:
            socket.create_connection(self._endpoints[place], _LOOK_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False
