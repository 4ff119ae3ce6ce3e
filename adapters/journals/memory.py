"""A journal in this process: standalone jobs, tests, embedders whose agents share one process."""

from __future__ import annotations

import _thread
from collections.abc import Iterable, Mapping, Sequence

from reknit.core.entries import Entry, Node


class MemoryJournal:
    """Appends are durable and ordered for as long as the process lives. May be shared by agents in many threads."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lock = _thread.allocate_lock()
        self._waiting: list[_thread.LockType] = []

    def append(self, entry: Entry) -> None:
        with self._lock:
            self._entries.append(entry)
            waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.release()

    def read(self, after: int, wait_s: float = 0.0) -> Sequence[Entry]:
        with self._lock:
            found = self._entries[after:]
            if found or wait_s <= 0:
                return found
            # A condition without `threading`: a lock of our own, held, that the next append opens.
            gate = _thread.allocate_lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire(timeout=wait_s)
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
            return self._entries[after:]


class MemoryLiveness:
    """Counters in this process, beside its journal."""

    def __init__(self) -> None:
        self._counts: dict[Node, int] = {}

    def beat(self, node: Node) -> None:
        self._counts[node] = self._counts.get(node, 0) + 1

    def counters(self, nodes: Iterable[Node]) -> Mapping[Node, int]:
        return {node: self._counts[node] for node in nodes if node in self._counts}
