"""Processes of the simulated world: the agent of one host, and the workers that it has started."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from reknit.adapters.link.machine import LinkState
from reknit.adapters.link.messages import Read
from reknit.adapters.runtime.loop import Loop
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Node
from reknit.core.job.founding import Candidate, Held, Origin
from reknit.core.job.workers import WorkerFailure


@define(eq=False)
class Group:
    """The workers of one node in one round, as they really are."""

    epoch: int
    node: Node
    command: StartWorkers
    running: set[int]
    exited: set[int] = field(factory=set)
    """Local ranks of the workers that exited with 0."""
    gone_at: float | None = None
    """When the stop under way ends. None: no stop is under way."""
    is_stuck: bool = False
    """Its processes survive SIGKILL, and its agent has said so."""
    up_at: float | None = None
    """For watchers: when the agent learned that all these workers run. None until then."""
    was_quick: bool = False
    """For watchers: the first failure came within a second of `up_at`, or before all workers ran."""

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.command.round

    @property
    def hosts(self) -> tuple[str, int]:
        """Address and port of the workers' own store in this round."""
        return self.command.assignment.master_addr, self.command.assignment.master_port

    @property
    def is_over(self) -> bool:
        """All workers have exited with 0."""
        return len(self.exited) == len(self.command.assignment.workers)

    @property
    def is_whole(self) -> bool:
        """True if no worker has failed or was killed."""
        return len(self.running | self.exited) == len(self.command.assignment.workers)

    def failure(self, local: int, exitcode: int, message: str) -> WorkerFailure:
        rank = self.command.assignment.workers[local].rank
        return WorkerFailure(local, rank, exitcode, pid=1000 + rank, message=message)


@define(eq=False)
class Inputs:
    """What the ports of one agent report at the next turn of its loop."""

    workers: list[Event] = field(factory=list)
    signals: list[int] = field(factory=list)


@define(eq=False)
class Proc:
    """One agent process, its link to the store, and what is wrong with them."""

    name: str
    host: int
    spec: Spec
    skew: float
    """What the monotonic clock of this process shows when the world's shows 0, in seconds."""
    number: int = 0
    """How many processes were started before this one."""
    twin: bool = False
    """The process runs on another host than `host`, with the same node id."""
    rate: float = 1.0
    """Seconds that the clock of this process counts in one second of the world."""
    started_at: float = 0.0
    link: LinkState = field(init=False)
    """The machine of its link. Set when the process begins."""
    parked: Read | None = None
    """The read that waits at the store for news. None: no read waits."""
    inbox: list[Callable[[], None]] = field(factory=list)
    """What has happened to the process while it was suspended, in order."""
    suspended: bool = False
    was_suspended: bool = False
    cut: bool = False
    """The process cannot reach the store."""
    was_cut: bool = False
    returns_at: float = 0.0
    """Before this time the process cannot reach the store, although the last outage is over."""
    full: bool = False
    """The process can read, and nothing that it says gets into the journal."""
    was_full: bool = False
    refused: bool = False
    """The link has given up: it reads and says nothing any more."""
    dead: bool = False
    dead_at: float = 0.0
    told_at: float = 0.0
    """When the agent was last asked to leave."""
    scheduled: float | None = None
    """The deadline of the agent for which the world will wake it. None: there is none."""
    faults: list[str] = field(factory=list)
    """What will go wrong with the next appends, one by one: lose, lag or again."""
    origin: Origin | None = None
    """Of the life of the journal in which the process takes part. None: it has found none."""
    is_anew: bool = False
    """Its agent begins anew in this life."""
    held: Held | None = None
    """What its agent has folded of the journal."""
    given: Origin | None = None
    """Its agent was given something of this life, and has not folded it yet."""
    candidate: Candidate | None = None
    """It offers to found the journal again."""
    group: Group | None = None
    """The workers that were started last. None: none were started."""
    quiet: dict[Node, float] = field(factory=dict)
    """For how many seconds each watched node had really been silent when this agent last read the counters."""
    counts: dict[Node, int] = field(factory=dict)
    """The counters that the agent has read last."""
    inputs: Inputs = field(factory=Inputs)
    """What the ports will report at the loop's next turn."""
    loop: Loop = field(init=False)
    """Set when the process begins (`World.begin`)."""
    agent: Agent = field(init=False)
    """The agent of the loop, after its last step."""

    @property
    def cursor(self) -> int:
        """Number of entries of the journal that the agent was told of."""
        return self.link.reading.position

    @property
    def up(self) -> bool:
        return not self.dead and self.agent.result is None

    def clock(self, now: float) -> float:
        """What the clock of this process shows at this time of the world."""
        return now * self.rate + self.skew

    def true(self, at: float) -> float:
        """The time of the world at which the clock of this process shows `at`."""
        return (at - self.skew) / self.rate

    def felt(self, seconds: float) -> float:
        """What the clock of this process counts while so many seconds pass in the world."""
        return seconds * self.rate

    @property
    def id(self) -> str:
        return self.spec.node_id
