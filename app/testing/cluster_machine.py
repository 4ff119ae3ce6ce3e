"""A simulated cluster as a state machine of Hypothesis. Rules of your own can be added in a subclass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .play import History
from .script import WAITS, Move, Setup
from .violation import CHECKS
from .weather import kinds, move, setups

HOSTS = st.integers(0, 7)
MOVES = st.runner().flatmap(lambda machine: st.sampled_from(machine.moves))


class ClusterMachine(RuleBasedStateMachine):
    """One history: agents start, things happen to them, and at the end all must come to rest.

    Every check looks at every step. A failure is a `Violation`. Its notes hold the history as a script and as a story.

        TestCluster = ClusterMachine.TestCase
    """

    checks: ClassVar[Iterable[str]] = CHECKS
    """The checks that are asked."""
    oracle: ClassVar[bool] = False
    """Whether the fold is compared with its second implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.history: History | None = None
        self.moves: tuple[str, ...] = ()
        """What may happen in this history."""
        self.is_broken = True
        """A check has spoken, or the history has not begun."""

    @initialize(setup=setups(), moves=kinds())
    def form(self, setup: Setup, moves: tuple[str, ...]) -> None:
        """The first agents meet."""
        self.moves = moves
        self.history = History(setup, checks=self.checks, oracle=self.oracle)
        self.history.form()
        self.is_broken = False

    @rule(name=MOVES, host=HOSTS)
    def happens(self, name: str, host: int) -> None:
        """Something happens to one host, or to all."""
        self.make(move(name, host))

    @rule(seconds=st.sampled_from(WAITS))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.make(Move("wait", number=seconds))

    @rule()
    def settle(self) -> None:
        """Time passes, until all are at rest."""
        self.make(Move("settle"))

    def make(self, move: Move) -> None:
        """Let this happen. For rules of your own."""
        if self.history is None:
            raise RuntimeError("the history has not begun")
        self.is_broken = True
        self.history.make(move)
        self.is_broken = False

    def teardown(self) -> None:
        """All faults stop, and all must come to rest (L1, L2)."""
        if self.history is not None and not self.is_broken:
            self.history.conclude()
