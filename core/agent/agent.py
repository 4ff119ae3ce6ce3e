"""The state of one node's agent. A value: `step` makes the next one, nothing else changes it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import field, frozen

from reknit.core.job.entries import Entry, Node, NodeId, Terms
from reknit.core.job.job import EMPTY, Job, Outcome
from reknit.core.job.ranks import Assignment
from reknit.core.job.validators import name, positive_seconds, seconds, whole

from .commands import Result
from .events import WorkerExit
from .reasons import AgentEnd, StopReason
from .states import WorkerState


@frozen
class Spec:
    """What an agent is told once. Times are in seconds. A value out of range raises `ValueError`."""

    node_id: NodeId = field(validator=name)
    """Stable: the same when the host's agent is started again."""
    address: str = field(validator=name)
    """Where other nodes reach this one: MASTER_ADDR when it is group rank 0."""
    terms: Terms = Terms()
    role: str = field(default="default", validator=name)
    local_world_size: int = field(default=1, validator=whole(1))
    """Workers on this node, at least 1."""
    rank_hint: int | None = None
    shares_journal: bool = True
    """False: no other agent can ever meet this one, so it beats to nobody."""
    hosts_journal: bool = False
    """The journal ends with this agent, so it leaves last."""
    opens_after_s: float = field(default=0.0, validator=seconds)
    """How long it leaves it to others to fix the terms: to the host of the journal, which nobody can do without."""
    grace_s: float = field(default=30.0, validator=seconds)
    """Between the signal that stops workers and SIGKILL."""
    resay_s: float = field(default=2.0, validator=positive_seconds)
    """An entry that does not show up in the journal is said again after this."""
    store_timeout_s: float = field(default=300.0, validator=seconds)
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
    up_at: float | None = None
    """When the adapter reported that all of them run. None until then."""
    stopping: StopReason | None = None
    kill_at: float = 0.0
    """When SIGKILL follows, while stopping."""
    exits: Mapping[int, WorkerExit] = EMPTY
    """The workers that ended by themselves, by local rank."""
    assignment: Assignment | None = None
    stuck: tuple[int, ...] = ()


@frozen
class StopRequest:
    """Somebody wants this node to leave. Repeated requests are counted in one value."""

    signal: int
    """The signal of the first request. The workers get it."""
    latest: int
    """The signal of the latest request."""
    at: float
    """When the latest request came."""
    count: int
    """How many requests came. A repetition of the same signal within `step.REPEAT_S` is not counted."""
    kill_at: float
    """Workers that are still alive at this time are killed."""


@frozen
class Pulse:
    """Beats sent and silences heard (see `watching`)."""

    beat_at: float | None = None
    """When the last beat was sent."""
    asked_at: float | None = None
    """Send time of the oldest beat that is not acknowledged. None if all are."""
    proven_at: float | None = None
    """Send time of the newest beat that was acknowledged. Up to this time every other node can have heard from this
    node."""
    acked_at: float | None = None
    """When the latest acknowledgement arrived: `Counters` in which this node's own counter had moved."""
    spares_until: float | None = None
    """This node counts nobody's silence before this time. It is set after a long pause between two of its own reads."""
    count: int = -1
    """This node's own counter, as read last. -1 before the first read."""
    gap: bool = False
    """Nothing was acknowledged for longer than the silence limit, and the journal has not been read since."""
    watch: tuple[Node, ...] = ()
    """The nodes whose counters the latest beat asked for."""
    heard: Mapping[Node, tuple[int, float]] = EMPTY
    """Per watched node: its counter, and for how many seconds of fresh reads the counter has stood still."""


class Timer(Enum):
    """What an agent can wait for. A timer starts in the step that finds its condition true, and runs as long."""

    LAST_CALL = "last call"
    GIVE_UP = "give up"
    ADMIT = "admit"
    BACKOFF = "backoff"
    ECHO = "echo"
    REOPEN = "reopen"
    OUTAGE = "outage"
    OPEN = "open"
    LINGER = "linger"


class Stage(Enum):
    """How far this incarnation has come into the job.

        STARTING -> READING -> OUTSIDE -> JOINING -> LIVE
                                  ^__________|_________|      as the next incarnation

    The stages in which the rest of the agent's life can be:

    | stage | `epoch` | `is_renewed` | workers alive |
    |---|---|---|---|
    | STARTING | None | no | no |
    | READING | None | yes or no | no |
    | OUTSIDE | set | yes or no | of an incarnation before |
    | JOINING | set | yes or no | of an incarnation before |
    | LIVE | set | yes or no | yes, its own |

    `leaving`, `outage` and `end` may be set in every stage. `result` is set last, and then no worker is alive.
    """

    STARTING = "starting"
    """The journal has not been read."""
    READING = "reading"
    """The journal was read. It has no terms yet, or its job is over, or its terms are not this agent's."""
    OUTSIDE = "outside"
    """The agent takes part in the job's epoch, and `me` has not said `Joined`."""
    JOINING = "joining"
    """`me` has said `Joined`, which may be on its way."""
    LIVE = "live"
    """`me` was seen in the journal. It may have been declared lost since. The job tells."""


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
    """Incarnation and round of the `Joined` that has offered `port`. None: no `Joined` has."""
    job: Job = Job()
    stage: Stage = Stage.STARTING
    epoch: int | None = None
    """The epoch that this agent takes part in. None until it has read the terms."""
    is_renewed: bool = False
    """True once this agent has taken a new incarnation number. The agent does so when another node has declared it
    lost, or when it was silent for so long that it must assume so."""
    workers: Workers = Workers()
    quick: int = 0
    """Quick failures of this node's workers in a row: see `working.QUICK_S`. A round that lasted sets it to 0."""
    leaving: StopRequest | None = None
    outage: str | None = None
    """Why the journal cannot be reached, while it cannot."""
    end: AgentEnd | None = None
    """Why this agent must end, whatever the job does. None: it need not."""
    said: Mapping[Entry, float] = EMPTY
    """The entries that this agent has said and not yet seen in the journal, and when it said each of them last."""
    since: Mapping[tuple[Timer, int], float] = EMPTY
    """The running timers, each with the round that it is about, and when it started."""
    pulse: Pulse = Pulse()
    wakes_at: float | None = None
    """The next deadline. None: only an event can change anything."""
    result: Result | None = None
    """Set once, with `Finish`."""

    @property
    def was_read(self) -> bool:
        """The journal was read at least once."""
        return self.stage is not Stage.STARTING

    @property
    def has_joined(self) -> bool:
        """`me` has said `Joined`: the other nodes may know of it."""
        return self.stage is Stage.LIVE or self.stage is Stage.JOINING

    @property
    def was_live(self) -> bool:
        """`me` was seen in the journal."""
        return self.stage is Stage.LIVE

    @property
    def is_departing(self) -> bool:
        """The job is over, or this node leaves it. All that this node still says is a report and goodbye."""
        return bool(self.outcome is not None or self.leaving is not None or self.workers.stuck)

    @property
    def outcome(self) -> Outcome | None:
        """How this agent's epoch of the job ended, however long ago."""
        if self.epoch is None:
            return None
        return self.job.past[self.epoch] if self.epoch < self.job.epoch else self.job.outcome
