"""Which kinds of trouble one history has. They are drawn once, so that most kinds are absent (swarm testing).

A history with every fault ends at the first one. Most bugs need two or three kinds.
"""

from __future__ import annotations

from hashlib import sha256

from hypothesis import strategies as st

from reknit.core.job.entries import Admission

from .script import GLOBAL_MOVES, NODE_MOVES, TROUBLES, WAITS, Move, Script, Setup

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
assert {m for kind in KINDS for m in kind} >= set(NODE_MOVES), "a move that no weather makes is never made"


@st.composite
def setups(draw: st.DrawFn) -> Setup:
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


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    setup = draw(setups())
    # Hashed, because Hypothesis prefers short lists and small numbers: each kind exists in a quarter of the histories.
    bits = int.from_bytes(sha256(str(draw(st.integers(0, 2**20))).encode()).digest()[:16])
    mask = bits & (bits >> 64)
    kinds = [kind for i, kind in enumerate(KINDS) if mask >> i & 1] or [("fail",)]
    happen = st.builds(_move, st.sampled_from([m for kind in kinds for m in kind]), st.integers(0, setup.nodes - 1))
    waits = st.sampled_from((0.0, *WAITS, -1.0))
    least = draw(st.sampled_from((1, 4, 8, 12)))
    pairs = draw(st.lists(st.tuples(happen, waits), min_size=least, max_size=least + 6))
    return Script(setup, tuple(move for one, seconds in pairs for move in (one, *_pause(seconds))))


def _pause(seconds: float) -> tuple[Move, ...]:
    return () if not seconds else (Move("settle"),) if seconds < 0 else (Move("wait", number=seconds),)


def _move(name: str, host: int) -> Move:
    return Move(name) if name in GLOBAL_MOVES else Move(name, host)
