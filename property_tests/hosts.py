"""What the checks remember of each agent, and the error that a check raises."""

from __future__ import annotations

from attrs import define, field, frozen

from reknit.adapters.simulated import hosts
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, Node


class Violation(AssertionError):
    """Something that must always hold does not."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def demand(holds: object, rule: str, text: str) -> None:
    if not holds:
        raise Violation(rule, text)


@frozen
class Traced:
    at: float
    event: Event
    commands: tuple[Command, ...]
    wakes_at: float | None


@define(eq=False)
class Proc(hosts.Proc):
    """One agent process, and what the checks remember of it."""

    trace: list[Traced] = field(factory=list)
    read_at: float = 0.0
    """When it read the journal last."""
    ended_at: float = 0.0
    """When it learned of the last end of a round."""
    failed_at: float = 0.0
    """When it learned of the first failure of its last round."""
    learned_at: float | None = None
    """When it learned how the job ended. None: it has not."""
    offers: dict[int, tuple[Node, int]] = field(factory=dict)
    """Per bootstrap port the incarnation and round that it was offered for."""
    said: dict[Entry, float] = field(factory=dict)
    """When each entry was said last."""
    per_round: dict[tuple[int, int, Node], set[Entry]] = field(factory=dict)
    """The different entries that it has said, per epoch, round and incarnation."""
