"""Rule 17: of several journals that go on from the same entries, at most one forms another round.

Some agents form round 0 in a journal at the first of two endpoints. Then anything may happen that rule 17 speaks of.
The network is cut and is whole again. Stores are lost. Agents move to the other endpoint and back, with whatever they
have read, found the journal again there, and found it again from there. Entries land late or twice. Agents are cut off
while they wait for a majority, so that they are counted where they are no more.

What an agent may say, which journal it goes to, who founds one from which fold, and who begins anew is decided by the
real journal in a TCPStore. Only the two stores, the clock and the wishes of the agents are drawn (`endpoints`,
`processes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from itertools import accumulate, islice, pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.adapters.journals.envelope import Life
from reknit.adapters.journals.tcpstore.keys import Keys
from reknit.core.job import entries as said
from reknit.core.job.entries import Entry, RestartPolicy, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Closed, Gathering, Job, Running, ready
from reknit.core.job.majority import agreeing

from .conftest import HISTORIES
from .endpoints import Network, Store
from .processes import JOB, Late, Process

STEPS = 42
DEEPEST = 3
"""So many agents may wait at the same time while another one acts."""
REACHES = ((True, False), (True, False), (False, True), (False, True), (True, True), (False, False))
"""Whether a single agent reaches the first and the second endpoint."""


class World:
    """The agents of a job, and what happens to them."""

    def __init__(self, dice: Random, *, needs_majority: bool) -> None:
        self.dice = dice
        self.network = Network(dice, self.somebody_acts_meanwhile)
        least, restarts = dice.choice((1, 1, 1, 2, 3)), RestartPolicy(max_restarts=dice.randint(0, 5))
        self.terms = Terms(min_nodes=least, max_nodes=8, restarts=restarts, needs_majority=needs_majority)
        self.acting: list[Process] = []
        """The process that acts. Before it those that wait for it."""
        self.late: list[Late] = []
        self.landed_elsewhere = 0
        """Entries that have landed in a journal that other agents have left before."""
        self.is_cut = False
        names = "abcde"[: max(least, dice.choice((2, 3, 3, 3, 4, 5)))]
        self.processes = [self._process(name, f"nonce of {name}", founds=name == "a") for name in names]
        with self.network.in_use():
            self._begin()
            for _ in range(STEPS):
                self._step()
        self.journals = [list(accumulate(entries, fold, initial=base)) for base, entries in self._journals()]
        """What each life of the journal came to, from the fold with which it began, entry by entry."""

    def _process(self, name: str, nonce: str, *, founds: bool = False) -> Process:
        return Process(self.dice, self.network, name, nonce, founds=founds)

    def _begin(self) -> None:
        """Round 0 is sealed in the first journal."""
        host = self.processes[0]
        with host.acting():
            host.read()
            self.envelope = copy(host.envelope)
            host.journal.append("opened", said.Opened(self.terms, "j"))
        for process in self.processes:
            with process.acting():
                process.read()
                process.last = process.joining()
                process.journal.append("joined", process.last)
        with host.acting():
            host.journal.append("called", said.LastCall(0))

    def _step(self) -> None:
        dice, draw = self.dice, self.dice.randrange(40)
        self.network.now += dice.choice((0, 30, 60))
        if draw < (2 if self.is_cut else 16) and self._can_move():
            self._cut()
        elif draw < 2:
            self._heal()
        elif draw < 5:
            self._reaches(dice.choice(self.processes), *dice.choice(REACHES))
        elif draw < 7 and self.late:
            self._land(self.late.pop(dice.randrange(len(self.late))))
        elif draw < 8 and not dice.randrange(4):
            self.processes.append(self._process(dice.choice("abcdef"), f"new {len(self.processes)}"))
        else:
            self._somebody_acts()

    # ---- agents act ----

    def _somebody_acts(self, *, reads: bool = False) -> None:
        free = [p for p in self.processes if not p.is_acting and not p.end]
        if reads:
            free = [p for p in free if p.reach == self.network.reach] or free
        if free:
            self.acting.append(self.dice.choice(free))
            self.late += self.acting[-1].act(reads=reads)
            self.acting.pop()

    def somebody_acts_meanwhile(self) -> None:
        """An agent waits. It is cut off, says something, or another agent acts."""
        if len(self.acting) > DEEPEST:
            return
        waiting, draw = self.acting[-1], self.dice.randrange(16)
        if draw < 4:
            home = waiting.places.home
            self._reaches(waiting, home == 0, home == 1)
        elif draw < 5:
            self._cut()
        elif draw < 6:
            self.late += waiting.speak_meanwhile()
        elif draw < 14:
            self._somebody_acts(reads=True)

    # ---- trouble ----

    def _can_move(self) -> bool:
        """Enough agents for a majority could go on in another journal. Otherwise a cut mostly makes all wait."""
        known = [p for p in self.processes if p.last is not None and not p.end]
        return 2 * sum(p.is_free for p in known) > len(known)

    def _cut(self) -> None:
        """Most agents reach one endpoint, and some reach both. Many notice it at once."""
        dice, self.is_cut = self.dice, True
        if dice.randrange(8) == 0:
            self.network.lose(dice.randrange(2))
        home = dice.choice(self.processes).places.home
        side = dice.choice(((home, 1 - home), (home, 1 - home, 1 - home), (1 - home,)))
        for process in self.processes:
            place, reaches_both = dice.choice(side), dice.randrange(6) == 0
            self._reaches(process, place == 0 or reaches_both, place == 1 or reaches_both)
        self.network.now += 60
        for _ in range(dice.randrange(len(self.processes) + 1)):
            self._somebody_acts(reads=True)

    def _heal(self) -> None:
        self.is_cut = False
        for process in self.processes:
            self._reaches(process, True, True)

    @staticmethod
    def _reaches(process: Process, first: bool, second: bool) -> None:
        process.reach.update({0: first, 1: second})

    def _land(self, late: Late) -> None:
        if late.store in self.network.stores:
            late.land()
            self.landed_elsewhere += any(p.lives > late.course.life.number for p in self.processes)

    # ---- what is in the journals ----

    def _journals(self) -> Iterator[tuple[Job, list[Entry]]]:
        """All lives of the journal, also in stores that were lost: the fold with which each begins, and its entries."""
        keys = Keys(JOB)
        for store in (*self.network.lost, *self.network.stores):
            if keys.of("").slot(0) in store.values:
                yield Job(), self._entries(store, Life())
            for key, record in store.first_folds.items():
                found = self.envelope.open_fold(record)
                assert found is not None
                position, base, digest = found
                yield base, self._entries(store, Life(key.split("/")[-2], position, digest))

    def _entries(self, store: Store, life: Life) -> list[Entry]:
        keys = Keys(JOB).of(life.name)
        slots = range(life.position, int(store.values.get(keys.head, b"0")))
        records = [(store.values.get(keys.slot(slot), b""), life.place(slot)) for slot in slots]
        return [self.envelope.open(record, place)[1] for record, place in records]


def rounds(world: World) -> dict[tuple[int, int], list[int]]:
    """Epoch and number of each round: the journals in which it was sealed."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for journal, jobs in enumerate(world.journals):
        for before, job in pairwise(jobs):
            if isinstance(job.phase, Running) and (before.epoch, before.members) != (job.epoch, job.members):
                found[job.epoch, job.round].append(journal)
    return found


