"""One thread that reads the workers' output and hands it to the console and to files.

Rules:

1. A console that blocks holds up the workers that write, never the thread that decides. The relay hands output to a
   `ConsoleWriter`, which has its own thread. While the console is full, the relay does not read the workers that write
   to it.
2. The thread that decides reads as well: when a worker has ended, it wants the worker's last lines at once. It cannot
   wait for end-of-file, because a grandchild may hold the pipe open. So one lock guards reading, remembering and
   handing over. None of these blocks. Files are written without the lock, by the relay's thread alone, because a disk
   may hang.
3. The console gets whole lines. The beginning of a line waits for its end for `PARTIAL_S`, on a terminal for
   `PROMPT_S`. Then it is shown as it is: it may be a prompt or a progress bar.
4. After a read that brought little, the thread sleeps for `BATCH_S`. So a worker that flushes every line costs one read
   per `BATCH_S` and not one per line. A single line is still shown at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from errno import EAGAIN

from reknit.adapters.runtime.clock import Poller
from reknit.adapters.runtime.threads import Thread

from .console import ConsoleWriter

PARTIAL_S = 1.0
"""Seconds that the beginning of a line waits for its end. An unbuffered `print` writes a line in pieces, and on a busy
machine a worker may lose its processor between two of them."""
PROMPT_S = 0.1
"""Seconds that it waits on a terminal, where somebody looks."""
BATCH_S = 0.0015
"""Seconds that the thread sleeps after a read that brought little."""
_LITTLE = 16_384
"""A turn that has read fewer bytes than this brought little."""
_CHUNK = 65_536
"""Upper bound on one read, in bytes."""
_TAIL = 16_384
"""Number of bytes at the end of a stream that are remembered for the report of a failure."""
_DRAIN_LIMIT = 1 << 20
"""Bytes that `drain` reads at most. Without a limit, a grandchild that writes without end would hold up the thread that
decides."""
_LONGEST_LINE = 1 << 18
"""Upper bound on the beginning of a line that waits for its end, in bytes."""
LEAVES_S = 0.5
"""Seconds that `close` waits for the end of the thread, which has nothing left to do then."""


class Tap:
    """One stream of one worker: what was read from it, and where that goes."""

    def __init__(
        self,
        source: int,
        console: ConsoleWriter | None,
        file: int | None = None,
        prefix: bytes = b"",
        name: str = "",
        *,
        is_terminal: bool = False,
        ends_with_reader: bool = False,
    ) -> None:
        self.source = source
        """This process's end of the pipe or terminal. -1: it is closed."""
        self.console = console
        """Where the stream is shown. None: it is not shown."""
        self.file = file
        """The descriptor of the file that gets the stream. None: no file gets it."""
        self.name = name
        """The path of the file, for messages."""
        self.prefix = prefix
        """Text that is put before each line on the console. With a prefix, a carriage return ends its line as well. A
        carriage return at the beginning of a line ends none, and is left out."""
        self.is_terminal = is_terminal
        """`source` is a pseudo-terminal and no pipe."""
        self.ends_with_reader = ends_with_reader
        """When nobody reads the console any more, the stream is closed. The worker then fails at its next write, as it
        would if it wrote to the console itself (`reknit run … | head`)."""
        self.was_unread = False
        """The stream was closed for that reason."""
        self.tail = b""
        """The last `_TAIL` bytes that were read."""
        self.partial = b""
        """The beginning of a line that the console has not got yet."""
        self.due = 0.0
        """When `partial` is shown without its end, in seconds of the monotonic clock."""
        self.unwritten = b""
        """Bytes that were read, and that the file has not got yet."""
        self.is_finished = False
        """Nothing will be read any more. When `unwritten` is written, the file is closed."""


