"""Why something was stopped, restarted or ended. Values, not text: `describe` makes the sentences.

A reason names the nodes and workers that it is about, so that a caller can act on it.
"""

from __future__ import annotations

from enum import Enum

from .entries import Node, WorkerFailure
from .values import frozen


@frozen
class WorkerFailed:
    """Workers of `node` failed; `failure` is the one that is blamed."""

    node: Node
    failure: WorkerFailure


@frozen
class NodeGone:
    """A member went without having failed: `how` is lost, left, leaving or replaced."""

    node: Node
    how: str
    by: Node | None = None
    """Who said so, if it was another node."""


@frozen
class NodesAdmitted:
    """Standbys get their place in the next round."""

    nodes: tuple[Node, ...]


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


@frozen
class AllSucceeded:
    """Every member of the round succeeded."""


@frozen
class SignalReceived:
    signal: int


@frozen
class Replaced:
    """Another agent with this node's id has joined."""

    by: Node


@frozen
class DeclaredLost:
    """The others counted this node out; it must stop before it may come back."""


@frozen
class CutOff:
    """No beat of this node was acknowledged for `seconds`."""

    seconds: float


@frozen
class StoreLost:
    """The journal could not be reached for longer than the agent is willing to wait."""

    why: str


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


@frozen
class JournalRefused:
    refusal: Refusal
    why: str


@frozen
class TermsDiffer:
    """The journal's job has other terms than this agent was given: `(field, theirs, ours)` each."""

    differences: tuple[tuple[str, str, str], ...]


@frozen
class AlreadyFinished:
    """The job had succeeded before this node came."""


@frozen
class CannotStop:
    """Processes of this node survive SIGKILL."""

    pids: tuple[int, ...]


Reason = (
    WorkerFailed
    | NodeGone
    | NodesAdmitted
    | BudgetSpent
    | Unstable
    | TooFewNodes
    | AbortedByOperator
    | AllSucceeded
    | SignalReceived
    | Replaced
    | DeclaredLost
    | CutOff
    | StoreLost
    | JournalRefused
    | TermsDiffer
    | AlreadyFinished
    | CannotStop
)