def counted(world: World) -> dict[tuple[object, ...], set[int]]:
    """Each member of a sealed round, and the journals in which it was counted for the next one."""
    found: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for journal, jobs in enumerate(world.journals):
        for job in jobs:
            if isinstance(job.phase, Closed) or not job.members:
                continue
            is_gathering = isinstance(job.phase, Gathering)
            nonces = {joined.nonce for joined in ready(job)} if is_gathering else ()
            nodes = agreeing(job, nonces)
            for member in job.members:
                if member.node in nodes:
                    found[job.epoch, job.round - is_gathering, job.members, member.nonce].add(journal)
    return found


def played(seed: int, *, needs_majority: bool = True) -> World:
    return World(Random(seed), needs_majority=needs_majority)


@settings(max_examples=HISTORIES)
@given(st.integers(0, 2**32))
def test_one_of_several_journals_forms_a_round(seed: int) -> None:
    """Groups that cannot reach each other would otherwise train one job, and write the same checkpoints. The reason
    that the rule gives is asked as well: no process counts in two journals."""
    world = played(seed)
    assert [(round, journals) for round, journals in rounds(world).items() if len(journals) > 1] == []
    assert [(process, journals) for process, journals in counted(world).items() if len(journals) > 1] == []


def test_the_histories_of_that_law_could_break_it() -> None:
    """Without the need for a majority several journals form a round."""
    without = (played(seed, needs_majority=False) for seed in range(200))
    broken = (world for world in without if any(len(journals) > 1 for journals in rounds(world).values()))
    assert len(list(islice(broken, 2))) == 2


def reached(world: World) -> set[str]:
    """What has happened in this history."""
    numbers = {number for journals in rounds(world).values() for number in journals}
    lives, ends = max(p.lives for p in world.processes), " ".join(p.end for p in world.processes)
    seen = {
        "a round in a journal that was founded again": len(numbers) > 1,
        "a journal founded from one that was founded again": lives > 1,
        "one that was founded from that": lives > 2,
        "there and back": any(p.moves > 1 for p in world.processes),
        "begun anew": any("+" in p.nonce for p in world.processes),
        "landed after others have moved": world.landed_elsewhere > 0,
        "founded from an older fold than an agent has": "without something that this node has read" in ends,
        "another epoch": any(p.job.epoch for p in world.processes),
    }
    return {what for what, is_so in seen.items() if is_so}


REACHED = 8
"""All of them."""


def test_the_histories_of_that_law_reach_what_the_rule_speaks_of() -> None:
    """A law that draws no such history shows nothing about it."""
    found: set[str] = set()
    for seed in range(1000):
        found |= reached(played(seed))
        if len(found) == REACHED:
            return
    raise AssertionError(found)
