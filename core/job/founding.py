"""Founding a journal again whose store has lost it: which agent does it, and who may go on in it. Rule 16 of
docs/protocol.md has the reasons.

The store of `c10d` ends with its host. When the host is back, the store is empty. The other agents still have the fold
of what they have read. One of them founds the journal again: it writes its fold into the store, and the journal begins
another *life*. Nothing here asks a store. The adapter tells what it has found there, and carries out what is decided
(adapters/journals/tcpstore/recovery.py, adapters/simulated/store.py).

1. An agent founds a journal only from what it has folded, and only if it was given nothing beyond. What it was given
   may start workers in the next moment.
2. Each agent that finds no journal makes an offer. The best offer stands in one key of the store. An offer is better if
   workers may run because of what its agent has read. Then the latest life counts, then the highest position.
3. The agent with the best offer waits for `OFFERS_S`, in which every other agent tries to reach the store. It does not
   count who has come: an agent may come twice, and none knows all the others.
4. A best offer that stands for `DEAD_S` may be that of a dead agent. Another agent puts its own in its place, and waits
   for `OFFERS_S` anew: the dead offer may have hidden a better one. An agent that is only slow may be overtaken in this
   way. Whoever writes the header first has founded the journal, and each agent compares that with what it has read.
5. An agent goes on in another life only if this life holds all that the agent was given. The *line* of lives tells:
   each life names the lives from which it goes on, and where each of them begins. Otherwise see rule 7.
6. An agent that finds another journal in the place of its own may have workers. Then the other journal has to make way,
   if no round was sealed there. Otherwise see rule 7.
7. An agent that cannot go on, and has read of a sealed round, kills its workers and ends. One that has read of none has
   no workers, and begins anew: as another incarnation, with another nonce.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from attrs import evolve, frozen

from .entries import Entry
from .fold import fold
from .job import Gathering, Job, Running, Verdict
from .memory import without_nodes

OFFERS_S = 1.5
"""How long the agent with the best offer waits for others. An agent that has lost its store tries to reach it every
second. Seconds."""
DEAD_S = 3.0
"""How long the offer of another agent may be the best before that agent counts as dead. It must be longer than
`OFFERS_S`: otherwise two agents that live would replace each other's offer for ever. Seconds."""
TURNS = 12
"""The agent counts as dead so many round trips later: founding a journal takes about eight."""
ELDERS_S = 3.0
"""How long a host that may have lost its store waits for agents that remember the journal. Seconds."""
OFFERED_S = 6.0
"""How much longer it waits if such an agent has come by then. That agent may have to wait for others. Seconds."""
_LINE = 64
"""Number of earlier lives that a life names."""


# ---- the lives of a journal ----


@frozen
class Life:
    """Names one life of one journal. Equal names mean the same records."""

    journal: str = ""
    """The id of the journal. Empty: its store is taken to lose nothing, so this is not asked."""
    name: str = ""
    """Empty: the first life."""


Line = tuple[tuple[str, int], ...]
"""Names of lives of one journal, each with the position where it begins. Each goes on from the one before it."""


@frozen
class Origin:
    """Where a life of a journal begins. The header of the journal holds it."""

    life: Life = Life()
    position: int = 0
    """The life begins with a fold of all entries before this position."""
    digest: str = ""
    """The digest of all records before `position`."""
    number: int = 0
    """How often the journal was founded again until this life began."""
    before: Line = ()
    """The lives from which this one goes on, the first one first. Only the latest are named."""

    @property
    def line(self) -> Line:
        """This life, and those before it."""
        return (*self.before, (self.life.name, self.position))[-_LINE:]


def next_life(held: Held, name: str, number: int = 0) -> Origin:
    """The life that an agent begins when it founds the journal again. `number`: the highest number of a life of which
    this agent knows besides its own."""
    number = 1 + max(held.origin.number, number)
    return Origin(Life(held.origin.life.journal, name), held.position, held.digest, number, held.origin.line)


def common(one: Origin, other: Origin) -> float:
    """Up to which position two lives of one journal hold the same records. Infinity: they are the same life. -1: this
    is not known."""
    lines = one.line, other.line
    starts = dict(lines[1])
    last = next((name for name, _ in reversed(lines[0]) if name in starts), None)
    if last is None:
        return -1
    ends = (position for line in lines for position in _after(line, last))
    return min(ends, default=inf)


def _after(line: Line, name: str) -> list[int]:
    """Where the life begins that follows this one. Empty: it is the last."""
    at = [each for each, _ in line].index(name)
    return [position for _, position in line[at + 1 : at + 2]]


# ---- which journal counts ----


@frozen
class Held:
    """What an agent has of a journal from which it was given something."""

    origin: Origin
    """Of the life in which the agent has read."""
    position: int
    """The agent has folded everything before."""
    job: Job
    """The fold."""
    digest: str = ""
    """Of all records before `position`."""
    has_unfolded: bool = False
    """The agent was given entries that it has not folded yet."""


class Choice(Enum):
    """What an agent does at a store."""

    BEGIN = "begin"
    """There is no journal, and the agent has read none. It begins one, or waits for the host to do so."""
    ENTER = "enter"
    """Take part in the journal that is there, and go on."""
    ANEW = "anew"
    """Take part in the journal that is there as a new agent, which has no workers. What it was before counts no more.
    """
    FOUND = "found"
    """There is no journal any more. Found it again."""
    OBJECT = "object"
    """There is another journal. If no round was sealed there, it makes way, and the agent's own is founded again.
    Otherwise see `overruled`."""
    WAIT = "wait"
    """The agent has to fold first what it was given."""
    END = "end"
    """The journal that is there does not hold what the agent was given, and may have acted on. The agent ends."""


