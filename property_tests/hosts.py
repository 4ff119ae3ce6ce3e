"""Processes of the simulated world: the agent of one host, and the workers that it has started."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen

from reknit.core.agent import Agent, Spec
from reknit.core.commands import Beat, Command, StartWorkers
from reknit.core.entries import Entry, Node, WorkerFailure
from reknit.core.events import Event

ECHO = "RuntimeError: Connection closed by peer [10.0.0.2]:4242"
OWN = "ValueError: my own"


class Violation(AssertionError):
    """Something that must always hold does not."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def demand(holds: object, rule: str, text: str) -> None:
    if not holds:
        raise Violation(rule, text)


@define(eq=False)
class Group:
    """The workers of one node in one round, as they really are."""

    epoch: int
    node: Node
    command: StartWorkers
    running: set[int]
    exited: set[int] = field(factory=set)
    """Those that exited with 0."""
    gone_at: float | None = None
    """When the stop under way ends."""
    is_stuck: bool = False
    """Its processes survive SIGKILL, and its agent has said so."""

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


@frozen
class Traced:
    at: float
    event: Event
    commands: tuple[Command, ...]
    wakes_at: float | None


@define(eq=False)
class Proc:
    """One agent process."""

    name: str
    host: int
    spec: Spec
    skew: float
    """Its monotonic clock minus the world's."""
    agent: Agent
    number: int = 0
    twin: bool = False
    started_at: float = 0.0
    cursor: int = 0
    """How much of the journal was handed to the agent."""
    reading: bool = False
    idle: int = 0
    """Token of the pending empty read."""
    inbox: list[Callable[[], None]] = field(factory=list)
    suspended: bool = False
    was_suspended: bool = False
    cut: bool = False
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
    scheduled: float | None = None
    faults: list[str] = field(factory=list)
    held: list[Entry] = field(factory=list)
    """Appends that wait in its link for the store."""
    late_beat: Beat | None = None
    """The one that waits there."""
    group: Group | None = None
    trace: list[Traced] = field(factory=list)
    quiet: dict[Node, float] = field(factory=dict)
    """For how long each node that it watches had been silent when it read the counters last: the truth."""
    counts: dict[Node, int] = field(factory=dict)
    read_at: float = 0.0
    """When it read the journal last."""
    ended_at: float = 0.0
    """When it learned of the last end of a round."""
    failed_at: float = 0.0
    """When it learned of the first failure of its last round."""
    told_at: float = 0.0
    """When it was told to leave last, and below when it learned how the job ended."""
    learned_at: float | None = None
    offers: dict[int, tuple[Node, int]] = field(factory=dict)
    """Per bootstrap port the incarnation and round that it was offered for."""
    said: dict[Entry, float] = field(factory=dict)
    """When each entry was said last, and how many different ones per round and incarnation."""
    per_round: dict[tuple[int, int, Node], set[Entry]] = field(factory=dict)

    @property
    def up(self) -> bool:
        return not self.dead and self.agent.result is None

    @property
    def id(self) -> str:
        return self.spec.node_id
