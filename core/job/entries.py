"""What is written in a job's journal: the only thing that agents share.

An entry is a fact in the past tense, small, immutable and said by one node. The union `Entry` is closed:
a reader that meets another kind must end (see `codec`), because two folds that differ are two jobs.

1. Entries are idempotent by (kind, node, incarnation, round): the journal is at-least-once. Those that name no node
   name the epoch: a late copy must not touch the next one. A node's do not: all incarnations of an epoch are gone in
   the next.
2. No entry holds a time. A deadline that matters to the job becomes an entry of its own (`LastCall`, `Admit`,
   `GaveUp`, `Lost`), and the fold decides whether its condition still holds when it is reached.
3. What an entry means is decided in `fold` alone.
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
    """One incarnation of an agent's host. Every new agent process on the host is a new one, and so is an agent that
    comes back after it was counted out."""

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
    """The node takes part only as a replacement, when the running round ends for another reason. No round has more
    nodes than the first."""


@frozen
class RestartPolicy:
    """How often a job may be knit together again. Nonsense raises `ValueError`."""

    max_restarts: int = field(default=0, validator=whole(0))
    """Failures that the whole job survives. A round that ends because of one or more spends 1."""
    max_unspent: int = field(default=1000, validator=whole(0))
    """Rounds that may end for another reason: nodes lost, leaving or admitted. The limit stops a job whose nodes come
    and go for ever."""
    backoff_s: float = field(default=0.0, validator=seconds)
    """Wait before joining again after the first restart; doubles with each restart spent."""
    backoff_max_s: float = field(default=60.0, validator=seconds)


@frozen
class Terms:
    """What all agents of a job must agree on. Fixed by `Opened`. Nonsense raises `ValueError`."""

    min_nodes: int = field(default=1, validator=whole(1))
    """At least 1."""
    max_nodes: int = field(default=1)
    """At least `min_nodes`."""
    restarts: RestartPolicy = RestartPolicy()
    admission: Admission = Admission.SOON
    join_timeout_s: float = field(default=600.0, validator=seconds)
    """A round that has too few nodes for that long is given up."""
    last_call_s: float = field(default=30.0, validator=seconds)
    """Wait for newcomers once the minimum has joined the first round."""
    settle_s: float = field(default=1.0, validator=seconds)
    """Wait between a node's joining a running job and the round that admits it, so that ten arrivals cost one round."""
    beat_s: float = field(default=1.0, validator=positive_seconds)
    """Time between two beats of a node."""
    silence_s: float = field(default=4.0)
    """A node whose counter stands still for that long is lost. More than `beat_s`."""
    fence_s: float | None = field(default=None)
    """Without an acknowledged beat for that long an agent kills its own workers. None: never. Less than `silence_s`."""
    format: int = FORMAT

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
    """Negative: killed by that signal (torchelastic's convention). 126, 127, 71: it could not be started."""
    pid: int = 0
    """Process id of the worker that has ended with this exit code. 0: no process has, see `is_of_worker`."""
    message: str = ""
    """`Type: text` of the exception from the worker's error file, or why it could not be started."""
    traceback: str = ""
    stderr: tuple[str, ...] = ()
    """Its last lines."""
    log: str = ""
    """Folder or file with its output; empty if there is none."""

    @property
    def is_of_worker(self) -> bool:
        """Whether a process of the worker was seen to end with `exitcode`. False: reknit has chosen `exitcode`, because
        the worker could not be started, or was lost with its keeper.

        The pid tells this: whoever has seen a process end knows its pid. A field of its own could contradict the pid.
        """
        return self.pid != 0


@frozen
class Opened:
    """The job's terms. Ignored unless it opens exactly the `epoch` that the fold waits for."""

    terms: Terms
    journal: str
    """The id of the journal: the nonce of the agent that opened it."""
    epoch: int = 0


@frozen
class Joined:
    """`node` has no workers running on its host and offers these places for `round`."""

    node: Node
    nonce: str
    """Drawn by the agent process: tells a repetition from a second agent with the same id."""
    round: int
    address: str
    port: int
    """Reserved on this node: MASTER_PORT of the round if the node becomes group rank 0."""
    role: str = "default"
    local_world_size: int = 1
    rank_hint: int | None = None
    """Wished group rank in the first round."""


@frozen
class LastCall:
    """Newcomers have been waited for long enough."""

    round: int
    epoch: int = 0


@frozen
class Admit:
    """Standbys have waited long enough for `round` to be formed with them."""

    round: int
    epoch: int = 0


@frozen
class GaveUp:
    """Too few nodes for too long."""

    round: int
    epoch: int = 0


@frozen
class Failed:
    """Workers of `node` failed. Says nothing about the job: the fold judges."""

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
    """`node` fell silent, says `by`. That incarnation is gone for ever."""

    node: Node
    by: Node


@frozen
class Leaving:
    """`node` was told to leave. Its workers may still run."""

    node: Node


@frozen
class Left:
    """`node` says goodbye: no worker of it runs, but for the processes in `stuck`, which could not be killed."""

    node: Node
    stuck: tuple[int, ...] = ()


@frozen
class Aborted:
    """An operator ended the job."""

    why: str
    epoch: int = 0


@frozen
class Filler:
    """Said by a reader in place of a writer that died between reserving a slot and writing it."""


Entry = Opened | Joined | LastCall | Admit | GaveUp | Failed | Succeeded | Lost | Leaving | Left | Aborted | Filler
