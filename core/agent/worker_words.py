"""The commands and events about workers that a keeper understands. `commands` and `events` have the others.

A keeper imports this module, and nothing else of the agent. `StopWorkers` is not here: it carries the reason of the
stop, which needs the whole vocabulary of a job, and which no keeper asks for.
"""

from __future__ import annotations

from attrs import frozen

from reknit.core.job.workers import Assignment, WorkerFailure

MOST_AWAITED = 5
"""The longest wait for exits, as a multiple of `StopWorkers.await_exits_s`."""


@frozen
class StartWorkers:
    """Start all workers of a round. Answered by `WorkersStarted`, and by `WorkersExited` when workers end.

    `WorkersExited` also reports workers that could not be started.
    """

    round: int
    assignment: Assignment


@frozen
class ReservePort:
    """Reserve another bootstrap port in place of the present one. Answered by `PortReserved`."""


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
    """The adapter has found these workers ended at one look. Which of them ended first is not known."""

    at: float
    round: int
    exits: tuple[WorkerExit, ...]


@frozen
class WorkersStopped:
    """The answer to `StopWorkers`: no process of the round is left, except for those in `stuck`."""

    at: float
    round: int
    port: int
    """Bootstrap port that is reserved for the next `Joined`. 0 if no port could be reserved."""
    stuck: tuple[int, ...] = ()
    """The ids (pid) of processes of the round that still live after SIGKILL. Empty in most cases."""
    killed: tuple[int, ...] = ()
    """The ranks of the workers that SIGKILL has ended, because the grace of the stop was over. The lowest comes first.
    For people: no decision depends on it."""
    grace_s: float = 0.0
    """With `killed`: the seconds from the signal of the stop to SIGKILL. A further request to stop may have shortened
    the grace of the first."""


@frozen
class PortReserved:
    """The answer to `ReservePort`."""

    at: float
    port: int
    """Bootstrap port that is reserved for the next `Joined`. 0 if no port could be reserved."""
