"""Why an agent stops its workers, or ends. Reasons are values: `describe` makes sentences of them.

The reasons of the first group concern this node alone. They are in no journal, and the job may go on elsewhere. The
reasons why a round or the job ends stand in core/job/reasons.py.
"""

from __future__ import annotations

from attrs import frozen

from reknit.core.job.entries import Node
from reknit.core.job.reasons import JobEnd, Refusal, RoundEnd

# ---- this agent ------------------------------------------------------------------------------------------------------


@frozen
class StoreLost:
    """The journal could not be reached for `Spec.store_timeout_s`, or answers or own entries got lost for so long.
    `why` is what the adapter reported last, or `UNSAID` (core/agent/lifecycle.py) if no call has failed."""

    why: str
    answers: bool = False
    """As in `JournalFailed`."""


@frozen
class JournalRefused:
    """The journal cannot be used, and trying again does not help. `why` is a text for the operator of this node."""

    refusal: Refusal
    why: str


@frozen
class TermsDiffer:
    """The job has other terms than this agent was given."""

    differences: tuple[tuple[str, str, str], ...]
    """For each term that differs: its name, its value in the job, and the value that this agent was given."""
    by: Node | None = None
    """The node that began the job, and so has set its terms. None: this node is gone, or its agent was started again
    since."""


@frozen
class Replaced:
    """Another agent with this node's id has joined."""

    by: Node


@frozen
class AlreadyFinished:
    """The job had succeeded before this agent read its journal."""


AgentEnd = StoreLost | JournalRefused | TermsDiffer | Replaced | AlreadyFinished
"""Why this agent cannot take part in the job, or cannot any longer, whatever happens to the job (`Causes.unable`).
Whoever adds one looks at `lifecycle`, `core/text/describe.py`, app/report.py, app/elastic and docs/exit-status.md as
well."""

# ---- this node's workers ---------------------------------------------------------------------------------------------


@frozen
class SignalReceived:
    """The agent was asked to stop. `signal` is the number of the signal that its workers get."""

    signal: int


@frozen
class DeclaredLost:
    """The journal shows this node as gone. Its workers must end before it may join again."""


@frozen
class CutOff:
    """No beat of this node was acknowledged for `seconds`, which is `Terms.fence_s`."""

    seconds: float


@frozen
class CannotStop:
    """Processes of this node survive SIGKILL. `pids` are their numbers."""

    pids: tuple[int, ...]


StopReason = AgentEnd | JobEnd | RoundEnd | SignalReceived | DeclaredLost | CutOff
"""Why workers that are alive are stopped."""

RunEnd = AgentEnd | JobEnd | SignalReceived | CannotStop
"""Why the agent's run ended. `Result.why` holds it."""

Reason = StopReason | RunEnd
"""Any reason of the core. `describe.reason_text` makes a sentence of each."""
