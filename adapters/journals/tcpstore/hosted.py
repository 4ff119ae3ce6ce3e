"""A journal whose store this agent hosts: when the store fails, it knows why, and starts another server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from reknit.adapters.runtime.ports import Batch, Journal, Refused, Remembers, Unavailable
from reknit.core.job.entries import Entry, Node
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

T = TypeVar("T")
_SERVERS = 3
"""How many servers of the store an agent starts at most, if none of them ever serves."""


class Host(Protocol):
    """A store that this agent hosts."""

    @property
    def pid(self) -> int: ...

    @property
    def cannot_serve(self) -> bool:
        """What `failure` has told last holds for any store that would be started here."""
        ...

    def failure(self) -> str | None:
        """Why the store does not serve any more. None: it serves."""
        ...

    def restart(self) -> None:
        """Serve again, with an empty store, if the store does not serve any more. Raises `OSError`."""
        ...

    def close(self) -> None: ...


class HostedJournal:
    """Implements `ports.Journal` and `ports.Remembers` over a journal whose store this agent hosts. When the store
    fails, it knows why.

    1. If the server ends while this agent lives, another one is started at the same port. The agents that remember the
       journal found it again there.
    2. A store that has never served, and says that it cannot (for example because torch is missing), will never serve.
       So the journal is refused at once, and the agent does not wait for the end of an outage. The same holds if
       `_SERVERS` servers have ended and none of them has served.
    """

    def __init__(self, journal: Journal, host: Host, on_start: Callable[[int], object] = lambda _: None) -> None:
        """`on_start`: called with the pid of each further server."""
        self._journal = journal
        self._host = host
        self._on_start = on_start
        self._has_served = False
        self._servers = 1
        """How many were started."""
        self._judging = threading.Lock()

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        return self._asked(lambda: self._journal.append(token, entry, life))

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        return self._asked(lambda: self._journal.read(after, wait_s, least))

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        return self._asked(lambda: self._journal.beat(node, count, watch))

    def remember(self, position: int, job: Job) -> None:
        if isinstance(self._journal, Remembers):
            self._journal.remember(position, job)

    def take_back(self) -> None:
        if isinstance(self._journal, Remembers):
            self._journal.take_back()

    def close(self) -> None:
        self._journal.close()

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except Unavailable as e:
            with self._judging:
                why = self._host.failure()
                if why is None:
                    raise
                if not self._has_served and (self._host.cannot_serve or self._servers >= _SERVERS):
                    raise Refused(Refusal.SETUP, why) from None
                raise Unavailable(f"{e}; {why}; {self._restarted()}") from None
        self._has_served = True
        return answer

    def _restarted(self) -> str:
        try:
            self._host.restart()
        except OSError as error:
            return f"no other server can be started: {(error.strerror or str(error)).lower()}"
        self._servers += 1
        self._on_start(self._host.pid)
        return "another server was started"
