"""Processes of the simulated world: the agent of one host, and the workers that it has started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field

from reknit.adapters.loop import Loop
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import StartWorkers
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, Node, WorkerFailure


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
    """For watchers: when its agent learned that all of them run. None until then."""
    was_quick: bool = False
    """For watchers: its first failure came within a second of that, or before."""

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.command.round

    @property
    def hosts(self) -> tuple[str, int]:
        """Where the round's store is."""
        return self.command.assignment.master_addr, self.command.assignment.master_port

    @property
    def is_whole(self) -> bool:
        """No worker has failed or was killed."""
        return len(self.running | self.exited) == len(self.command.assignment.workers)

    def failure(self, local: int, exitcode: int, message: str) -> WorkerFailure:
        rank = self.command.assignment.workers[local].rank
        return WorkerFailure(local, rank, exitcode, pid=1000 + rank, message=message)


@define(eq=False)
class Inputs:
    """What the ports of one agent have to tell at its loop's next turn."""

    link: list[Event] = field(factory=list)
    workers: list[Event] = field(factory=list)
    signals: list[int] = field(factory=list)


@define(eq=False)
class Proc:
    """One agent process, its link to the store, and what is wrong with them."""

    name: str
    host: int
    spec: Spec
    skew: float
    """The monotonic clock of this process minus the world's, in seconds."""
    number: int = 0
    """How many processes were started before it."""
    twin: bool = False
    """It runs on another host than `host`, with the same node id."""
    started_at: float = 0.0
    cursor: int = 0
    """How much of the journal was handed to the agent."""
    reading: bool = False
    idle: int = 0
    """Token of the pending empty read."""
    inbox: list[Callable[[], None]] = field(factory=list)
    """What has happened to it while it was suspended."""
    suspended: bool = False
    was_suspended: bool = False
    cut: bool = False
    """It reaches the store no more."""
    was_cut: bool = False
    returns_at: float = 0.0
    """Until then its link has not found out that an outage is over."""
    full: bool = False
    """It can read, and nothing that it says gets into the journal."""
    was_full: bool = False
    refused: bool = False
    """Its link has given up: nothing is read or said any more."""
    dead: bool = False
    dead_at: float = 0.0
    told_at: float = 0.0
    """When it was asked to leave last."""
    scheduled: float | None = None
    """The deadline of its agent that the world will wake it for."""
    faults: list[str] = field(factory=list)
    """What will go wrong with its next appends: lose, lag or again."""
    held: list[Entry] = field(factory=list)
    """Appends that wait in its link for the store."""
    late_beat: tuple[Node, Sequence[Node]] | None = None
    """The beat that waits in its link for the store."""
    group: Group | None = None
    """The workers that it has started last."""
    quiet: dict[Node, float] = field(factory=dict)
    """The truth: for how long each watched node had been silent when this agent read the counters last."""
    counts: dict[Node, int] = field(factory=dict)
    """The counters that it has read last."""
    inputs: Inputs = field(factory=Inputs)
    """What its ports have to tell."""
    loop: Loop = field(init=False)
    """Made when the process begins (`World.begin`)."""
    agent: Agent = field(init=False)
    """The agent of the loop, after its last step."""

    @property
    def up(self) -> bool:
        return not self.dead and self.agent.result is None

    @property
    def id(self) -> str:
        return self.spec.node_id
