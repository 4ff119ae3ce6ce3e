"""Where the workers' output goes.

Each stream of a worker goes one of these ways, as in torchelastic (docs/torchelastic.md#output):

- *console* (the default). The stream goes through the relay, so lines of two workers are not mixed, and a report of a
  failure can show the last lines. If the console's stdout and stderr are the same file, pipe or terminal, the worker
  gets one pipe for both. So its lines come in the order in which it wrote them.
- *file*. The worker writes to the file itself. Nothing is copied.
- *tee*. The stream goes through the relay to the file, and to the console with a prefix before each line.
- *discard*. The stream is not shown. Stderr is still read, for its last lines.

If the console is a terminal, the worker gets a terminal in place of the pipe. So colours and progress bars work. If the
keeper is killed, output that the relay has not read yet is lost.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from .console import ConsoleWriter, LineStyle
from .relay import Relay, Tap

STDOUT, STDERR = 1, 2
"""The streams, as bits of torchelastic's masks and as descriptors."""

STDIN = 0
_TAIL = 16_384
_STYLE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
"""Escape sequences: colours, movements of the cursor, titles of the window."""


@frozen
class StreamSettings:
    """Which streams go where. A mask is a sum of `STDOUT` and `STDERR`, for all workers or by local rank."""

    redirects: int | Mapping[int, int] = 0
    """Mask of the streams that go to a file only."""
    tee: int | Mapping[int, int] = 0
    """Mask of the streams that go to a file and to the console."""
    shown: frozenset[int] = frozenset()
    """Only these local ranks are shown on the console (`--local-ranks-filter`). Empty: all."""
    prefix: str = ""
    """Template of the prefix before teed lines, with the macros `role_name`, `local_rank`, `rank` and `hostname`.
    Empty: the variable TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, or else `[<role><local_rank>]:`."""
    output: Literal["relay", "inherit"] = "relay"
    """What happens to a stream that goes to the console without a prefix. "relay": see the top of this file. "inherit":
    the worker writes to the console itself. Then lines of two workers may be mixed, and a failure has no last lines."""
    lines: LineStyle = LineStyle()
    """How reknit writes its own lines to the console."""


def _has(masks: int | Mapping[int, int], local_rank: int, stream: int) -> bool:
    return bool((masks if isinstance(masks, int) else masks.get(local_rank, 0)) & stream)


