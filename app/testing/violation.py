"""What a check says that finds something wrong, and the names of all checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CHECKS = {
    "S1": "all agents derive the same job from the journal, and the same ranks",
    "S2": "a node has workers of one round at a time, and two rounds never run side by side",
    "S3": "workers start only as members of a sealed round",
    "S4": "a restart is spent on a failure, once per round, and never more than the budget",
    "S5": "all agents report the same end, and it is true",
    "S6": "a job that has ended stays as it is",
    "S7": "no agent ends while its workers are alive",
    "S8": "nothing raises an exception",
    "S9": "the same events make the same states and commands, also read from their text",
    "L1": "without new faults the job runs or ends, and all agents with it",
    "L2": "a node that is dead or takes no part is noticed",
    "L3": "what agents say, remember and do is bounded",
    "alike": "agents that stand in the job alike make the same step",
    "backoff": "a member waits before it joins again after a failure",
    "beat": "the count of an agent's beats stands still only if its node takes no part",
    "causes": "a cause to end is never taken back",
    "echo": "an agent does not act on a failure that looks like an echo before its cause has had time to come",
    "exits": "a stop waits for workers that are about to end if no round follows a failure, and no restart waits",
    "fence": "workers are killed when the fence falls, and the agent is awake then",
    "fresh": "workers start only if a beat was acknowledged lately",
    "host": "the host of the store ends last",
    "order": "a report comes before the next `Joined`, and `Leaving` before `Left`",
    "outage": "no outage ends an agent before the store timeout",
    "port": "a bootstrap port is offered for one round, and held until the workers start",
    "quiet": "a quiet stretch, computed, is what the agent does beat by beat",
    "replaced": "no agent ends because of a process that was dead before it started",
    "sequel": "what an agent answers before the end of a round is judged holds afterwards",
    "silence": "a node is declared lost only if it was silent, and only in the step of a fresh read",
    "stage": "an agent's stage, epoch, renewal and workers fit together (the table in `Stage`)",
    "steady": "a round that has run for long is said to be steady",
    "step": "a step starts or stops workers at most once",
    "stop": "an agent stops only workers that exist, with the grace that it must give, and says if any survive",
    "terms": "an agent with other terms than the job's disturbs no other agent",
    "wake": "no deadline is in the past, and an event without news changes nothing",
}
"""Each check by its name. docs/protocol.md#invariants says more about S1 to S9 and L1 to L3."""

_asked: ContextVar[frozenset[str]] = ContextVar("asked", default=frozenset(CHECKS))


class Violation(AssertionError):
    """Something that must always hold does not. Its notes hold the history as text, and the story."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check
        """A key of `CHECKS`."""


def demand(holds: object, check: str, text: str) -> None:
    """Raise `Violation` if this does not hold, and the check is asked."""
    if not holds:
        violated(check, text)


def violated(check: str, text: str) -> None:
    """Raise `Violation` if this check is asked."""
    if check in _asked.get():
        raise Violation(check, text)


@contextmanager
def asking(checks: Iterable[str]) -> Iterator[None]:
    """Within the block, only these checks speak. `ValueError`: there is no such check."""
    wanted = frozenset(checks)
    if unknown := sorted(wanted - CHECKS.keys()):
        raise ValueError(f"no check is named {', '.join(unknown)}: the names are {', '.join(CHECKS)}")
    before = _asked.set(wanted)
    try:
        yield
    finally:
        _asked.reset(before)
