"""The state of one node's agent. A value: `step` makes the next one, nothing else changes it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from .commands import Result
from .entries import Entry, Node, NodeId, Terms
from .events import WorkerExit
from .job import Job, Outcome
from .ranks import Assignment
from .reasons import Reason
from .states import WorkerState
from .values import EMPTY, frozen


@frozen
class Spec:
    """What an agent is told once. Times in seconds."""

    node_id: NodeId
    """Stable: the same when the host's agent is started again."""
    address: str
    """Where other nodes reach this one: MASTER_ADDR when it is group rank 0."""
    terms: Terms = Terms()
    role: str = "default"
    local_world_size: int = 1
    """At least 1."""
    rank_hint: int | None = None
    shares_journal: bool = True
    """False: no other agent can ever meet this one, so it beats to nobody."""
    hosts_journal: bool = False
    """The journal ends with this agent, so it leaves last."""
    opens_after_s: float = 0.0
    """How long it leaves it to others to fix the terms: to the host of the journal, which nobody can do without."""
    grace_s: float = 30.0
    """Between the signal that stops workers and SIGKILL."""
    resay_s: float = 2.0
    """An entry that does not show up in the journal is said again after this."""
    store_timeout_s: float = 300.0
    """The longest outage of the journal that workers are kept through, and the longest wait for a last word."""


@frozen
class Workers:
    """This node's workers of the last round that it took part in."""

    state: WorkerState = WorkerState.INIT
    node: Node | None = None
    """The incarnation that started them. None before the first start."""
    epoch: int = 0
    round: int = -1
    alive: bool = False
    """Processes may exist: from `StartWorkers` until `WorkersStopped`."""
    stopping: Reason | None = None
    kill_at: float = 0.0
    """When SIGKILL follows, while stopping."""
    exits: Mapping[int, WorkerExit] = EMPTY
    """By local rank; those that ended by themselves."""
    assignment: Assignment | None = None
    stuck: tuple[int, ...] = ()


@frozen
class StopRequest:
    """A wish that this node leaves."""

    signal: int
    """The first: the one that is forwarded."""
    latest: int
    at: float
    """Of the latest."""
    count: int
    kill_at: float
    """Workers that are still there then are killed."""


@frozen
class Pulse:
    """Beats sent and silences heard (see `watching`)."""

    beat_at: float | None = None
    """When the last beat was sent."""
    asked_at: float | None = None
    """When the first was sent of those that are not acknowledged yet."""
    proven_at: float | None = None
    """When the last one that came back had been sent at the latest: until then the others have surely heard of it."""
    acked_at: float | None = None
    """When the last one came back: `Counters` in which this node's own counter had moved."""
    spares_until: float | None = None
    """Nobody's silence is counted until then, after a pause between two of its own reads."""
    count: int = -1
    gap: bool = False
    """Nothing was acknowledged for longer than the silence limit, and the journal has not been read since."""
    watch: tuple[Node, ...] = ()
    heard: Mapping[Node, tuple[int, float]] = EMPTY
    """Per watched node its counter, and for how many seconds of fresh reads it stood still."""


class Timer(Enum):
    """What an agent can wait for. A timer runs while its condition holds, since the step that first saw it hold."""

    LAST_CALL = "last call"
    GIVE_UP = "give up"
    ADMIT = "admit"
    BACKOFF = "backoff"
    ECHO = "echo"
    REOPEN = "reopen"
    OUTAGE = "outage"
    OPEN = "open"
    LINGER = "linger"


@frozen
class Agent:
    """One node's agent. Start with `Agent(spec)` and the event `Started`."""

    spec: Spec
    at: float = 0.0
    """The time of the last event."""
    nonce: str = ""
    me: Node = Node(NodeId(""))
    port: int | None = None
    """The bootstrap port for the next `Joined`. None while workers use it."""
    offered: tuple[Node, int] | None = None
    """Incarnation and round of the `Joined` that has offered it."""
    job: Job = Job()
    was_read: bool = False
    epoch: int | None = None
    """The epoch that this agent takes part in. None until it has read the terms."""
    was_live: bool = False
    """`me` was seen in the journal."""
    joined: bool = False
    """`me` has said `Joined`, which may be on its way."""
    is_renewed: bool = False
    """`me` is not the first incarnation of this agent: it was counted out before, or had to count on it."""
    workers: Workers = Workers()
    leaving: StopRequest | None = None
    outage: str | None = None
    """Why the journal cannot be reached, while it cannot."""
    end: Reason | None = None
    """Why this agent must end whatever the job does."""
    said: Mapping[Entry, float] = EMPTY
    """What was said and is not in the journal yet, and when."""
    since: Mapping[tuple[Timer, int], float] = EMPTY
    """Running timers, per round."""
    pulse: Pulse = Pulse()
    wakes_at: float | None = None
    """The next deadline. None: only an event can change anything."""
    result: Result | None = None
    """Set once, with `Finish`."""

    @property
    def is_departing(self) -> bool:
        """The job is over, or this node must leave it: what is left to say is goodbye."""
        return bool(self.outcome is not None or self.leaving is not None or self.workers.stuck)

    @property
    def outcome(self) -> Outcome | None:
        """How this agent's epoch of the job ended, however long ago."""
        if self.epoch is None:
            return None
        return self.job.past[self.epoch] if self.epoch < self.job.epoch else self.job.outcome
