"""Founding a journal again whose store has lost it. Rule 16 of docs/protocol.md says why this is safe.

The store of `c10d` lives as long as its host. When the host is back, the store is empty. Every other agent still has
the whole fold.

1. Each agent that finds no header offers what it has: its position, and the digest of all records before it. An agent
   that finds a young journal offers in the same way when it has made that journal void (`young`). The key `best` holds
   the best offer: the latest life, in it the highest position, and among equals the smallest name.
2. The agent with the best offer waits for the others: until as many agents have offered as nodes are live, or for
   `_OFFERS_S`. If one is missing, it is probably the host, and the wait is short. Only offers of the same journal are
   counted.
3. Then this agent writes its fold and the position into the keys of a new life, which nobody else writes to. At last it
   writes the header, with `compare_set`. The header names the journal, the life, the position and the digest.
4. The agent with the best offer renews it every second. An offer that stands still is that of a dead agent, and another
   agent puts its own in its place. Then it waits again, because a third agent may have a better offer, which the dead
   one has hidden.
5. Whoever writes the header first has decided: it puts the header where there was none, or in the place of the void
   one. Every agent checks the header against what it has read itself.
6. Agents may remember different journals: a store may be lost while a young journal is in it. Then an offer of a
   journal in which workers run is better than any other.
7. If the store may be at two endpoints, each agent also votes for the best offer, unless it has read what the agent
   with this offer has not. That agent waits for the votes of a majority (rule 17). Only votes for this very offer
   count, so the vote of an agent that has died counts for no later one. An agent that waits in vain takes its offer and
   its vote back, and looks at the other endpoint. How long it waits is drawn by lot. Otherwise two agents that are
   never at the same endpoint together would stay so for ever. The agent whose offer was the best in vain makes none
   the next time. Otherwise it would keep those from agreeing who have read something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from math import inf

from attrs import evolve, frozen

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.history import Life, common, lives
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.keys import Keys, LifeKeys
from reknit.adapters.journals.tcpstore.votes import (
    POLL_S,
    TURNS,
    Count,
    Election,
    cast,
    counted,
    highest,
    position_of,
    stay_s,
    too_few,
    vote,
    withdraw,
)
from reknit.adapters.ports import Unavailable
from reknit.core.job.job import Job
from reknit.core.job.majority import moved

_OFFERS_S = 1.5
"""How long the agent with the best offer waits for others. An agent that lost its store tries again every second."""
_ONE_MISSING_S = 0.3
_RENEW_S = 1.0
"""How often the best offer is renewed. One that stands still for `2 * _OFFERS_S`, and `TURNS` round trips, is that of a
dead agent."""
LARGEST = 4 << 20
"""Upper bound on a value in the store, in bytes. torch's server closes the connection at a value of 8 MiB. A larger
fold is published only where a life of the journal begins, in several values."""


@frozen
class Memory:
    """What an agent has read and folded."""

    position: int
    job: Job
    digest: str
    """Of all records before `position`."""
    life: Life = Life()
    """In which it has read them."""


def found_again(
    client: Client,
    keys: Keys,
    envelope: Envelope,
    memory: Memory,
    void: bytes = b"",
    number: int = 1,
    election: Election | None = None,
) -> bytes:
    """Found the journal again, or wait until another agent has. Returns the header.

    `void`: the header of a journal that makes way for this one. Empty: the store has no header.
    `number`: of the new life (`Life.number`).
    `election`: the store may be at two endpoints, so a majority is needed. None: there is one endpoint.

    Raises `Unavailable` if there is no majority."""
    candidate = _Candidate(client, keys, envelope, memory, number, election)
    give_up_at = inf if election is None else time.monotonic() + stay_s(client)
    candidate.come()
    while not (header := header_within(client, keys, POLL_S, void)):
        if candidate.is_chosen():
            header = _founded(client, keys, envelope, memory, candidate.life, void)
            candidate.check_founded(header, void)
            return header
        if time.monotonic() >= give_up_at:
            return candidate.given_up(void)
        candidate.look()
    return header


class _Candidate:
    """An agent that offers to found the journal again."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        envelope: Envelope,
        memory: Memory,
        number: int,
        election: Election | None,
    ) -> None:
        self.life = Life(os.urandom(8).hex(), memory.position, memory.digest, number, memory.life.line)
        self._client, self._keys, self._envelope = client, keys, envelope
        self._job = memory.job
        self._number = memory.life.number
        """The number of the life that this agent has read last (`Life.number`). It may have come to a later life, and
        have read nothing there."""
        self._election = election
        self._abstains = election is not None and election.past.taken_in_vain()
        self._renewals = 0
        self._offer = self._made()
        self._voters: Collection[str] = ()
        """Nonces of the agents that have voted for this agent's offer when it has counted last."""
        self._offers = 0
        """How many agents have offered here."""
        self._best = b""
        self._best_at = 0.0
        """When this agent's offer has become the best, or when another agent's best offer has last been seen to change.
        Monotonic time."""
        self._renewed_at = 0.0
        self._least_s = 0.0

    @property
    def is_best(self) -> bool:
        """This agent's offer is the best one."""
        return self._best == self._offer

    def come(self) -> None:
        self._best_at = time.monotonic()
        self._see(self._client.get(self._keys.best) if self._abstains else self._offered())
        self._client.add(self._keys.offers, 1)
        # Only now: whoever counts this offer must find it.
        self._offers = self._client.add(self._keys.offers_of(self._envelope.journal), 1)

    def look(self) -> None:
        """See which offer is the best now. Keep it, renew it, or put this agent's own in its place."""
        client, keys = self._client, self._keys
        self._offers, (best,) = client.add_and_get(keys.offers_of(self._envelope.journal), 0, [keys.best])
        is_still = self._waited_s() >= 2 * _OFFERS_S + TURNS * client.round_trip_s
        if self._abstains and not best and is_still:
            self._abstains = False  # nobody else makes an offer
        if self._abstains:
            self._see(best)
            if time.monotonic() - self._renewed_at >= _RENEW_S:
                self._renewed_at = time.monotonic()
                client.add(keys.offers, 1)  # a host that waits for agents sees that one is here
            return
        is_dead = best == self._best != self._offer and is_still
        if is_dead:
            best = client.compare_set(keys.best, best, self._offer)
        is_better = _rank(self._envelope, self._offer) < _rank(self._envelope, best)
        if is_better:
            best = self._offered()
        if is_dead or is_better:
            self._least_s = _OFFERS_S
        self._see(best)
        if best == self._offer and time.monotonic() - self._renewed_at >= _RENEW_S:
            self._renew()

    def _offered(self) -> bytes:
        """Put this agent's offer in place if it is the best. Returns the best."""
        client, best = self._client, self._client.compare_set(self._keys.best, b"", self._offer)
        while _rank(self._envelope, self._offer) < _rank(self._envelope, best):
            best = client.compare_set(self._keys.best, best, self._offer)
        return best

    def is_chosen(self) -> bool:
        """Whether this agent is to found the journal."""
        waited_s = self._waited_s()
        if not self.is_best or waited_s < self._least_s:
            return False
        ballots = self._ballots()
        self._voters = ballots.keys()
        if not self._is_enough(self._counted(ballots), waited_s) or not self._has_highest_number(ballots):
            return False
        # An agent that was counted may have come with a better offer. It has offered before it was counted.
        return self._client.get(self._keys.best) == self._offer

    def _is_enough(self, count: Count, waited_s: float) -> bool:
        """As many agents have come as can be expected."""
        if not count.is_majority:
            return False
        if count.have >= count.all - 1 and waited_s >= _ONE_MISSING_S:
            return True
        return count.have >= count.all or waited_s >= _OFFERS_S

    def _counted(self, ballots: Mapping[str, bytes]) -> Count:
        if self._election is None or not self._job.members:
            return Count(self._offers, len(self._job.live))
        return counted(self._job, ballots)

    def _ballots(self) -> Mapping[str, bytes]:
        if self._election is None:
            return {}
        choice = _choice_of(self.life.name, self.life.number)
        return cast(self._client, self._keys.vote, self._envelope, self._job, choice)

    def _has_highest_number(self, ballots: Mapping[str, bytes]) -> bool:
        """The new life has a higher number than any that one of the voters has voted for before. That one may have
        been founded, and another agent may be there. Otherwise the offer names another number from now on."""
        number = highest(self._envelope, ballots)
        if number < self.life.number:
            return True
        self.life = evolve(self.life, number=number + 1)
        self._renew()
        return False

    def check_founded(self, header: bytes, void: bytes) -> None:
        """Take the header back, and raise `Unavailable`, if there is no majority any more. This agent was so slow that
        another one has taken its vote back, and may go on elsewhere. Whoever votes for another offer by now is still
        here. This agent has written the header before it looks. The other one looks for a header after it has taken
        its vote back (`given_up`). So one sees the other."""
        election = self._election
        if election is None or self._envelope.rank_of(header)[1] != self.life.name:
            return
        here = cast(self._client, self._keys.vote, self._envelope, self._job, None)
        count = self._counted({nonce: vote for nonce, vote in here.items() if nonce in self._voters})
        if not count.is_majority:
            self._client.compare_set(self._keys.header, header, void)
            self._withdraw(election)
            raise too_few(election, count)

    def given_up(self, void: bytes) -> bytes:
        """Take the offer and the vote back. Returns the header, if another agent has written it meanwhile. Otherwise
        raises `Unavailable`."""
        election = self._election
        if election is None:
            raise AssertionError("only an agent that needs a majority gives up")
        election.past.was_in_vain = self.is_best
        error = too_few(election, self._counted(self._ballots()))
        self._withdraw(election)
        header = self._client.get(self._keys.header)
        if header in (b"", void):
            raise error
        return header

    def _withdraw(self, election: Election) -> None:
        self._client.compare_set(self._keys.best, self._offer, b"")
        withdraw(self._client, self._keys.vote, election)

    def _waited_s(self) -> float:
        return time.monotonic() - self._best_at - self._client.round_trip_s

    def _see(self, best: bytes) -> None:
        if best == self._best:
            return
        self._best, self._best_at = best, time.monotonic()
        if self._election is not None:
            self._vote(best, self._election)

    def _renew(self) -> None:
        before, self._renewals = self._offer, self._renewals + 1
        self._offer = self._made()
        self._renewed_at = time.monotonic()
        if self._client.compare_set(self._keys.best, before, self._offer) == self._offer:
            self._best = self._offer  # this agent waits no longer for that
            if self._election is not None:
                self._vote(self._offer, self._election)  # it may name another number now

    def _made(self) -> bytes:
        job, life = self._job, self.life
        fields = {"position": life.position, "digest": life.digest, "name": life.name, "number": self._number}
        more = {
            "founds": life.number,
            "before": life.before,
            "journal": self._envelope.journal,
            "renewals": self._renewals,
        }
        has_workers = bool(job.members) and job.outcome is None
        return self._envelope.seal({**fields, **more, "has_workers": has_workers}, "offer")

    def _vote(self, offer: bytes, election: Election) -> None:
        """Vote for the life that this offer would found. Vote for nothing if that life would not hold all that this
        agent has read."""
        fields = self._envelope.unseal(offer, "offer")
        life = Life(str(fields.get("name")), position_of(fields), before=lives(fields.get("before")))
        number, choice, past = fields.get("founds"), "", election.past
        if type(number) is int and common(election.life, life) >= election.position:
            choice = _choice_of(life.name, number)
            past.voted(life.name, number)
        beside = {"number": past.number_beside(life.name)}
        vote(self._client, self._keys.vote, self._envelope, election.nonce, choice, beside)


