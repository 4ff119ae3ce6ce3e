"""What goes into the machine of a link, and what comes out: the words of `adapters/link/machine.py`.

They are named tuples. A class of attrs costs each launch half a millisecond, and there are many of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from reknit.core.agent.commands import Append, Beat
from reknit.core.job.founding import Life

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Batch
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job
    from reknit.core.job.reasons import Refusal


class Lane(Enum):
    """Who makes a call. The values name the threads."""

    READ = "reads"
    SAY = "says"
    BEAT = "beats"


# ---- calls: what a link wants from the journal ----


class Read(NamedTuple):
    """`Journal.read`."""

    after: int
    wait_s: float
    least: int = 1
    pause_s: float = 0.0
    """Seconds to wait before the call."""


class SendEntry(NamedTuple):
    """`Journal.append`."""

    token: str
    entry: Entry
    life: Life = Life()
    """The life of the journal that the agent had folded when it wanted the entry."""
    pause_s: float = 0.0


class SendBeat(NamedTuple):
    """`Journal.beat`."""

    beat: Beat
    pause_s: float = 0.0


Call = Read | SendEntry | SendBeat
LANES: dict[type[Call], Lane] = {Read: Lane.READ, SendEntry: Lane.SAY, SendBeat: Lane.BEAT}


# ---- inputs: what happens to a link, besides the agent's `Append` and `Beat` ----


class Folded(NamedTuple):
    """The agent has folded the read that it was told of last."""

    job: Job


class BatchRead(NamedTuple):
    """A `Read` has returned."""

    batch: Batch


class Appended(NamedTuple):
    """A `SendEntry` has returned."""

    is_taken: bool = True
    """The entry is in the journal. False: the journal is in another life, and has not written it."""


class Beaten(NamedTuple):
    """A `SendBeat` has returned."""

    counts: Mapping[Node, int]


class CallFailed(NamedTuple):
    """The call that this lane had under way has failed, and trying again may help."""

    lane: Lane
    why: str
    answers: bool = False
    """As in `Unavailable`."""


class Forbidden(NamedTuple):
    """A call has failed, and trying again does not help."""

    refusal: Refusal
    why: str


class LinkClosed(NamedTuple):
    """The agent has closed the link."""


Input = Append | Beat | Folded | BatchRead | Appended | Beaten | CallFailed | Forbidden | LinkClosed
