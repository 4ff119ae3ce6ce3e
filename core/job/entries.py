"""What is written in a job's journal: the only thing that agents share.

An entry is a fact in the past tense, small and immutable. One node says it. The union `Entry` is closed: a reader that
meets another kind must end (see `codec`). If it went on without the entry, its fold would differ from the others'.

1. An entry that is read twice changes nothing the second time, because a journal may hold an entry twice. Two entries
   are the same if they have the same kind, node, incarnation and round. An entry that names no node names its epoch, so
   that a late copy does not touch the next epoch. An entry that names a node needs no epoch: no incarnation of one
   epoch is live in the next.
2. No entry holds a time. A deadline that matters to the job becomes an entry of its own (`LastCall`, `Admit`,
   `Steady`, `GaveUp`, `Lost`). The fold decides whether the condition of the deadline still holds when it reaches the
   entry.
3. `fold` alone decides what an entry means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import Attribute, field, frozen

from .validators import of_type, positive_seconds, refuse, seconds, whole
from .workers import WorkerFailure

if TYPE_CHECKING:
    from typing import NewType

    NodeId = NewType("NodeId", str)
else:
    NodeId = str

FORMAT = 6
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
    """When a node that joins a running job gets its place.

    `SOON`: a new round starts `Terms.settle_s` after the node has joined.
    `AT_FAILURE`: the node takes part when the running round ends for another reason.
    `NEVER`: the node takes part only in place of a node that is gone, when the running round ends for another reason.
    No round has more nodes than the first.
    """

    SOON = "soon"
    AT_FAILURE = "at-failure"
    NEVER = "never"


@frozen
class RestartPolicy:
    """How often a job may form a new round. A value out of range raises `ValueError`."""

    max_restarts: int = field(default=0, validator=whole(0))
    """Number of restarts that the job may spend. The job spends one when a round ends because workers failed. It is one
    restart even if several workers failed in the round. 0: the first failure ends the job."""
    max_unspent: int = field(default=1000, validator=whole(0))
    """Number of rounds that may end for another reason: nodes lost, leaving or admitted. The limit stops a job whose
    nodes come and go for ever. A round that runs for `steady_s` sets the count to 0."""
    backoff_s: float = field(default=0.0, validator=seconds)
    """Seconds that a node waits after the first failed round before it joins again. The wait doubles with each restart
    spent."""
    backoff_max_s: float = field(default=60.0, validator=seconds)
    """Upper bound of that wait, in seconds."""
    renews: bool = field(default=False, validator=of_type(bool))
    """Whether a round that runs for `steady_s` also gives back the restarts that were spent."""
    steady_s: float = field(default=60.0, validator=positive_seconds)
    """A round that runs for so many seconds is steady: the job has come out of the trouble that it had before. More
    than 0. Infinity: no round is ever steady."""


@frozen
class Terms:
    """What all agents of a job must agree on. `Opened` fixes it. A value out of range raises `ValueError`.

        Terms(min_nodes=2, max_nodes=4, restarts=RestartPolicy(max_restarts=3))

    Every field has a default. The defaults are for a job with one node that survives no failure.
    """

    min_nodes: int = field(default=1, validator=whole(1))
    """Number of nodes without which no round starts. At least 1."""
    max_nodes: int = field(default=1)
    """Upper bound on the nodes of a round. At least `min_nodes`."""
    restarts: RestartPolicy = field(default=RestartPolicy(), validator=of_type(RestartPolicy))
    """How often the job may form a new round."""
    admission: Admission = field(default=Admission.SOON, validator=of_type(Admission))
    """When a node that joins a running job takes part: see `Admission`."""
    join_timeout_s: float = field(default=600.0, validator=seconds)
    """A round that has too few nodes for so many seconds is given up, and the job fails. Too few are fewer than
    `min_nodes`."""
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
    """Names the agent process, and how often it has begun anew (`Agent.speaker`). It tells a repeated `Joined` from
    that of a second agent with the same id."""
    round: int
    address: str
    port: int
    """Port that is reserved on this node: the MASTER_PORT of the round if the node becomes group rank 0."""
    role: str = "default"
    local_world_size: int = 1
    """Number of workers that this node will start."""
    rank_hint: int | None = None
    """The group rank that the node wishes in the first round. None: it has no wish."""
    seen: int = -1
    """The highest incarnation of this stable id that the agent had read. -1: none. A new incarnation counts only if
    this is the highest one in the journal, or if the live one has the same nonce."""


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
class Steady:
    """`round` has run for `RestartPolicy.steady_s`."""

    round: int
    epoch: int = 0


@frozen
class GaveUp:
    """`round` had too few nodes for `Terms.join_timeout_s`."""

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
    seen: int = -1
    """As in `Joined`. It matters if the node leaves before its `Joined` is in the journal."""


@frozen
class Aborted:
    """An operator ended the job."""

    why: str
    epoch: int = 0


@frozen
class Filler:
    """Means nothing. A reader puts it into the slot of a writer that died between reserving the slot and writing it."""


Entry = (
    Opened | Joined | LastCall | Admit | Steady | GaveUp | Failed | Succeeded | Lost | Leaving | Left | Aborted | Filler
)


class Entries(tuple[Entry, ...]):
    """Entries that were read together, in the journal's order. It knows what it holds: it finds an entry as fast among
    thousands as among few, once one of the agents that share the batch has looked for one."""

    folded: tuple[object, object] | None = None
    """A job, and what these entries make of it. `fold_all` notes it, so that agents that share the batch and the job
    fold it once. None: nobody has folded the batch."""

    def __contains__(self, entry: object) -> bool:
        node: Node | None = getattr(entry, "node", None)
        if len(self) < FEW or node is None:
            return tuple.__contains__(self, entry)
        latest = self._latest.get(node.id)
        return latest is not None and (latest == entry or tuple.__contains__(self, entry))

    @cached_property
    def names(self) -> Set[NodeId]:
        """The ids of the nodes that they name."""
        return self._latest.keys()

    @cached_property
    def kinds(self) -> Sequence[frozenset[Node]]:
        """The nodes that they name, in groups that are named by entries of the same types."""
        naming = [(node, type(entry)) for entry in self if (node := getattr(entry, "node", None)) is not None]
        types = dict(naming)
        if len(types) == len(naming) and len(set(types.values())) == 1:  # a crowd of nodes that come
            return [frozenset(types)]
        each: dict[Node, tuple[type, ...]] = {}
        for node, its in naming:
            each[node] = (*each.get(node, ()), its)
        found: dict[tuple[type, ...], list[Node]] = {}
        for node, all_its in each.items():
            found.setdefault(all_its, []).append(node)
        return [*map(frozenset, found.values())]

    @cached_property
    def _latest(self) -> Mapping[NodeId, Entry]:
        """The last of the entries that name each node."""
        return {node.id: entry for entry in self if (node := getattr(entry, "node", None)) is not None}


FEW = 16
"""A batch of fewer entries is looked through."""
