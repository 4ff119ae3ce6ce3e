"""Finding and reading the traces of agents: those of this host, and those in folders that a user names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from attrs import evolve, frozen

from reknit.adapters.host.record import ProcessId
from reknit.core.text.codec import CodecError, decode
from reknit.core.text.story import Told

from .trace_place import about, folders, is_live
from .trace_reader import Replayed, Resumed, read, skim

_PART = re.compile(r"[0-9]{6}\.jsonl")


@frozen
class Owner:
    """Whose trace it is. `trace_folder.about_line` writes it."""

    job: str
    """The name of the job (run id)."""
    node: str
    """The id of the node."""
    agent: ProcessId
    """The process of the agent."""
    host: str
    """The boot of its host and its namespace of pids: `place.this_host`."""
    version: str
    """Of reknit."""
    command: tuple[str, ...] = ()
    """The command line of the workers. Empty: they call a function."""
    began: float = 0.0
    """When the agent began, in seconds since 1970."""


@frozen
class StoredTrace:
    """A folder with a trace."""

    path: str
    parts: tuple[str, ...]
    """The paths of its files, in their order."""
    about: Owner | None
    """None: its first line is torn."""

    @property
    def latest(self) -> StoredTrace:
        """Its last file alone."""
        return evolve(self, parts=self.parts[-1:])

    @property
    def is_cut(self) -> bool:
        """Files between the first and the last ones were removed, because the trace became too large."""
        numbers = [int(os.path.basename(part).partition(".")[0]) for part in self.parts]
        return numbers != [*range(len(numbers))]

    @property
    def alive_at(self) -> float:
        """When the agent was alive last, as far as its trace shows, in seconds since 1970."""
        try:
            return os.stat(self.parts[-1]).st_mtime
        except OSError:
            return 0.0

    @property
    def is_live(self) -> bool:
        """The agent runs on this host."""
        return is_live(about(self.path))


@frozen
class Unreadable:
    """A line of a trace that cannot be read. What follows it in its file is left out."""

    path: str
    line: int
    """Number of the line, from 1."""
    why: str


def stored(path: str) -> StoredTrace | None:
    """The trace in this folder. None: there is none."""
    try:
        names = sorted(n for n in os.listdir(path) if _PART.fullmatch(n) and os.path.isfile(os.path.join(path, n)))
    except OSError:
        return None
    parts = tuple(os.path.join(path, name) for name in names)
    return StoredTrace(os.path.realpath(path), parts, _owner(path)) if parts else None


def _owner(path: str) -> Owner | None:
    try:
        return decode(about(path), Owner)
    except CodecError:
        return None


def of_this_host() -> list[StoredTrace]:
    """The traces of this user's agents on this host, the oldest first. Those that were moved away are missing."""
    return [trace for trace in map(stored, folders()) if trace is not None]


def below(path: str) -> list[StoredTrace]:
    """All traces in a folder and the folders in it, for example in what `--log-dir` has named. A link counts if it
    leads to a trace, as those in the folder with the traces of this host. Other links are not followed."""
    found: dict[str, StoredTrace] = {}
    for folder, inner, _ in os.walk(path):
        links = [each for name in inner if os.path.islink(each := os.path.join(folder, name))]
        for each in (folder, *links):
            if (trace := stored(each)) is not None:
                found[trace.path] = trace
    return [found[path] for path in sorted(found)]


def steps_of(trace: StoredTrace) -> Iterator[Resumed | Replayed | Unreadable]:
    """Make the steps of a trace again. A file that is torn or damaged is read as far as it goes."""
    return _each(trace, read)


def told_by(trace: StoredTrace) -> Iterator[Resumed | Told | Unreadable]:
    """What a trace tells of its steps, as far as it can be read."""
    return _each(trace, skim)


T = TypeVar("T")


def _each(trace: StoredTrace, read: Callable[[Iterator[str]], Iterator[T]]) -> Iterator[T | Unreadable]:
    for part in trace.parts:
        at = 0

        def lines(part: str = part) -> Iterator[str]:
            nonlocal at
            with open(part, encoding="utf-8", errors="replace") as file:
                for line in file:
                    at += 1
                    yield line

        try:
            yield from read(lines())
        except (OSError, ValueError, TypeError, LookupError) as error:  # whoever has damaged it may have left anything
            yield Unreadable(part, at, str(error))