def choice(held: Held | None, found: Origin | None, known: str = "") -> Choice:
    """What an agent does that has `held` and finds `found`. None: it has read nothing, or there is no journal. `known`:
    the digest of all records before the life that was found, as far as the agent knows it. Empty: it does not."""
    if held is None:
        return Choice.BEGIN if found is None else Choice.ENTER
    if found is not None and found.life == held.origin.life:
        return Choice.ENTER
    if held.has_unfolded:
        return Choice.WAIT
    if held.position == 0:
        return Choice.BEGIN if found is None else Choice.ENTER  # it has read nothing
    if found is None:
        return Choice.FOUND
    if found.life.journal == held.origin.life.journal:
        is_whole = common(held.origin, found) >= held.position and known in ("", found.digest)
        return Choice.ENTER if is_whole else overruled(held)
    outcome = held.job.outcome
    if outcome is not None and outcome.verdict is Verdict.SUCCEEDED:
        return Choice.END  # the other journal is a new run of the job
    return Choice.OBJECT if has_sealed(held.job) else overruled(held)


def overruled(held: Held) -> Choice:
    """What an agent does where the journal that is there stays, and does not hold what the agent has read."""
    return Choice.END if has_sealed(held.job) or held.job.outcome is not None else Choice.ANEW


def has_sealed(job: Job) -> bool:
    """A round was sealed in this epoch or in one before. Workers may run because of it."""
    return bool(job.members or job.epoch)


def waits_s(*, is_remembered: bool, has_offers: bool) -> float:
    """How long a host that has read nothing waits for agents that remember the journal, before it begins another one.
    Seconds. `is_remembered`: an agent of this host has hosted the store before, and has not ended in order.
    `has_offers`: an agent has offered to found the journal again."""
    return (ELDERS_S if is_remembered or has_offers else 0.0) + (OFFERED_S if has_offers else 0.0)


# ---- a young journal makes way ----


def judged(job: Job, entry: Entry | None) -> tuple[Job, bool | None]:
    """The fold of a young journal after one more record, and whether the journal is void. None: nothing has decided
    yet. `job`: its fold before. `entry`: what the record says. None: the record is a veto."""
    if has_sealed(job):
        return job, False
    if entry is None:
        return job, True
    job = fold(job, entry)
    return job, False if has_sealed(job) else None


# ---- who founds the journal again ----


@frozen
class Offer:
    """What an agent offers from which the journal can be founded again."""

    has_workers: bool
    """A round was sealed in what the agent has read. Workers may run because of it."""
    number: int
    """Of the life that the agent has read (`Origin.number`)."""
    position: int
    """The agent has folded everything before."""
    name: str
    """Of the life that would begin. No two offers have the same."""

    def is_better_than(self, other: Offer | None) -> bool:
        """The order is the same for all agents, whichever journal they remember. Otherwise two of them would replace
        each other's offer for ever. None: nobody has offered anything that can be read."""
        return other is None or self._rank < other._rank

    @property
    def _rank(self) -> tuple[bool, int, int, str]:
        return not self.has_workers, -self.number, -self.position, self.name


def offer_of(held: Held, name: str) -> Offer:
    """`name`: of the life that would begin."""
    return Offer(has_sealed(held.job), held.origin.number, held.position, name)


class FoundingMove(Enum):
    """What an agent that offers to found a journal again does next."""

    LOOK = "look"
    """Look again."""
    OFFER = "offer"
    """Put the own offer in the place of the best one, if that has not changed, and look again."""
    FOUND = "found"
    """Found the journal."""


@frozen
class Candidate:
    """An agent that offers to found a journal again. `looked` makes the next one."""

    offer: Offer
    best: Offer | None = None
    """The best offer, as seen last."""
    best_at: float | None = None
    """When it was seen first, in seconds. None: this agent has not looked yet."""


def looked(
    candidate: Candidate, best: Offer | None, at: float, round_trip_s: float = 0.0
) -> tuple[Candidate, FoundingMove]:
    """The candidate after a look, and what it does next. `best`: the best offer in the store. `round_trip_s`: to the
    store."""
    if candidate.best_at is None or best != candidate.best:
        candidate = evolve(candidate, best=best, best_at=at)
    waited_s = at - (candidate.best_at or 0.0)
    if best == candidate.offer:
        return candidate, FoundingMove.FOUND if waited_s >= OFFERS_S + round_trip_s else FoundingMove.LOOK
    is_dead = waited_s >= DEAD_S + TURNS * round_trip_s
    return candidate, FoundingMove.OFFER if is_dead or candidate.offer.is_better_than(best) else FoundingMove.LOOK


def moved(job: Job) -> Job:
    """The fold with which another life begins.

    A node that has joined the next round joins it again, and offers another port. The round may have been sealed in the
    life before, and workers may dial the port with which it was. So while a round is gathered, all live nodes are
    expected. Standbys of a running round are gone, and come back as new incarnations.
    """
    phase = job.phase
    if isinstance(phase, Gathering):
        return evolve(job, phase=evolve(phase, expected=frozenset(joined.node for joined in job.live.values())))
    if isinstance(phase, Running):
        return without_nodes(job, [j.node for j in job.live.values() if j.node not in job.member_nodes])
    return job