class WorkerStreams:
    """One worker's stdout and stderr: the descriptors for its start, and then what reads its output."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        """By stream: the descriptor that becomes this stream of the worker. The worker inherits a missing stream."""
        self.taps: dict[int, Tap] = {}
        """By stream: what reads the stream. A stream that does not go through the relay is missing."""
        self.files: dict[int, str] = {}
        """By stream: the path of its file. A stream without a file is missing."""

    def spawned(self) -> None:
        """Close this process's copies of `ends`. The worker has its own now, or was not started. While a copy is open,
        the relay cannot see the end of the stream."""
        for fd in set(self.ends.values()):
            os.close(fd)
        self.ends = {}


class Streams:
    """The output of all workers of this agent. Only `open` raises `OSError`."""

    def __init__(
        self,
        settings: StreamSettings,
        *,
        env: Mapping[str, str] | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """`stdout`, `stderr`: the descriptors of the console."""
        self._settings = settings
        self._template = settings.prefix or (env or {}).get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
        self._fds = {STDOUT: stdout, STDERR: stderr}
        self._relay = Relay(self.say)
        err = ConsoleWriter(stderr, has_room=self._relay.wake, style=settings.lines)
        self._is_one = is_same(stdout, stderr)
        """Stdout and stderr are the same console. Then all output to it goes through the relay, in whole lines."""
        self._consoles = {
            STDOUT: err if self._is_one else ConsoleWriter(stdout, has_room=self._relay.wake, fails=self._lost),
            STDERR: err,
        }

    def _lost(self, why: str) -> None:
        self.say(f"reknit: stdout cannot be written: {why}. Output of the workers is missing there")

    @property
    def has_files(self) -> bool:
        """Whether the output of some worker goes to a file."""
        return bool(self._settings.redirects or self._settings.tee)

    def open(
        self,
        *,
        local_rank: int,
        rank: int,
        role: str,
        folder: str,
        paths: Mapping[int, str] | None = None,
        is_direct: bool = False,
    ) -> WorkerStreams:
        """Prepare both streams of a worker. `folder`: an existing folder for its files. Empty: it has no files.
        `paths`: by stream, the file that it is written to. Empty or missing, or None for both streams: the stream goes
        where the settings say. `is_direct`: stdout goes to the console without the relay, so a program
        that talks to somebody finds a terminal at both ends."""
        streams = WorkerStreams()
        try:
            streams.files = {stream: path for stream, path in (paths or {}).items() if path}
            for stream, path in streams.files.items():
                streams.ends[stream] = _create(path)
            self._open(streams, local_rank, rank, role, folder, is_direct)
        except BaseException:
            streams.spawned()
            self.release(streams)
            raise
        return streams

    def _open(
        self, streams: WorkerStreams, local_rank: int, rank: int, role: str, folder: str, is_direct: bool
    ) -> None:
        settings = self._settings
        is_shown = not settings.shown or local_rank in settings.shown
        plain = []
        for stream in (STDOUT, STDERR):
            if stream in streams.files:
                continue
            tee = _has(settings.tee, local_rank, stream)
            to_file = tee or _has(settings.redirects, local_rank, stream)
            if to_file and folder:
                streams.files[stream] = os.path.join(folder, "stdout.log" if stream == STDOUT else "stderr.log")
            if tee and is_shown:
                self._tap(streams, (stream,), prefix=_prefix(self._template, role, local_rank, rank))
            elif to_file:
                streams.ends[stream] = _create(streams.files.get(stream, os.devnull))
            else:
                plain.append(stream)
        if is_shown:
            self._open_shown(streams, plain, is_direct=is_direct)
        else:
            self._open_hidden(streams, plain)

    def _open_shown(self, streams: WorkerStreams, plain: list[int], *, is_direct: bool) -> None:
        """Open the streams that go to the console and nowhere else."""
        relayed = [] if self._settings.output == "inherit" else plain
        if is_direct or _is_null(self._fds[STDOUT]):
            relayed = [stream for stream in relayed if stream == STDERR]  # its last lines are still wanted
        if relayed and self._is_one:
            self._tap(streams, tuple(relayed))
        else:
            for stream in relayed:
                self._tap(streams, (stream,))
        for stream in plain:
            if stream not in relayed and self._fds[stream] != stream:
                streams.ends[stream] = os.dup(self._fds[stream])

    def _open_hidden(self, streams: WorkerStreams, plain: list[int]) -> None:
        for stream in plain:
            if stream == STDERR and self._settings.output == "relay":
                self._tap(streams, (stream,), is_shown=False)
            else:
                streams.ends[stream] = _create(os.devnull)

    def _tap(self, streams: WorkerStreams, which: tuple[int, ...], *, prefix: str = "", is_shown: bool = True) -> None:
        """Open one pipe or terminal for all streams of `which`, and have the relay read it."""
        stream = which[-1]
        console = self._consoles[stream] if is_shown else None
        terminal = _terminal_like(console.fd) if console is not None and not prefix else None
        ours, theirs = terminal or os.pipe()
        streams.ends |= dict.fromkeys(which, theirs)
        file = None
        try:
            if stream in streams.files:
                file = _create(streams.files[stream])
            name = streams.files.get(stream, "")
            tap = Tap(
                ours,
                console,
                file,
                prefix.encode(),
                name,
                is_terminal=terminal is not None,
                ends_with_reader=which == (STDOUT,) and file is None,
            )
            self._relay.add(tap)
        except OSError:
            os.close(ours)
            if file is not None:
                os.close(file)
            raise
        streams.taps[stream] = tap

    def say(self, line: str) -> None:
        """Show a line of reknit's own on the console's stderr, after the output that was read before. Never waits."""
        self._consoles[STDERR].say(line)

    def resized(self) -> bool:
        """Give all terminals of workers the size of the console's terminal. False if no worker has a terminal."""
        return self._relay.resize(lambda terminal: _copy_size(self._fds[STDERR], terminal))

    def tail(self, streams: WorkerStreams, lines: int) -> tuple[str, ...]:
        """The last lines of a worker's stderr, up to what it wrote just before it ended, or of its stdout if it has
        written nothing to stderr. Never waits.

        If stdout and stderr are the same console, these are the last lines of both.
        """
        for stream in (STDERR, STDOUT):
            found: tuple[str, ...] = ()
            if tap := streams.taps.get(stream):
                self._relay.drain(tap)
                found = last_lines(tap.tail, lines)
            elif path := streams.files.get(stream):
                found = last_lines(_end_of(path), lines)
            if found:
                return found
        return ()

    def was_unread(self, streams: WorkerStreams) -> bool:
        """The worker's stdout was closed because nobody reads that of this command any more."""
        return any(tap.was_unread for tap in streams.taps.values())

    def release(self, streams: WorkerStreams) -> None:
        """The worker is gone: read what is left, and close its streams. What was read still reaches console and
        files."""
        self._relay.close_taps(streams.taps.values())

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything that was read or said is written. False if that takes longer than `deadline_s`."""
        deadline = time.monotonic() + deadline_s
        flushed = [self._relay.flush(deadline_s)]
        flushed += [console.flush(deadline - time.monotonic()) for console in self._consoles.values()]
        return all(flushed)

    def close(self, deadline_s: float) -> bool:
        """Like `flush`. Then drop what could not be written, end the threads and close the descriptors.

        All workers must have been released before. A thread that hangs in a write is left behind.

        The keeper calls neither this nor the other `close` of what it holds, because its process ends. A process that
        goes on afterwards, as that of a test does, must call it.
        """
        deadline = time.monotonic() + deadline_s
        is_flushed = self.flush(deadline_s)
        self._relay.close()
        for console in self._consoles.values():
            is_flushed &= console.close(deadline - time.monotonic())
        return is_flushed


def last_lines(data: bytes, lines: int) -> tuple[str, ...]:
    """The last lines of `data`, as readable text whatever bytes it holds. Of a progress bar only the last state is
    kept.
    """
    text = _STYLE.sub("", data.decode("utf-8", "backslashreplace")).removesuffix("\n")
    found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
    if len(data) >= _TAIL and len(found) > 1:
        del found[0]  # the beginning of this line is probably missing
    return tuple(found[-lines:]) if lines > 0 else ()


def _end_of(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, _TAIL, max(0, size - _TAIL))
    except OSError:
        return b""
    finally:
        os.close(fd)


def file_with(data: bytes) -> int:
    """A descriptor of a new file without a name that holds `data`. It stands at the beginning of the file."""
    from tempfile import TemporaryFile

    with TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return os.dup(file.fileno())


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


def _prefix(template: str, role: str, local_rank: int, rank: int) -> str:
    if not template:
        return f"[{role}{local_rank}]:"
    from string import Template

    macros = {"role_name": role, "local_rank": local_rank, "rank": rank, "hostname": os.uname().nodename}
    return Template(template).safe_substitute(macros)


def is_same(one: int, other: int) -> bool:
    """Both descriptors are open on the same file, pipe or terminal. False if that is /dev/null: nobody reads it, so the
    order of lines does not matter there. False if one of them is closed."""
    try:
        a, b = os.fstat(one), os.fstat(other)
        if _is_null(one):
            return False
        if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino):
            return True
    except OSError:
        return False
    return _is_own_terminal(one) and _is_own_terminal(other)


def _is_null(fd: int) -> bool:
    """Whether this is /dev/null."""
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev


def _is_own_terminal(fd: int) -> bool:
    """Whether this is the terminal of this session. It can be open under two names: its own name, and /dev/tty."""
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True


def _terminal_like(console: int) -> tuple[int, int] | None:
    """This process's end and the worker's end of a new pseudo-terminal. None: the console is no terminal, or no
    pseudo-terminal is free."""
    if not os.isatty(console):
        return None
    import termios

    try:
        ours, theirs = os.openpty()
    except OSError:
        return None  # all are in use. The worker gets a pipe
    try:
        mode = termios.tcgetattr(theirs)
        mode[1] &= ~termios.OPOST  # the console's terminal turns \n into \r\n. This one must not do it as well
        termios.tcsetattr(theirs, termios.TCSANOW, mode)
    except (OSError, termios.error):
        pass
    _copy_size(console, theirs)
    return ours, theirs


def _copy_size(console: int, terminal: int) -> None:
    import fcntl
    import termios

    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        pass  # the terminal then keeps another size
