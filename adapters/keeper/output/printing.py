"""Shows the workers' output through the objects `sys.stdout` and `sys.stderr` of a program that has replaced them.

A notebook, for example, shows under a cell what is written to its object `sys.stdout`. What a process writes to
descriptor 1 appears in the terminal of the notebook's server, where nobody looks.

1. A stream whose object writes to the usual descriptor is left alone: the keeper inherits the descriptor.
2. For any other object the keeper gets a pipe in the place of the descriptor. A thread here reads the pipe, and calls
   the object's `write`.
3. The objects are those of the moment when the agent was opened.
4. A slow object holds up the workers that write, and not the agent. An object that raises an error is not called again,
   and the rest of its output is dropped.
"""

from __future__ import annotations

import codecs
import os
import sys
from typing import Any

from reknit.adapters.host.children import abandon_in_forks
from reknit.adapters.runtime.clock import Poller
from reknit.adapters.runtime.ports import CannotStart
from reknit.adapters.runtime.threads import Thread

_CHUNK = 1 << 16
_LAST_S = 10.0
"""How long `close` waits until the objects have taken what was written. Seconds."""


class Printing:
    """The way from the workers' output to the program's `sys.stdout` and `sys.stderr`."""

    def __init__(self) -> None:
        """Raises `CannotStart` if no descriptor or thread is left."""
        self._targets: dict[int, _Target] = {}
        """By read end of a pipe."""
        self._ends: list[int] = []
        """The write ends of the pipes, and the pipe that ends the thread."""
        self._thread: Thread | None = None
        self._stop, self._stopped = -1, -1
        try:
            out = self._end_for(sys.stdout, 1)
            is_one = sys.stderr is sys.stdout and out != 1
            self.console = out, out if is_one else self._end_for(sys.stderr, 2)
            """The descriptors that become the keeper's stdout and stderr."""
            if self._targets:
                self._start()
        except BaseException as error:
            self.close()
            self._let_go()
            if isinstance(error, OSError | RuntimeError):  # Python raises RuntimeError if there is no thread to be had
                raise CannotStart(f"the workers' output cannot be shown: {error}") from None
            raise
        abandon_in_forks(self)

    def _end_for(self, stream: Any, number: int) -> int:
        if _is_usual(stream, number):
            return number
        source, sink = os.pipe()
        os.set_blocking(source, False)
        self._targets[source] = _Target(stream)
        self._ends.append(sink)
        return sink

    def _start(self) -> None:
        self._stopped, self._stop = os.pipe()
        self._thread = Thread(self._run, name="reknit output")
        self._thread.start()

    def close(self) -> None:
        """To be called when the keeper has ended: hand over what it has written, and close everything. Waits for the
        objects, but not without a limit. May be repeated."""
        if self._thread is None:
            return
        os.write(self._stop, b"!")
        if self._thread.wait(_LAST_S):
            self._let_go()
        self._thread = None

    def abandon(self) -> None:
        """In a forked child: close its copies of the descriptors."""
        self._thread = None
        self._let_go()

    def _let_go(self) -> None:
        for fd in (*self._targets, *self._ends, self._stop, self._stopped):
            if fd >= 0:
                os.close(fd)
        self._targets, self._ends, self._stop, self._stopped = {}, [], -1, -1

    # ---- the thread ----

    def _run(self) -> None:
        poller = Poller()
        for fd in (*self._targets, self._stopped):
            poller.add(fd)
        is_over = False
        while not is_over:
            ready = poller.ready(None)
            is_over = self._stopped in ready
            for source, target in self._targets.items():
                while data := _read(source):
                    target.write(data)
                    if not is_over:
                        break  # the other stream may have something as well
        for target in self._targets.values():
            target.write(b"", is_last=True)
        poller.close()


class _Target:
    """One object of the program, which takes text."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, *, is_last: bool = False) -> None:
        text = self._decoder.decode(data, is_last)
        if self._stream is None or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except Exception:
            self._stream = None  # for example a file that was closed meanwhile: nobody can be told


def _is_usual(stream: Any, number: int) -> bool:
    """Whether this object writes to the descriptor `number`. Also True if there is no object that could be written
    to."""
    if stream is None or getattr(stream, "closed", False):
        return True
    try:
        return bool(stream.fileno() == number)
    except (AttributeError, OSError, ValueError):
        return False


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return b""