def _choice_of(name: str, number: int) -> str:
    """What a vote for the life with this name and number names."""
    return f"{name} {number}"


def _founded(client: Client, keys: Keys, envelope: Envelope, memory: Memory, life: Life, void: bytes) -> bytes:
    of_life = keys.of(life.name)
    _write(client, of_life, envelope.wrap_job(memory.position, moved(memory.job), memory.digest))
    client.set(of_life.fold_at, b"%d" % life.position)
    client.set(of_life.head, b"%d" % life.position)
    return client.compare_set(keys.header, void, envelope.header(life))


def header_within(client: Client, keys: Keys, wait_s: float, void: bytes = b"") -> bytes:
    """The header, if there is another than `void` within so many seconds. Empty: there is none. A header that was taken
    back is empty. The store takes it for a value, and does not wait for another one."""
    give_up_at = time.monotonic() + wait_s
    while True:
        if not void:
            client.wait([keys.header], wait_s)
        header = client.get(keys.header)
        if header not in (b"", void):
            return header
        if time.monotonic() >= give_up_at:
            return b""
        time.sleep(POLL_S)


def _write(client: Client, keys: LifeKeys, fold: bytes) -> None:
    first, *others = (fold[i : i + LARGEST] for i in range(0, len(fold), LARGEST))
    for number, part in enumerate(others, 1):
        client.set(keys.part(number), part)
    client.set(keys.fold, first)


