"""The trace of an agent in a folder of its own, while the agent runs.

1. The line of a step is in the file before the commands of the step are carried out. So it is there if the agent is
   killed. `trace_thread` is for a folder that may be slow.
2. In a quiet stretch nothing happens but beats. Only the last `_QUIET` steps of one are written, when something happens
   again, and before them the agent as it was then. So a job that runs for weeks without trouble has a short trace. The
   time of the file shows until when the agent was alive.
3. The files have `PART` bytes each. The first and the last `_LAST` are kept. Each begins with the agent as it was, so
   each can be read alone.
4. A disk that is full ends the trace, and one line says so. It does not end the job.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from reknit.adapters.host.children import stat_of
from reknit.adapters.host.place import this_host
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Counters, EntriesRead, Event, Woken

from .trace import agent_line, step_line

PART = 16 << 20
"""Bytes after which another file is begun."""
_LAST = 3
_QUIET = 64
_TOUCH_S = 10.0
"""Seconds between two signs of life in a quiet stretch."""


def about_line(job: str, node: str, version: str, command: Sequence[str], began: float) -> str:
    """The first line of each file: whose trace it is. `traces.Owner` says what the fields mean. The process that calls
    this is the agent."""
    pid = os.getpid()
    try:
        start = int(stat_of(str(pid))[19])
    except (OSError, IndexError, ValueError):
        start = 0  # there is no /proc
    return owner_line(job, node, (pid, start), this_host(), version, command, began)


def owner_line(
    job: str, node: str, agent: tuple[int, int], host: str, version: str, command: Sequence[str], began: float
) -> str:
    """The same for any agent. `agent`: the pid of its process, and when that was started."""
    # `Owner` is not made here, because its class takes longer to make than a job with one node has to spare.
    process = {"kind": "ProcessId", "pid": agent[0], "start": agent[1]}
    fields = {"job": job, "node": node, "agent": process, "host": host, "version": version}
    about = {"kind": "Owner", **fields, "command": [*command], "began": began}
    return f'{{"about":{json.dumps(about)}}}\n'


def is_quiet(before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> bool:
    """Nothing has happened in this step but a beat: nobody learns more from it than that time has passed."""
    return (
        isinstance(event, Woken | Counters | EntriesRead)
        and all(isinstance(command, Beat) for command in commands)
        and before.job is after.job
        and before.workers is after.workers
        and before.lifecycle is after.lifecycle
        and before.me is after.me
        and before.stage is after.stage
        and before.contact.outage == after.contact.outage
    )


class Files(Protocol):
    """Where a trace is written."""

    def write(self, text: str, *, begins: bool, must_wait: bool) -> bool:
        """Write lines, or set the time of the file if there are none. `begins`: into another file. `must_wait`: they
        must be in the file before this returns, unless the disk is too slow. False: they are lost. Raises `OSError` if
        no file can be written any more."""
        ...

    def close(self) -> None:
        """Bounded in time. May be repeated."""
        ...


class TraceFolder:
    """An observer of one loop. Only the thread that runs the loop calls it. Close it when the loop has ended."""

    def __init__(self, about: str, files: Files, say: Callable[[str], None]) -> None:
        """`about`: the first line of each file. `say`: shows a line for the operator."""
        self._about = about
        self._files = files
        self._say = say
        self._quiet: deque[tuple[Agent, str]] = deque(maxlen=_QUIET)
        """The last steps of a quiet stretch: the agent before the step, and its line."""
        self._has_begun = self._has_gap = self._has_lost = self._is_over = False
        self._size = 0
        """Bytes of the present file."""
        self._touch_at = 0.0

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if self._is_over:
            return
        line = step_line(time.time(), before, event, after, commands)
        if self._has_begun and is_quiet(before, event, after, commands):
            self._has_gap = self._has_gap or len(self._quiet) == _QUIET
            self._quiet.append((before, line))
            self._touch()
            return
        first = self._quiet[0][0] if self._quiet else before
        lines = [kept for _, kept in self._quiet] + [line]
        self._quiet.clear()
        begins = not self._has_begun or self._size > PART
        if begins or self._has_gap or self._has_lost:
            lines.insert(0, agent_line(first, is_quiet=not self._has_lost))
        if begins:
            lines.insert(0, self._about)
            self._size = 0
        text = "".join(lines)
        self._has_begun, self._has_gap = True, False
        self._size += len(text)
        self._has_lost = not self._write(text, begins=begins, must_wait=bool(commands))

    def _touch(self) -> None:
        """Show that the agent lives, by the time of the file: nothing is written in a quiet stretch."""
        if time.monotonic() >= self._touch_at:
            self._touch_at = time.monotonic() + _TOUCH_S
            self._write("")

    def _write(self, text: str, *, begins: bool = False, must_wait: bool = False) -> bool:
        """False: it is lost."""
        try:
            return self._files.write(text, begins=begins, must_wait=must_wait)
        except OSError as error:
            self._is_over = True
            self._say(f"no trace of this agent: {error.strerror or error}; the job goes on")
            return False

    def close(self) -> None:
        """May be repeated."""
        self._is_over = True
        self._files.close()
        self._say = _unheard  # it may hold on to what holds on to this


def _unheard(line: str) -> None:
    """The loop has ended."""


class Parts:
    """The files of one trace. Implements `Files`, and waits for the disk."""

    def __init__(self, make: Callable[[], str]) -> None:
        """`make`: makes the folder, and returns its path. Called at the first write. May raise `OSError`."""
        self._make = make
        self._folder = ""
        self._number = self._fd = -1

    def write(self, text: str, *, begins: bool, must_wait: bool = True) -> bool:
        if begins:
            self._folder = self._folder or self._make()
            self.close()
            self._number += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path(self._number), flags, 0o600)
            if self._number > _LAST:
                os.unlink(self._path(self._number - _LAST))
        if not text:
            os.utime(self._fd)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._fd, data) :]
        return True

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number:06}.jsonl")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
