"""The two endpoints at which the store of a job may be. Rule 17 of docs/protocol.md says why this is safe.

1. The journal is at one of them, the agent's *home*. An agent that cannot reach the store for a while tries both, in
   turn, until it finds the journal, or until enough agents are there to found the journal again (`rebirth`).
2. An agent goes on in the journal to which it comes if this journal holds all that the agent has read. Otherwise it
   begins there as a new agent. It cannot do this if it may have workers. An agent that has said `Left` goes nowhere.
3. A new agent looks at both endpoints. If both have a journal of the job, the later one counts.
4. The host of the first endpoint begins a new journal only if the second one answers and has none. It leaves a note
   there that says so, in the place of a header. Whoever writes the note or a header first has decided.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from attrs import frozen

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.client import Client, endpoint
from reknit.adapters.journals.tcpstore.keys import OWNER, Keys
from reknit.adapters.journals.tcpstore.lines import FIRST, ROUND_TRIPS, TIMEOUT_S
from reknit.adapters.journals.tcpstore.voice import Voice
from reknit.adapters.journals.tcpstore.votes import LONGEST_STAY_S
from reknit.adapters.ports import Refused, Unavailable
from reknit.core.job.entries import Terms
from reknit.core.job.job import Gathering, Job, Running
from reknit.core.job.majority import has_majority
from reknit.core.job.reasons import Refusal

LOOK_S = FIRST * TIMEOUT_S
"""How long an agent waits for the answer of an endpoint that may have the journal. Seconds."""
_BRIEF_LOOK_S, _NOTE_LOOK_S = 1.0, 3.0
"""The same for an agent that has more to do meanwhile, if no store of the job is far away: to see whether there is a
later journal, and to find a note. Seconds."""
_PAUSE_S = 0.5
"""After both endpoints were tried in vain, no thread of the agent tries again for so long. Seconds."""
ELDERS_S = 3.0
"""How long a host that has lost its store waits for agents that remember the journal. They try again every second. With
two endpoints it waits longer (`elders_s`)."""
_SILENCES = 2
"""An agent tries the other endpoint when it could not reach the store for so many silence limits, and the time that a
call may take."""
_STRAYED_S = 2.0
"""How often an agent looks for a later journal while its own one has no majority. Seconds."""


def away_s(timeout_s: float, silence_s: float) -> float:
    """After how many seconds without the store an agent tries the other endpoint. `timeout_s`: how long a call may
    take."""
    return timeout_s + _SILENCES * silence_s


def elsewhere_s(timeout_s: float, silence_s: float) -> float:
    """After how many seconds at most the agent has asked there. The last call to the first endpoint may hang."""
    return away_s(timeout_s, silence_s) + FIRST * timeout_s


def elders_s(timeout_s: float, silence_s: float) -> float:
    """How many seconds a host waits at most for agents that remember the journal: until they have been at both
    endpoints, and had time to find a majority at the second one."""
    return ELDERS_S + elsewhere_s(timeout_s, silence_s) + LONGEST_STAY_S


def owner_of(job: str) -> bytes:
    """What stands at the key `OWNER` in a store that serves this job."""
    return job.encode(errors="surrogatepass")


def check_owner(where: str, owner: bytes, job: str) -> None:
    """Raises `Refused` if the store at this endpoint serves another job. `owner`: what stands at the key `OWNER`."""
    if owner not in (b"", owner_of(job)):
        other = owner.decode(errors="replace")
        why = f"{where} serves job {other}, not {job}: give --rdzv-id={other}, or another endpoint"
        raise Refused(Refusal.OTHER_JOB, why)


@frozen
class Found:
    """What is at an endpoint."""

    place: int
    """0: the first endpoint. 1: the second."""
    header: bytes
    """Empty: there is no journal of the job."""
    rank: tuple[int, str]
    """Which life of the journal it is: its number and its name. Later lives have higher numbers. The name decides
    between two lives that were founded from the same one. The number is -1 if there is none."""
    owner: bytes = b""
    """The job that the store serves. Empty: none yet."""
    offers: bytes = b""
    """How often agents have offered there to found the journal again. Empty: never."""
    best: bytes = b""
    """The best offer there, which its agent renews."""


class Places:
    """Where one agent's journal is."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        hosted: int | None = None,
        on_move: Callable[[str], object] = lambda _: None,
        silence_s: float = Terms().silence_s,
        exclusive: bool = False,
        on_wait: Callable[[float], object] = lambda _: None,
    ) -> None:
        """`endpoints`: two. `hosted`: the one whose store this agent hosts, 0 or 1. None: it hosts none. `on_move`:
        called with the endpoint when the journal was found at another one than before. `silence_s`: of the terms of
        this agent, in seconds. `exclusive`: each of the two stores serves one job only. `on_wait`: called once, before
        this host waits for agents that remember the journal, with the seconds that it waits at most."""
        self._on_wait, self._has_told = on_wait, False
        self.moving = threading.Lock()
        """Held while a connection is made."""
        self.home = 0
        self._endpoints = endpoints
        self._hosted = hosted
        self._on_move = on_move
        self._silence_s = silence_s
        self._exclusive = exclusive
        self._place = 0
        self._reached_at = time.monotonic()
        self._looks_elsewhere = False
        self._failed_at, self._why, self._answers = float("-inf"), "", False
        self._strayed_at = float("inf")
        self._looking: set[Client] = set()
        """The connections of the looks that last."""
        self._is_closed = False

    def close(self) -> None:
        """A look that waits for an endpoint ends, in whichever thread, and no other one begins."""
        self._is_closed = True
        for client in list(self._looking):
            client.close()

    @property
    def is_host(self) -> bool:
        """This agent hosts the store in which the journal is."""
        return self._hosted == self.home

    # ---- where to look ----

    def reached(self) -> None:
        """The store has answered."""
        self._reached_at = time.monotonic()

    def check_pause(self) -> None:
        if time.monotonic() - self._failed_at < _PAUSE_S:
            raise Unavailable(self._why, answers=self._answers)

    def order(self, timeout_s: float) -> Sequence[int]:
        """The endpoints that an agent tries that has read a sealed round, and has not said goodbye."""
        if self._looks_elsewhere:
            return (1 - self.home, self.home)
        return (self.home, 1 - self.home) if self.is_away(timeout_s) else (self.home,)

    def is_away(self, timeout_s: float) -> bool:
        """The store could not be reached for so long that this agent tries the other endpoint."""
        return time.monotonic() - self._reached_at >= away_s(timeout_s, self._silence_s)

    def point(self, place: int) -> tuple[str, int]:
        self._place = place
        return self._endpoints[place]

    def found(self) -> None:
        """The journal was found where this agent looks now."""
        if self.home != self._place:
            self.home = self._place
            self._on_move(endpoint(*self._endpoints[self.home]))
        self._failed_at, self._looks_elsewhere = float("-inf"), False
        self.reached()

    def look_at(self, place: int) -> None:
        """Try this endpoint first, when the next connection is made."""
        self._looks_elsewhere = place != self.home

    def wait_for_elders_s(self, timeout_s: float) -> float:
        """How many more seconds this host waits for agents that remember the journal. The operator is told so once."""
        wait_s = elders_s(timeout_s, self._silence_s) - ELDERS_S
        if not self._has_told:
            self._has_told = True
            self._on_wait(wait_s)
        return wait_s

    def failed(self, why: str, *, answers: bool) -> Unavailable:
        self._failed_at, self._why, self._answers = time.monotonic(), why, answers
        return Unavailable(why, answers=answers)

    # ---- what is there ----

    def latest(self, keys: Keys, envelope: Envelope, timeout_s: float = LOOK_S) -> Found:
        """The later of the journals at the two endpoints. The first endpoint if there is none. `timeout_s`: how long
        each endpoint may take to answer."""
        found = [self._looked(place, keys, envelope, timeout_s) or Found(place, b"", (-1, "")) for place in (0, 1)]
        return max(found, key=lambda each: (each.rank, -each.place))

    def later(
        self,
        keys: Keys,
        envelope: Envelope,
        voice: Voice,
        job: Job,
        rank: tuple[int, str],
        round_trip_s: float,
    ) -> Found | None:
        """What this agent should look for, if it waits for a majority in vain, or works without one: the nodes that
        have succeeded may be lost, and then the round goes on. It is a later journal than the one with this rank, or
        what is at home if that journal is not there any more. None: there is nothing, or it is not yet time to look
        again."""
        joined, phase, now = voice.joined, job.phase, time.monotonic()
        is_waiting = isinstance(phase, Gathering) and joined is not None and joined.node not in phase.expected
        if not (is_waiting or isinstance(phase, Running)) or has_majority(job) or voice.has_left:
            self._strayed_at = float("inf")
            return None
        self._strayed_at = min(self._strayed_at, now)
        if now - self._strayed_at < _STRAYED_S:
            return None
        self._strayed_at = now
        timeout_s = max(_BRIEF_LOOK_S, ROUND_TRIPS * round_trip_s)
        found = [each for place in (0, 1) if (each := self._looked(place, keys, envelope, timeout_s)) is not None]
        if later := [each for each in found if each.rank > rank]:
            return max(later, key=lambda each: each.rank)
        return next((each for each in found if each.place == self.home and each.rank != rank), None)

    def name_of(self, found: Found) -> str:
        return endpoint(*self._endpoints[found.place])

    def check_first(self) -> None:
        """Raises `Unavailable` if this agent looks at the second endpoint. No journal begins there."""
        if self._place != 0:
            raise self.failed(f"the journal was at {endpoint(*self._endpoints[self._place])} just now", answers=True)

    def is_remembered(self, keys: Keys, envelope: Envelope) -> bool:
        """Whether the second endpoint shows that agents may remember a journal: there is a note, because a new journal
        has begun at the first endpoint before, or an agent has offered to found the journal again. Raises `Unavailable`
        if no new journal may begin, and `Refused`."""
        found = self._second(keys, envelope)
        return bool(found.header or found.offers)

    def offers(self, keys: Keys, envelope: Envelope) -> list[bytes]:
        """What shows that agents at the second endpoint offer to found the journal again: it changes while they do.
        Empty: no store answers there."""
        found = self._looked(1, keys, envelope, LOOK_S)
        return [] if found is None else [found.offers, found.best]

    def reserve(self, keys: Keys, envelope: Envelope, header: bytes) -> None:
        """Write at the second endpoint that a new journal with this header begins at the first one. Raises
        `Unavailable` if no new journal may begin, and `Refused`."""
        before, note = self._second(keys, envelope).header, envelope.elsewhere(header)
        owner, found = self._noted(keys, before, note, envelope.job)
        self._check_owner(owner, envelope.job)
        if found != note:
            raise self.failed(f"another agent was faster at {endpoint(*self._endpoints[1])}", answers=True)

    def note(self, keys: Keys, envelope: Envelope, round_trip_s: float) -> bytes:
        """The note at the second endpoint, if this agent looks at the first one. Empty: there is none, or no store
        answers there. `round_trip_s`: the longest of any agent."""
        timeout_s = max(_NOTE_LOOK_S, ROUND_TRIPS * round_trip_s)
        found = self._looked(1, keys, envelope, timeout_s) if self._place == 0 else None
        return found.header if found is not None and found.header and envelope.is_elsewhere(found.header) else b""

    def note_again(self, keys: Keys, envelope: Envelope, header: bytes, before: bytes) -> None:
        """The journal with this header has been founded at the first endpoint, or another one has made way for it. The
        note `before` names this journal from now on. Otherwise nobody could go to the second endpoint any more. A note
        that was written since stays: its journal may have begun when this one was lost."""
        try:
            if self._place == 0 and before:
                self._noted(keys, before, envelope.elsewhere(header), envelope.job)
        except Unavailable:
            pass  # usually that store is lost, and the note with it

    def _noted(self, keys: Keys, before: bytes, note: bytes, job: str) -> tuple[bytes, bytes]:
        """Put the note in the place of `before`. Returns the owner of the store, and what stands there now."""
        name = owner_of(job)
        with self._look(1, LOOK_S) as client:
            owner = client.compare_set(OWNER, b"", name) if self._exclusive else name
            return owner, client.compare_set(keys.header, before, note) if owner == name else b""

    def _check_owner(self, owner: bytes, job: str) -> None:
        if self._exclusive:
            check_owner(endpoint(*self._endpoints[1]), owner, job)

    def _second(self, keys: Keys, envelope: Envelope) -> Found:
        """What is at the second endpoint. In the place of the header there is a note, or nothing."""
        found, where = self._looked(1, keys, envelope, LOOK_S), endpoint(*self._endpoints[1])
        if found is None:
            raise self.failed(
                f"no store answers at the second endpoint {where}, and a job with two endpoints begins when both hosts "
                "are there",
                answers=True,
            )
        self._check_owner(found.owner, envelope.job)
        if found.rank[0] >= 0:
            raise self.failed(f"the job goes on at {where}", answers=True)
        if found.header and not envelope.is_elsewhere(found.header):
            envelope.another().admit(found.header)  # it is refused
        return found

    def _looked(self, place: int, keys: Keys, envelope: Envelope, timeout_s: float) -> Found | None:
        """None: the endpoint does not answer."""
        try:
            with self._look(place, timeout_s, (OWNER, keys.header, keys.offers, keys.best)) as client:
                owner, header, offers, best = client.greeting
        except Unavailable:
            return None
        return Found(place, header, envelope.rank_of(header), owner, offers, best)

    @contextmanager
    def _look(self, place: int, timeout_s: float, keys: Sequence[str] = ()) -> Iterator[Client]:
        """A connection to this endpoint, beside those of the agent's threads."""
        begun: list[Client] = []
        try:
            yield Client(*self._endpoints[place], timeout_s, keys, partial(self._begun, begun))
        finally:
            for client in begun:
                client.close()
                self._looking.discard(client)

    def _begun(self, begun: list[Client], client: Client) -> None:
        begun.append(client)
        self._looking.add(client)
        if self._is_closed:
            raise Unavailable(f"{endpoint(*self._endpoints[self._place])}: the journal was closed here")
