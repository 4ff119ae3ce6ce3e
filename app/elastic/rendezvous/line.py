"""The way to the journal for a node on which torchrun starts the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from reknit.core.agent.events import Event
from reknit.core.job.entries import Aborted, Entry, Joined, Node
from reknit.core.job.job import Gathering, Job
from reknit.core.job.job import Running as RunningPhase

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Link


class Caller(Protocol):
    """The torchrun that starts the workers of this node, as its calls show it."""

    @property
    def has_succeeded(self) -> bool:
        """Its workers have succeeded. It asks for no further round."""
        ...

    def is_silent(self) -> bool:
        """It does not call any more."""
        ...


class RendezvousLink:
    """Implements `ports.Link` over a link: beats only while torchrun lives, joins only if torchrun would start workers,
    and can say that the job ends."""

    def __init__(self, link: Link, caller: Caller, wake: Callable[[], None]) -> None:
        self._link = link
        self._caller = caller
        self._wake = wake
        self._why = ""
        """Why the job is to end. Empty: it is not."""
        self._job = Job()

    def abort(self, why: str) -> None:
        """Say that the job ends, for all nodes. From any thread."""
        self._why = why
        self._wake()

    def append(self, entry: Entry) -> None:
        if not (isinstance(entry, Joined) and self._caller.has_succeeded):
            self._link.append(entry)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        if not self._caller.is_silent():
            self._link.beat(node, count, watch)

    def events(self, now: float) -> list[Event]:
        if self._why and isinstance(self._job.phase, Gathering | RunningPhase):
            self._link.append(Aborted(self._why, self._job.epoch))
            self._why = ""
        return self._link.events(now)

    def folded(self, job: Job) -> None:
        self._job = job
        self._link.folded(job)

    def close(self) -> None:
        self._link.close()
