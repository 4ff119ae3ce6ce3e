"""Folds that readers publish for other readers. The optional part of a journal: `ports.Remembers`.

If each of a thousand nodes decodes a thousand `Joined`, that is a million. So a reader that had much to read publishes
the fold, and a reader that is far behind begins with that fold (`Batch.base`).

1. A journal publishes at the beginning of its next read, in the thread that reads. By then the agent has folded what
   was read before, and what the reader knows needs no lock. The agent's own entries do not wait for it.
2. A journal tries once. Nobody depends on a fold: without one, a reader reads the entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Batch
    from reknit.core.job.job import Job

MANY = 32
"""After a read of more entries than this, a reader publishes their fold. A reader that is further behind than this
looks for a published fold first."""


class Unpublished:
    """The fold that a reader is to publish. One for each journal."""

    def __init__(self) -> None:
        self._is_worth = False
        """The fold of what was read last is to be published."""
        self._fold: tuple[int, Job] | None = None

    def found(self, batch: Batch, *, is_awaited: bool = False) -> Batch:
        """A read ends with this batch. `is_awaited`: other readers wait for the fold, however few the entries are."""
        self._is_worth = is_awaited or len(batch.entries) > MANY
        return batch

    def folded(self, position: int, job: Job) -> None:
        """The agent has folded everything before `position`. Called between two reads."""
        if self._is_worth:
            self._fold = position, job

    def take(self) -> tuple[int, Job] | None:
        """Position and fold that are to be published now. None: there are none."""
        fold, self._fold = self._fold, None
        return fold
