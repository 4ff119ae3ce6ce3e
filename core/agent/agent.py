"""The state of one node's agent. A value: `step` makes the next one, nothing else changes it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import evolve, field, frozen

from reknit.core.job.entries import Entry, Node, NodeId, Terms
from reknit.core.job.founding import Life
from reknit.core.job.job import EMPTY, Job, Outcome
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.validators import name, positive_seconds, seconds, whole
from reknit.core.job.workers import Assignment

from .commands import Result
from .reasons import AgentEnd, SignalReceived, StopReason
from .states import WorkerState
from .worker_words import WorkerExit


@frozen
class Spec:
    """What an agent must know about its node and its job. Times are in seconds. A value out of range raises
    `ValueError`."""

    node_id: NodeId = field(validator=name)
    """Name of the node, the same each time when its agent is started."""
    address: str = field(validator=name)
    """The address at which the workers of other nodes reach this node. It is MASTER_ADDR if the node is group rank
    0."""
    terms: Terms = Terms()
    """What all agents of the job must agree on."""
    role: str = field(default="default", validator=name)
    local_world_size: int = field(default=1, validator=whole(1))
    """Number of workers on this node, at least 1."""
    rank_hint: int | None = None
    """Wished group rank in the first round, from 0. None: no wish."""
    shares_journal: bool = True
    """Other agents can read this journal. False: this agent is alone, so it does not beat."""
    hosts_journal: bool = False
    """The journal ends when this agent ends. So this agent leaves last."""
    opens_after_s: float = field(default=0.0, validator=seconds)
    """How long this agent waits for another agent to append `Opened`, before it does so itself. Agents that do not host
    the store wait, because the terms of the host shall hold. 0: it does not wait."""
    grace_s: float = field(default=30.0, validator=seconds)
    """Time between the signal that stops workers and SIGKILL."""
    resay_s: float = field(default=2.0, validator=positive_seconds)
    """An entry that does not appear in the journal is appended again after this time. Above 0."""
    store_timeout_s: float = field(default=300.0, validator=seconds)
    """The agent ends, and its workers with it, when round trips of some kind to the store have failed for so long. When
    the agent ends for another reason, it tries at most so long to append its last entries. If it hosts the journal, it
    stays for the other nodes, at most so long after the end of the job."""
    stop_s: float = field(default=10.0, validator=seconds)
    """Workers that are not reported to be gone so long after SIGKILL show that their keeper hangs. Then this node takes
    part no more (`contact.takes_part`). A keeper reports processes that survive SIGKILL after 5 s. Infinite if
    something else stops the workers, which may take as long as it likes."""


@frozen
class NodeWorkers:
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
    kill_at: float | None = None
    """The latest time at which SIGKILL follows. None: nothing is being stopped."""
    exits: Mapping[int, WorkerExit] = EMPTY
    """The workers that ended by themselves, by local rank."""
    assignment: Assignment | None = None
    """Their ranks: as `StartWorkers` asked for, or as `WorkersStarted` has reported."""


# ---- the agent's life ------------------------------------------------------------------------------------------------


@frozen
class StopRequest:
    """Somebody wants this node to leave. Repeated requests are counted in one value."""

    signal: int
    """The signal of the first request. The workers get it."""
    latest: int
    """The signal of the latest request."""
    at: float
    """When the latest request came."""
    kill_at: float
    """Workers that are still alive at this time are killed."""
    count: int = 1
    """How many requests came. A repetition of the same signal within `lifecycle.REPEAT_S` is not counted. A budget that
    was spent before counts as one."""
    is_late: bool = False
    """The first request came after this agent had read the end of the job."""


@frozen
class Causes:
    """Why this agent ends. There may be several causes, and none is taken back. `lifecycle` says who sets each, and
    `lifecycle.result_of` ranks them."""

    request: StopRequest | None = None
    """Somebody wants this node to leave."""
    budget: BudgetSpent | None = None
    """This node's workers have failed, and it bears no further failure (`RestartsLimited`)."""
    unable: AgentEnd | None = None
    """Why this agent cannot take part in the job, or cannot any longer, whatever the job does."""
    outcome: Outcome | None = None
    """The job has ended: how this agent's epoch ended, as this agent has read it."""
    stuck: tuple[int, ...] = ()
    """The ids (pid) of this node's processes that survive SIGKILL."""

    @property
    def why_leaving(self) -> SignalReceived | BudgetSpent | None:
        """Why this node leaves, whether or not the job goes on. None: it does not."""
        if self.budget is not None:
            return self.budget
        return None if self.request is None else SignalReceived(self.request.signal)

    @property
    def is_departing(self) -> bool:
        """The job is over, or this node leaves it. All that this node still says is that it leaves, a report and
        goodbye."""
        return bool(self.outcome is not None or self.why_leaving is not None or self.stuck)