def first_fold(client: Client, keys: LifeKeys) -> bytes:
    """The fold that was written when this life began. A later fold if one has been published since."""
    fold, number = client.get(keys.fold), 1
    while len(fold) == number * LARGEST and (part := client.get(keys.part(number))):
        fold, number = fold + part, number + 1
    return fold


def base_of(client: Client, keys: LifeKeys, envelope: Envelope) -> tuple[int, Job]:
    """The position and the fold with which this life begins. A later fold if a reader has published one since. No
    reader reads past a veto that counts (`young`), so all agents judge alike. Raises `Unavailable`."""
    found = envelope.open_fold(first_fold(client, keys))
    if found is None:
        raise Unavailable(f"the fold with which the journal of job {envelope.job} goes on is damaged")
    position, job, _ = found
    return position, job


def _rank(envelope: Envelope, offer: bytes) -> tuple[int, int, int, str]:
    """The smaller, the better. What is no offer of a journal of this job is the worst. The order is the same for all
    agents, whichever journal they remember. Otherwise two of them would replace each other's offer for ever."""
    fields = envelope.of(offer).unseal(offer, "offer")
    position, number = position_of(fields), fields.get("number")
    if position < 0 or type(number) is not int:
        return 2, 0, 0, ""
    return 0 if fields.get("has_workers") is True else 1, -number, -position, str(fields.get("name"))
