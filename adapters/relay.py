"""One thread that copies the workers' output to the console and to files.

1. The thread exists so that a console that blocks (`| less`) blocks only the workers that write, never the agent's
   loop. So the lock is held while reading and remembering, which do not block, and never while writing.
2. Only the thread writes, so the order stays, even when the main thread reads: on a worker's exit it wants all of its
   last words and cannot wait for end-of-file, because a grandchild may hold the pipe open.
3. Back-pressure: the thread reads no more until it has written what it has read.
"""

from __future__ import annotations

import _thread
import os
import select
from collections.abc import Iterable
from errno import EAGAIN

from .clock import Poller

_CHUNK = 65_536
_TAIL = 16_384
_DRAIN_LIMIT = 1 << 20
"""A grandchild that goes on writing must not keep the main thread reading."""
_LONGEST_LINE = 65_536


class Tap:
    """One stream of one worker: what was read from it, and where that goes."""

    def __init__(
        self, source: int, console: int | None, file: int | None = None, prefix: bytes = b"", name: str = ""
    ) -> None:
        self.source = source
        """Our end of the pipe or terminal; -1 once it is closed."""
        self.console = console
        self.file = file
        self.name = name
        """Of the file."""
        self.prefix = prefix
        """Put before each line on the console, then shown in whole lines only. Empty: bytes go through as they come."""
        self.tail = b""
        self.unwritten = b""
        self.partial = b""
        """The beginning of a line that the console has not seen yet. Belongs to the thread."""
        self.finished = False
        """Nothing will be read any more; once everything is written, the file is closed."""


class Relay:
    """The thread, started with the first tap."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._taps: dict[int, Tap] = {}
        self._dirty: list[Tap] = []
        self._writing = False
        self._waiter: _thread.LockType | None = None
        self._poller: Poller | None = None
        self._wake_end = -1

    def add(self, tap: Tap) -> None:
        """Raises `OSError`: no thread, no descriptor."""
        os.set_blocking(tap.source, False)  # our end only: the worker's keeps its own mode
        with self._lock:
            poller = self._poller or self._start()
            poller.add(tap.source)
            self._taps[tap.source] = tap
        self._wake()  # poll, where there is no epoll, would not notice

    def _start(self) -> Poller:
        poller = Poller()
        read_end, wake_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(wake_end, False)
        poller.add(read_end)
        try:
            _thread.start_new_thread(self._run, (poller, read_end))
        except RuntimeError:  # how Python says EAGAIN here
            os.close(read_end)
            os.close(wake_end)
            poller.close()
            raise OSError(EAGAIN, "no thread for the workers' output") from None
        self._poller, self._wake_end = poller, wake_end
        return poller

    def say(self, tap: Tap, data: bytes) -> None:
        """Write something of our own, in order with what was read. Raises `OSError` like `add`."""
        with self._lock:
            if self._poller is None:
                self._start()
            tap.unwritten += data
            self._touch(tap)
        self._wake()

    def drain(self, tap: Tap) -> None:
        """Read what is there, without waiting for more."""
        left = _DRAIN_LIMIT
        while left > 0:
            with self._lock:
                size = self._read(tap)
            if not size:
                break
            left -= size
        self._wake()

    def close(self, taps: Iterable[Tap]) -> None:
        """Read no more from these, after what is there now. What was read is still written."""
        for tap in taps:
            self.drain(tap)
            with self._lock:
                self._finish_reading(tap)
        self._wake()

    def finish(self, deadline_s: float) -> bool:
        """Wait until everything that was read has been written; False if it takes longer than that."""
        with self._lock:
            if not (self._dirty or self._writing):
                return True
            self._waiter = waiter = _thread.allocate_lock()
            waiter.acquire()
        self._wake()
        return waiter.acquire(timeout=max(0.0, deadline_s))

    def _wake(self) -> None:
        if self._wake_end >= 0:
            try:
                os.write(self._wake_end, b"!")
            except BlockingIOError:
                pass  # full of wake-ups that were not taken yet

    # ---- under the lock ----

    def _read(self, tap: Tap) -> int:
        """Read once; the number of bytes, 0 if there are none now or no more."""
        if tap.source < 0:
            return 0
        try:
            data = os.read(tap.source, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: how a pseudo-terminal says end-of-file
        if not data:
            self._finish_reading(tap)
            return 0
        tap.tail = (tap.tail + data)[-_TAIL:] if len(data) < _TAIL else data[-_TAIL:]
        tap.unwritten += data
        self._touch(tap)
        return len(data)

    def _finish_reading(self, tap: Tap) -> None:
        if tap.source >= 0:
            assert self._poller is not None
            self._poller.remove(tap.source)
            self._taps.pop(tap.source, None)
            os.close(tap.source)
            tap.source = -1
            tap.finished = True
            self._touch(tap)

    def _touch(self, tap: Tap) -> None:
        if tap not in self._dirty:
            self._dirty.append(tap)

    # ---- the thread ----

    def _run(self, poller: Poller, wake_end: int) -> None:
        while True:
            for fd in poller.ready(None):
                if fd == wake_end:
                    _discard(wake_end)
                    continue
                with self._lock:
                    # Closed in the meantime, or even another one under the same number: then there is nothing to read.
                    if tap := self._taps.get(fd):
                        self._read(tap)
            while self._write_dirty():
                pass

    def _write_dirty(self) -> bool:
        """Write what was read so far. False if there was nothing to write."""
        with self._lock:
            batch = [(tap, tap.unwritten, tap.finished) for tap in self._dirty]
            for tap in self._dirty:
                tap.unwritten = b""
            self._dirty = []
            self._writing = bool(batch)
            if not batch and self._waiter is not None:
                self._waiter.release()
                self._waiter = None
        for tap, data, finished in batch:
            _deliver(tap, data, finished)
        return bool(batch)


def _deliver(tap: Tap, data: bytes, finished: bool) -> None:
    if tap.file is not None and not write_all(tap.file, data):
        _close_file(tap)  # the disk is full, or gone: the console goes on
        write_all(2, f"reknit: {tap.name} cannot be written any more; its end is missing\n".encode())
    if tap.console is not None:
        shown = whole_lines(tap, data, finished) if tap.prefix else data
        if not write_all(tap.console, shown):
            tap.console = None  # nobody reads it: go on draining, or the workers would block
    if finished:
        _close_file(tap)


def _close_file(tap: Tap) -> None:
    if tap.file is not None:
        os.close(tap.file)
        tap.file = None


def whole_lines(tap: Tap, data: bytes, finished: bool) -> bytes:
    """The lines that are complete now, each with the prefix. A progress bar's carriage return ends a line, too."""
    lines = (tap.partial + data).splitlines(keepends=True)
    tap.partial = b""
    # A carriage return at the very end may be half of a line end.
    if lines and not finished and not lines[-1].endswith(b"\n") and len(lines[-1]) < _LONGEST_LINE:
        tap.partial = lines.pop()
    if lines and not lines[-1].endswith((b"\n", b"\r")):
        lines[-1] += b"\n"  # or the next worker's line would be glued to it
    return b"".join([tap.prefix + line for line in lines])


def write_all(fd: int, data: bytes) -> bool:
    """Write everything, however long it takes. False if it cannot be written at all."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # Somebody who shares the terminal with us has made it non-blocking.
            writable = select.poll()
            writable.register(fd, select.POLLOUT)
            writable.poll()
        except OSError:
            return False
    return True


def _discard(fd: int) -> None:
    try:
        while len(os.read(fd, 4096)) == 4096:
            pass
    except BlockingIOError:
        pass
