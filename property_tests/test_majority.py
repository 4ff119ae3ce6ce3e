"""Rule 17: of several journals that go on from the same entries, at most one forms another round.

All begin with the same journal, of any length. Then some agents move to another endpoint, where the journal begins with
`moved`, and perhaps some move on from there. An agent process speaks in the journal in which it is. If it has said what
may count elsewhere, it has begun as a new one, with another nonce (`Places.has_to_begin_anew`). Everything else may be
said by anybody who is there, in any order.
"""

from __future__ import annotations

from random import Random

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from reknit.core.job import entries as said
from reknit.core.job.entries import Entry, Joined, Node, NodeId, RestartPolicy, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Closed, Gathering, Job, Running
from reknit.core.job.majority import is_over
from reknit.core.job.moving import moved
from reknit.core.job.workers import WorkerFailure


class Process:
    """An agent process."""

    def __init__(self, name: str, nonce: str, home: Place | None = None) -> None:
        self.name, self.nonce, self.home = name, nonce, home
        self.last: Joined | None = None
        """The last `Joined` that it has said under this nonce."""
        self.has_left = False

    def known(self, job: Job) -> Joined | None:
        """Its `Joined`, if it is live."""
        joined = job.live.get(NodeId(self.name))
        return joined if joined is not None and joined.nonce == self.nonce else None

    def moves_to(self, place: Place, read: Job) -> None:
        """`read`: what it has read where it comes from."""
        self.home = place
        if (
            self.last is not None
            and place.job.live.get(self.last.node.id) != self.last
            and not is_over(self.last, read)
        ):
            self.nonce, self.last = f"{self.nonce}+", None


class Place:
    """A journal, and who speaks in it."""

    def __init__(self, dice: Random, name: str, job: Job) -> None:
        self.dice, self.name, self.job = dice, name, job
        self.newcomers: list[Process] = []
        self.rounds = 0
        """How many rounds were sealed here."""

    def say(self, entry: Entry) -> None:
        before, self.job = self.job, fold(self.job, entry)
        is_running = isinstance(self.job.phase, Running)
        self.rounds += is_running and (before.epoch, before.members) != (self.job.epoch, self.job.members)

    def speak(self, processes: list[Process]) -> None:
        """One of them, or a new one, says something."""
        dice, job = self.dice, self.job
        here = [p for p in processes if p.home is self and not p.has_left]
        draw = dice.randrange(20)
        if draw < 5 and here:
            self._join(dice.choice(here))
        elif draw < 11 and here:
            self._report(dice.choice(here), draw)
        elif draw < 14:
            self.say(said.LastCall(job.round, job.epoch))
        elif draw < 15:
            self.say(dice.choice((said.GaveUp(job.round, job.epoch), said.Admit(job.round + 1, job.epoch))))
        elif draw < 16:
            other = said.Steady(job.round, job.epoch) if dice.randrange(6) else said.Aborted("x", job.epoch)
            self.say(dice.choice((other, said.Opened(job.terms, "j", job.epoch + 1))))
        elif draw < 18:
            names = [f"{self.name}{i}" for i in range(6)] + [member.node.id for member in job.members]
            newcomer = Process(dice.choice(names), f"{self.name} {len(self.newcomers)}", self)
            self.newcomers.append(newcomer)
            self._join(newcomer)

    def _join(self, process: Process) -> None:
        job, known = self.job, process.known(self.job)
        round = job.round + isinstance(job.phase, Running)
        if known is not None and self.dice.randrange(5):
            process.last = evolve(known, round=job.round)
        else:
            incarnation = job.highest_incarnation(NodeId(process.name)) + 1
            process.last = joined(process.name, round, process.nonce, incarnation)
        self.say(process.last)

    def _report(self, process: Process, draw: int) -> None:
        known, job = process.known(self.job), self.job
        if known is None:
            return
        node, worked = known.node, job.round - (not isinstance(job.phase, Running))
        if draw < 8:
            self.say(said.Lost(self.dice.choice(list(job.live.values())).node, node))
        elif draw < 9:
            process.has_left = self.dice.randrange(2) == 0
            self.say(said.Left(node) if process.has_left else said.Leaving(node))
        else:
            failed = said.Failed(node, worked, (WorkerFailure(0, 0, 1),))
            self.say(failed if self.dice.randrange(2) else said.Succeeded(node, worked))


def joined(name: str, round: int, nonce: str, incarnation: int = 0) -> Joined:
    return Joined(Node(NodeId(name), incarnation), nonce, round, f"{name}.net", 1, seen=incarnation - 1)


def begun(dice: Random, steps: int, *, needs_majority: bool) -> tuple[Place, list[Process]]:
    """A journal of a job in which a round was sealed, and all processes."""
    least = dice.randint(1, 3)
    policy = RestartPolicy(max_restarts=dice.randint(0, 5))
    terms = Terms(min_nodes=least, max_nodes=8, restarts=policy, needs_majority=needs_majority)
    place = Place(dice, "x", Job())
    place.say(said.Opened(terms, "j"))
    processes = [Process(name, f"nonce of {name}", place) for name in "abcde"[: dice.randint(max(2, least), 5)]]
    for process in processes:
        process.last = joined(process.name, 0, process.nonce)
        place.say(process.last)
    place.say(said.LastCall(0))
    for _ in range(steps):
        place.speak(processes + place.newcomers)
    return place, processes + place.newcomers


def split(dice: Random, before: Place, name: str, processes: list[Process]) -> Place:
    """Another journal that goes on from this one. Some processes go there, and some are dead."""
    place = Place(dice, name, moved(before.job))
    for process in processes:
        if process.home is before and not process.has_left:
            draw = dice.randrange(3)
            if draw == 0:
                process.moves_to(place, before.job)
            elif draw == 1 and dice.randrange(2):
                process.home = None
    return place


def played(seed: int, *, needs_majority: bool = True) -> list[Place]:
    dice = Random(seed)
    x, processes = begun(dice, dice.randrange(25), needs_majority=needs_majority)
    if not x.job.members or isinstance(x.job.phase, Closed):
        return []  # such a journal is not founded again
    x.rounds, places = 0, [x]
    places += [split(dice, x, name, processes) for name in "yz"[: dice.choice((1, 1, 2))]]
    if dice.randrange(3) == 0:
        places.append(split(dice, places[1], "w", processes))
    for _ in range(60):
        place = dice.choice(places)
        place.speak([*processes, *(p for each in places for p in each.newcomers)])
    return places


@given(st.integers(0, 2**32))
def test_one_of_several_journals_forms_a_round(seed: int) -> None:
    """Groups that cannot reach each other would otherwise train one job, and write the same checkpoints."""
    winners = [place for place in played(seed) if place.rounds]
    assert len(winners) <= 1, [(place.name, place.job) for place in winners]


def test_the_histories_of_that_law_could_break_it() -> None:
    """Without the need for a majority several journals often form a round. With it, one of them often does."""
    without = [played(seed, needs_majority=False) for seed in range(100)]
    assert sum(1 for places in without if sum(place.rounds > 0 for place in places) > 1) > 20
    with_one = [played(seed) for seed in range(100)]
    assert sum(1 for places in with_one if any(place.rounds for place in places)) > 20
    assert any(isinstance(place.job.phase, Gathering) for places in with_one for place in places)
