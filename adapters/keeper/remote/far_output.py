"""The output of workers whose keeper has no console: it crosses the stream to the agent.

1. The keeper gives its workers two pipes in the place of the console, and sends what they write as `Output` records.
2. The keeper sends a record only while the agent has allowed it (`Credit`) and while the stream takes it at once. So at
   most one record is ahead of an event, and a worker that writes too much waits, as for a slow console.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from reknit.adapters.keeper.protocol.stream import Stream
from reknit.adapters.keeper.protocol.wire import Credit, Output
from reknit.adapters.runtime.clock import SystemClock, is_readable

LARGEST_RECORD = 16_384
"""Bytes of a worker's output in one `Output`, at most."""
WINDOW = 64
"""Number of `Output` records that may be on their way. For each record that the agent has written, it allows another
one by `Credit`."""


class FarOutput:
    """The keeper's side."""

    def __init__(self, clock: SystemClock, stream: Stream) -> None:
        """Raises `OSError` if no descriptor is left."""
        self._clock = clock
        self._stream = stream
        self._credit = WINDOW
        self._pipes: dict[int, int] = {}
        """The read ends of the pipes, with the number of the stream."""
        self._is_watched = True
        """The clock watches the pipes."""
        ends = []
        for number in (1, 2):
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            self._pipes[ours] = number
            clock.watch(ours)
            ends.append(theirs)
        self.console: tuple[int, int] = (ends[0], ends[1])
        """The descriptors that workers get in the place of stdout and stderr of a console."""

    def allow(self, records: int) -> None:
        """The agent allows so many more records."""
        self._credit += records

    def hand_on(self) -> None:
        """Send what the workers have written: one record per pipe and call."""
        for fd, number in self._pipes.items():
            if not self._is_open():
                break
            try:
                data = os.read(fd, LARGEST_RECORD)
            except BlockingIOError:
                continue
            self._credit -= 1
            self._stream.send(Output(number, data.decode("utf-8", "surrogateescape")))
        if self._is_watched != self._is_open():
            # Output that waits in the pipes would wake the clock again and again. So the pipes are not watched while
            # the stream takes no more.
            self._is_watched = not self._is_watched
            for fd in self._pipes:
                (self._clock.watch if self._is_watched else self._clock.unwatch)(fd)

    def is_waiting(self) -> bool:
        """Workers have written what was not sent yet."""
        return any(is_readable(fd) for fd in self._pipes)

    def _is_open(self) -> bool:
        return self._credit > 0 and not self._stream.unsent


class OutputTaken:
    """The agent's side: how much output it has taken."""

    def __init__(self) -> None:
        self._records = 0
        """Number of `Output` records that have come and were not acknowledged."""

    def note(self) -> None:
        """An `Output` has come."""
        self._records += 1

    def grant(self, tell: Callable[[object], None]) -> None:
        """Allow the keeper as many records as have come since the last time."""
        if self._records:
            tell(Credit(self._records))
            self._records = 0
