"""Which kinds of trouble one history has. They are drawn once, so that most kinds are absent (swarm testing).

A history with every fault ends at the first one. Most bugs need two or three kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from hypothesis import strategies as st

from reknit.core.job.entries import Admission

from .script import GLOBAL_MOVES, TROUBLES, WAITS, Move, Script, Setup

KINDS: tuple[tuple[str, ...], ...] = (
    ("start",),
    ("crash", "start"),
    ("fail",),
    ("succeed", "part"),
    ("succeed", "start"),
    ("suspend", "resume"),
    ("cut", "mend"),
    ("cut", "wipe", "mend"),
    ("outage", "restore"),
    ("wipe",),
    ("wipe", "crash", "start"),
    ("full", "empty", "succeed"),
    ("refuse", "start"),
    ("stop", "start", "fail"),
    ("stop", "interrupt", "halt"),
    ("twin",),
    ("other",),
    ("slow",),
    ("stuck", "stop"),
    ("stale",),
    ("deaf",),
    ("blind",),
    ("mute",),
    ("hang", "stop", "fail"),
    ("stall",),
    ("lose", "lag", "again"),
    ("suspend", "lag", "resume", "crash", "start"),
    ("abort", "start"),
    ("freeze", "freeze", "fail"),
)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Small clusters of all kinds: one to eight nodes, any policy, and up to three kinds of trouble (`TROUBLES`)."""
    nodes = draw(st.sampled_from((3, 3, 2, 4, 5, 2, 3, 1, 3, 2, 4, 2, 3, 3, 2, 8)))
    formed = nodes - draw(st.sampled_from((0, 0, 0, 0, 1, 1, 2, nodes)))
    most = max(1, nodes - draw(st.sampled_from((0, 0, 0, 1, 1, 2, -1))))
    least = max(1, min(most, nodes - draw(st.sampled_from((1, 1, 2, 0, 3, 4)))))
    kind = draw(st.integers(0, 7))
    return Setup(
        nodes=nodes,
        formed=max(0, formed),
        min=least,
        max=most,
        budget=draw(st.integers(0, 3)),
        unspent=draw(st.sampled_from((1000, 1000, 3, 0))),
        renews=draw(st.sampled_from((False, False, True))),
        admission=draw(st.sampled_from((Admission.SOON, Admission.SOON, Admission.AT_FAILURE, Admission.NEVER))),
        fence=kind == 1,
        host=kind in (2, 4, 5),
        echo=kind != 3,
        remembers=draw(st.sampled_from((1024, 1024, 1024, 0, 1))),
        backoff=draw(st.sampled_from((0.0, 0.0, 1.0))),
        sizes=draw(st.sampled_from(((1,), (2,), (1, 2), (3, 1, 2)))),
        graces=draw(st.sampled_from(((7,), (7,), (7, 2), (1, 7, 12)))),
        rates=draw(st.sampled_from(((100,), (100,), (100, 130), (100, 70), (130, 70, 100)))),
        changing=draw(st.sampled_from((False, False, True))),
        text=draw(st.sampled_from((False, False, False, False, False, False, False, True))),
        roles=draw(st.sampled_from(("t", "t", "ts", "tst"))),
        hints=draw(st.sampled_from(((), (), (1, 0), (2, 2, 0), (0, 0, 0, 1), (9, -1)))),
        weather=draw(st.frozensets(st.sampled_from(TROUBLES), max_size=3)),
        seed=draw(st.integers(0, 2**16)),
    )


SETUPS = setups()


@st.composite
def kinds(draw: st.DrawFn) -> tuple[str, ...]:
    """The moves that one history may have. Each kind of trouble is in a quarter of the histories."""
    # Hashed, because Hypothesis prefers small numbers.
    bits = int.from_bytes(sha256(str(draw(st.integers(0, 2**20))).encode()).digest()[:16])
    mask = bits & (bits >> 64)
    found = [kind for i, kind in enumerate(KINDS) if mask >> i & 1] or [("fail",)]
    return tuple(move for kind in found for move in kind)


@st.composite
def scripts(
    draw: st.DrawFn, setups: st.SearchStrategy[Setup] | None = None, moves: Sequence[str] | None = None
) -> Script:
    """Histories of small clusters.

    `setups`: the clusters. None: of all kinds. `moves`: names of what may happen (`NODE_MOVES`, `GLOBAL_MOVES`). None:
    they are drawn for each history, and most are absent from it.
    """
    setup = draw(SETUPS if setups is None else setups)
    names = draw(kinds()) if moves is None else tuple(moves)
    happen = st.builds(move, st.sampled_from(names), st.integers(0, setup.nodes - 1))
    waits = st.sampled_from((0.0, *WAITS, -1.0))
    # Drawn, because Hypothesis prefers short lists.
    least = draw(st.sampled_from((1, 4, 8, 12)))
    pairs = draw(st.lists(st.tuples(happen, waits), min_size=least, max_size=least + 6))
    return Script(setup, tuple(each for one, seconds in pairs for each in (one, *_pause(seconds))))


def move(name: str, host: int) -> Move:
    """What happens to this host, or to all if such a move names no host."""
    return Move(name) if name in GLOBAL_MOVES else Move(name, host)


def _pause(seconds: float) -> tuple[Move, ...]:
    return () if not seconds else (Move("settle"),) if seconds < 0 else (Move("wait", number=seconds),)
