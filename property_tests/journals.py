"""Journals that agents could write, and some that none would: what the laws of the fold are asked about.

Entries drawn blindly rarely fit the job, and most are ignored. These are drawn with the oracle's knowledge of the
job, so they reach replaced members, late copies, several epochs and full rounds. One entry in six is off by one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from attrs import evolve
from hypothesis import strategies as st

from reknit.app.testing.checks.oracle import Oracle
from reknit.core.job import entries as said
from reknit.core.job.entries import Admission, Entry, Joined, Node, NodeId, RestartPolicy, Terms
from reknit.core.job.workers import NoProgress, WorkerFailure

IDS = "abcde"
MESSAGES = ("ValueError: own", "Connection reset by peer", "KeyError: own")


class _Writer:
    """Draws one entry after the other. `dice` decides everything."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.oracle = Oracle()
        self.journal: list[Entry] = []
        self.ids = [NodeId(name) for name in IDS[: dice.randint(2, 5)]]

    def terms(self) -> Terms:
        dice = self.dice
        least = dice.randint(1, 3)
        policy = RestartPolicy(dice.choice((0, 1, 2, 5)), max_unspent=dice.choice((1000, 1000, 5, 1, 0)))
        return Terms(
            min_nodes=least,
            max_nodes=least + dice.choice((0, 1, 1, 2)),
            restarts=policy,
            admission=dice.choice((Admission.SOON, Admission.AT_FAILURE, Admission.NEVER)),
            silence_s=4.0,
        )

    def write(self, entry: Entry) -> None:
        self.journal.append(entry)
        self.oracle.feed(entry)

    def next(self) -> Entry:
        if self.dice.randrange(8) == 0:
            return self.dice.choice(self.journal)  # a late copy
        gathers = self.oracle.phase == "gathering" and self.dice.randrange(2)
        entry = self._towards_a_round() if gathers else self.dice.choices(list(KINDS), list(KINDS.values()))[0](self)
        return self._bent(entry) if self.dice.randrange(6) == 0 else entry

    def _towards_a_round(self) -> Entry:
        """What the gathered round waits for. Otherwise most journals would never come to a second round."""
        oracle = self.oracle
        enough = len(oracle.live) - len(oracle.leaving) >= oracle.terms.min_nodes
        return self.last_call() if enough and not oracle.expected else self.joined()

    def _bent(self, entry: Entry) -> Entry:
        """The entry with one thing that is a little wrong."""
        for name in self.dice.sample(("round", "epoch", "node", "by"), 4):
            value = getattr(entry, name, None)
            if isinstance(value, Node):
                return evolve(entry, **{name: Node(value.id, max(0, value.incarnation + self.dice.choice((-1, 1))))})
            if isinstance(value, int):
                return evolve(entry, **{name: max(0, value + self.dice.choice((-1, 1)))})
        return entry

    # ---- whom it is about ----

    def any_live(self) -> Node:
        live = [joined.node for joined in self.oracle.live.values()]
        return self.dice.choice(live) if live else self.newcomer()

    def newcomer(self) -> Node:
        node_id = self.dice.choice(self.ids)
        return Node(node_id, self.oracle.top(node_id) + 1)

    def member(self) -> Node:
        """Mostly one whose report is still to come."""
        oracle = self.oracle
        nodes = sorted(oracle.expected if oracle.phase == "gathering" else oracle.members - oracle.done)
        return self.dice.choice(nodes) if nodes and self.dice.randrange(5) else self.any_live()

    @property
    def worked(self) -> int:
        """The round that reports are about."""
        return self.oracle.round - (self.oracle.phase == "gathering")

    # ---- entries ----

    def joined(self) -> Entry:
        dice, oracle = self.dice, self.oracle
        coming = sorted(oracle.expected) if oracle.phase == "gathering" else []
        if coming and dice.randrange(6):
            known = oracle.live[dice.choice(coming).id]
            nonce = known.nonce if dice.randrange(8) else "another"
            return evolve(known, round=oracle.round, port=known.port + 1, nonce=nonce)
        node = self.newcomer() if dice.randrange(5) else self.any_live()
        return Joined(
            node,
            f"nonce-{node}-{dice.randrange(2)}",
            oracle.round + (oracle.phase == "running"),
            f"{node.id}.net",
            dice.randrange(1, 5),
            dice.choice("tu"),
            dice.choice((1, 1, 2, 2, 0)),
            dice.choice((None, None, 0, 1, 2, -1)),
            node.incarnation - (1 if dice.randrange(6) else 2),
        )

    def failed(self) -> Entry:
        node, dice = self.member(), self.dice
        count = dice.choice((1, 1, 2, 0))
        failures = [WorkerFailure(i, i, 1, message=dice.choice(MESSAGES), cause=self.cause()) for i in range(count)]
        return said.Failed(node, self.worked, tuple(failures))

    def cause(self) -> NoProgress | None:
        if self.dice.randrange(3):
            return None
        step = self.dice.choice((None, 0, 1, 2, 2))
        return NoProgress(self.dice.choice((29.5, 30.0)), step, step is None and self.dice.randrange(2) == 0)

    def succeeded(self) -> Entry:
        return said.Succeeded(self.member(), self.worked)

    def lost(self) -> Entry:
        return said.Lost(self.any_live() if self.dice.randrange(4) else self.newcomer(), self.any_live())

    def leaving(self) -> Entry:
        return said.Leaving(self.any_live())

    def left(self) -> Entry:
        return said.Left(
            self.any_live() if self.dice.randrange(4) else self.newcomer(), self.dice.choice(((), (), (7,)))
        )

    def last_call(self) -> Entry:
        return said.LastCall(self.oracle.round, max(0, self.oracle.epoch))

    def admit(self) -> Entry:
        return said.Admit(self.oracle.round + 1, max(0, self.oracle.epoch))

    def gave_up(self) -> Entry:
        return said.GaveUp(self.oracle.round, max(0, self.oracle.epoch))

    def ended(self) -> Entry:
        """The job is aborted, or opened again."""
        if self.oracle.phase != "closed" and self.dice.randrange(4):
            return self.joined()
        if self.oracle.phase == "closed" or self.dice.randrange(3) == 0:
            return said.Opened(self.terms(), f"journal-{self.dice.randrange(9)}", self.oracle.epoch + 1)
        return said.Aborted("because", self.oracle.epoch)


KINDS: dict[Callable[[_Writer], Entry], int] = {
    _Writer.joined: 10,
    _Writer.failed: 4,
    _Writer.succeeded: 4,
    _Writer.lost: 2,
    _Writer.leaving: 1,
    _Writer.left: 2,
    _Writer.last_call: 2,
    _Writer.admit: 2,
    _Writer.gave_up: 1,
    _Writer.ended: 2,
    lambda _: said.Filler(): 1,
}
"""How often each kind is drawn."""


def written(seed: int, size: int) -> list[Entry]:
    """A journal of `size` entries after the first. The same seed with a smaller size makes the beginning of it."""
    writer = _Writer(Random(seed))
    writer.write(said.Opened(writer.terms(), "j"))
    while len(writer.journal) <= size:
        closed = writer.oracle.phase == "closed" and writer.dice.randrange(4)
        writer.write(writer.ended() if closed else writer.next())
    return writer.journal


PLAUSIBLE = st.builds(written, st.integers(0, 2**32), st.integers(0, 60))
