"""One console: the descriptor on which people read what reknit says and what the workers write.

Rules:

1. Code that decides or ends something never waits for a console. `say` puts a line into a queue and returns. One thread
   writes. It is started with the first line.
2. At most `WORDS` bytes of reknit's own lines wait. When a new line does not fit, the oldest waiting line is dropped,
   because the newest lines tell how the job ended.
3. A caller that relays the output of workers asks `is_full` first, and does not read its workers while the answer is
   yes. So a console that nobody reads holds up the workers that write. Nothing of their output is dropped, and memory
   is bounded.
4. Lines stay whole. Each caller of `write` is a source. When a line of one source is unfinished and another source
   writes, a line end is put between the two.
5. Lines that could not be written are counted. When writing goes on, a line says how many are missing.
6. The console's mode, blocking or not, is shared with other processes, and is not changed. The thread opens a pipe or
   a terminal once more for itself, without blocking, and waits in `poll`, where it can be told to end. A socket or a
   file cannot be opened once more, and is written as it is. If such a write blocks for ever, `close` leaves the thread
   behind. It is a daemon thread, so it cannot keep the process alive.
"""

from __future__ import annotations

import os
import re
import select
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from errno import EAGAIN, EPIPE

from attrs import frozen

from reknit.adapters.runtime.threads import Thread

WORDS = 1 << 18
"""Bytes of reknit's own lines that wait, at most."""

OUTPUT = 1 << 18
"""Bytes of workers' output from which on `is_full` says yes."""

LAST_WORDS_S = 1.0
"""For `flush`: how long a process waits for its console if it was asked to end, or has lost its agent or keeper.
Seconds."""

READER_S = 10.0
"""For `flush`: how long a process waits for its console if its job has ended by itself (`reknit run … | less`).
Seconds."""

_BATCH = 1 << 16
_AGAIN_MS = 20
LEAVES_S = 0.5
"""How long `close` waits for a thread that has nothing left to do. Seconds."""

_UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(line: str) -> str:
    """`line` with escapes in the place of characters that could control a terminal or begin another line.

    These are all control characters except the tab, and the characters that change the direction of text. The text of a
    worker's exception may come from another node, and must not move the cursor of this node's terminal.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), line)


_PREFIX = "reknit: "


@frozen
class LineStyle:
    """How the lines of reknit's own are written."""

    has_times: bool | None = None
    """Whether each begins with the wall-clock time. None: it does where the console is no terminal."""
    is_json: bool = False
    """Each is a JSON object with the members `time` and `message`, in one line."""
    is_quiet: bool = False
    """None is written."""

    def written(self, line: str, *, to_terminal: bool) -> str:
        """`line` as it is written now. A line without the prefix, such as an event of torchelastic, stays as it is."""
        if not line.startswith(_PREFIX):
            return escaped(line)
        if self.is_json:
            import json  # only now: few jobs need it

            return json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "message": line.removeprefix(_PREFIX)})
        has_time = not to_terminal if self.has_times is None else self.has_times
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {escaped(line)}" if has_time else escaped(line)


PLAIN = LineStyle(has_times=False)