@frozen
class Working:
    """The agent takes part in the job, or waits until it can."""


@frozen
class Stopping:
    """Workers of this node may be alive. They are being stopped."""


@frozen
class Parting:
    """No worker is left. The agent says what it owes, and goodbye, and waits until the journal shows both. One that can
    take no part says nothing, and ends at once."""

    since: float
    """When it began to wait. It begins anew when it reads the end of the job."""


@frozen
class Serving:
    """No worker is left. The agent hosts the store, and stays for the other nodes that use it."""

    since: float
    """When it began to wait. It begins anew when it reads the end of the job."""


@frozen
class Ending:
    causes: Causes
    phase: Stopping | Parting | Serving


@frozen
class Done:
    """The agent has given `Finish`. Nothing changes it any more."""

    causes: Causes
    result: Result


# ---- the store and the other nodes -----------------------------------------------------------------------------------


@frozen
class Contact:
    """This agent's contact with the store: its beats, its reads, and an outage. Times are those of the agent's clock,
    and None if there was no such moment.

        beat_at   a beat is sent
        asked_at  the first of the beats with the latest count is sent
        proven_at the same, of the latest count that was acknowledged
        acked_at  that acknowledgement arrives

    Beats and the gap are the matter of `contact`. `silence.heard` notes acknowledgements, `incarnation.read` reads,
    `lifecycle.journal_failed` an outage, and `timers.after_sleep` that the agent was suspended in it."""

    beat_at: float | None = None
    """When the last beat was sent."""
    asked_at: float | None = None
    """When the count of the latest beat was sent first."""
    proven_at: float | None = None
    """When the newest acknowledged count was sent first. The count was in the store at some time after this, so the
    other nodes may have counted this node's silence from this moment on."""
    acked_at: float | None = None
    """When the latest acknowledgement arrived: `Counters` in which this node's own counter had moved."""
    read_at: float | None = None
    """When the journal was read last."""
    sent: int = 0
    """The count of the latest beat. It grows only while this node takes part (`contact.takes_part`). 0 before the first
    beat."""
    count: int = 0
    """The newest count that was acknowledged. 0: none was."""
    gap: bool = False
    """No new count was acknowledged for the silence limit. It ends when a new count was acknowledged and the journal is
    read after that."""
    outage: str | None = None
    """Why the store cannot be used. None: no outage is reported."""
    answers: bool = False
    """In this outage, the store has answered the call that failed last, and something else was missing."""
    overslept: bool = False
    """In the outage that lasts, this agent was suspended until its patience was over, and tries once more."""


@frozen
class Heard:
    """What this agent knows of a node that it watches."""

    count: int
    """The node's counter, as read last."""
    silent_s: float = 0.0
    """Seconds, from one fresh read to the next, in which the counter has stood still. Less than 0: it has moved since
    the last fresh read."""
    spared_s: float = 0.0
    """How many of these seconds do not count, because this agent was cut off meanwhile (see `silence.spare_s`)."""


@frozen
class Silence:
    """What this agent hears of the nodes that it watches (see `silence`)."""

    watch: tuple[Node, ...] = ()
    """The nodes whose counters the latest beat asked for."""
    heard: Mapping[Node, Heard] = EMPTY
    """The watched nodes."""
    heard_at: float | None = None
    """When counters were read last. None: never."""
    spares_until: float | None = None
    """A node that this agent begins to watch before this time is forgiven the time that is left until then. It is set
    after a long pause between two of the agent's own reads."""


class Timer(Enum):
    """What an agent can wait for. A timer starts in the step that finds its condition true, and runs as long as the
    condition holds."""

    LAST_CALL = "last call"
    GIVE_UP = "give up"
    ADMIT = "admit"
    STEADY = "steady"
    BACKOFF = "backoff"
    ECHO = "echo"
    REOPEN = "reopen"
    OUTAGE = "outage"
    OPEN = "open"


