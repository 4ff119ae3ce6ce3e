"""What the driver needs of the world. No decision is taken behind these: they do what they are told, and report.

An adapter turns exceptions of the world into events where they happen; none of these calls raises for the world's sake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from reknit.core.commands import StartWorkers, StopWorkers
from reknit.core.entries import Entry, Node
from reknit.core.events import Event


class Journal(Protocol):
    """An append-only, totally ordered sequence of entries. At-least-once; the order is the store's."""

    def append(self, entry: Entry) -> None: ...

    def read(self, after: int, wait_s: float = 0.0) -> Sequence[Entry]:
        """The entries from position `after` on, waiting up to `wait_s` seconds for the first of them."""
        ...


class Liveness(Protocol):
    """One counter per incarnation of a node: counters, never clocks."""

    def beat(self, node: Node) -> None: ...

    def counters(self, nodes: Iterable[Node]) -> Mapping[Node, int]:
        """The counters of these nodes; one that never beat is missing."""
        ...


class Requests(Protocol):
    """Signals to this process, or an embedder's wish, that the node leaves."""

    def taken(self) -> Sequence[int]:
        """The signal numbers that came since the last call. Never waits."""
        ...


class Workers(Protocol):
    """The workers of this node, of one round at a time."""

    def start(self, command: StartWorkers) -> None: ...

    def stop(self, command: StopWorkers) -> None: ...

    def reserve_port(self) -> int:
        """A bootstrap port on this host, kept until the next round has ended."""
        ...

    def events(self, now: float) -> list[Event]:
        """What has happened to the workers since the last call. Never waits."""
        ...

    @property
    def wakes_at(self) -> float | None:
        """When `events` must be called at the latest, on the clock's time: the end of a grace."""
        ...

    def close(self) -> None:
        """Leave nothing behind, whatever state the workers are in. Bounded in time."""
        ...


class Console(Protocol):
    """The agent's own lines, in order with what the workers write. A console that blocks holds nobody up."""

    def say(self, line: str) -> None: ...

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is written; False if it is not by then."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wait(self, until: float | None) -> None:
        """Sleep until a watched file descriptor is ready, a signal came, or `until`. May return early."""
        ...

    def watch(self, fd: int) -> None: ...

    def unwatch(self, fd: int) -> None: ...
