"""What is written in a job's journal: the only thing that agents share.

An entry is a fact in the past tense, small and immutable. One node says it. The union `Entry` is closed: a reader that
meets another kind must end (see `codec`). If it went on without the entry, its fold would differ from the others'.

1. An entry that is read twice changes nothing the second time, because a journal may hold an entry twice. Two entries
   are the same if they have the same kind, node, incarnation and round. An entry that names no node names its epoch, so
   that a late copy does not touch the next epoch. An entry that names a node needs no epoch: no incarnation of one
   epoch is live in the next.
2. No entry holds a time. A deadline that matters to the job becomes an entry of its own (`LastCall`, `Admit`,
   `GaveUp`, `Lost`). The fold decides whether the condition of the deadline still holds when it reaches the entry.
3. `fold` alone decides what an entry means.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import Attribute, field, frozen

from .validators import positive_seconds, refuse, seconds, whole

if TYPE_CHECKING:
    from typing import NewType

    NodeId = NewType("NodeId", str)
else:
    NodeId = str

FORMAT = 1
"""Version of the entries and of the fold. Agents of one job must agree on it."""


@frozen
class Node:
    """One incarnation of an agent's host.

    A new agent process on the host takes a new incarnation number. So does an agent that comes back after the other
    nodes have declared it lost.
    """

    id: NodeId
    incarnation: int = 0

    def __hash__(self) -> int:
        return hash(self.id)  # cheap: two incarnations of one node rarely meet in one set

    def __lt__(self, other: Node) -> bool:
        return (self.id, self.incarnation) < (other.id, other.incarnation)

    def __str__(self) -> str:
        return f"{self.id}.{self.incarnation}" if self.incarnation else self.id


class Admission(Enum):
    """When a node that joins a running job gets its place."""

    SOON = "soon"
    """A new round starts `Terms.settle_s` after it joined."""
    AT_FAILURE = "at-failure"
    """The node takes part when the running round ends for another reason."""
    NEVER = "never"
    """The node takes part only in place of a node that is gone, when the running round ends for another reason. No
    round has more nodes than the first."""


@frozen
class RestartPolicy:
    """How often a job may form a new round. A value out of range raises `ValueError`."""

    max_restarts: int = field(default=0, validator=whole(0))
    """Number of rounds that may end because workers failed. Such an end spends one restart, however many workers
    failed in the round."""
    max_unspent: int = field(default=1000, validator=whole(0))
    """Number of rounds that may end for another reason: nodes lost, leaving or admitted. The limit stops a job whose
    nodes come and go for ever."""
    backoff_s: float = field(default=0.0, validator=seconds)
    """Seconds that a node waits after the first failed round before it joins again. The wait doubles with each restart
    spent."""
    backoff_max_s: float = field(default=60.0, validator=seconds)
    """Upper bound of that wait, in seconds."""


@frozen
class Terms:
    """What all agents of a job must agree on. `Opened` fixes it. A value out of range raises `ValueError`."""

    min_nodes: int = field(default=1, validator=whole(1))
    """Number of nodes without which no round starts. At least 1."""
    max_nodes: int = field(default=1)
    """Upper bound on the nodes of a round. At least `min_nodes`."""
    restarts: RestartPolicy = RestartPolicy()
    admission: Admission = Admission.SOON
    join_timeout_s: float = field(default=600.0, validator=seconds)
    """A round that has fewer than `min_nodes` nodes for so many seconds is given up, and the job fails."""
    last_call_s: float = field(default=30.0, validator=seconds)
    """Seconds for which the first round waits for more nodes once `min_nodes` have joined."""
    settle_s: float = field(default=1.0, validator=seconds)
    """Seconds between the joining of a node to a running job and the round that admits it. With this wait ten nodes
    that come together cost one new round."""
    beat_s: float = field(default=1.0, validator=positive_seconds)
    """Seconds between two beats of a node."""
    silence_s: float = field(default=4.0)
    """A node whose counter stands still for so many seconds is lost. More than `beat_s`."""
    fence_s: float | None = field(default=None)
    """An agent that had no acknowledged beat for so many seconds kills its own workers. Less than `silence_s`. None: it
    never does."""
    format: int = FORMAT
    """Version of the entries and of the fold, as in `FORMAT`."""

    @max_nodes.validator
    def _not_below_the_minimum(self, attribute: Attribute[Any], value: int) -> None:
        whole(1)(self, attribute, value)
        if value < self.min_nodes:
            refuse(self, "max_nodes", value, f"at least min_nodes, which is {self.min_nodes}")

    @silence_s.validator
    def _longer_than_a_beat(self, attribute: Attribute[Any], value: float) -> None:
        positive_seconds(self, attribute, value)
        if value <= self.beat_s:
            refuse(self, "silence_s", value, f"longer than beat_s, which is {self.beat_s:g}")

    @fence_s.validator
    def _shorter_than_silence(self, attribute: Attribute[Any], value: float | None) -> None:
        if value is None:
            return
        positive_seconds(self, attribute, value)
        if value >= self.silence_s:
            refuse(self, "fence_s", value, f"shorter than silence_s, which is {self.silence_s:g}")


@frozen
class WorkerFailure:
    """How one worker failed, as its own agent saw it."""

    local_rank: int
    rank: int
    exitcode: int
    """As in torchelastic: a negative number means that the worker was killed by that signal. 126, 127 and 71 mean that
    the worker could not be started."""
    pid: int = 0
    """The pid of the worker that has ended with this exit code. 0: no process has, see `is_of_worker`."""
    message: str = ""
    """`Type: text` of the exception from the worker's error file, or why the worker could not be started."""
    traceback: str = ""
    """The traceback of that exception. Empty if none is known."""
    stderr: tuple[str, ...] = ()
    """The last lines that the worker wrote to its stderr, as far as the keeper read them."""
    log: str = ""
    """Folder or file with the worker's output. Empty if the output is in no file."""

    @property
    def is_of_worker(self) -> bool:
        """Whether a process of the worker was seen to end with `exitcode`. False: reknit has chosen `exitcode`, because
        the worker could not be started, or was lost with its keeper.

        The pid tells this: whoever has seen a process end knows its pid. A field of its own could contradict the pid.
        """
        return self.pid != 0


