"""The clients of one agent, by the name of the thread that uses them, and how long each may take.

A call may take `timeout_s`, or four times as long as the store took to answer the greeting. The first connection, and
one after a connection that was not made in time, may take twice as long. So a round trip of 6 s does no harm, with a
limit of 5 s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from reknit.adapters.journals.tcpstore.client import Client, endpoint
from reknit.adapters.ports import Unavailable

TIMEOUT_S = 5.0
"""Usual upper bound on the wait for one answer of a store that is not far away. Seconds."""
FIRST = 2
"""The first connection, and one after a connection that took too long, may take so many times `timeout_s`."""
ROUND_TRIPS = 4
"""A call may take so many times as long as the answer to the greeting."""
_AWAY_S = 1.0
"""Least bound on the connection to each of two endpoints, when the store could not be reached for long. Seconds."""


class Lines:
    """`address` is where the next connection leads."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.address = host, port
        self.timeout_s = timeout_s
        self.clients: dict[str, Client] = {}
        self._limit_s = FIRST * timeout_s
        """How long the next connection may take. Any thread's connection shows how far away the store is."""
        self._is_closed = False

    @property
    def where(self) -> str:
        return endpoint(*self.address)

    def close(self) -> None:
        self._is_closed = True
        self.close_all_but(None)

    def close_all_but(self, client: Client | None) -> None:
        for other in list(self.clients.values()):
            if other is not client:
                other.close()

    def check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"{self.where}: the journal was closed here")

    def hurry(self, round_trip_s: float) -> None:
        """The next connection is one of several tries. `round_trip_s`: the longest of any agent."""
        self._limit_s = max(_AWAY_S, ROUND_TRIPS * round_trip_s)

    def connected(self, role: str, keys: Sequence[str]) -> Client:
        """A new client for this thread. `keys`: what the greeting asks for."""
        limit_s, began = self._limit_s, time.monotonic()
        try:
            client = Client(*self.address, limit_s, keys, partial(self._begun, role))
        except Unavailable:
            is_late = time.monotonic() - began >= limit_s
            self._limit_s = max(self._limit_s, FIRST * self.timeout_s) if is_late else self.timeout_s
            raise
        self._limit_s = max(self.timeout_s, ROUND_TRIPS * client.round_trip_s)
        client.limit(self._limit_s)
        return client

    def _begun(self, role: str, client: Client) -> None:
        """This client is about to connect. From now on, `close` closes it."""
        self.clients[role] = client
        self.check_open()  # `close` may have been called before it could see this client
