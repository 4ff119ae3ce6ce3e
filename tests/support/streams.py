"""Streams of workers for tests: a console that a test can read, and processes that write to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from reknit.adapters.keeper.output.console import PLAIN
from reknit.adapters.keeper.output.streams import Streams, StreamSettings, WorkerStreams
from tests.support.waiting import until


class Console:
    """A pipe in the place of the agent's stdout or stderr. It is read when a test asks for it."""

    def __init__(self) -> None:
        self.read_end, self.fd = os.pipe()
        self.seen = b""
        self.writers: list[Streams] = []

    def read_until(self, wanted: bytes) -> bytes:
        os.set_blocking(self.read_end, False)

        def found() -> bool:
            try:
                self.seen += os.read(self.read_end, 1 << 20)
            except BlockingIOError:
                pass
            return wanted in self.seen

        until(found, f"{wanted!r} on the console, which has {self.seen!r}")
        return self.seen

    def close(self) -> None:
        for streams in self.writers:
            streams.close(0.0)
        for fd in (self.read_end, self.fd):
            try:
                os.close(fd)
            except OSError:
                pass


def spawn(streams: WorkerStreams, script: str, *args: str) -> int:
    """Run a script as a worker is run."""
    actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in streams.ends.items()]
    pid = os.posix_spawn(sys.executable, ["python", "-c", script, *args], os.environ, file_actions=actions)
    streams.spawned()
    return pid


def finished(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def streams_to(out: Console, err: Console, **settings: Any) -> Streams:
    streams = Streams(StreamSettings(**{"lines": PLAIN, **settings}), stdout=out.fd, stderr=err.fd)
    err.writers.append(streams)
    return streams


def open_(streams: Streams, folder: Path | str = "", local_rank: int = 0) -> WorkerStreams:
    return streams.open(local_rank=local_rank, rank=local_rank + 4, role="trainer", folder=str(folder))