@frozen
class Opened:
    """Opens `epoch` of the job with these terms. The fold ignores it unless it waits for exactly this epoch."""

    terms: Terms
    journal: str
    """The id of the journal: the nonce of the agent that opened it."""
    epoch: int = 0
    """0 in a new journal. One more each time that an ended job begins again in the same journal."""


@frozen
class Joined:
    """`node` has no workers running on its host and offers these places for `round`."""

    node: Node
    nonce: str
    """Random text that the agent process has drawn. It tells a repeated `Joined` from that of a second agent with the
    same id."""
    round: int
    address: str
    port: int
    """Port that is reserved on this node: the MASTER_PORT of the round if the node becomes group rank 0."""
    role: str = "default"
    local_world_size: int = 1
    """Number of workers that this node will start."""
    rank_hint: int | None = None
    """The group rank that the node wishes in the first round. None: it has no wish."""


@frozen
class LastCall:
    """The first round has waited for more nodes for `Terms.last_call_s`. It may start with those that have joined."""

    round: int
    epoch: int = 0


@frozen
class Admit:
    """Standbys have waited for `Terms.settle_s`. `round` shall be formed with them."""

    round: int
    epoch: int = 0


@frozen
class GaveUp:
    """`round` had fewer than `Terms.min_nodes` nodes for `Terms.join_timeout_s`."""

    round: int
    epoch: int = 0


@frozen
class Failed:
    """Workers of `node` failed. What follows for the job is decided by the fold."""

    node: Node
    round: int
    failures: tuple[WorkerFailure, ...]


@frozen
class Succeeded:
    """All workers of `node` exited with 0."""

    node: Node
    round: int


@frozen
class Lost:
    """`by` declares that `node` fell silent. This incarnation of `node` is gone for ever."""

    node: Node
    by: Node


@frozen
class Leaving:
    """`node` was told to leave. Its workers may still run."""

    node: Node


@frozen
class Left:
    """`node` says goodbye. None of its workers runs, except for the processes in `stuck`."""

    node: Node
    stuck: tuple[int, ...] = ()
    """Process numbers that survived SIGKILL. Empty in most cases."""


@frozen
class Aborted:
    """An operator ended the job."""

    why: str
    epoch: int = 0


@frozen
class Filler:
    """Means nothing. A reader puts it into the slot of a writer that died between reserving the slot and writing it."""


Entry = Opened | Joined | LastCall | Admit | GaveUp | Failed | Succeeded | Lost | Leaving | Left | Aborted | Filler
