"""What the driver needs of the world. No decision is taken behind these: they do what they are told, and report.

1. What the driver calls never waits and never raises for the world's sake: what happened comes back as events.
2. What has to wait, waits in a `Journal`, which `link` calls from threads of its own. That one raises `Unavailable` or
   `Refused`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from reknit.core.commands import StartWorkers, StopWorkers
from reknit.core.entries import Entry, Node
from reknit.core.events import Event
from reknit.core.job import Job
from reknit.core.reasons import Refusal
from reknit.core.values import frozen


class Unavailable(Exception):
    """The store does not answer now; trying again may help. The text says what was tried, and what came of it."""


class Refused(Exception):
    """There is no use in trying again. The text is one line for the operator of this node."""

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal


@frozen
class Batch:
    """What a read of a journal has found."""

    position: int
    """Where the next read begins. What it counts (entries, bytes, revisions) is the journal's own affair; it grows."""
    entries: tuple[Entry, ...] = ()
    base: Job | None = None
    """The fold of all that was skipped, if the reader was far behind: the entries come after it."""
    is_awaited: bool = False
    """Others wait for the fold of this: it is to be published, however short."""


class Journal(Protocol):
    """A store that holds an append-only, totally ordered sequence of entries, and a counter per node beside it.

    Every call returns or raises within a bounded time. Two threads may use it: one reads, the other does the rest; with
    a `file`, a third beats.
    """

    def append(self, token: str, entry: Entry) -> None:
        """Returns when the entry is in the journal for good. `token` is unique to this entry: a call that is repeated
        after `Unavailable` does not double what the first may have written after all."""
        ...

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        """What follows position `after` (0: the start), waiting up to `wait_s` seconds for something to come.

        `least`: fewer entries than these change nothing for the reader, who may be woken a little later for them, by up
        to a second and a half in a crowd, even if `wait_s` is less.
        Empty only if the store has answered, during this call, that there is nothing."""
        ...

    def beat(self, node: Node, watch: Sequence[Node]) -> Mapping[Node, int]:
        """Raise the counter of `node`; the new values of its own and of those in `watch`. One that never beat is
        missing, or 0."""
        ...

    def publish(self, position: int, job: Job) -> None:
        """Offer the fold of everything before `position` to readers that are far behind. May do nothing."""
        ...

    def close(self) -> None:
        """Let go of everything. Calls that wait in the other thread end with `Unavailable`, or soon."""
        ...


class Link(Protocol):
    """This agent's connection to the journal."""

    def append(self, entry: Entry) -> None: ...

    def beat(self, node: Node, watch: Sequence[Node]) -> None:
        """Answered by `Counters`, and then, but for the first, by an `EntriesRead`, which may be empty."""
        ...

    def events(self, now: float) -> list[Event]:
        """`EntriesRead` (at least one at the start), `Counters`, `JournalFailed`, since the last call."""
        ...

    def folded(self, job: Job) -> None:
        """The agent has taken in the next `EntriesRead` in turn, and this is the fold of all up to it."""
        ...

    def close(self) -> None: ...


class Requests(Protocol):
    """Signals to this process, or an embedder's wish, that the node leaves."""

    def taken(self) -> Sequence[int]:
        """The signal numbers that came since the last call."""
        ...


class Workers(Protocol):
    """The workers of this node, of one round at a time."""

    def start(self, command: StartWorkers) -> None: ...

    def stop(self, command: StopWorkers) -> None: ...

    def reserve_port(self) -> int:
        """A bootstrap port on this host, kept until the next round has ended."""
        ...

    def renew_port(self) -> None:
        """Reserve another one in its place, and report it."""
        ...

    def events(self, now: float) -> list[Event]:
        """What has happened to the workers since the last call."""
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
