"""What the checks remember of each agent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf

from attrs import define, field, frozen

from reknit.adapters.simulated import hosts
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.agent.step import step
from reknit.core.job.entries import Entry, Node
from reknit.core.job.founding import Life

MOST_WOKEN = 40
"""An agent is woken less often than this within `WOKEN_S` seconds."""
WOKEN_S = 8.0


@frozen
class Traced:
    at: float
    event: Event
    commands: tuple[Command, ...]
    wakes_at: float | None


@define(eq=False)
class CheckedProc(hosts.Proc):
    """One agent process, and what the checks remember of it."""

    trace: list[Traced] = field(factory=list)
    read_at: float = 0.0
    """When it read the journal last."""
    heard_at: float = 0.0
    """When a new count of its beats was acknowledged last."""
    was_full: bool = False
    """It could read and say nothing for some time."""
    was_out: bool = False
    """Round trips of its host to the store have failed at some time, although other hosts could reach it."""
    was_late: bool = False
    """Before the last step, an entry of this agent was late. So its wait for the store goes on, although the store may
    be back."""
    bore_s: float = 0.0
    """For how long it had not read the journal, when it found that it must end."""
    ended_at: float = 0.0
    """When it learned of the last end of a round."""
    failed_at: float = 0.0
    """When it learned of the first failure of its last round."""
    learned_at: float | None = None
    """When it learned how the job ended. None: it has not."""
    offers: dict[int, tuple[Life, Node, int]] = field(factory=dict)
    """Per bootstrap port the life, incarnation and round that it was offered for."""
    said: dict[tuple[Life, Node, Entry], float] = field(factory=dict)
    """When each incarnation said each entry last, by life of the journal."""
    per_round: dict[tuple[Life, int, int, Node], set[Entry]] = field(factory=dict)
    """The different entries that it has said, per life of the journal, epoch, round and incarnation."""
    beat: tuple[Node | None, float] = (None, 0.0)
    """As whom it has beaten last, and when."""
    beaten: int = 0
    """The count of that beat."""
    hung_at: float = -inf
    """When its keeper hung last."""
    out_at: float = 0.0
    """When something kept it from the store last."""
    woken: deque[float] = field(factory=lambda: deque(maxlen=MOST_WOKEN))
    """When it was woken by a deadline of its own, the last times."""
    is_out: bool = False
    """It has answered that no round follows."""
    foreseen: set[tuple[int, int]] = field(factory=set)
    """The rounds, each with its epoch, of which it has answered that another round follows."""
    hasty: set[tuple[int, int]] = field(factory=set)
    """The rounds, each with its epoch, whose workers it has stopped because of a failure, without waiting for those
    that were about to end."""

    def steps(self) -> Iterator[tuple[Agent, Event, Agent, Sequence[Command]]]:
        """All steps of the agent again: the agent before, the event, the agent after, and what it wanted done."""
        agent = Agent(self.spec)
        for traced in self.trace:
            before, agent = agent, step(agent, traced.event).agent
            yield before, traced.event, agent, traced.commands

    @property
    def stuck_pids(self) -> set[int]:
        """The processes of its workers that survive SIGKILL."""
        group = self.group
        return {1000 + local for local in group.running} if group is not None and group.is_stuck else set()
