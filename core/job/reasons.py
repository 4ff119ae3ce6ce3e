"""Why a round or the job ended. Values, not text: `describe` makes the sentences.

A reason names the nodes and workers that it is about, so that a caller can act on it. Each union below lists all that
can end one kind of thing. Why this node's workers or this agent ended stands in core/agent/reasons.py.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from .entries import Node, WorkerFailure

# ---- a round ---------------------------------------------------------------------------------------------------------


@frozen
class WorkerFailed:
    """Workers of `node` failed; `failure` is the one that is blamed."""

    node: Node
    failure: WorkerFailure


class Departure(Enum):
    """How a node went."""

    LOST = "lost"
    """It fell silent."""
    LEFT = "left"
    """It said goodbye."""
    LEAVING = "leaving"
    """It was told to leave. Its workers may still run."""
    REPLACED = "replaced"
    """A new agent process of the same host has joined."""


@frozen
class NodeGone:
    """A member went without having failed itself."""

    node: Node
    how: Departure
    by: Node | None = None
    """Who said so, if it was another node."""


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
    """One failure too many. `root` is the failure of the last round that is blamed."""

    max_restarts: int
    root: WorkerFailed


@frozen
class Unstable:
    """More rounds ended without a failure than the terms allow."""

    max_unspent: int


@frozen
class TooFewNodes:
    have: int
    need: int


@frozen
class AbortedByOperator:
    why: str


JobEnd = AllSucceeded | BudgetSpent | Unstable | TooFewNodes | AbortedByOperator
"""Why no round will follow. The same on every agent."""

# ---- what is wrong with a journal ------------------------------------------------------------------------------------


class Refusal(Enum):
    """Why there is no use in trying a journal again."""

    OTHER_JOB = "other job"
    """The endpoint serves another job."""
    SECRET = "secret"
    """Its entries are signed with another secret, or one side has none."""
    IDENTITY = "identity"
    """It is not the journal that was read before: empty, or shorter."""
    FORMAT = "format"
    """It holds what this version cannot read: two folds would be two jobs."""
    SETUP = "setup"
    """It cannot be used as it was asked for: no such folder, no such client library."""
