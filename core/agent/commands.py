"""What an agent wants done. The counterpart of `events`.

1. Commands are carried out in the order in which they are given. Some are answered by events. No command raises: what
   goes wrong comes back as an event.
2. A command that stops or ends something carries the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from reknit.core.job.entries import Entry, Node
from reknit.core.job.job import EMPTY
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.restart import root_cause_of
from reknit.core.job.workers import WorkerFailure

from .reasons import RunEnd, StopReason
from .states import WorkerState
from .worker_words import ReservePort, StartWorkers

# The same on every POSIX system. `describe` alone imports `signal`, for the names.
SIGTERM = 15
SIGKILL = 9


@frozen
class Append:
    """Append `entry` to the journal. The entry may get lost, or be appended twice. The agent learns from what it reads
    whether the entry is there."""

    entry: Entry


@frozen
class StopWorkers:
    """End every process of the round: `signal`, then SIGKILL `grace_s` seconds later. Answered by `WorkersStopped`.

    The command may be given again for the same round. SIGKILL then comes at the earlier of the two times.
    """

    round: int
    signal: int
    grace_s: float
    why: StopReason
    hangs: bool = False
    """A worker of the job hangs. So those of this node that make no progress either are looked at and ended as hung
    workers, if this node watches progress. Their failures tell which worker of the job is to blame."""
    await_exits_s: float = 0.0
    """The signal waits until no worker has ended for so many seconds, and for `MOST_AWAITED` times as long at most. So
    workers that are about to end by themselves do so, and are reported. The wait ends early when all workers have
    ended, and with a further command for the same round."""


@frozen
class Beat:
    """Set this node's counter to `count`. Then read it, and the counters of the nodes in `watch`. Answered by
    `Counters`. The same beat again changes nothing."""

    node: Node
    count: int
    watch: tuple[Node, ...]


@frozen
class Result:
    """How the agent's run ended on this node. It has the form of torchelastic's `RunResult`."""

    state: WorkerState
    """SUCCEEDED and FAILED: how the job ended for this agent. FAILED also if the node left after a failure that it did
    not bear (`RestartsLimited`). STOPPED: the node was told to leave before the job ended, or the job was aborted.
    UNHEALTHY: the agent cannot stop its workers."""
    why: RunEnd
    """The reason, a typed value: see core/agent/reasons.py."""
    return_values: Mapping[int, object] = EMPTY
    """If the job succeeded: None for the global rank of each of this node's workers. Else empty."""
    failures: Mapping[int, WorkerFailure] = EMPTY
    """If the job failed: the failures of the last round that are in the journal, by global rank. If this node did not
    bear a failure: those of its workers. Else empty."""

    @property
    def root(self) -> WorkerFailure | None:
        """The failure that is blamed. None: the run did not end because workers failed."""
        if isinstance(self.why, BudgetSpent):
            return self.why.root.failure
        return root_cause_of(tuple(self.failures.values())) if self.failures else None


@frozen
class Finish:
    """The agent is done. It has no workers, and gives no further command."""

    result: Result


Command = Append | StartWorkers | StopWorkers | ReservePort | Beat | Finish
