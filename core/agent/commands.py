"""What an agent wants done. The counterpart of `events`.

1. Commands are carried out in the order in which they are given. Some are answered by events. No command raises: what
   goes wrong comes back as an event.
2. A command that stops or ends something carries the reason.
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
    """Append `entry` to the journal. The entry may get lost, or be appended twice. The agent learns from what it reads
    whether the entry is there."""

    entry: Entry


@frozen
class StartWorkers:
    """Start all workers of a round. Answered by `WorkersStarted`, and by `WorkersExited` when workers end.

    `WorkersExited` also reports workers that could not be started.
    """

    round: int
    assignment: Assignment


@frozen
class StopWorkers:
    """End every process of the round: `signal`, then SIGKILL after `grace_s` seconds. Answered by `WorkersStopped`.

    The command may be given again for the same round. SIGKILL then comes at the earlier of the two times.
    """

    round: int
    signal: int
    grace_s: float
    why: StopReason


@frozen
class ReservePort:
    """Reserve another bootstrap port in place of the present one. Answered by `PortReserved`."""


@frozen
class Beat:
    """Raise this node's counter. Then read it, and the counters of the nodes in `watch`. Answered by `Counters`."""

    node: Node
    watch: tuple[Node, ...]


@frozen
class Result:
    """How the agent's run ended on this node. It has the form of torchelastic's `RunResult`."""

    state: WorkerState
    """SUCCEEDED and FAILED: how the job ended for this agent. STOPPED: the node left before the job ended, or the job
    was aborted. UNHEALTHY: the agent cannot stop its workers."""
    why: RunEnd
    return_values: Mapping[int, object] = EMPTY
    """If the job succeeded: None for the global rank of each of this node's workers. Else empty."""
    failures: Mapping[int, WorkerFailure] = EMPTY
    """If the job failed: the failures of the last round that are in the journal, by global rank. Else empty."""


@frozen
class Finish:
    """The agent is done. It has no workers, and gives no further command."""

    result: Result


Command = Append | StartWorkers | StopWorkers | ReservePort | Beat | Finish
