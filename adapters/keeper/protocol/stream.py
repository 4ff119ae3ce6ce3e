"""The stream between an agent and its keeper: messages of `wire` as lines of JSON, over any pair of descriptors.

1. Neither side ever waits. `Stream.send` keeps what the other side does not take yet, and `Stream.receive` returns what
   has come. So two sides with full buffers cannot block each other.
2. If a line is no message, the stream is broken, and `receive` raises `Broken`. Before the first message other lines
   may come, for example the banner of a login on another host.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any, get_args

from reknit.core.text.codec import CodecError, decode, encode

from .wire import VERSION, Happened, Hello

_LONGEST_BANNER = 1 << 20
_CHUNK = 1 << 16
_MOST_CHUNKS = 64
_LONGEST_LINE = 1 << 26


class Broken(Exception):
    """The stream has ended, or something came that is no message. The text says which."""


class StreamEnded(Broken):
    """The stream has ended."""


class Limited(Broken):
    """The keeper has met a limit of the machine, for example on open files."""


class Stream:
    """Messages over two descriptors, which may be the same one. The stream owns and closes both."""

    def __init__(self, source: int, sink: int, incoming: Any, *, has_banner: bool = False) -> None:
        """`source` is read, and `sink` is written to. `incoming`: the union of the messages that may arrive.
        `has_banner`: other lines may come before the first message."""
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self.source = source
        self.sink = sink
        self.wants_to_write: Callable[[bool], None] = _nothing
        """Called with True when something begins to wait until the other side takes it, and with False when nothing
        waits any more."""
        self._incoming = incoming
        self._has_banner = has_banner
        self._skipped = 0
        self._unread = bytearray()
        """What has come and was not returned yet."""
        self._searched = 0
        """So many bytes at its beginning hold no line end."""
        self._unsent = bytearray()

    def send(self, message: object) -> None:
        """Queue a message, and write what can be written now. No error is raised if the stream has ended: `receive`
        finds that out."""
        data = encode(message)
        data.pop("at", None)
        was_empty = not self._unsent
        self._unsent += json.dumps(data, separators=(",", ":")).encode() + b"\n"
        self.flush()
        if was_empty and self._unsent:
            self.wants_to_write(True)

    @property
    def is_closed(self) -> bool:
        return self.source < 0

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._unsent)

    def flush(self) -> None:
        """Write what can be written now."""
        if not self._unsent:
            return
        try:
            while self._unsent:
                del self._unsent[: _write(self.sink, memoryview(self._unsent)[:_CHUNK].tobytes())]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        self.wants_to_write(False)

    def receive(self, now: float) -> list[Any]:
        """What has arrived since the last call. Events get the time `now`. Raises `Broken` when all messages that came
        before were returned."""
        is_ended = False
        try:
            # No more than this in one call: the other side may write without a pause. The rest wakes the clock again.
            for _ in range(_MOST_CHUNKS):
                data = os.read(self.source, _CHUNK)
                self._unread += data
                if not data:
                    is_ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            is_ended = True  # ECONNRESET: the other side was killed before it had read everything
        lines = self._whole_lines()
        if not lines and len(self._unread) > (_LONGEST_BANNER if self._has_banner else _LONGEST_LINE):
            raise Broken(f"a line of more than {len(self._unread)} bytes is no message")
        messages = []
        for at, line in enumerate(lines):
            try:
                if not self._is_banner(line):
                    messages.append(self._message(line, now))
            except Broken:
                if not messages:
                    raise
                # The next call finds it again, and raises.
                self._unread, self._searched = bytearray(b"\n").join([*lines[at:], self._unread]), 0
                return messages
        if is_ended and not messages:
            raise StreamEnded("the stream was cut in the middle of a line" if self._unread else "the stream has ended")
        return messages

    def _whole_lines(self) -> list[bytes]:
        """Take the lines that have come whole. What has come of the next line stays, and is not searched again: garbage
        without a line end would hold up the thread that decides."""
        end = self._unread.rfind(b"\n", self._searched) + 1
        lines = bytes(self._unread[:end]).split(b"\n")[:-1]
        del self._unread[:end]
        self._searched = len(self._unread)
        return lines

    def _is_banner(self, line: bytes) -> bool:
        if not self._has_banner:
            return False
        self._has_banner = not line.startswith(b'{"kind":"Hello"')
        self._skipped += len(line)
        if self._skipped > _LONGEST_BANNER:
            raise Broken("no hello within the first MiB")
        return self._has_banner

    def _message(self, line: bytes, now: float) -> Any:
        try:
            data = json.loads(line)
            if isinstance(data, dict) and data.get("kind") == Hello.__name__ and data.get("version") != VERSION:
                # The version is looked at first, because a keeper of another version may send other fields.
                theirs = str(data.get("version"))[:20]
                raise Broken(f"its messages are of version {theirs}, this agent's are of version {VERSION}")
            if isinstance(data, dict) and str(data.get("kind")) in _STAMPED:
                data["at"] = now
            return decode(data, self._incoming)
        except (CodecError, ValueError, RecursionError) as error:
            raise Broken(f"{line[:60]!r} is no message: {error}") from None

    def close(self) -> None:
        """May be repeated, also when it was interrupted: a number is forgotten before it is closed."""
        sink, self.sink = self.sink, -1
        if sink not in (-1, self.source):
            os.close(sink)
        source, self.source = self.source, -1
        if source >= 0:
            os.close(source)


_STAMPED = frozenset(cls.__name__ for cls in get_args(Happened))


def _write(fd: int, data: bytes) -> int:
    """Like `os.write`. If the other side has ended, this raises an error and never ends the process by SIGPIPE.

    Python ignores SIGPIPE. A host program may have changed that.
    """
    if signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN:
        return os.write(fd, data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
    try:
        return os.write(fd, data)
    except BrokenPipeError:
        if signal.SIGPIPE not in before and signal.SIGPIPE in signal.sigpending():
            signal.sigwait((signal.SIGPIPE,))
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing(is_wanted: bool) -> None:
    """Does nothing: no caller has asked to be told."""
