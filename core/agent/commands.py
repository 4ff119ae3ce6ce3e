"""What an agent wants done. The counterpart of `events`.

1. A command is carried out in the order given, and answered by events, if at all. None of them can fail:
   what goes wrong comes back as an event.
2. A command that stops or ends something says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from reknit.core.job.entries import Entry, Node, WorkerFailure
from reknit.core.job.job import EMPTY
from reknit.core.job.ranks import Assignment

from .reasons import RunEnd, StopReason
from .states import WorkerState

# The same on every POSIX system. `describe` alone imports `signal`, for the names.
SIGTERM = 15
SIGKILL = 9


@frozen
class Append:
    """Say this in the journal. May be lost or doubled: the agent looks for it in what it reads."""

    entry: Entry


@frozen
class StartWorkers:
    """Start all workers of a round. Answered by `WorkersStarted`, then `WorkersExited` as they end.

    Those that could not be started are reported in `WorkersExited` likewise.
    """

    round: int
    assignment: Assignment


@frozen
class StopWorkers:
    """End every process of the round: `signal`, then SIGKILL after `grace_s`. Answered by `WorkersStopped`.

    Given again for the same round, the earlier of the two SIGKILLs counts: the grace can only become shorter.
    """

    round: int
    signal: int
    grace_s: float
    why: StopReason


@frozen
class ReservePort:
    """Reserve another bootstrap port. Answered by `PortReserved`."""


@frozen
class Beat:
    """Raise this node's counter and read it together with those of `watch`. Answered by `Counters`."""

    node: Node
    watch: tuple[Node, ...]


@frozen
class Result:
    """How the agent's run ended on this node; all or nothing, keyed by global rank (torchelastic's `RunResult`)."""

    state: WorkerState
    """SUCCEEDED, FAILED, STOPPED when the node left before the job ended, UNHEALTHY when it cannot stop its workers."""
    why: RunEnd
    return_values: Mapping[int, object] = EMPTY
    """This node's ranks if the job succeeded, else empty."""
    failures: Mapping[int, WorkerFailure] = EMPTY
    """The workers of the last round that failed, as far as the journal tells, else empty."""


@frozen
class Finish:
    """The agent is done: nothing follows, and it has no workers."""

    result: Result


Command = Append | StartWorkers | StopWorkers | ReservePort | Beat | Finish
