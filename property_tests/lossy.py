"""A store in memory that loses everything now and then. It stands for the TCPStore of a job (rule 16).

Everything above the client is real: `TCPStoreJournal`, `Connections`, `recovery`, and what the core decides. Each look
at the clock costs some time. While an agent waits, others may act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from reknit.adapters.journals.tcpstore import connections, journal, recovery
from reknit.adapters.runtime.ports import Unavailable

LOOK_S = 0.4
"""How much time passes with each look at the clock. An agent that waits looks some times. Seconds."""


class Reach:
    """Whether an agent reaches the store. Its connections ask at each call."""

    def __init__(self) -> None:
        self.is_there = True


class Store:
    """What is kept until the store is lost."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.headers: list[bytes] = []
        """The headers that were written here, in this order."""
        self.first_folds: dict[str, bytes] = {}
        """The fold with which each life begins that was founded here, by its key."""


class Network:
    """The endpoint, and the agent that acts now."""

    def __init__(self, dice: Random, others_act: Callable[[], None]) -> None:
        self.dice = dice
        self.store = Store()
        self.lost: list[Store] = []
        self.reach = Reach()
        """Of the agent that acts now."""
        self.others_act = others_act
        """Called while an agent waits."""
        self.now = 0.0
        self._ports = count(1)

    def free_port(self) -> int:
        """A port that no agent has offered."""
        return next(self._ports)

    def lose(self) -> None:
        """The store is empty."""
        self.lost.append(self.store)
        self.store = Store()

    # ---- the clock ----

    def monotonic(self) -> float:
        self.now += LOOK_S
        return self.now

    def sleep(self, _: float) -> None:
        self.others_act()

    # ---- connections ----

    def client(
        self,
        host: str,
        port: int,
        timeout_s: float,
        keys: Sequence[str] = (),
        on_begin: Callable[[Client], None] = lambda _: None,
    ) -> Client:
        """In place of the real `StoreClient`."""
        client = Client(self)
        on_begin(client)
        client.greeting = client.multi_get(keys)
        return client

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """All agents use this store and this clock."""
        clock = SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
        with ExitStack() as stack:
            for module in (connections, journal, recovery):
                stack.enter_context(patch.object(module, "time", clock))
            stack.enter_context(patch.object(recovery, "os", SimpleNamespace(urandom=self.dice.randbytes)))
            stack.enter_context(patch.object(connections, "StoreClient", self.client))
            yield


class Client:
    """A connection to the store. It breaks for good when the agent does not reach the store, or the store is lost."""

    round_trip_s = 0.0

    def __init__(self, network: Network) -> None:
        self.network, self.store, self.reach = network, network.store, network.reach
        self.is_closed = False
        self.greeting: list[bytes] = []

    @property
    def _values(self) -> dict[str, bytes]:
        if self.is_closed or not self.reach.is_there or self.store is not self.network.store:
            self.is_closed = True
            raise Unavailable("the endpoint is not reached")
        return self.store.values

    def limit(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"")

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/head") and self.network.dice.randrange(4) == 0:
            self.network.others_act()  # an agent that founds a journal is slow
        self._values[key] = value
        if key.endswith("/header"):
            self.store.headers.append(value)
        if key.endswith("/fold") and f"{key[:-5]}/head" not in self.store.values:
            self.store.first_folds[key] = value  # later ones are published by readers

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        values = self._values
        if values.get(key, b"") == expected:
            self.set(key, desired)
        return values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        values = self._values
        number = int(values.get(key, b"0")) + amount
        values[key] = b"%d" % number
        return number

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._values
        return [values.get(key, b"") for key in keys]

    def add_and_get(self, key: str, amount: int, keys: Sequence[str]) -> tuple[int, list[bytes]]:
        return self.add(key, amount), self.multi_get(keys)

    def wait(self, keys: Sequence[str], wait_s: float) -> bool:
        if any(key not in self._values for key in keys):
            self.network.others_act()
        return all(key in self._values for key in keys)
