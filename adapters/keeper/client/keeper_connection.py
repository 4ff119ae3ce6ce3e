"""One running keeper, seen from its agent: what it says, whether it lives, and how it is ended."""

from __future__ import annotations

import os
import signal
import time

from reknit.adapters.host.children import reap, signal_process
from reknit.adapters.keeper.protocol.files import Sender, WithFiles
from reknit.adapters.keeper.protocol.stream import Broken, StreamEnded
from reknit.adapters.keeper.protocol.wire import Shutdown
from reknit.adapters.runtime.clock import is_readable
from reknit.adapters.runtime.ports import Clock

from .start import Keeping, Start

END_S = 0.1
"""Time for a keeper that has ended by itself to be seen as ended. After that it is killed. Seconds."""
_KILL_S = 10.0


class KeeperConnection:
    """The connection to one keeper. Wakes the clock when the keeper has said something, and when it ends."""

    def __init__(self, clock: Clock, start: Start) -> None:
        """Starts a keeper. Raises `OSError`."""
        keeping: Keeping = start()
        self._clock = clock
        self._stream, self.pid, self._fd = keeping.stream, keeping.pid, keeping.fd
        self._sender = Sender(keeping.parcels)
        self.takes_files = keeping.parcels is not None
        """Whether a `WithFiles` may be sent to this keeper."""
        clock.watch(self._stream.source)
        if self._fd >= 0:
            clock.watch(self._fd)
        self._stream.wants_to_write = self._watch_sink

    def send(self, message: object) -> None:
        """Send a message or a `WithFiles`. Never waits."""
        if self._sender.is_waiting or isinstance(message, WithFiles):
            self._sender.add(message)
            self._send_files()
        else:
            self._stream.send(message)

    def _send_files(self) -> None:
        if not self._sender.is_waiting:
            return
        self._clock.unwatch(self._sender.fd)
        for message in self._sender.ready():
            self._stream.send(message)
        if self._sender.is_waiting:
            self._clock.watch_writable(self._sender.fd)

    @property
    def unsent(self) -> int:
        """Bytes that the keeper has not taken yet."""
        return self._stream.unsent

    def listen(self, now: float) -> list[object]:
        """What the keeper has said since the last call. Events get the time `now`. Raises `Broken` when the keeper is
        dead or has sent something that is no message, once all earlier messages were returned."""
        # In this order: if the keeper is dead now, everything that it has ever said is read below.
        is_dead = self._fd >= 0 and is_readable(self._fd)
        self._send_files()
        self._stream.flush()
        messages = self._stream.receive(now)
        if is_dead and not messages:
            raise StreamEnded("it has ended")
        return messages

    def wait(self, seconds: float) -> None:
        """Wait until the keeper says something, for so many seconds at most."""
        is_readable(self._stream.source, seconds)

    def shut_down(self, deadline_s: float) -> bool:
        """Tell the keeper to end its workers and itself, and wait for that. False if the keeper was killed before it
        could do so, or if how it has ended is not known. May be repeated if a signal's handler has raised an error in
        it."""
        try:
            if not self._stream.is_closed:
                self._stream.send(Shutdown())
                # A stopped keeper (SIGSTOP) is continued by the kernel only if it had the time to ask for that.
                signal_process(self.pid, signal.SIGCONT)
                self._await_end(time.monotonic() + deadline_s)
        finally:
            how = self.end()
        return bool(how) and not how.startswith("killed")

    def _await_end(self, give_up: float) -> None:
        while (left_s := give_up - time.monotonic()) > 0:
            self._stream.flush()
            self.wait(min(left_s, 0.1) if self._stream.unsent else left_s)
            try:
                self._stream.receive(0.0)
            except Broken:
                break
        # The stream ends a moment before the process does.
        if self._fd >= 0:
            is_readable(self._fd, give_up - time.monotonic())
        else:
            reap([self.pid], max(0.0, give_up - time.monotonic()))

    def end(self) -> str:
        """Kill the keeper if it lives, and close everything. Returns how the keeper had ended by itself. Empty: it was
        alive, or how it ended is not known. May be repeated."""
        self._stream.wants_to_write = _nothing
        for fd in (self._stream.source, self._stream.sink, self._fd, self._sender.fd):
            if fd >= 0:
                self._clock.unwatch(fd)
        self._stream.close()
        self._sender.close()
        if self._fd >= 0:
            is_readable(self._fd, END_S)
        how = _reaped(self.pid)
        if how is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # other code of this process has waited for it
            reap([self.pid], _KILL_S)
        self._close_fd()
        return how or ""

    def abandon(self) -> None:
        """In a forked child: close its copies of the descriptors. The keeper goes on."""
        self._stream.close()
        self._sender.close()
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1  # first: an interrupt can come after a call, and a number is never closed twice
        if fd >= 0:
            os.close(fd)

    def _watch_sink(self, is_wanted: bool) -> None:
        if is_wanted:
            self._clock.watch_writable(self._stream.sink)
        else:
            self._clock.unwatch(self._stream.sink)


def _reaped(pid: int) -> str | None:
    """How this child has ended. None: it lives. Empty: other code of this process has waited for it."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return ""
    if not found:
        return None
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it has ended with status {code}"


def _nothing(is_wanted: bool) -> None:
    """The stream is closed: nothing waits to be written any more."""