class ConsoleWriter:
    """Writes to one descriptor. The caller closes the descriptor. All methods may be called from any thread."""

    def __init__(
        self,
        fd: int,
        *,
        has_room: Callable[[], None] | None = None,
        fails: Callable[[str], None] | None = None,
        style: LineStyle = PLAIN,
    ) -> None:
        """`style`: how lines of reknit's own are written. `has_room`: called by the writing thread when `is_full` had
        said yes and would now say no, and when `has_reader` has become False. `fails`: called by this thread with the
        reason, once, when output is lost for another reason, for example because the disk is full."""
        self.fd = fd
        self.style = style
        self.is_terminal = os.isatty(fd)
        self._has_room, self._fails = has_room, fails
        self._changed = threading.Condition()
        self._queue: OrderedDict[int, bytes] = OrderedDict()
        """What waits to be written, by a number that only grows."""
        self._number = 0
        self._own: deque[int] = deque()
        """The numbers of reknit's own lines in the queue, in order."""
        self._own_size = 0
        self._output_size = 0
        self._missing = 0
        """Number of lines that were dropped or could not be written, and that no line has told of yet."""
        self._was_full = False
        self.has_reader = True
        """False: the pipe has no reader any more, and will never have one again."""
        self._unfinished: object = None
        """The source whose last line has no end yet. None: the next byte begins a line."""
        self._is_writing = False
        self._thread: Thread | None = None
        self._stop_end = -1
        self._leaving: Thread | None = None
        """The thread that was told to end and has not ended. What comes meanwhile is dropped, because no second thread
        may write beside one that blocks."""

    # ---- what others call ----

    def say(self, line: str) -> None:
        """Write a line of reknit's own after everything that came before. Never waits, never raises."""
        if self.style.is_quiet:
            return
        data = self._lined(line)
        with self._changed:
            if self._leaving is not None:
                self._missing += 1
                return
            try:
                self._start()
            except OSError:
                self._write_here(data)
                return
            self._end_line_of_others(self, data)
            self._own.append(self._put(data))
            self._own_size += len(data)
            while self._own_size > WORDS and len(self._own) > 1:
                self._own_size -= len(self._queue.pop(self._own.popleft()))
                self._missing += 1

    def write(self, data: bytes, source: object) -> None:
        """Write output of workers. Never waits. Ask `is_full` before the next call. Raises `OSError` like `start`."""
        if not data:
            return
        with self._changed:
            if self._leaving is not None:
                self._missing += data.count(b"\n")
                return
            self._start()
            self._end_line_of_others(source, data)
            self._put(data)
            self._output_size += len(data)

    def is_full(self) -> bool:
        """Whether output of workers must wait. After a yes the answer stays yes until half of the queue is free. Then
        `has_room` is called."""
        with self._changed:
            if self._output_size >= OUTPUT:
                self._was_full = True
            return self._was_full

    def continues(self, source: object) -> bool:
        """Whether the next byte of this source would continue an unfinished line of this source."""
        with self._changed:
            return self._unfinished is source

    def start(self) -> None:
        """Start the thread now and not with the first line. Raises `OSError` if no thread or descriptor is left."""
        with self._changed:
            self._start()

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything is written. False if that takes longer than `deadline_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._is_writing), max(0.0, deadline_s))

    def close(self, deadline_s: float) -> bool:
        """Like `flush`. Then drop what is left, and end the thread. A later line starts another thread."""
        is_flushed = self.flush(deadline_s)
        with self._changed:
            if self._thread is not None:
                self._leaving, self._thread = self._thread, None
                self._queue.clear()
                self._own.clear()
                self._own_size = self._output_size = 0
                self._unfinished = None
                os.write(self._stop_end, b"!")
                os.close(self._stop_end)
                self._changed.notify_all()
            leaving = self._leaving
        if leaving is not None:
            leaving.wait(LEAVES_S)
        return is_flushed

    # ---- under the lock ----

    def _start(self) -> None:
        if self._thread is not None:
            return
        stopped, self._stop_end = os.pipe()
        thread = Thread(self._run, stopped, name=f"console {self.fd}")
        try:
            thread.start()
        except RuntimeError:  # this is what Python raises if the system allows no further thread
            os.close(stopped)
            os.close(self._stop_end)
            raise OSError(EAGAIN, "no thread for the workers' output") from None
        self._thread = thread

    def _lined(self, line: str) -> bytes:
        return f"{self.style.written(line, to_terminal=self.is_terminal)}\n".encode(errors="backslashreplace")

    def _put(self, data: bytes) -> int:
        self._number += 1
        self._queue[self._number] = data
        self._changed.notify_all()
        return self._number

    def _end_line_of_others(self, source: object, data: bytes) -> None:
        # No line end is put before a carriage return, which goes back to the beginning of the line. So progress bars of
        # two workers share one line, as they would without reknit.
        if self._unfinished not in (None, source) and not data.startswith(b"\r"):
            self._put(b"\n")
            self._output_size += 1
        self._unfinished = None if data.endswith((b"\n", b"\r")) else source

    def _write_here(self, data: bytes) -> None:
        """Used if no thread can be started: write now what the console takes without waiting."""
        console = select.poll()
        console.register(self.fd, select.POLLOUT)
        try:
            if console.poll(0):
                os.write(self.fd, data[: select.PIPE_BUF])
                return
        except OSError:
            pass
        self._missing += 1

    # ---- the thread ----

    def _run(self, stopped: int) -> None:
        fd = _opened_again(self.fd)
        ready = select.poll()
        ready.register(fd, select.POLLOUT)
        ready.register(stopped, select.POLLIN)
        is_line_start = True
        while batch := self._next(is_line_start):
            self._write(batch, fd, ready, stopped)
            is_line_start = batch.endswith(b"\n")
        os.close(stopped)
        if fd != self.fd:
            os.close(fd)
        with self._changed:
            self._leaving = None

    def _next(self, is_line_start: bool) -> bytes:
        """Wait for something to write, and return it. Empty: the thread is to end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._leaving)
            if self._leaving is not None:
                return b""
            self._is_writing = True
            batch = self._take(is_line_start)
            has_room = self._has_room if self._was_full and self._output_size <= OUTPUT // 2 else None
            self._was_full = self._was_full and has_room is None
        if has_room is not None:
            has_room()
        return batch

    def _take(self, is_line_start: bool) -> bytes:
        batch, size = [], 0
        if self._missing:
            lines, are = ("1 line", "is") if self._missing == 1 else (f"{self._missing} lines", "are")
            note = self._lined(f"reknit: {lines} could not be written to this console and {are} missing here")
            batch.append(note if is_line_start else b"\n" + note)
            self._missing = 0
        while self._queue and size < _BATCH:
            number, data = self._queue.popitem(last=False)
            if self._own and self._own[0] == number:
                self._own.popleft()
                self._own_size -= len(data)
            else:
                self._output_size -= len(data)
            batch.append(data)
            size += len(data)
        return b"".join(batch)

    def _write(self, batch: bytes, fd: int, ready: select.poll, stopped: int) -> None:
        """Write the whole batch, however long it takes, unless the thread is told to end."""
        at, takes_all = 0, _kind(fd) == stat.S_IFREG
        while at < len(batch):
            if stopped in dict(ready.poll()):
                return
            end = len(batch) if takes_all else _end_of_piece(batch, at)
            try:
                at += os.write(fd, batch[at:end])
            except BlockingIOError:
                # Another process has filled the console meanwhile. Or a terminal has room for half a line end only, and
                # `poll` says for ever that it can be written to.
                stop = select.poll()
                stop.register(stopped, select.POLLIN)
                stop.poll(_AGAIN_MS)
            except OSError as error:  # the reader of the console is gone, or the disk is full
                with self._changed:
                    self._missing += max(1, batch.count(b"\n", at, end))
                    has_left = self.has_reader and error.errno == EPIPE
                    self.has_reader = self.has_reader and not has_left
                if has_left and self._has_room is not None:
                    self._has_room()
                if error.errno != EPIPE and self._fails is not None:
                    self._fails(error.strerror or str(error))
                    self._fails = None
                at = end


def _end_of_piece(batch: bytes, at: int) -> int:
    """The end of the piece that is written next: whole lines of at most PIPE_BUF bytes, if possible. A pipe that has
    room takes so much without blocking, and does not mix it with what other processes write."""
    whole_lines = batch.rfind(b"\n", at, at + select.PIPE_BUF) + 1
    return whole_lines or min(at + select.PIPE_BUF, len(batch))


def _kind(fd: int) -> int:
    try:
        return stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError:
        return 0  # the descriptor is closed


def _opened_again(fd: int) -> int:
    """A descriptor for the same pipe or terminal that does not block. `fd` itself if there can be none."""
    if _kind(fd) != stat.S_IFIFO and not os.isatty(fd):
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return fd  # the terminal of another user, no free descriptor, or no such path on this system
