"""Rule 16: a job whose store loses everything, again and again, goes on as one job.

Some agents form rounds. Meanwhile the store is lost, with its host or alone. The agents found the journal again, from
whatever they have read. A host that comes back begins another journal, if nobody is there in time who remembers the old
one, and rounds may be formed there. Entries land late or twice. Agents are cut off while they found a journal.

What an agent does at a store is decided by the real code: `TCPStoreJournal`, and the functions of the core that it
carries out. Only the store, the clock and the wishes of the agents are drawn (`lossy`, `processes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_tests.planted.bug import Bug, planted
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.keys import StoreKeys
from reknit.core.job import entries as said
from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.job.fold import fold
from reknit.core.job.founding import Origin
from reknit.core.job.job import Gathering, Job, Running

from .conftest import HISTORIES
from .lossy import Network, Store
from .processes import JOB, Late, Process, Round

STEPS = 40
DEEPEST = 3
"""So many agents may wait at the same time while another one acts."""


class World:
    """The agents of a job, and what happens to them."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.network = Network(dice, self.somebody_acts_meanwhile)
        least, restarts = dice.choice((1, 1, 1, 2, 3)), RestartPolicy(max_restarts=dice.randint(0, 5))
        self.terms = Terms(min_nodes=least, max_nodes=8, restarts=restarts)
        self.acting: list[Process] = []
        """The process that acts. Before it those that wait for it."""
        self.late: list[Late] = []
        self.losses = 0
        names = "abcde"[: max(least, dice.choice((2, 3, 3, 3, 4, 5)))]
        self.processes = [self._process(name, f"nonce of {name}", founds=name == "a") for name in names]
        with self.network.in_use():
            self._begin()
            for number in range(dice.choice((0, 0, 1, 2))):
                self.processes.append(self._process("fgh"[number], f"new {number}"))
            for _ in range(STEPS):
                self._step()
        lives = list(self._lives())
        self.journals = [jobs for _, jobs in lives]

    def _process(self, name: str, nonce: str, *, founds: bool = False, has_elders: bool = False) -> Process:
        return Process(self.dice, self.network, self.terms, name, nonce, founds=founds, has_elders=has_elders)

    def _begin(self) -> None:
        """Round 0 is sealed in the first journal."""
        self.host = host = self.processes[0]
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
        self.network.now += dice.choice((0, 1, 3))
        if draw < 3:
            self._lose()
        elif draw < 7:
            dice.choice(self.processes).reach.is_there = dice.randrange(3) > 0
        elif draw < 9 and self.late:
            self._land(self.late.pop(dice.randrange(len(self.late))))
        elif draw < 11:
            self._all_go_on()
        elif draw < 12 and not dice.randrange(2):
            self.processes.append(self._process(dice.choice("bcdef"), f"new {len(self.processes)}"))
        else:
            self._somebody_acts()

    # ---- agents act ----

    def _somebody_acts(self, *, reads: bool = False) -> None:
        free = [p for p in self.processes if not p.is_acting and not p.end]
        if free:
            self.acting.append(self.dice.choice(free))
            self.late += self.acting[-1].act(reads=reads)
            self.acting.pop()

    def _all_go_on(self) -> None:
        """All agents that reach the store do what their job waits for, some times each."""
        for _ in range(self.dice.randrange(1, 6)):
            here = [p for p in self.processes if p.reach.is_there and not p.is_acting and not p.end]
            for process in self.dice.sample(here, len(here)):
                self.acting.append(process)
                self.late += process.act(reads=False, is_calm=True)
                self.acting.pop()

    def somebody_acts_meanwhile(self) -> None:
        """An agent waits. It is cut off, says something, or another agent acts."""
        if len(self.acting) > DEEPEST or not self.acting:
            return
        waiting, draw = self.acting[-1], self.dice.randrange(32)
        if draw < 1:
            waiting.reach.is_there = False
        elif draw < 2:
            self._lose()
        elif draw < 6:
            self.late += waiting.speak_meanwhile()
        elif draw < 22:
            self._somebody_acts(reads=True)

    # ---- trouble ----

    def _lose(self) -> None:
        """The store loses everything. Usually its host is started again, on its machine or in a new container."""
        self.losses += 1
        self.network.lose()
        for process in self.processes:
            process.reach.is_there = process.reach.is_there or self.dice.randrange(3) > 0
        if self.dice.randrange(3) and not self.host.is_acting:
            self.host.end = self.host.end or "started again"
            has_note = self.dice.randrange(3) > 0
            self.host = self._process("a", f"new {len(self.processes)}", founds=True, has_elders=has_note)
            self.processes.append(self.host)

    def _land(self, late: Late) -> None:
        if late.store is self.network.store:
            late.land()

    # ---- what is in the journals ----

    def _lives(self) -> Iterator[tuple[Origin, list[Job]]]:
        """All lives of all journals of the job, also in stores that were lost: the fold with which each begins, and the
        fold after each of its entries."""
        for store in (*self.network.lost, self.network.store):
            for header in store.headers:
                origin = self.envelope.read_header(header)
                yield origin, list(_folds(store, self.envelope.of(origin), origin))


def _folds(store: Store, envelope: Envelope, origin: Origin) -> Iterator[Job]:
    keys, base = StoreKeys(JOB).of(origin.life.name), Job()
    if origin.life.name:
        found = envelope.open_fold(store.first_folds[keys.fold])
        assert found is not None
        _, base, _ = found
    slots = range(origin.position, int(store.values.get(keys.head, b"0")))
    records = [(store.values.get(keys.slot(slot), b""), keys.place(slot)) for slot in slots]
    return accumulate((envelope.open(record, place)[1] for record, place in records), fold, initial=base)


