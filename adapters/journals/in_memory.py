"""A journal in the memory of this process: for jobs with one node, tests, and programs that run all agents of a job."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.core.agent.events import Counters, EntriesRead, Event
from reknit.core.job.founding import Life

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Batch, Clock
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job


class MemoryJournal:
    """Implements `ports.Journal`. Agents in many threads may share it."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._tokens: set[str] = set()
        self._counts: dict[Node, int] = {}
        self._changed = threading.Condition()

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        with self._changed:
            if token not in self._tokens:
                self._tokens.add(token)
                self._entries.append(entry)
                self._changed.notify_all()
        return True

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        from reknit.adapters.runtime.ports import Batch

        with self._changed:
            if wait_s > 0 and len(self._entries) <= after:
                self._changed.wait(wait_s)
            found = tuple(self._entries[after:])
        return Batch(after + len(found), found)

    def since(self, after: int) -> tuple[Entry, ...]:
        """The entries from position `after` on."""
        with self._changed:
            return tuple(self._entries[after:])

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        with self._changed:
            self._counts[node] = count
            return {n: self._counts[n] for n in (node, *watch) if n in self._counts}

    def close(self) -> None:
        """End the reads that wait now. Agents that share the journal can go on using it."""
        with self._changed:
            self._changed.notify_all()


class MemoryLink:
    """Implements `ports.Link` for the only agent of a journal in memory. It needs no thread and never waits."""

    def __init__(self, journal: MemoryJournal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._position = 0
        self._count = 0
        self._counters: list[Event] = []
        self._owes_read = True

    def append(self, entry: Entry) -> None:
        self._count += 1
        self._journal.append(str(self._count), entry)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        self._counters.append(Counters(self._clock.now(), self._journal.beat(node, count, watch)))
        self._owes_read = True

    def events(self, now: float) -> list[Event]:
        events, self._counters = self._counters, []
        entries = self._journal.since(self._position)
        if entries or self._owes_read:
            self._position += len(entries)
            self._owes_read = False
            events.append(EntriesRead(now, entries))
        return events

    def folded(self, job: Job) -> None:
        """Does nothing: this link does not wait for entries."""

    def close(self) -> None:
        self._journal.close()
