"""Each side of a stream to another host says now and then that it is there.

On one host the kernel tells each side when the other has ended. Between two hosts a connection may break without a
word.
"""

from __future__ import annotations

PING_S = 5.0
"""Seconds between two pings of one side."""
SILENCE_S = 20.0
"""Seconds after which a side that was not heard is taken for gone."""


class Pings:
    """When one side sends its next ping, and when it has heard the other side last."""

    def __init__(self, now: float) -> None:
        """`now`: the first ping is due at once, and the other side counts as heard."""
        self._due_at = self._heard_at = now

    @property
    def wakes_at(self) -> float:
        """The next time at which this side must look."""
        return min(self._due_at, self._heard_at + SILENCE_S)

    def heard(self, now: float) -> None:
        """Something came from the other side."""
        self._heard_at = now

    def overdue(self, now: float) -> str:
        """Why the other side is taken for gone. Empty: it is not."""
        return f"nothing was heard of it for {SILENCE_S:g} s" if now >= self._heard_at + SILENCE_S else ""

    def takes_turn(self, now: float) -> bool:
        """A ping is due now. The caller sends it."""
        is_due = now >= self._due_at
        if is_due:
            self._due_at = now + PING_S
        return is_due
