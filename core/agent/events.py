"""What can happen to an agent. The counterpart of `commands`.

1. An event is a fact that an adapter observed. What goes wrong in the world is an event too, never an exception.
2. Every event carries `at`: seconds on the adapter's monotonic clock. The core knows no other time.
3. An event about workers names its round. If the round is not that of this node's present workers, the event is late,
   and the agent ignores it.
4. A kind of event exists only if a decision of the agent depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from reknit.core.job.entries import Entries, Entry, Node
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

from .worker_words import PortReserved, WorkersExited, WorkersStarted, WorkersStopped


@frozen
class Started:
    """The agent's process is up."""

    at: float
    nonce: str
    """Random text that is unique to this process."""
    port: int
    """Bootstrap port that is reserved for the first `Joined`. 0 if no port could be reserved. The agent joins all the
    same, and the workers report that they have no port."""


def _entries(entries: Iterable[Entry]) -> Entries:
    return entries if isinstance(entries, Entries) else Entries(entries)


@frozen
class EntriesRead:
    """A fresh read of the journal ended. `entries` follow those that were read before.

    The adapter reports a read at the start and after every `Beat`, even if the read found no new entries. It shows that
    the journal answers.
    """

    at: float
    entries: Entries = field(default=Entries(), converter=_entries)
    base: Job | None = None
    """The fold of all that comes before `entries`. The reader takes it in place of entries that it has skipped, because
    it was far behind. None: the reader has skipped nothing."""
    life: Life = Life()
    """The life of the journal that was read. Another one than in the read before: the store has lost the journal (rule
    16). Then `base` is the fold with which this life begins, or None if nothing was read before."""
    is_anew: bool = False
    """This life does not hold all that the agent was given before. So the agent begins anew in it."""


@frozen
class Counters:
    """The answer to `Beat`: the store has acknowledged the agent's beat."""

    at: float
    counts: Mapping[Node, int]
    """The counters of this node and of the nodes that it watches. A node that never beat is missing, or has 0."""


@frozen
class JournalFailed:
    """The journal or the counters cannot be used. The adapter goes on trying, unless `refusal` is set."""

    at: float
    why: str
    """One line for the operator of this node."""
    refusal: Refusal | None = None
    """Set if trying again does not help. None: trying again may help."""
    answers: bool = False
    """The store has answered, and something else is missing. For people: the agent does the same in both cases."""


@frozen
class StopRequested:
    """The agent was asked to leave the job: by a signal, or by the program that runs it."""

    at: float
    signal: int
    """The signal's number. SIGKILL stands for a request without a grace."""


@frozen
class RestartsLimited:
    """The program that runs this agent bears fewer failures of this node's workers than the job does. For example, it
    knows that a device of this host is broken."""

    at: float
    left: int
    """Failures that are still borne, counted from the beginning of this node's present round, or else of its last one.
    After one more the node leaves the job."""


@frozen
class Woken:
    """Time has passed. The adapter sends it at `timers.next_wake`. If it comes early, late or twice, nothing breaks."""

    at: float


Event = (
    Started
    | EntriesRead
    | Counters
    | JournalFailed
    | WorkersStarted
    | WorkersExited
    | WorkersStopped
    | PortReserved
    | StopRequested
    | RestartsLimited
    | Woken
)
