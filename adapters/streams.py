"""Where the workers' output goes.

Per worker and stream one of these, as torchelastic has them (`torchelastic-contract.md`, section 1.5):

- *console* (the default): stdout is inherited; stderr goes through the relay, verbatim and at once, so that its last
  lines can be shown with a failure. If our stderr is a terminal, the worker gets one, too: colours and bars stay.
- *file*: opened by the worker's spawn; nothing is copied.
- *tee*: through the relay to the file, and to the console with a prefix before each line.
- *discard*: not shown. Stderr is still read, for its last lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from reknit.core.values import frozen

from .relay import Relay, Tap, write_all

STDOUT, STDERR = 1, 2
"""The streams, as bits of torchelastic's masks and as descriptors."""

_TAIL = 16_384


@frozen
class StreamSettings:
    """Which streams go where. A mask is a sum of `STDOUT` and `STDERR`, for all workers or by local rank."""

    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    shown: frozenset[int] = frozenset()
    """`--local-ranks-filter`: only these local ranks reach the console. Empty: all."""
    prefix: str = ""
    """Template of the tee prefix with the macros `role_name`, `local_rank`, `rank`. Empty: the environment's
    TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else `[<role><local_rank>]:`."""


def _has(masks: int | Mapping[int, int], local_rank: int, stream: int) -> bool:
    return bool((masks if isinstance(masks, int) else masks.get(local_rank, 0)) & stream)


class WorkerStreams:
    """One worker's stdout and stderr: what its spawn needs, and afterwards what it said."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        """Stream → the descriptor that the worker gets for it. A stream that is missing is inherited."""
        self.taps: dict[int, Tap] = {}
        self.files: dict[int, str] = {}

    def spawned(self) -> None:
        """The worker has its ends now, or will never have them: close ours, or there would be no end-of-file."""
        for fd in self.ends.values():
            os.close(fd)
        self.ends = {}


class Streams:
    """The output of all workers of this agent. Raises `OSError` only from `open`."""

    def __init__(
        self, settings: StreamSettings, *, env: Mapping[str, str] | None = None, stdout: int = 1, stderr: int = 2
    ) -> None:
        self._settings = settings
        self._template = settings.prefix or (env or {}).get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
        self._console = {STDOUT: stdout, STDERR: stderr}
        self._relay = Relay()
        self._own = Tap(source=-1, console=stderr)

    @property
    def has_files(self) -> bool:
        """Whether anybody's output goes to a file."""
        return bool(self._settings.redirects or self._settings.tee)

    def open(self, *, local_rank: int, rank: int, role: str, folder: str) -> WorkerStreams:
        """Prepare both streams of a worker. `folder` exists and gets its files; empty: there are none."""
        streams = WorkerStreams()
        try:
            for stream in (STDOUT, STDERR):
                self._open(streams, stream, local_rank, rank, role, folder)
        except BaseException:
            streams.spawned()
            self.release(streams)
            raise
        return streams

    def _open(self, streams: WorkerStreams, stream: int, local_rank: int, rank: int, role: str, folder: str) -> None:
        settings = self._settings
        shown = not settings.shown or local_rank in settings.shown
        tee = _has(settings.tee, local_rank, stream)
        to_file = tee or _has(settings.redirects, local_rank, stream)
        console = self._console[stream] if shown else None
        if to_file and folder:
            streams.files[stream] = os.path.join(folder, "stdout.log" if stream == STDOUT else "stderr.log")
        if tee and shown:
            prefix = _prefix(self._template, role, local_rank, rank)
            self._tap(streams, stream, console, os.pipe(), prefix)
        elif to_file:
            streams.ends[stream] = _create(streams.files.get(stream, os.devnull))
        elif stream == STDERR:
            self._tap(streams, stream, console, _terminal_like(console) or os.pipe())
        elif not shown:
            streams.ends[stream] = _create(os.devnull)
        elif console != stream:
            streams.ends[stream] = os.dup(self._console[stream])

    def _tap(
        self, streams: WorkerStreams, stream: int, console: int | None, ends: tuple[int, int], prefix: str = ""
    ) -> None:
        ours, streams.ends[stream] = ends
        file = None
        try:
            if stream in streams.files:
                file = _create(streams.files[stream])
            tap = Tap(ours, console, file, prefix.encode(), streams.files.get(stream, ""))
            self._relay.add(tap)
        except OSError:
            os.close(ours)
            if file is not None:
                os.close(file)
            raise
        streams.taps[stream] = tap

    def say(self, line: str) -> None:
        """A line of the agent's own on the console's stderr, after what the workers wrote before. Never waits."""
        data = f"{line}\n".encode(errors="backslashreplace")
        try:
            self._relay.say(self._own, data)
        except OSError:
            write_all(self._console[STDERR], data)  # no thread to be had: then it may have to wait

    def tail(self, streams: WorkerStreams, lines: int) -> tuple[str, ...]:
        """The last lines of stderr, with everything that the worker wrote before it ended. Never waits."""
        if tap := streams.taps.get(STDERR):
            self._relay.drain(tap)
            return last_lines(tap.tail, lines)
        if path := streams.files.get(STDERR):
            return last_lines(_end_of(path), lines)
        return ()

    def release(self, streams: WorkerStreams) -> None:
        """The worker is gone: read what is left and close. What was read still reaches console and files."""
        self._relay.close(streams.taps.values())

    def finish(self, deadline_s: float) -> bool:
        """Wait until everything that was read has been written; False if it takes longer than that."""
        return self._relay.finish(deadline_s)


def last_lines(data: bytes, lines: int) -> tuple[str, ...]:
    """The last lines of a stream's end, readable whatever bytes they hold; of a progress bar its last state."""
    text = data.decode("utf-8", "backslashreplace").removesuffix("\n")
    found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
    if len(data) >= _TAIL and len(found) > 1:
        del found[0]  # most likely not its beginning
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


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


def _prefix(template: str, role: str, local_rank: int, rank: int) -> str:
    if not template:
        return f"[{role}{local_rank}]:"
    from string import Template

    return Template(template).safe_substitute(role_name=role, local_rank=local_rank, rank=rank)


def _terminal_like(console: int | None) -> tuple[int, int] | None:
    """Our end and the worker's of a pseudo-terminal, if the console is a terminal and one can be had."""
    if console is None or not os.isatty(console):
        return None
    import fcntl
    import termios

    try:
        ours, theirs = os.openpty()
    except OSError:
        return None  # all in use: a pipe does as well
    try:
        mode = termios.tcgetattr(theirs)
        mode[1] &= ~termios.OPOST  # raw: the real terminal turns \n into \r\n, once
        termios.tcsetattr(theirs, termios.TCSANOW, mode)
        size = fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    except (OSError, termios.error):
        pass  # a terminal with another size is still one
    return ours, theirs