class Relay:
    """All taps, and the thread that reads them. The thread is started with the first tap."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say`: shows a line of reknit's own, without waiting."""
        self._say = say
        self._lock = threading.Condition()
        self._taps: dict[int, Tap] = {}
        self._waiting: set[int] = set()
        """Sources that are not read because their console is full."""
        self._partial: dict[Tap, None] = {}
        self._unwritten: dict[Tap, None] = {}
        self._has_said_unread = False
        self._is_writing = False
        self._is_closing = False
        self._thread: Thread | None = None
        self._poller: Poller | None = None
        self._wake_end = -1

    # ---- what others call ----

    def add(self, tap: Tap) -> None:
        """Begin to read this tap. Raises `OSError` if no thread or descriptor is left."""
        os.set_blocking(tap.source, False)  # this end only: the worker's end keeps its own mode
        if tap.console is not None:
            tap.console.start()
        with self._lock:
            self._start().add(tap.source)
            self._taps[tap.source] = tap
        self.wake()  # on a system without epoll, a waiting poll does not notice a new descriptor

    def drain(self, tap: Tap) -> None:
        """Read and hand over what the tap has now, without waiting for more."""
        left = _DRAIN_LIMIT
        while left > 0:
            with self._lock:
                size = self._read(tap)
            if not size:
                break
            left -= size
        with self._lock:
            self._show_partial(tap)
        self.wake()

    def close_taps(self, taps: Iterable[Tap]) -> None:
        """Read what these taps have now, and no more after that. What was read is still written."""
        for tap in taps:
            self.drain(tap)
            with self._lock:
                self._finish_reading(tap)
        self.wake()

    def resize(self, resize: Callable[[int], None]) -> bool:
        """Call `resize` with this process's end of each worker's terminal. False if no worker has one."""
        with self._lock:
            terminals = [tap.source for tap in self._taps.values() if tap.is_terminal]
            for fd in terminals:
                resize(fd)
        return bool(terminals)

    def flush(self, deadline_s: float) -> bool:
        """Wait until the consoles' queues and the files have everything that was read. False if that takes longer than
        `deadline_s`."""
        with self._lock:
            for tap in list(self._partial):
                self._show_partial(tap)
            return self._lock.wait_for(lambda: not (self._unwritten or self._is_writing), max(0.0, deadline_s))

    def close(self) -> None:
        """End the thread and close all descriptors. A thread that hangs in a write to a file is left behind. See
        `Streams.close` for who calls this."""
        with self._lock:
            for tap in list(self._taps.values()):
                self._finish_reading(tap)
            thread = self._thread
            self._is_closing = thread is not None
        self.wake()
        if thread is not None:
            thread.wait(LEAVES_S)

    def wake(self) -> None:
        """Make the thread look again, because a console has room or there is something to write."""
        with self._lock:
            if self._wake_end >= 0:
                try:
                    os.write(self._wake_end, b"!")
                except BlockingIOError:
                    pass  # the pipe is full of wake-ups that the thread has not taken yet

    # ---- under the lock ----

    def _start(self) -> Poller:
        if self._poller is not None:
            return self._poller
        if self._is_closing:
            raise OSError(EAGAIN, "the thread for the workers' output hangs in a file")
        poller = Poller()
        read_end, wake_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(wake_end, False)
        poller.add(read_end)
        thread = Thread(self._run, poller, read_end, name="relay")
        try:
            thread.start()
        except RuntimeError:  # this is what Python raises if the system allows no further thread
            os.close(read_end)
            os.close(wake_end)
            poller.close()
            raise OSError(EAGAIN, "no thread for the workers' output") from None
        self._thread, self._poller, self._wake_end = thread, poller, wake_end
        return poller

    def _read(self, tap: Tap) -> int:
        """Read once. Returns the number of bytes. 0: there is nothing to read now, or the stream has ended."""
        if tap.source < 0:
            return 0
        try:
            data = os.read(tap.source, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # a pseudo-terminal reports its end by EIO
        if not data:
            self._finish_reading(tap)
            return 0
        tap.tail = (tap.tail + data)[-_TAIL:] if len(data) < _TAIL else data[-_TAIL:]
        if tap.file is not None:
            tap.unwritten += data
            self._unwritten[tap] = None
        if tap.console is not None:
            self._show(tap, tap.console, data)
        return len(data)

    def _show(self, tap: Tap, console: ConsoleWriter, data: bytes) -> None:
        """Hand the complete lines to the console. Keep the beginning of the next line until its end comes, or
        its time is over (rule 3)."""
        is_new = not tap.partial
        lines, tap.partial = _whole_lines(tap.partial + data, tap.prefix)
        self._write(tap, console, lines)
        if len(tap.partial) >= _LONGEST_LINE:
            self._show_partial(tap)
        elif not tap.partial:
            self._partial.pop(tap, None)
        elif is_new or lines:
            tap.due = time.monotonic() + (PROMPT_S if console.is_terminal else PARTIAL_S)
            self._partial[tap] = None

    def _show_partial(self, tap: Tap) -> None:
        self._partial.pop(tap, None)
        if tap.partial and tap.console is not None:
            self._write(tap, tap.console, tap.partial)
            tap.partial = b""

    def _write(self, tap: Tap, console: ConsoleWriter, data: bytes) -> None:
        if data and tap.prefix:
            lines = data.splitlines(keepends=True)
            # The rest of a line that was shown without its end needs no prefix: the line has one already.
            rest = lines.pop(0) if console.continues(tap) else b""
            # A progress bar begins with a carriage return. As a line of its own, it would be a prefix and nothing else.
            data = rest + b"".join(tap.prefix + line for line in lines if line != b"\r")
        console.write(data, tap)

    def _finish_reading(self, tap: Tap) -> None:
        if tap.source < 0:
            return
        if self._poller is not None:
            self._poller.remove(tap.source)
        self._taps.pop(tap.source, None)
        self._waiting.discard(tap.source)
        os.close(tap.source)
        tap.source = -1
        tap.is_finished = True
        self._show_partial(tap)
        if tap.prefix and tap.console is not None and tap.console.continues(tap):
            tap.console.write(b"\n", tap)
        if tap.file is not None:
            self._unwritten[tap] = None

    # ---- the thread ----

    def _run(self, poller: Poller, wake_end: int) -> None:
        while not self._is_closing:
            size = sum(self._look(poller, fd, wake_end) for fd in poller.ready(self._patience_s()))
            self._show_due()
            self._write_files()
            if 0 < size < _LITTLE:
                time.sleep(BATCH_S)
        self._write_files()
        with self._lock:
            os.close(wake_end)
            os.close(self._wake_end)
            poller.close()
            self._poller, self._wake_end, self._thread, self._is_closing = None, -1, None, False

    def _look(self, poller: Poller, fd: int, wake_end: int) -> int:
        if fd == wake_end:
            _discard(wake_end)
            self._resume(poller)
            return 0
        with self._lock:
            # The tap may have been closed meanwhile. The number of its descriptor may even belong to another tap by
            # now. That tap then has nothing to read, which does no harm.
            tap = self._taps.get(fd)
            if tap is None:
                return 0
            if _is_unread(tap):
                self._end_unread(tap)
                return 0
            if tap.console is not None and tap.console.is_full():
                poller.remove(fd)
                self._waiting.add(fd)
                return 0
            return self._read(tap)

    def _resume(self, poller: Poller) -> None:
        with self._lock:
            for tap in [tap for tap in self._taps.values() if _is_unread(tap)]:
                self._end_unread(tap)
            for fd in list(self._waiting):
                console = self._taps[fd].console
                if console is None or not console.is_full():
                    self._waiting.discard(fd)
                    poller.add(fd)

    def _end_unread(self, tap: Tap) -> None:
        tap.was_unread = True
        self._finish_reading(tap)
        if not self._has_said_unread:
            self._has_said_unread = True
            self._say("reknit: nobody reads the stdout of this command any more: workers that write to it fail")

    def _patience_s(self) -> float | None:
        with self._lock:
            due = min((tap.due for tap in self._partial), default=None)
        return None if due is None else due - time.monotonic()

    def _show_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            for tap in [tap for tap in self._partial if tap.due <= now]:
                self._show_partial(tap)

    def _write_files(self) -> None:
        while True:
            with self._lock:
                batch = [(tap, tap.unwritten, tap.is_finished) for tap in self._unwritten]
                for tap in self._unwritten:
                    tap.unwritten = b""
                self._unwritten = {}
                self._is_writing = bool(batch)
                if not batch:
                    self._lock.notify_all()
                    return
            for tap, data, is_finished in batch:
                self._write_file(tap, data, is_finished)

    def _write_file(self, tap: Tap, data: bytes, is_finished: bool) -> None:
        if tap.file is not None and not _write_all(tap.file, data):
            _close_file(tap)  # the disk is full or gone. The console still gets the output
            self._say(f"reknit: {tap.name} cannot be written any more: the rest of this output is missing in the file")
        if is_finished:
            _close_file(tap)


def _close_file(tap: Tap) -> None:
    if tap.file is not None:
        os.close(tap.file)
        tap.file = None


def _whole_lines(data: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """The complete lines of `data`, and the beginning of the line after them."""
    end = data.rfind(b"\n") + 1
    if prefix:
        # A progress bar ends its states with carriage returns. A carriage return at the very end may be the first half
        # of a line end.
        end = max(end, data.rfind(b"\r", 0, -1) + 1)
    return data[:end], data[end:]


def _write_all(fd: int, data: bytes) -> bool:
    """Write everything, however long it takes. False if the file takes no more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError:
            return False
    return True


def _is_unread(tap: Tap) -> bool:
    return tap.ends_with_reader and tap.console is not None and not tap.console.has_reader


def _discard(fd: int) -> None:
    try:
        while len(os.read(fd, 4096)) == 4096:
            pass
    except BlockingIOError:
        pass
