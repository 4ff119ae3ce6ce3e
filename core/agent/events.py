"""What can happen to an agent. The counterpart of `commands`.

1. An event is a fact that an adapter observed. The world misbehaving is an event, never an exception.
2. Every event carries `at`: seconds on the adapter's monotonic clock. It is the only time that the core knows.
3. An event about workers names its round; one that names another round than the workers' is stale and ignored.
4. An event exists only if something decides on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from reknit.core.job.entries import Entry, Node, WorkerFailure
from reknit.core.job.job import Job
from reknit.core.job.ranks import Assignment
from reknit.core.job.reasons import Refusal


@frozen
class Started:
    """The agent's process is up."""

    at: float
    nonce: str
    """Unique to this process."""
    port: int
    """Bootstrap port reserved for the first `Joined`; 0 if none was to be had, which the workers will find out."""


@frozen
class EntriesRead:
    """A fresh read of the journal ended: these entries follow those read before.

    May be empty, and must be told so at the start and after every `Beat`: it shows that the journal answers.
    """

    at: float
    entries: tuple[Entry, ...] = ()
    base: Job | None = None
    """The fold of all that comes before `entries`, if the reader was far behind and has skipped what it holds."""


@frozen
class Counters:
    """The agent's beat was acknowledged, and these are the counters of the nodes watched, its own among them."""

    at: float
    counts: Mapping[Node, int]


@frozen
class JournalFailed:
    """The journal or the counters cannot be reached; the adapter goes on trying."""

    at: float
    why: str
    refusal: Refusal | None = None
    """There is no use in trying."""


@frozen
class WorkersStarted:
    """All workers of the round run."""

    at: float
    round: int
    assignment: Assignment | None = None
    """The ranks that the workers really got, if another rendezvous than the journal has decided them. It takes the
    place of the assignment in `StartWorkers`. None: the workers got the ranks of `StartWorkers`."""


@frozen
class WorkerExit:
    """The end of one worker. `failure` is None if it exited with 0."""

    local_rank: int
    failure: WorkerFailure | None = None


@frozen
class WorkersExited:
    """These workers ended by the time of one look; which was first is not known."""

    at: float
    round: int
    exits: tuple[WorkerExit, ...]


@frozen
class WorkersStopped:
    """The answer to `StopWorkers`: no process of the round is left, but for those in `stuck`, which survive SIGKILL."""

    at: float
    round: int
    port: int
    """Bootstrap port reserved for the next `Joined`."""
    stuck: tuple[int, ...] = ()


@frozen
class PortReserved:
    """The answer to `ReservePort`."""

    at: float
    port: int


@frozen
class StopRequested:
    """Somebody wants this node to leave: a signal to the agent, or the embedder."""

    at: float
    signal: int


@frozen
class Woken:
    """Time passed, perhaps as far as `agent.wakes_at`. Early, late and repeated wake-ups are harmless."""

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
    | Woken
)
