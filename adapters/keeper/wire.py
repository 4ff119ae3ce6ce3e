"""What an agent and its keeper say to each other, and how: one JSON object per line, over any pair of byte streams.

1. The core's own commands go to the keeper, and the core's own events come back, written by `core/text/codec`. The few
   other messages are below.
2. A message carries no time, because the keeper may run on a host with another clock. The agent's client gives every
   event that arrives its own time.
3. Neither side ever waits. `Stream.send` keeps what the other side does not take yet, and `Stream.receive` returns
   what has come. So two sides with full buffers cannot block each other.
4. If a line is no message, the stream is broken, and `receive` raises `Broken`. Before the first message other lines
   may come, for example the banner of a login on another host.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from attrs import frozen

from reknit.core.agent.commands import ReservePort, StartWorkers, StopWorkers
from reknit.core.agent.events import PortReserved, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.ranks import Assignment, WorkerRanks
from reknit.core.text.codec import CodecError, decode, encode

from .streams import StreamSettings

VERSION = 2
"""The version of the messages. Both sides must have the same."""
LARGEST_RECORD = 16_384
"""Bytes of a worker's output in one `Output`, at most."""
WINDOW = 64
"""Number of `Output` records that may be on their way. For each record that the agent has written, it allows another
one by `Credit`."""
PING_S = 5.0
"""Seconds between two `Ping` of one side."""
SILENCE_S = 20.0
"""Seconds after which a side that was not heard is taken for gone."""
_LONGEST_BANNER = 1 << 20
_CHUNK = 1 << 16
_MOST_CHUNKS = 64
_LONGEST_LINE = 1 << 26


# ---- agent → keeper, beside StartWorkers, StopWorkers and ReservePort ----


@frozen
class Process:
    """One worker of a `StartProcesses`."""

    local_rank: int
    rank: int
    """The global rank."""
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Variables on top of those with which the environment of every worker begins."""
    stdout: str = ""
    stderr: str = ""
    """The file that the stream is written to. Its folder exists. Empty: the stream goes where the `StreamSettings` of
    the keeper send it."""
    error_file: str = ""
    """The file into which the worker writes why it failed, as the variable TORCHELASTIC_ERROR_FILE. Its folder exists.
    Empty: the worker has no such variable."""
    descriptors: tuple[tuple[int, int], ...] = ()
    """Open files that the worker gets besides its streams: the number in the worker, and which one of the files that
    were sent with the command."""


@frozen
class StartProcesses:
    """Start these workers, for an agent that has worked out itself what each of them gets.

    Answered as `StartWorkers` is, by the same events.
    """

    round: int
    processes: tuple[Process, ...]
    assignment: Assignment | None = None
    """The ranks of the workers. The keeper makes the variables and the error file of each worker from them, as for
    `StartWorkers`. None: each `Process` says everything."""
    fork_server: Process | None = None
    """The process that forks the workers without an `argv`. The keeper starts it if it has none."""
    descriptors: int = 0
    """Number of open files that were sent before this message, beside the stream (`parcels.py`)."""


@frozen
class Configure:
    """The agent's first message: what the workers of this keeper are. Answered by `Ready` or `Unusable`."""

    argv: tuple[str, ...]
    run_id: str
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the workers besides the keeper's own environment."""
    withheld: tuple[str, ...] = ()
    """Names of variables in the keeper's environment that workers do not get, because only agents need them."""
    cwd: str = ""
    """The workers' working folder. Empty: that of the keeper."""
    stdin: str | None = None
    """What each worker reads from its standard input, one character per byte (Latin-1). None: workers inherit the
    keeper's standard input."""
    streams: StreamSettings = StreamSettings()
    relays: bool = False
    """Stdout goes through the relay even if it is another console than stderr. So lines of two workers are not mixed.
    """
    log_base: str = ""
    """The folder in which a folder for this run's files is made. Empty: the host's folder for temporary files."""
    log_dir: str = ""
    """The folder of this run, if an earlier keeper of this agent has made it. Empty: this keeper makes it."""
    master_port: int = 0
    """The bootstrap port of every round. 0: any free one."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, as its device 0."""
    used_ports: tuple[int, ...] = ()
    """Bootstrap ports that this agent has used. None of them is reserved again."""
    port: int = 0
    """The bootstrap port that an earlier keeper has reserved for the next round. Other nodes may know it already, so it
    is reserved again. 0: there is none."""
    mark: str = ""
    """Every worker has this text in its environment, in the variable `orphans.MARK`. Empty: it has no such variable."""
    sweeps: bool = False
    """An earlier keeper of this agent was killed. So the keeper first ends every process that carries the mark."""
    pings: bool = False
    """Both sides send `Ping`. A side that hears nothing for `SILENCE_S` seconds takes the other side for gone."""


