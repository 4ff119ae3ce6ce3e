"""The states of a node's workers, with torchelastic's names and meaning. The whole group has one."""

from __future__ import annotations

from enum import Enum


class WorkerState(Enum):
    UNKNOWN = "UNKNOWN"
    """The agent has lost track of them. This one does not: the name is kept for those who know torchelastic's."""
    INIT = "INIT"
    """Not started yet, or being started."""
    HEALTHY = "HEALTHY"
    """Running, or being stopped for a reason that is not theirs."""
    UNHEALTHY = "UNHEALTHY"
    """Running, but beyond control: processes survive SIGKILL."""
    STOPPED = "STOPPED"
    """Ended by the agent."""
    SUCCEEDED = "SUCCEEDED"
    """All exited with 0."""
    FAILED = "FAILED"
    """At least one failed; the others are being stopped, or are."""

    @property
    def is_running(self) -> bool:
        return self in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)
