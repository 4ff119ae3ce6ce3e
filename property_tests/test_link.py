"""The machine of the link under any interleaving of what the agent wants and what becomes of the calls.

A history is a list of numbers, each of which chooses one of the things that can happen then. The journal of a history
may lose what it has taken, and may be written by others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from reknit.adapters.link.machine import LinkStep, begun, step, taken
from reknit.adapters.link.messages import (
    LANES,
    Appended,
    BatchRead,
    Beaten,
    Call,
    CallFailed,
    Folded,
    Forbidden,
    Input,
    Lane,
    LinkClosed,
    Read,
    SendBeat,
    SendEntry,
)
from reknit.adapters.runtime.ports import Batch
from reknit.core.agent.commands import Append, Beat
from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.job.entries import Aborted, Entry, Node, NodeId
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

ME = Node(NodeId("me"))
WORDS = tuple(Aborted(word) for word in "abcd")
FOREIGN = Aborted("foreign")
MOST_NEWS = 6
"""A read, the answer to a beat, and a failure before, between and after them, and a refusal."""
MOST_DRAINED = 60


class History:
    """An agent, its link and a journal. Every method is one thing that can happen, and checks what follows."""

    def __init__(self, *, is_lossy: bool) -> None:
        self.is_lossy = is_lossy
        self.journal: list[Entry] = []
        self.tokens: dict[str, Entry] = {}
        """Everything that was to be said, by its token."""
        self.landed: set[str] = set()
        self.at = 0.0
        self.calls: dict[Lane, Call] = {}
        """What is under way."""
        self.failed: set[Lane] = set()
        """The lanes whose last call has failed."""
        self.beats = 0
        self.is_beat_wanted = False
        self.wanted: set[Entry] = set()
        """What the agent wants to have said and has not read."""
        self.read: list[Entry] = []
        self.untold = 0
        """Reads that were told and not folded."""
        self.is_owed = True
        """A read that begins from now on must be told."""
        self.must_tell = False
        """The read that is under way must be told, unless something cannot be said meanwhile."""
        self.is_stale = False
        self.is_over = False
        self.link, calls = begun("n", 3.0)
        self._note(calls)

    # ---- what can happen ----

    def possible(self) -> list[Callable[[], None]]:
        agent = [*(partial(self.want, word) for word in WORDS), self.want_beat, self.turn, self.speak_elsewhere]
        ends = [partial(end, lane) for lane in self.calls for end in (self.succeed, self.fail, self.vanish)]
        return [*agent, *ends, *ends, self.close, self.refuse]

    def want(self, entry: Entry) -> None:
        is_new = entry not in self.link.saying.underway
        count = len(self.tokens) + len(self.link.saying.queue)
        self._feed(Append(entry))
        self.wanted.add(entry)
        assert is_new or len(self.tokens) + len(self.link.saying.queue) == count, f"{entry} is said twice at once"

    def want_beat(self) -> None:
        self.turn()  # an agent wants one beat in a turn of its loop at most, and a turn takes the news first
        self.beats += 1
        self.is_beat_wanted = True
        self._feed(Beat(ME, self.beats, ()))

    def turn(self) -> None:
        """The agent takes the news, and folds."""
        self.link, news = taken(self.link)
        for event in news:
            if isinstance(event, EntriesRead):
                self.read += event.entries
                self.wanted.difference_update(event.entries)
                self.untold -= 1
                self._feed(Folded(Job()))

    def speak_elsewhere(self) -> None:
        self.journal.append(FOREIGN)

    def succeed(self, lane: Lane) -> None:
        call = self.calls.pop(lane)
        was_failed = lane in self.failed
        self.failed.discard(lane)
        answer = self._carried_out(call)
        owes_read = was_failed and lane is not Lane.READ  # its retry is told at any rate
        if lane is Lane.BEAT:
            self.is_beat_wanted = False
            owes_read |= self.beats > 1 and self.link.beating.has_beaten
        if owes_read:
            self.is_owed = True
            self.failed.discard(Lane.READ)  # the journal answers, so the next read makes no pause
        self._feed(answer)

    def fail(self, lane: Lane) -> None:
        """The call has failed before it did anything."""
        self._lose(lane, self.calls.pop(lane))

    def vanish(self, lane: Lane) -> None:
        """The call was carried out, and its answer is lost."""
        call = self.calls.pop(lane)
        self._carried_out(call)
        self._lose(lane, call)

    def close(self) -> None:
        self._end(LinkClosed())

    def refuse(self) -> None:
        self._end(Forbidden(Refusal.SECRET, "no"))

    # ---- how it happens ----

    def _carried_out(self, call: Call) -> Input:
        match call:
            case SendEntry(token, entry):
                if token not in self.landed:
                    self.landed.add(token)
                    if not (self.is_lossy and len(self.landed) % 3 == 0):
                        self.journal.append(entry)
                return Appended()
            case SendBeat(beat):
                return Beaten({ME: beat.count})
            case Read(after):
                found = tuple(self.journal[after:])
                return BatchRead(Batch(after + len(found), found))

    def _lose(self, lane: Lane, call: Call) -> None:
        self.failed.add(lane)
        if lane is Lane.READ:
            self.is_owed = True
            self.must_tell = self.is_stale = False
        elif Lane.READ in self.calls:
            self.is_stale = True
        self._feed(CallFailed(lane, "no"))

    def _end(self, last: Input) -> None:
        calls = self.calls
        self._feed(last)
        self.is_over = True
        for lane, call in calls.items():
            before = self.link
            for late in (self._carried_out(call), CallFailed(lane, "no")):
                assert step(self.link, late, self.at) == LinkStep(before, ()), "something follows the end"
        assert step(self.link, Append(WORDS[0]), self.at) == LinkStep(self.link, ())

    def _feed(self, happened: Input) -> None:
        self.at += 1.0
        before = self.link.news
        self.link, calls = step(self.link, happened, self.at)
        self._told(happened, self.link.news[len(before) :])
        self._note(calls)
        assert len(self.link.news) <= MOST_NEWS, "what the agent has to hear piles up"
        assert len({say.entry for say in self.link.saying.queue}) <= len(WORDS)
        assert len(self.link.saying.underway) <= len(WORDS)

    # ---- what must hold ----

    def _told(self, happened: Input, news: tuple[Event, ...]) -> None:
        reads = [event for event in news if isinstance(event, EntriesRead)]
        self.untold += len(reads)
        assert self.untold <= 1, "a second read is told before the first is folded"
        if isinstance(happened, Beaten):
            assert any(isinstance(event, Counters) for event in news), "an answer to a beat is not told"
        if isinstance(happened, CallFailed | Forbidden):
            assert any(isinstance(event, JournalFailed) for event in self.link.news), "a failure is not told"
        if isinstance(happened, BatchRead):
            if self.is_stale:
                self.is_owed = True
            assert not (reads and self.is_stale), "a read is told that was under way during an outage"
            is_due = self.must_tell or happened.batch.entries
            assert bool(reads) == bool(is_due and not self.is_stale), "a read is told in vain, or is not told"
            is_known = reads and self.link.saying.underway.intersection(happened.batch.entries)
            assert not is_known, "what was read back counts as on its way"
            self.must_tell = self.is_stale = False
        else:
            assert not reads
        is_stuck = self.failed & {Lane.SAY, Lane.BEAT}
        assert not (reads and is_stuck), "a read is told while something cannot be said"

    def _note(self, calls: tuple[Call, ...]) -> None:
        for call in calls:
            lane = LANES[type(call)]
            assert lane not in self.calls, f"two calls at once: {self.calls[lane]} and {call}"
            self.calls[lane] = call
            assert (0.05 <= call.pause_s <= 1.0) if lane in self.failed else call.pause_s == 0.0
            if isinstance(call, SendEntry):
                assert self.tokens.setdefault(call.token, call.entry) == call.entry
                assert call.token == max(self.tokens, key=lambda token: int(token[2:])), "out of order"
            elif isinstance(call, Read):
                assert call.after == len(self.read) + self._unread(), "something is skipped or read twice"
                assert not self.failed & {Lane.SAY, Lane.BEAT}, "a read begins while something cannot be said"
                self.must_tell, self.is_owed = self.is_owed, False
                assert call.wait_s == (0.0 if self.must_tell else 3.0)
        if not self.link.is_ended:
            assert (Lane.BEAT in self.calls) == self.is_beat_wanted, "a beat waits"
            assert Lane.SAY in self.calls or not self.link.saying.queue, "an entry waits"
            is_held = self.untold or self.failed & {Lane.SAY, Lane.BEAT}
            assert Lane.READ in self.calls or is_held, "nobody reads"

    def _unread(self) -> int:
        return sum(len(event.entries) for event in self.link.news if isinstance(event, EntriesRead))

    def drain(self) -> None:
        """Nothing fails any more, and the agent says again what it has not read: then it reads everything."""
        had_failed = bool(self.failed)
        reads = 0
        for _ in range(MOST_DRAINED):
            for lane in list(self.calls):
                self.succeed(lane)
            reads += self.untold
            self.turn()
            for entry in sorted(self.wanted, key=str):
                self.want(entry)
        assert not self.wanted, "something that the agent wants is never said"
        assert self.read == self.journal
        assert not self.link.saying.queue
        assert not self.failed
        assert reads or not had_failed, "the end of an outage is not told"


@given(st.lists(st.integers(0, 59), max_size=60), st.booleans())
def test_nothing_is_lost_doubled_or_told_out_of_place(choices: list[int], is_lossy: bool) -> None:
    """Whatever is wanted, succeeds, fails or vanishes, and in which order."""
    history = History(is_lossy=is_lossy)
    for choice in choices:
        possible = history.possible()
        # The ends come last, so that most histories have none.
        possible[choice if choice < len(possible) else choice % (len(possible) - 2)]()
        if history.is_over:
            return
    history.drain()
