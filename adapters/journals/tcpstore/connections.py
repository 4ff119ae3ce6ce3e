"""The connections of a journal in a TCPStore, and finding out which journal is there.

1. The reader has a connection, and the appends have one. Beats use that of the appends as well, until an append takes
   long. Every new connection first checks that the journal is the same.
2. The header is written once. Usually the agent that hosts the store writes it. If an agent that has read the journal
   finds no header, the store has lost everything, and the journal is founded again (`rebirth`).
3. An agent that has read nothing begins the journal, or waits for the one that does (`beginning`).
4. An agent that finds another journal makes it void if it can (`young`). If no round was sealed in its own journal, the
   agent has no workers, and takes part in the other one.
5. If the store may be at two endpoints, `Places` says where to look. The journal that is found there counts by the same
   rules.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from reknit.adapters.journals.envelope import Envelope, number
from reknit.adapters.journals.history import Life, common
from reknit.adapters.journals.tcpstore.beginning import Beginning, makes_way
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.course import Course
from reknit.adapters.journals.tcpstore.keys import OWNER, Keys
from reknit.adapters.journals.tcpstore.lines import Lines
from reknit.adapters.journals.tcpstore.places import Places
from reknit.adapters.journals.tcpstore.rebirth import Memory, found_again
from reknit.adapters.journals.tcpstore.voice import Voice
from reknit.adapters.journals.tcpstore.votes import Election, Past, await_majority
from reknit.adapters.journals.tcpstore.young import is_void, is_void_now
from reknit.adapters.ports import Refused, Unavailable
from reknit.core.job.entries import Entry
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

_NOTHING = -1
"""In the place of a position: this agent begins anew, and was given nothing."""


class Connections:
    """The connections of one agent to one journal, by the name of the thread that uses them."""

    def __init__(
        self,
        host: str,
        port: int,
        envelope: Envelope,
        *,
        exclusive: bool,
        founds: bool,
        timeout_s: float,
        has_elders: bool,
        reads_only: bool,
        places: Places | None,
    ) -> None:
        """The parameters are those of `TCPStoreJournal`."""
        self.places = places
        self._lines = Lines(host, port, timeout_s)
        self.keys = Keys(envelope.job)
        self.pace_ms = 0
        """The longest round trip of any writer, as far as this agent knows. Milliseconds."""
        self._envelope = envelope
        self._founds = founds
        self._beginning = Beginning(
            self._lines, self.keys, envelope, places, exclusive=exclusive, has_elders=has_elders
        )
        self._reads_only = reads_only
        self._greeting = threading.Lock()
        self._saying = threading.Lock()
        """Held while this agent notes in which life it says or reads something."""
        self._course: Course | None = None
        self._memory: Memory | None = None
        self._given: tuple[Life, int] = Life(), 0
        """The life, and the position in it, up to which the agent was given entries. It may not have folded them
        yet."""
        self._folded: tuple[int, Job] | None = None
        """The position up to which the agent has folded the journal, and the fold. There may be no digest for it."""
        self.known: Course | None = None
        """The life of the journal in which the agent has folded something last. None: it has folded nothing yet."""
        self._starts_over = False
        self._voice = Voice()
        self._past = Past()

    @property
    def where(self) -> str:
        """The endpoint, for messages."""
        return self._lines.where

    def remember(self, position: int, job: Job) -> None:
        """The agent has folded everything before `position`."""
        with self._saying:
            course, (life, given) = self._course, self._given
            if course is None or position != given:
                return  # it was read of a journal in which this agent takes part no more
            self._folded = position, job
            if life.name == course.life.name:
                course.taken_in()
                self.known = course
            digest = "" if course.prefix is None else course.prefix.at(position)
            if digest:
                self._memory = Memory(position, job, digest, life)

    def close(self) -> None:
        self._lines.close()
        if self.places is not None:
            self.places.close()

    def client(self, role: str) -> tuple[Client, Course]:
        """The connection of one of the threads, and the life of the journal that it reaches."""
        client, course = self._lines.clients.get(role), self._course
        if client is not None and course is not None and not client.is_closed:
            return client, course
        self._lines.check_open()
        return self._opened(role) if self.places is None else self._moved(role, self.places)

    def may_say(self, entry: Entry, course: Course, known: Course | None) -> bool:
        """Whether this agent still wants to say this. `known`: the life that the agent knew when it wanted the entry.
        Raises `Unavailable` if it has come to another life of the journal than that of `course` meanwhile: what is
        appended there would count in the life before."""
        with self._saying:
            if self._course is not course:
                raise Unavailable(f"{self.where}: the journal has begun another life")
            is_stranger = course.has_other_base or known not in (None, course)
            return self._voice.may_say(entry, is_stranger=is_stranger)

    def holds(self, position: int) -> None:
        """The agent holds nothing beyond this position, and nothing beyond what it was given."""
        with self._saying:
            self._given = self._given[0], min(position, self._given[1])

    def give(self, course: Course, position: int) -> None:
        """The agent is about to be given what this life holds before `position`. Raises `Unavailable` if the agent has
        come to another life meanwhile: that one may not hold the same."""
        with self._saying:
            if self._course is not course:
                raise Unavailable(f"{self.where}: the journal has begun another life")
            self._given = course.life, position

    def _moved(self, role: str, places: Places) -> tuple[Client, Course]:
        """A connection to the endpoint at which the journal is."""
        with places.moving:
            places.check_pause()
            why, answers = list[str](), False
            for place in (order := self._order(places)):
                self._lines.check_open()
                if len(order) > 1:
                    self._lines.hurry(1e-3 * self.pace_ms)
                self._lines.address = places.point(place)
                try:
                    found = self._opened(role)
                except Unavailable as error:
                    why.append(str(error))
                    answers = answers or error.answers
                except Refused as refused:
                    if refused.refusal is not Refusal.OTHER_JOB or place == places.home:
                        raise
                    why.append(str(refused))
                else:
                    places.found()
                    return found
            raise places.failed("; ".join(why), answers=answers)

    def _order(self, places: Places) -> Sequence[int]:
        course, memory = self._course, self._memory
        if course is None or (memory is None and course.starts_over):
            return (places.latest(self.keys, self._envelope).place,)
        if self._voice.has_left:
            return (places.home,)
        if memory is None or not memory.job.members:
            return (self._home_of_a_newcomer(places, course),)
        return places.order(self._lines.timeout_s)

    def _home_of_a_newcomer(self, places: Places, course: Course) -> int:
        """Where an agent looks that has read no sealed round. It has no vote. So it goes to the other endpoint only
        when the others have founded the journal again there."""
        if not places.is_away(self._lines.timeout_s):
            return places.home
        found = places.latest(self.keys, self._envelope)
        return found.place if found.rank > (course.life.number, course.life.name) else places.home

    def _opened(self, role: str) -> tuple[Client, Course]:
        client = self._lines.connected(role, (OWNER, self.keys.header, self.keys.offers, self.keys.pace))
        try:
            with self._greeting:
                course = self._greeted(client)
            self._lines.check_open()
        except BaseException:
            client.close()
            raise
        return client, course

    # ---- which journal is there ----

    def _greeted(self, client: Client) -> Course:
        owner, header, _, pace = client.greeting
        self.pace_ms = max(self.pace_ms, number(pace))
        if self._reads_only:
            if not header and self._course is None:
                raise Refused(Refusal.SETUP, f"{self.where}: there is no journal of job {self._envelope.job}")
            return self._entered(client, header)
        if self._course is not None and not header:
            header = client.get(self.keys.header) or self._found_again(client, self._course)
        if self._course is not None and header and self._is_over(header, self._course):
            header = self._found_again(client, self._course, header)
        if self._course is not None and header and self._envelope.is_foreign(header):
            # The greeting may be old: another thread of this agent may have found the journal again since.
            header = client.get(self.keys.header) or header
            if self._envelope.is_foreign(header):
                header = self._at_another(client, self._course, header)
        if self._course is None:
            owner, header = self._beginning.begun(client) if self._founds else self._beginning.awaited(client)
            self._beginning.check_owner(owner)
            if not header:
                job, hint = self._envelope.job, "if no agent hosts this store, give --rdzv-conf=is_host=false"
                if self.places is not None:
                    hint = "it begins when both hosts are there, and no agent is left that remembers it"
                why = f"waited {self._lines.timeout_s:g} s for its host to begin the journal of job {job} ({hint})"
                raise Unavailable(f"{self.where}: {why}", answers=True)
        return self._entered(client, header)

    # ---- a store that was lost ----

    def _is_over(self, header: bytes, course: Course) -> bool:
        """At one of two endpoints: the journal that this agent has read is not here, but an earlier life of it, or the
        note that it has begun elsewhere."""
        if self.places is None or self._envelope.is_foreign(header):
            return False
        if self._envelope.is_elsewhere(header):
            return True
        rank = self._envelope.rank_of(header)
        return header != course.header and (0, "") <= rank <= (course.life.number, course.life.name)

    def _found_again(self, client: Client, course: Course, void: bytes = b"") -> bytes:
        """The header, after the store has lost everything. Empty: this agent cannot found the journal again. `void`: a
        header that makes way."""
        self._claim(client)
        self._check_folded()
        memory = self._memory
        if self.places is not None and (
            course.starts_over or self._voice.is_silent if memory is None else not memory.job.members
        ):
            # No round was formed, as far as this agent knows. Another agent may know better, and be elsewhere.
            self._start_over(client)
            raise Unavailable(f"{self.where}: the store has lost the journal", answers=True)
        if memory is None:
            if self._has_read_nothing(course):
                self._start_over(client)
            return b""
        return self._founded_from(client, course, memory, void)

    def _claim(self, client: Client) -> None:
        """Raises `Unavailable` if the store serves another job now. This agent may have workers, and somebody may only
        have started the wrong job there."""
        try:
            self._beginning.claim(client)
        except Refused as refused:
            raise Unavailable(str(refused), answers=True) from None

    def _election(self) -> Election:
        voice = self._voice
        nonce = "" if voice.joined is None or voice.has_left else voice.joined.nonce
        return Election(nonce, *self._given, self.where, self._past)

    def _founded_from(self, client: Client, course: Course, memory: Memory, void: bytes) -> bytes:
        number = course.life.number + 1
        if self.places is None:
            return found_again(client, self.keys, self._envelope, memory, void, number)
        if memory.job.outcome is not None:
            raise Unavailable(f"{self.where}: the store has lost the journal, and the job is over", answers=True)
        election = self._election()
        # Now: a later note is of a journal that has begun since.
        note = self.places.note(self.keys, self._envelope, 1e-3 * self.pace_ms)
        header = found_again(client, self.keys, self._envelope, memory, void, number, election)
        self.places.note_again(self.keys, self._envelope, header, note)
        return header

    def _at_another(self, client: Client, course: Course, header: bytes) -> bytes:
        """The header, after this agent has found that of another journal."""
        memory = self._memory
        if memory is not None and memory.job.members and self._envelope.is_elsewhere(header):
            client.add(self.keys.offers, 1)  # a host sees that an agent is here which remembers the journal
        self._check_note(header)  # a majority may be in time to make that journal void
        if memory is not None and memory.job.outcome is not None:
            return header  # it is refused: the job is over, and the other journal may be a new run of it
        if memory is not None and memory.job.members:
            if self.places is not None:
                verdict = is_void(client, self.keys, header, self._envelope)
                if verdict is False:
                    return header  # it is refused
                if verdict is None:
                    # A minority could make the new journal void, and could not found the old one again.
                    await_majority(client, self.keys, self._envelope, memory.job, header, self._election())
            if not is_void_now(client, self.keys, header, self._envelope):
                return header  # it is refused
            return self._founded_from(client, course, memory, header)
        if memory is not None or self._has_read_nothing(course):
            self._start_over(client)
        return header

    def _check_note(self, header: bytes) -> None:
        """At one of two endpoints: raises `Unavailable` if this is the note that a journal is at the other one."""
        if self.places is not None and self._envelope.is_elsewhere(header):
            self._envelope.check_endpoints(header)
            self.places.look_at(0)  # a note stands at the second endpoint
            job = self._envelope.job
            raise Unavailable(f"{self.where}: the journal of job {job} begins at the other endpoint", answers=True)

    def _has_read_nothing(self, course: Course) -> bool:
        return self._given[1] <= 0 or course.starts_over  # what was read, and not given to the agent, does not count

    def _start_over(self, client: Client | None) -> None:
        """Take part in any journal, as if this agent had read nothing. It has no workers."""
        self._voice.begin_anew()
        course = self._course
        if self._memory is not None or (course is not None and (course.starts_over or course.is_entered)):
            self._starts_over = True
        self._envelope.forget()
        self._course = self._memory = self._folded = None
        self._given = Life(), 0
        self._lines.close_all_but(client)

    def look_for_a_majority(self) -> None:
        """Raises `Unavailable` if the nodes of this journal have no majority, and `Places.later` finds another one."""
        memory, places, course = self._memory, self.places, self._course
        if memory is None or places is None or course is None:
            return
        rank, round_trip_s = (course.life.number, course.life.name), 1e-3 * self.pace_ms
        if found := places.later(self.keys, self._envelope, self._voice, memory.job, rank, round_trip_s):
            with self._greeting:
                places.look_at(found.place)
                self._lines.close_all_but(None)
            raise Unavailable(f"the job may go on in another journal at {places.name_of(found)}", answers=True)

    def made_way(self, client: Client, course: Course) -> Unavailable:
        """The error for an agent that has read that this journal is void."""
        with self._greeting:
            if self._course is course:
                self._beginning.void = course.header
                self._start_over(client)
        client.close()
        return Unavailable(f"{self.where}: {makes_way(self._envelope.job)}", answers=True)

    def _entered(self, client: Client, header: bytes) -> Course:
        course = self._course
        if course is not None and course.header == header:
            return course
        self._check_note(header)
        life = self._envelope.admit(header)
        if self._beginning.void and self.places is not None:
            # The agent that has founded the journal again may have died before it did this.
            before = self._envelope.elsewhere(self._beginning.void)
            self.places.note_again(self.keys, self._envelope, header, before)
            self._beginning.void = b""
        if course is not None and course.life.name == life.name:
            return course
        with self._saying:  # from now on this agent says and reads nothing in the life before
            starts_over = self._starts_over or (course is not None and course.starts_over)
            begins_anew = course is not None and not starts_over and self._has_to_begin_anew(course, life)
            if begins_anew and self.places is not None:
                self._voice.begin_anew()
                self._memory, self._folded, self._given, starts_over = None, None, (life, _NOTHING), True
            entered = Course(self.keys, life, header, starts_over=starts_over)
            entered.has_other_base = course is not None
            self._course, self._starts_over = entered, False
        if course is not None:
            self._lines.close_all_but(client)  # the others lead to the store that was lost
        return entered

    def _has_to_begin_anew(self, course: Course, life: Life) -> bool:
        """Whether this agent must begin as a new one in the life to which it comes. `course`: the life before. It must
        if it has said goodbye, or if it has read what the new life does not hold.

        Raises `Refused` if the agent has read what that life does not hold, and may have acted on it. Raises
        `Unavailable` if it has not folded yet what it has read."""
        given, position = self._given
        known = "" if course.prefix is None else course.prefix.at(life.position)
        has_more = (position > 0 and common(given, life) < position) or known not in ("", life.digest)
        places = self.places
        if places is not None and self._voice.has_left:
            return True
        if self._reads_only or not has_more:
            return False
        self._check_folded()
        if places is None or self._voice.may_have_workers(Job() if self._folded is None else self._folded[1]):
            raise self.left_behind()
        return True

    def _check_folded(self) -> None:
        """Raises `Unavailable` if the agent has not folded yet what it was given."""
        if self._folded is not None and self._given[1] not in (self._folded[0], _NOTHING):
            raise Unavailable(f"{self.where}: this node is just reading what the store has lost")

    def left_behind(self) -> Refused:
        """The error for an agent that has read what the others have not."""
        job = self._envelope.job
        return Refused(
            Refusal.IDENTITY,
            f"{self.where}: the store was lost, and the other agents have written the journal of job {job} "
            "again without something that this node has read; start this agent again",
        )
