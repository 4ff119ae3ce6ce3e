"""How an agent stands with its keeper: there is none, one is starting, or one is ready.

Each standing holds what belongs to it, and is thrown away with it. So a new keeper inherits nothing from the last one
by chance. What outlives a keeper is in `keeper_client.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.keeper.protocol import wire

from .keeper_connection import KeeperConnection

if TYPE_CHECKING:
    from reknit.adapters.keeper.remote.far_output import OutputTaken
    from reknit.adapters.keeper.remote.pings import Pings

HELLO_S = 60.0
"""Time for a new keeper to say that it is ready. A keeper that needs longer is killed. Seconds."""
_STEADY_S = 10.0
"""A keeper that fails after it was ready for longer than this begins a new row of failures. Seconds."""


@frozen
class NoKeeper:
    """There is no keeper, and none is started before the next start of workers."""

    why: str
    """Why: part of a line for the operator."""
    pid = 0
    wakes_at = None

    def tell(self, message: object) -> None:
        """Nobody takes the message."""

    def fence(self, at: float | None) -> None:
        """There are no workers to kill."""


class StartingKeeper:
    """A keeper was started, and has not said yet that it is ready."""

    def __init__(self, line: KeeperConnection, now: float, waiting: Sequence[object]) -> None:
        """`waiting`: messages that are sent when the keeper is ready."""
        self.line = line
        self._waiting = [*waiting]
        self._fence_at: float | None = None
        self.wakes_at = now + HELLO_S
        """When the keeper must be ready, on the clock's time."""

    @property
    def pid(self) -> int:
        return self.line.pid

    def tell(self, message: object) -> None:
        self._waiting.append(message)

    def fence(self, at: float | None) -> None:
        """See `ports.Fences`. The latest time is sent when the keeper is ready."""
        self._fence_at = at

    def overdue(self, now: float) -> str:
        """Why the keeper must be given up. Empty: it has time left."""
        return f"it was not ready within {HELLO_S:g} s" if now >= self.wakes_at else ""

    def ready(self, now: float, *, pings: bool) -> ReadyKeeper:
        """The keeper has said that it is ready. It gets the messages that have waited."""
        keeper = ReadyKeeper(self.line, now, pings=pings)
        keeper.fence(self._fence_at)  # before the workers are started
        for message in self._waiting:
            keeper.tell(message)
        return keeper


class ReadyKeeper:
    """A keeper that takes messages."""

    def __init__(self, line: KeeperConnection, now: float, *, pings: bool) -> None:
        """`pings`: both sides send pings. They begin here, because a login to another host may take long, and only
        `HELLO_S` limits it."""
        self.line = line
        self.owes_flush = False
        """A `Flush` was sent and not answered."""
        self._pings: Pings | None = None
        """None: the keeper runs on this host."""
        if pings:
            from reknit.adapters.keeper.remote.pings import Pings

            self._pings = Pings(now)
        self._taken: OutputTaken | None = None
        """None: no output has come over the stream."""
        self._fence_at: float | None = None
        """What the keeper was told by the latest `Fence`."""
        self._ready_at = now

    @property
    def pid(self) -> int:
        return self.line.pid

    @property
    def wakes_at(self) -> float | None:
        return self._pings.wakes_at if self._pings is not None else None

    def tell(self, message: object) -> None:
        self.line.send(message)

    def fence(self, at: float | None) -> None:
        """See `ports.Fences`. A keeper on another host is not told: it has another clock, and ends its workers when it
        hears nothing for too long (`remote/pings.py`)."""
        if at != self._fence_at and self._pings is None:
            self._fence_at = at
            self.tell(wire.Fence(at))

    def heard(self, now: float) -> None:
        if self._pings is not None:
            self._pings.heard(now)

    def overdue(self, now: float) -> str:
        """Why the keeper must be given up. Empty: it is not silent for too long."""
        return "" if self._pings is None else self._pings.overdue(now)

    def ping(self, now: float) -> None:
        """Send a ping if one is due."""
        if self._pings is not None and self._pings.takes_turn(now):
            self.tell(wire.Ping())

    def note_output(self) -> None:
        """An `Output` has come."""
        if self._taken is None:
            from reknit.adapters.keeper.remote.far_output import OutputTaken

            self._taken = OutputTaken()
        self._taken.note()

    def grant(self) -> None:
        """Allow the keeper to send as much output as has come since the last time."""
        if self._taken is not None:
            self._taken.grant(self.tell)

    def ask_for_flush(self) -> None:
        """Have the keeper say when its console has everything. It is asked once until it has answered."""
        if not self.owes_flush:
            self.owes_flush = True
            self.tell(wire.Flush())

    def was_steady(self, now: float) -> bool:
        """Whether this keeper was ready for so long that its end has nothing to do with failures before it."""
        return now - self._ready_at > _STEADY_S