def read_by_each(world: World) -> dict[tuple[str, int, int], set[Round]]:
    """The rounds of which an agent has read the seal, by its nonce, epoch and number."""
    found: dict[tuple[str, int, int], set[Round]] = defaultdict(set)
    for process in world.processes:
        for nonce, round in process.rounds:
            found[nonce, round.epoch, round.number].add(round)
    return found


def at_one_store(world: World) -> dict[tuple[str, int], set[Round]]:
    """The rounds whose workers meet in one store, by its address and port."""
    found: dict[tuple[str, int], set[Round]] = defaultdict(set)
    for store, round in set().union(*(process.stores for process in world.processes)):
        found[store].add(round)
    return found


def strayed(world: World) -> list[str]:
    """Agents whose fold is that of no journal."""
    folds = [Job(), *(job for jobs in world.journals for job in jobs)]
    return [process.nonce for process in world.processes if not process.end and process.job not in folds]


def several(found: Mapping[Any, set[Round]]) -> list[set[Round]]:
    return [rounds for rounds in found.values() if len(rounds) > 1]


def played(seed: int) -> World:
    return World(Random(seed))


@settings(max_examples=HISTORIES)
@given(st.integers(0, 2**32))
def test_what_an_agent_has_folded_is_what_a_journal_holds(seed: int) -> None:
    """Otherwise an agent could start the workers of a round that nobody has sealed. No agent reads the seals of two
    rounds with one number, and the workers of two rounds never meet in one store. An agent that may have workers never
    begins anew (`Process.read`)."""
    world = played(seed)
    assert strayed(world) == []
    assert several(read_by_each(world)) == []
    assert several(at_one_store(world)) == []


BUGS = (
    Bug(
        "an-older-line-will-do",
        16,
        "job.founding.choice",
        "common(held.origin, found) >= held.position and ",
        "",
    ),
    Bug("goes-on-where-it-was-left-behind", 16, "job.founding.overruled", "Choice.END if", "Choice.ENTER if"),
    Bug("begins-anew-with-workers", 16, "job.founding.overruled", "has_sealed(held.job) or ", ""),
    Bug("founds-while-it-reads", 16, "job.founding.choice", "if held.has_unfolded:", "if False:"),
    Bug("old-ports", 16, "job.founding.moved", "isinstance(phase, Gathering)", "False"),
    Bug(
        "nobody-objects",
        16,
        "job.founding.choice",
        "return Choice.OBJECT if has_sealed(held.job) else overruled(held)",
        "return Choice.ANEW",
    ),
    Bug("a-sealed-journal-makes-way", 16, "job.founding.has_sealed", "bool(job.members or job.epoch)", "False"),
)
"""Bugs in the code that founds journals again. The law finds each of them in few histories."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_law_finds_a_planted_bug(bug: Bug) -> None:
    """A law that finds no bug shows nothing."""
    with planted(bug):
        assert any(_is_broken(seed) for seed in range(300)), f"{bug.name} is not found"


def _is_broken(seed: int) -> bool:
    try:
        world = played(seed)
    except AssertionError:
        return True  # a process has begun anew that may have workers
    return bool(strayed(world) or several(read_by_each(world)) or several(at_one_store(world)))


def took_along(jobs: list[Job]) -> bool:
    """An agent had joined the gathered round before this life of the journal began, and is a member of it."""
    base = jobs[0]
    if not isinstance(base.phase, Gathering) or not base.members:
        return False
    nonces = {joined.nonce for joined in base.live.values() if joined.round == base.round}
    return any(job.phase == Running(base.round) and nonces & {m.nonce for m in job.members} for job in jobs)


def reached(world: World) -> set[str]:
    """What has happened in this history."""
    sealed: dict[tuple[int, int], list[int]] = defaultdict(list)
    for journal, jobs in enumerate(world.journals):
        for before, job in pairwise(jobs):
            if isinstance(job.phase, Running) and (before.epoch, before.members) != (job.epoch, job.members):
                sealed[job.epoch, job.round].append(journal)
    ends = " ".join(p.end for p in world.processes)
    lives = max(sum(bool(life.name) for life in p.lives) for p in world.processes)
    seen = {
        "a journal founded again": lives > 0,
        "one that was founded from that": lives > 1,
        "two lives later": lives > 2,
        "begun anew": any(p.births for p in world.processes),
        "begun anew twice": any(p.births > 1 for p in world.processes),
        "left behind without workers": any(p.was_left_behind for p in world.processes),
        "left behind with workers": "without something that this node has read" in ends,
        "a round that was sealed in vain": any(len(journals) > 1 for journals in sealed.values()),
        "joined in one life and was sealed in the next": any(took_along(jobs) for jobs in world.journals),
        "another epoch": any(p.job.epoch for p in world.processes),
    }
    return {what for what, is_so in seen.items() if is_so}


REACHED = 10
"""All of them."""


def test_the_histories_of_that_law_reach_what_the_rule_speaks_of() -> None:
    """A law that draws no such history shows nothing about it."""
    found: set[str] = set()
    for seed in range(1000):
        found |= reached(played(seed))
        if len(found) == REACHED:
            return
    raise AssertionError(found)
