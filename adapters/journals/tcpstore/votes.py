"""Votes in a store that may be at one of two endpoints. Rule 17 of docs/protocol.md says what they are for.

1. An agent votes for the life of the journal that the best offer would found (`rebirth`), or objects to a young journal
   (`young`). It has one key for each.
2. A vote names the offer, and an objection names the header of the young journal. So they count for nothing that comes
   later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from itertools import count
from random import uniform

from attrs import frozen

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.history import Life, chained, common, lives
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys
from reknit.adapters.ports import Unavailable
from reknit.core.job.job import Job
from reknit.core.job.majority import missing, moved

LONGEST_STAY_S = 10.0
_STAY_S = (5.0, LONGEST_STAY_S)
"""How long an agent waits at one of two endpoints for a majority, at least and at most, if the store is near. Meanwhile
it can take the place of a dead agent with a better offer, and wait for others. Seconds."""
TURNS = 12
"""The wait is longer by so many round trips. An agent needs about four to come, and as many for each look."""
POLL_S, _PER_MEMBER_S = 0.05, 2e-3
"""The pause between two looks, and how much longer it is for each member if every member looks. Seconds."""
_NO_MORE: Mapping[str, object] = {}
_KeyOf = Callable[[str], str]
"""The key of an agent, by its nonce."""


class Past:
    """What one agent has done in elections before."""

    def __init__(self) -> None:
        self.was_in_vain = False
        """The last time, the best offer was this agent's, and found no majority. Other agents may have read what that
        offer does not hold. As long as it is the best, they can agree on no other one."""
        self._numbers: dict[str, int] = {}
        """By name, the numbers of the lives for which this agent has voted. They may have been founded."""

    def taken_in_vain(self) -> bool:
        """`was_in_vain`, which counts for the next election only."""
        was_in_vain, self.was_in_vain = self.was_in_vain, False
        return was_in_vain

    def voted(self, name: str, number: int) -> None:
        self._numbers[name] = number

    def number_beside(self, name: str) -> int:
        """The highest number of a life that this agent has voted for, other than this one. 0: there is none."""
        return max((number for other, number in self._numbers.items() if other != name), default=0)


@frozen
class Election:
    """An agent's part in founding a journal again whose store may be at two endpoints."""

    nonce: str
    """Names the agent, as in its `Joined`. Empty: it has no vote, because it has not joined, or has said goodbye."""
    life: Life
    position: int
    """The agent has read this life of the journal up to this position, and may not have folded all of it."""
    where: str
    """The endpoint, for messages."""
    past: Past
    """What this agent has done in elections before."""


def await_majority(client: Client, keys: Keys, envelope: Envelope, job: Job, header: bytes, election: Election) -> None:
    """Wait until there are agents enough to found the journal again, in the place of the one with this header. Raises
    `Unavailable` if there are not.

    Each agent renews its objection, and counts the others whose objection it has seen to change. The header may stay
    for long, and so would the objection of an agent that has died."""
    give_up_at, choice = time.monotonic() + stay_s(client), chained("", header)
    own = {"line": election.life.line, "position": election.position}
    first: dict[str, bytes] = {}
    here: set[str] = set()
    """Whose objection has changed."""
    for renewals in count(1):
        vote(client, keys.objection, envelope, election.nonce, choice, {**own, "renewals": renewals})
        ballots = cast(client, keys.objection, envelope, job, choice)
        here |= {nonce for nonce, ballot in ballots.items() if first.setdefault(nonce, ballot) != ballot}
        read = {nonce: _read_by(envelope, nonce, ballots[nonce]) for nonce in here & ballots.keys()}
        found = _on_one_line(job, {**read, election.nonce: (election.life, election.position)})
        if found.is_majority:
            # Another agent may have seen only the last one of this agent. It must see a change as well.
            vote(client, keys.objection, envelope, election.nonce, choice, {**own, "renewals": renewals + 1})
            return
        if time.monotonic() >= give_up_at and renewals > 1:
            withdraw(client, keys.objection, election)
            raise too_few(election, found)
        time.sleep(POLL_S + _PER_MEMBER_S * len(job.members))


@frozen
class Count:
    """How many agents have offered, or have voted."""

    have: int
    all: int
    is_majority: bool = True


def stay_s(client: Client) -> float:
    """How many seconds this agent waits here for a majority."""
    return uniform(*_STAY_S) + TURNS * client.round_trip_s


def vote(
    client: Client, key: _KeyOf, envelope: Envelope, nonce: str, choice: str, more: Mapping[str, object] = _NO_MORE
) -> None:
    """`key`: the key of a nonce. `choice`: what this agent votes for, by its name. Empty: for nothing."""
    if nonce:
        client.set(key(nonce), envelope.seal({"choice": choice, **more}, _ballot(nonce)) if choice else b"")


def withdraw(client: Client, key: _KeyOf, election: Election) -> None:
    if election.nonce:
        client.set(key(election.nonce), b"")


def cast(client: Client, key: _KeyOf, envelope: Envelope, job: Job, choice: str | None) -> Mapping[str, bytes]:
    """The votes for this choice of agents of the last two rounds, by nonce. `choice`: None: for any."""
    nonces = list({member.nonce for member in job.members} | set(job.former))
    votes = zip(nonces, client.multi_get([key(nonce) for nonce in nonces]), strict=True)
    found = {nonce: (vote, envelope.unseal(vote, _ballot(nonce)).get("choice")) for nonce, vote in votes}
    return {nonce: vote for nonce, (vote, made) in found.items() if (made if choice is None else made == choice)}


def highest(envelope: Envelope, ballots: Mapping[str, bytes]) -> int:
    """The highest number of another life for which one of these agents has voted before. 0: there is none."""
    found = (envelope.unseal(ballot, _ballot(nonce)).get("number") for nonce, ballot in ballots.items())
    return max((number for number in found if type(number) is int), default=0)


def _read_by(envelope: Envelope, nonce: str, ballot: bytes) -> tuple[Life, int]:
    """The life of the journal that the agent with this ballot has read, and up to which position."""
    fields = envelope.unseal(ballot, _ballot(nonce))
    *before, last = lives(fields.get("line")) or (("", 0),)
    return Life(*last, before=tuple(before)), position_of(fields)


def _on_one_line(job: Job, read: Mapping[str, tuple[Life, int]]) -> Count:
    """The best count of agents of whom one has read all that the others have read. The others could not go on together.
    `read`: by nonce, what each has read."""
    lines = [
        [nonce for nonce, (life, position) in read.items() if common(life, furthest) >= position]
        for furthest, end in set(read.values())
        if end >= 0
    ]
    counts = [counted(job, line) for line in lines] or [counted(job, ())]
    return max(counts, key=lambda count: (count.is_majority, count.have))


def counted(job: Job, voters: Collection[str]) -> Count:
    """How many agents of the last round have voted, and whether they can go on from this fold. `voters`: nonces."""
    lack = missing(moved(job), voters)
    if lack is None:
        return Count(sum(member.nonce in voters for member in job.members), len(job.members))
    return Count(lack.have, lack.members, is_majority=False)


def _ballot(nonce: str) -> str:
    return f"vote of {nonce}"


def too_few(election: Election, count: Count) -> Unavailable:
    have = f"{count.have} of the {count.all} nodes of the last round can go on from here"
    return Unavailable(
        f"{election.where}: {have}, and more than half are needed; an agent that was started again does not count: if "
        "the others stay away, start all agents of the job again",
        answers=True,
    )


def position_of(fields: Mapping[str, object]) -> int:
    """-1: there is none."""
    position = fields.get("position")
    return position if type(position) is int else -1
