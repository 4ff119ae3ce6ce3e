"""Why an agent stops its workers, or ends. Values, not text: `describe` makes the sentences.

The first group is this node's own affair: it is in no journal, and the job may go on elsewhere. Each union below lists
all that can end one kind of thing. Why a round or the job ended stands in core/job/reasons.py.
"""

from __future__ import annotations

from attrs import frozen

from reknit.core.job.entries import Node
from reknit.core.job.reasons import JobEnd, Refusal, RoundEnd

# ---- this agent ------------------------------------------------------------------------------------------------------


@frozen
class StoreLost:
    """The journal could not be reached for longer than the agent is willing to wait."""

    why: str


@frozen
class JournalRefused:
    refusal: Refusal
    why: str


@frozen
class TermsDiffer:
    """The journal's job has other terms than this agent was given: `(field, theirs, ours)` each."""

    differences: tuple[tuple[str, str, str], ...]


@frozen
class Replaced:
    """Another agent with this node's id has joined."""

    by: Node


@frozen
class AlreadyFinished:
    """The job had succeeded before this node came."""


AgentEnd = StoreLost | JournalRefused | TermsDiffer | Replaced | AlreadyFinished
"""Why this agent must end whatever the job does."""

# ---- this node's workers ---------------------------------------------------------------------------------------------


@frozen
class SignalReceived:
    signal: int


@frozen
class DeclaredLost:
    """The others counted this node out; it must stop before it may come back."""


@frozen
class CutOff:
    """No beat of this node was acknowledged for `seconds`."""

    seconds: float


@frozen
class CannotStop:
    """Processes of this node survive SIGKILL."""

    pids: tuple[int, ...]


StopReason = AgentEnd | JobEnd | RoundEnd | SignalReceived | DeclaredLost | CutOff
"""Why workers that are alive are stopped."""

RunEnd = AgentEnd | JobEnd | SignalReceived | CannotStop
"""Why the agent's run ended: what its result says."""

Reason = StopReason | RunEnd
"""Any of them."""