@frozen
class Say:
    """A line of reknit's own for the keeper's console, in order with the workers' output."""

    line: str


@frozen
class Flush:
    """Answered by `Flushed` when the console has everything that was said and read before."""


@frozen
class Resized:
    """The console's terminal has another size."""


@frozen
class Credit:
    """The agent has written this many `Output` records. The keeper may send as many more."""

    records: int


@frozen
class Shutdown:
    """The keeper is to end every worker at once, and then itself. Answered by the end of the stream."""


# ---- keeper → agent, beside WorkersStarted, WorkersExited, WorkersStopped and PortReserved ----


@frozen
class Pids:
    """The processes of a round. Sent just before `WorkersStarted`."""

    round: int
    pids: Mapping[int, int]
    """By local rank. A worker that could not be started is missing."""


@frozen
class Exitcodes:
    """How the workers of a round have ended, those that the stop has ended included. Sent just before
    `WorkersStopped`."""

    round: int
    exitcodes: Mapping[int, int]
    """By local rank. A worker that was not started, or that survives SIGKILL, is missing."""


@frozen
class Hello:
    """The keeper's first message."""

    version: int
    pid: int
    host: str


@frozen
class Ready:
    """The keeper can start workers."""

    port: int
    """A bootstrap port that is reserved on the keeper's host. 0: no port is free."""
    log_dir: str = ""
    """The folder of this run on the keeper's host. Empty: there is none."""
    swept: int = 0
    stuck: tuple[int, ...] = ()
    """Number of processes of an earlier keeper that were ended."""


@frozen
class Unusable:
    """The keeper cannot do what it was configured for, or has met a limit of the machine and ends.

    The text is one line for the operator.
    """

    why: str
    is_usage: bool = False
    """The operator asked for something impossible, for example a log folder that cannot be made."""


@frozen
class Output:
    """What workers have written to the console. Only a keeper without a console of its own sends this."""

    stream: int
    text: str
    """The bytes as UTF-8. A byte that is not UTF-8 is a lone surrogate (`surrogateescape`)."""


@frozen
class Flushed:
    """The answer to `Flush`."""


# ---- both ways ----


@frozen
class Ping:
    """The sender lives."""


_Wanted = StartWorkers | StartProcesses | StopWorkers | ReservePort
_Happened = WorkersStarted | WorkersExited | WorkersStopped | PortReserved
ToKeeper = _Wanted | Configure | Say | Flush | Resized | Credit | Shutdown | Ping
ToAgent = _Happened | Hello | Ready | Unusable | Pids | Exitcodes | Output | Flushed | Ping


class Broken(Exception):
    """The stream has ended, or something came that is no message. The text says which."""


class Ended(Broken):
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
        self._unread = b""
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
        if len(self._unread) > (_LONGEST_BANNER if self._has_banner else _LONGEST_LINE) and b"\n" not in self._unread:
            raise Broken(f"a line of more than {len(self._unread)} bytes is no message")
        *lines, self._unread = self._unread.split(b"\n")
        messages = []
        for at, line in enumerate(lines):
            try:
                if not self._is_banner(line):
                    messages.append(self._message(line, now))
            except Broken:
                if not messages:
                    raise
                self._unread = b"\n".join([*lines[at:], self._unread])  # the next call finds it again, and raises
                return messages
        if is_ended and not messages:
            raise Ended("the stream was cut in the middle of a line" if self._unread else "the stream has ended")
        return messages

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
            if isinstance(data, dict) and data.get("kind") in _STAMPED:
                data["at"] = now
            return decode(data, self._incoming)
        except (CodecError, ValueError, RecursionError) as error:
            raise Broken(f"{line[:60]!r} is no message: {error}") from None

    def close(self) -> None:
        """May be repeated."""
        for fd in {self.source, self.sink} - {-1}:
            os.close(fd)
        self.source = self.sink = -1


_STAMPED = frozenset(cls.__name__ for cls in get_args(_Happened))


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


def workers_of(command: StartWorkers | StartProcesses) -> Sequence[WorkerRanks | Process]:
    """The workers that the command wants started."""
    return command.assignment.workers if isinstance(command, StartWorkers) else command.processes


def variables(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Environment variables as `Configure.env` carries them."""
    return tuple(sorted(env.items()))
