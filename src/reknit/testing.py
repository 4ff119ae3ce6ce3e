"""For programs that change a policy of reknit, or embed its core. docs/testing.md shows how.

scripts, setups   Hypothesis strategies: histories of small simulated clusters, and the clusters alone
play, parse       play a history, and read one from its text
ClusterMachine    the same as a `RuleBasedStateMachine`
CHECKS            what must hold, by name. `Violation` is raised if it does not
replaced          put a function of your own in the place of one of the core's
Owed              what an adapter owes the core, asked while it runs

It needs Hypothesis: pip install 'reknit[testing]'.
"""

from __future__ import annotations

from reknit.app.testing.cluster_machine import ClusterMachine
from reknit.app.testing.owed import OWES, Owed
from reknit.app.testing.play import History, play
from reknit.app.testing.replacing import replaced
from reknit.app.testing.script import GLOBAL_MOVES, NODE_MOVES, Move, Script, Setup, parse
from reknit.app.testing.transcript import tell
from reknit.app.testing.violation import CHECKS, Violation
from reknit.app.testing.weather import scripts, setups

__all__ = [
    "CHECKS",
    "GLOBAL_MOVES",
    "NODE_MOVES",
    "OWES",
    "ClusterMachine",
    "History",
    "Move",
    "Owed",
    "Script",
    "Setup",
    "Violation",
    "parse",
    "play",
    "replaced",
    "scripts",
    "setups",
    "tell",
]
