"""Why a round or the job ended. Reasons are values: `describe` makes sentences of them.

A reason names the nodes and workers that it is about, so that a caller can act on it. The union `RoundEnd` lists all
reasons for the end of a round, and `JobEnd` all reasons for the end of the job. The reasons why one node's workers or
its agent end stand in core/agent/reasons.py.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from .entries import Node
from .hanging import Hang
from .workers import WorkerFailure

# ---- a round ---------------------------------------------------------------------------------------------------------


@frozen
class WorkerFailed:
    """Workers of `node` failed. `failure` is the failure that is blamed."""

    node: Node
    failure: WorkerFailure
    hang: Hang | None = None
    """Where the workers stood that hung together, if `failure` is of one of them. Else None."""


class Departure(Enum):
    """How a node went."""

    LOST = "lost"
    """The node fell silent."""
    LEFT = "left"
    """The node said goodbye."""
    LEAVING = "leaving"
    """The node was told to leave. Its workers may still run."""
    REPLACED = "replaced"
    """A new agent process of the same host has joined."""


@frozen
class NodeGone:
    """A member went, and none of its own workers had failed."""

    node: Node
    how: Departure
    by: Node | None = None
    """The node that declared it lost. None if no other node did."""


@frozen
class NodesAdmitted:
    """Standbys get their place in the next round."""

    nodes: tuple[Node, ...]


RoundEnd = WorkerFailed | NodeGone | NodesAdmitted
"""Why the members stop their workers and gather again."""

# ---- the job ---------------------------------------------------------------------------------------------------------


@frozen
class AllSucceeded:
    """Every member of the round succeeded."""


@frozen
class BudgetSpent:
    """Workers failed, and all `max_restarts` restarts were spent. `root` is the failure that is blamed."""

    max_restarts: int
    root: WorkerFailed


@frozen
class Unstable:
    """More than `max_unspent` rounds ended without a failure."""

    max_unspent: int


@frozen
class TooFewNodes:
    """Only `have` nodes joined the round within `Terms.join_timeout_s`. It needs `need`."""

    have: int
    need: int


@frozen
class AbortedByOperator:
    """An operator ended the job. `why` is the operator's text."""

    why: str


@frozen
class LongOver:
    """This epoch of the job has ended so long ago that nothing else is remembered of it. It had not succeeded, because
    a job that has succeeded never begins again."""

    epoch: int


JobEnd = AllSucceeded | BudgetSpent | Unstable | TooFewNodes | AbortedByOperator | LongOver
"""Why no round will follow. All agents of the job compute the same one."""


def blamed_failure(why: RoundEnd | JobEnd | None) -> WorkerFailed | None:
    """The failure that is blamed for this end. None: no worker is blamed."""
    root = why.root if isinstance(why, BudgetSpent) else why
    return root if isinstance(root, WorkerFailed) else None


# ---- what is wrong with a journal ------------------------------------------------------------------------------------


class Refusal(Enum):
    """Why a journal cannot be used, and trying again does not help."""

    OTHER_JOB = "other job"
    """The endpoint serves another job."""
    SECRET = "secret"
    """The entries are signed with another secret. Or either the entries or this agent have no secret."""
    IDENTITY = "identity"
    """It is not the journal that was read before, by this agent or by others: it is empty, shorter, damaged, or has
    another id."""
    LEFT_BEHIND = "left behind"
    """The store was lost, and the journal that is there now does not hold what this agent had read."""
    FORMAT = "format"
    """The journal holds something that this version of reknit cannot read."""
    SETUP = "setup"
    """The journal cannot be used as it was asked for. For example, the folder does not exist."""
