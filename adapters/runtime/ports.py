"""What a loop needs of the world. No decision is taken behind these ports: they do what they are told, and report.

1. A call of the loop to a port never waits, except in `Clock.wait`. No port raises because the world misbehaves: what
   happened comes back as an event.
2. What has to wait, waits in a `Journal`. The link calls a journal from threads of its own. A journal raises
   `Unavailable` or `Refused`, and nothing else.
3. A port that gets news from elsewhere (another thread, a descriptor) wakes the clock: by `Clock.wake`, or by a
   descriptor that the clock watches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Entry, Node
from reknit.core.job.founding import Life
from reknit.core.job.job import Job, Verdict
from reknit.core.job.reasons import Refusal


class Unavailable(Exception):
    """The journal cannot be used now. Trying again may help. The text says what was tried and what happened."""

    def __init__(self, why: str, *, answers: bool = False) -> None:
        """`answers`: the store has answered, and something else is missing. False: it has not answered."""
        super().__init__(why)
        self.answers = answers


class Refused(Exception):
    """Trying again does not help. The text is one line for the operator of this node."""

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal


class NoJournal(Refused):
    """The store holds no journal of this job, or nobody has begun the job in it. For whoever reads alone."""

    def __init__(self, why: str) -> None:
        super().__init__(Refusal.SETUP, why)


class CannotStart(Exception):
    """This agent cannot have workers at all, for example because of a limit of the machine. The wiring raises it, and
    `Workers.events` raises it before `Started`.

    The text is one line for the operator of this node.
    """

    __module__ = "reknit"  # as people import it, and as a traceback shows it

    def __init__(self, why: str, *, is_usage: bool = False) -> None:
        super().__init__(why)
        self.is_usage = is_usage
        """The operator has asked for something impossible."""


@frozen
class Batch:
    """What a read of a journal has found."""

    position: int
    """Where the next read begins. It grows, in a unit that each journal chooses: entries, bytes or revisions."""
    entries: tuple[Entry, ...] = ()
    base: Job | None = None
    """The fold of the entries that the reader skipped because it was far behind. `entries` follow it. None: nothing was
    skipped. Only a journal that remembers folds (`Remembers`) skips entries."""
    life: Life = Life()
    """The life of the journal that was read. If the agent has folded something of another one (`Remembers`), there is a
    `base`, with which this life begins (rule 16)."""
    is_anew: bool = False
    """This life does not hold all that the agent was given. So the agent begins anew in it (`Choice.ANEW`)."""


class Journal(Protocol):
    """A store that holds an append-only, totally ordered sequence of entries, and one counter per node.

    Every call returns or raises within a bounded time. Three threads may use a journal: one reads, one appends, and one
    beats. A beat waits for no call of another thread for longer than a moment: a node that does not beat in time is
    taken for dead.

    A journal may offer `Remembers` as well.
    """

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        """Returns True when the entry is in the journal for good.

        `life`: the one that the agent had folded when it wanted the entry. By default any. Returns False if the journal
        is in another one by now. Then the entry was not written. A journal whose store loses nothing has one life, and
        need not look.

        `token` is unique to this entry. A call that raised `Unavailable` may have written the entry all the same; with
        the same token, the repeated call does not write it twice."""
        ...

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        """The entries after position `after` (0: the start). If there are none, waits up to `wait_s` seconds for some.

        `least`: the reader cannot act on fewer new entries than this. The journal may hold back a smaller batch for up
        to 1.5 s, even if `wait_s` is less.
        Empty only if the store has answered, during this call, that there is nothing new."""
        ...

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        """Set the counter of `node` to `count`, which is above 0. The same call again changes nothing.

        Returns the counters of `node` and of the nodes in `watch`. A node that never beat is missing, or has 0. So has
        a counter that holds no number, because counters are not signed and anybody may have written there."""
        ...

    def close(self) -> None:
        """Let go of everything. Calls that wait in another thread end soon, or raise `Unavailable`. May be repeated."""
        ...


@frozen
class Record:
    """What a record of a journal says: an entry, and what the store needs (docs/protocol.md#format-records)."""

    entry: Entry
    token: str = ""
    by: str = ""
    at: float | None = None
    """None: the record does not say it."""
    seen: str = ""


class Readable(Protocol):
    """A journal that was opened for reading alone (`reads_only=True`). It creates nothing and changes nothing in the
    store. It needs only the right to read. `append` and `beat` raise `Refused`."""

    def records(self, after: int) -> tuple[int, Sequence[tuple[str, Record]]]:
        """The records after position `after` (0: the start), each with its place. For people and tools.

        A record that no agent of the job has written is a `Filler` without an author.

        The first value is the position at which the next call goes on. If it is `after`, there is nothing new. Raises
        `Unavailable`, `Refused`, and `NoJournal` if there is no journal."""
        ...

    def close(self) -> None: ...


@frozen
class Stored:
    """A journal that lies in a store, and what can be known of its job without taking part."""

    job: str
    """The job's id."""
    verdict: Verdict | None = None
    """How the job has ended. None: it has not, or `why` says why this cannot be known."""
    at: float | None = None
    """When the last entry was written, in seconds of Unix time by the clock of its writer. None: no entry says it. For
    people, and to find journals that are old. The removal itself does not depend on it."""
    silence_s: float = 0.0
    """Agents of the job that live have written something after so many seconds."""
    why: str = ""
    """Why nothing is known of the job. Empty: it is known."""


class Shelf(Protocol):
    """All journals in a store, for `reknit prune`. Every call raises `Unavailable` or `Refused`."""

    def jobs(self) -> Sequence[str]:
        """The ids of the jobs."""
        ...

    def look(self, job: str) -> Stored: ...

    def is_quiet(self, job: str) -> bool:
        """Whether nothing was written into the journal since `look`, not even a beat."""
        ...

    def remove(self, job: str) -> bool:
        """Remove the journal if it is quiet. False: it is not, and nothing was removed."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Remembers(Protocol):
    """What a journal may offer besides `Journal`. The link then tells it of every fold of the agent.

    A journal uses the folds for one of two things, or for both. It may publish a fold, so that readers that are far
    behind need not read everything (`Batch.base`). And it may be founded again with a fold if its store has lost it."""

    def remember(self, position: int, job: Job) -> None:
        """The agent has folded everything before `position`, where the last read has ended: the fold is `job`.

        Called by the thread of the loop, between two reads. Never waits."""
        ...

    def take_back(self) -> None:
        """The link has dropped the last read, and has not told the agent of it.

        Called by the thread that has read. Never waits."""
        ...


class Link(Protocol):
    """This agent's connection to the journal."""

    def append(self, entry: Entry) -> None:
        """Say this in the journal. May be lost or doubled."""
        ...

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        """Set the node's counter. Nothing is done while an earlier beat is on its way.

        Answered by `Counters`, and then, except for the first beat, by an `EntriesRead`, which may be empty."""
        ...

    def events(self, now: float) -> list[Event]:
        """`EntriesRead` (at least one at the start), `Counters`, `JournalFailed`, since the last call."""
        ...

    def folded(self, job: Job) -> None:
        """The agent has folded an `EntriesRead`: the oldest that was not reported here before. `job`: the fold, which
        shows how many more entries are worth waiting for."""
        ...

    def close(self) -> None:
        """Close the journal too. Afterwards no thread and no descriptor is left. Bounded in time."""
        ...


class Requests(Protocol):
    """Requests that this node leaves the job. They are signals to this process, or come from the program that runs the
    agent."""

    def taken(self) -> Sequence[int]:
        """The signal numbers that came since the last call, in order. A program that sends none gives SIGTERM."""
        ...


class Workers(Protocol):
    """The workers of this node, of one round at a time.

    The first event is `Started`, which brings the agent's nonce and its first bootstrap port. Nothing comes before it.
    """

    def start(self, command: StartWorkers) -> None:
        """Answered by `WorkersStarted`, and by `WorkersExited` as they end."""
        ...

    def stop(self, command: StopWorkers) -> None:
        """Answered by `WorkersStopped`, with the bootstrap port of the next round."""
        ...

    def renew_port(self) -> None:
        """Reserve another bootstrap port in place of the present one. Answered by `PortReserved`."""
        ...

    def events(self, now: float) -> list[Event]:
        """What has happened to the workers since the last call."""
        ...

    @property
    def wakes_at(self) -> float | None:
        """When `events` must be called at the latest, on the clock's time: the end of a grace. None: no deadline.

        A time that has passed means at once: there is news that did not wake the clock.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind, whatever state the workers are in. Bounded in time."""
        ...


@runtime_checkable
class Fences(Protocol):
    """What a port `Workers` may offer besides: it also kills the workers while the loop cannot run, for example because
    the agent is suspended."""

    def fence(self, at: float | None) -> None:
        """Kill the workers at this time on the clock, without a grace, unless another call names another time before.
        Answered by `WorkersStopped` if they were killed. None: there is no such time. Called in every step."""
        ...


class Console(Protocol):
    """The agent's own lines, in order with what the workers write. A console that blocks holds nobody up."""

    def say(self, line: str) -> None: ...

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is written; False if it is not by then."""
        ...


class Clock(Protocol):
    """Time, and waiting. `wake` may be called from any thread, the rest from the thread of the loop."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wait(self, until: float | None) -> None:
        """Sleep until a watched file descriptor is readable, somebody calls `wake`, or `until`. May return early.

        None: without a deadline. A time that has passed: does not sleep.
        """
        ...

    def wake(self) -> None:
        """End the wait that is under way, or else the next one. Does nothing after `close`."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` would return at once, deadlines aside. `OSError`: there is none."""
        ...

    def watch(self, fd: int) -> None: ...

    def watch_writable(self, fd: int) -> None:
        """Wake when something can be written to this descriptor, which is not watched for reading."""
        ...

    def unwatch(self, fd: int) -> None:
        """To be called before the descriptor is closed. May be repeated."""
        ...