class Stage(Enum):
    """How far this incarnation has come into the job.

        STARTING -> READING -> OUTSIDE -> JOINING -> LIVE
                                  ^__________|_________|      as the next incarnation

    What can hold in each stage:

    | stage | `epoch` | `is_renewed` | workers alive |
    |---|---|---|---|
    | STARTING | None | no | no |
    | READING | None | yes or no | no |
    | OUTSIDE | set | yes or no | of an incarnation before |
    | JOINING | set | yes or no | no |
    | LIVE | set | yes or no | yes, its own |

    Each stage may be that of an agent that works, ends or is done (`Agent.lifecycle`).
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
    """Random text that is unique to this process. Empty before `Started`."""
    births: int = 0
    """How often this agent has begun anew, because it has come to another journal."""
    me: Node = Node(NodeId(""))
    """The incarnation as which this agent speaks."""
    port: int | None = None
    """The bootstrap port for the next `Joined`. None while workers use it."""
    offered: tuple[Node, int] | None = None
    """Incarnation and round of the `Joined` that has offered `port`. None: no `Joined` has. The round is -1 if it was
    another life of the journal."""
    life: Life = Life()
    """The life of the journal that was read last."""
    job: Job = Job()
    """The fold of what was read of the journal."""
    stage: Stage = Stage.STARTING
    epoch: int | None = None
    """The epoch that this agent takes part in. None until it has read the terms."""
    epochs_before: Mapping[str, int] = EMPTY
    """The epochs in which this agent took part before it began anew, by the id of the journal."""
    is_renewed: bool = False
    """True once this agent has taken a new incarnation number (`incarnation` says when)."""
    workers: NodeWorkers = NodeWorkers()
    lifecycle: Working | Ending | Done = Working()
    """Whether this agent takes part, ends or has ended, and why."""
    quick: int = 0
    """Quick failures of this node's workers in a row: see `workers.QUICK_S`. A round that lasted sets it to 0."""
    max_restarts: int | None = None
    """This node bears no failure of its workers when the job has spent so many restarts (`RestartsLimited`). None: it
    bears what the job bears."""
    contact: Contact = Contact()
    silence: Silence = Silence()
    said: Mapping[Entry, float] = EMPTY
    """The entries that this agent has said and not yet seen in the journal, and when it said each of them last."""
    unread: Mapping[Entry, float] = EMPTY
    """The entries that this agent wants said and has not read back since it said them, and when it said each of them
    first."""
    since: Mapping[Timer, tuple[int, float]] = EMPTY
    """The running timers. For each: the round that it is about, and when it started."""

    @property
    def speaker(self) -> str:
        """The nonce of its `Joined`, another one in each journal. So what this agent has said in a journal to which it
        comes back does not count any more."""
        return f"{self.nonce}.{self.births}" if self.births else self.nonce

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
    def restarts_left(self) -> int:
        """Failures that this node still bears, as they were counted when its last round began."""
        limit = self.job.terms.restarts.max_restarts
        if self.max_restarts is not None:
            limit = min(limit, self.max_restarts)
        return max(0, limit - self.restart_count)

    @property
    def restart_count(self) -> int:
        """Restarts that the job had spent when this node's last round began."""
        assignment = self.workers.assignment
        return self.job.spent if assignment is None else assignment.restart_count

    @property
    def causes(self) -> Causes:
        """Why this agent ends. There is none while it works."""
        return NO_CAUSES if isinstance(self.lifecycle, Working) else self.lifecycle.causes

    @property
    def is_working(self) -> bool:
        """Nothing has made this agent end."""
        return isinstance(self.lifecycle, Working)

    @property
    def is_serving(self) -> bool:
        """This agent hosts the store, has no worker left, and stays for the other nodes."""
        return isinstance(self.lifecycle, Ending) and isinstance(self.lifecycle.phase, Serving)

    @property
    def result(self) -> Result | None:
        """How this agent has ended. None: it has not."""
        return self.lifecycle.result if isinstance(self.lifecycle, Done) else None


NO_CAUSES = Causes()


def caused(agent: Agent, causes: Causes) -> Agent:
    """The agent with these causes to end. What it does next is found later in the step (`lifecycle.advanced`)."""
    phase = agent.lifecycle.phase if isinstance(agent.lifecycle, Ending) else Stopping()
    return evolve(agent, lifecycle=Ending(causes, phase))
