"""The states of a node's workers, with torchelastic's names and meaning. The whole group has one."""

from __future__ import annotations

from enum import Enum


class WorkerState(Enum):
    UNKNOWN = "UNKNOWN"
    """The agent cannot tell: processes were left that survive SIGKILL."""
    INIT = "INIT"
    """Not started yet, or being started."""
    HEALTHY = "HEALTHY"
    """Running."""
    UNHEALTHY = "UNHEALTHY"
    """Running, but about to be torn down for a reason other than their own failure."""
    STOPPED = "STOPPED"
    """Ended by the agent."""
    SUCCEEDED = "SUCCEEDED"
    """All exited with 0."""
    FAILED = "FAILED"
    """At least one failed; the others are being stopped, or are."""

    @property
    def is_running(self) -> bool:
        return self in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)
