"""Open files on their way from an agent to its keeper, over a socket beside the stream.

1. Only a keeper on the same host can be given open files (`SCM_RIGHTS`).
2. The agent sends the files of a message before the message itself. So when the keeper reads the message, the files
   wait in its socket.
3. Neither side waits. What the kernel does not take now is sent when the clock wakes up again. The kernel limits how
   many files may be on their way, so a sender goes on only as the keeper takes them.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from attrs import evolve, frozen

from .wire import StartProcesses

_MOST = 128
"""Number of files in one call. Linux takes 253 at most."""
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@frozen(eq=False)
class WithFiles:
    """A message, and the open files that belong to it. They stay open in the agent, and are the agent's to close."""

    message: StartProcesses
    descriptors: Sequence[int]
    """Who closes the files empties this list. Otherwise a parcel that still waits would send whatever has these numbers
    by then."""


class Sender:
    """The agent's end. Keeps parcels and the messages behind them in order."""

    def __init__(self, sock: socket.socket | None) -> None:
        """None: the keeper cannot be given open files."""
        self._sock = sock
        self._waiting: deque[object] = deque()
        self._sent = 0
        """Number of files of the first parcel that were sent."""

    @property
    def fd(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def is_waiting(self) -> bool:
        """Something could not be sent yet."""
        return bool(self._waiting)

    def add(self, message: object) -> None:
        """Queue a message or a `WithFiles`."""
        self._waiting.append(message)

    def ready(self) -> list[object]:
        """Send files as far as the kernel takes them. Returns the messages whose files are sent, in order."""
        found: list[object] = []
        while self._waiting:
            message = self._waiting[0]
            if isinstance(message, WithFiles):
                while part := message.descriptors[self._sent : self._sent + _MOST]:
                    if not self._send(part):
                        return found
                    self._sent += len(part)
                # If the files were closed meanwhile, the keeper must not take those of the next message for them.
                message, self._sent = evolve(message.message, descriptors=self._sent), 0
            found.append(message)
            self._waiting.popleft()
        return found

    def _send(self, descriptors: Sequence[int]) -> bool:
        if self._sock is None:
            raise AssertionError("a keeper without a socket for open files cannot be given any")
        try:
            socket.send_fds(self._sock, [b"f"], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            # ETOOMANYREFS: this user has too many files on their way. Any other error: the keeper is gone, which the
            # stream will show.
            return error.errno != errno.ETOOMANYREFS
        return True

    def close(self) -> None:
        """May be repeated."""
        self._waiting.clear()
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class Receiver:
    """The keeper's end."""

    def __init__(self, fd: int) -> None:
        """-1: the agent sends no open files."""
        self._sock = socket.socket(fileno=fd) if fd >= 0 else None
        self._taken: deque[int] = deque()
        if self._sock is not None:
            self._sock.setblocking(False)

    @property
    def fd(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    def receive(self) -> None:
        """Take what has come."""
        while self._sock is not None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, 1, _MOST, _CLOEXEC)
            except OSError:
                return  # there is nothing more
            for fd in descriptors:
                os.set_inheritable(fd, False)
            self._taken += descriptors
            if not data:
                return  # the agent is gone, which the stream shows

    def take(self, count: int) -> list[int]:
        """The next `count` files. The caller closes them. They are fewer if this process had no descriptor free."""
        if count:
            self.receive()
        return [self._taken.popleft() for _ in range(min(count, len(self._taken)))]


def new_file() -> int:
    """A descriptor of a new file without a name. Raises `OSError`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("reknit")
    from tempfile import TemporaryFile

    with TemporaryFile() as file:
        return os.dup(file.fileno())
