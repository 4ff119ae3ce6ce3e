"""The machine of the link, input by input: what it calls, and what it tells the agent. Each test is a table.

A row is what happens, the calls that follow, and the news. Rules: the top of adapters/link/machine.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from reknit.adapters.link.machine import LinkState, begun, step, taken
from reknit.adapters.link.messages import (
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
from reknit.core.job.entries import Aborted, Node, NodeId
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

ME = Node(NodeId("me"))
A, B = Aborted("a"), Aborted("b")
BEAT, LATER = Beat(ME, 1, ()), Beat(ME, 2, ())
LOOK_S = 3.0
NOTHING = BatchRead(Batch(0))
FOLDED = Folded(Job())
AT = 7.0
READ = EntriesRead(AT)
FAILED = JournalFailed(AT, "no")
IDLE = Read(0, LOOK_S)
"""A read that waits for news."""
AGAIN = Read(0, 0.0)
"""A read that does not wait, and is told at any rate."""
NEXT = Life("journal", "next")
IN_NEXT = BatchRead(Batch(9, base=Job(epoch=5), life=NEXT))
"""The reader has found another life of the journal. It begins with this fold."""
READ_NEXT = EntriesRead(AT, (), Job(epoch=5), NEXT)


class Row(NamedTuple):
    happens: Input
    calls: tuple[Call, ...] = ()
    news: tuple[Event, ...] = ()


def found(*entries: Aborted, at: int, base: Job | None = None, life: Life = Life()) -> BatchRead:
    return BatchRead(Batch(at, entries, base, life))


def fails(lane: Lane) -> CallFailed:
    return CallFailed(lane, "no")


def played(*rows: Row, begin: bool = True) -> LinkState:
    """The link after these rows. `begin`: it has made its first read, found nothing, and waits for news."""
    link, calls = begun("n", LOOK_S)
    assert calls == (AGAIN,)
    start = (Row(NOTHING, (), (READ,)), Row(FOLDED, (IDLE,))) if begin else ()
    for number, row in enumerate((*start, *rows)):
        link, calls = step(link, row.happens, AT)
        link, news = taken(link)
        assert (calls, news) == (row.calls, row.news), f"row {number - len(start)}: {row.happens}"
    return link


def test_the_first_read_is_told_even_if_it_is_empty() -> None:
    """The first agent of a job would not begin."""
    played(Row(NOTHING, (), (READ,)), Row(FOLDED, (IDLE,)), begin=False)


def test_a_read_that_finds_nothing_is_not_told() -> None:
    """An agent that has nothing to do sleeps."""
    played(Row(NOTHING, (IDLE,)), Row(NOTHING, (IDLE,)))


def test_nothing_is_read_before_the_agent_has_folded() -> None:
    """Only the fold tells how much is worth waiting for. What a stopped agent has to hear does not pile up."""
    link = played(Row(found(A, at=5), (), (EntriesRead(AT, (A,)),)), Row(FOLDED, (Read(5, LOOK_S),)))
    assert link.reading.position == 5


def test_entries_are_said_one_after_the_other() -> None:
    """A node's failure comes before its next `Joined`."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Append(B)),
        Row(Appended(), (SendEntry("n-2", B),)),
        Row(Appended()),
    )


def test_an_entry_on_its_way_is_not_added() -> None:
    """It may wait, be said, or wait to be read. A store that is slow would be flooded."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Append(A)),
        Row(Appended()),
        Row(Append(A)),
        Row(found(A, at=1), (), (EntriesRead(AT, (A,)),)),
        Row(Append(A), (SendEntry("n-2", A),)),
    )


def test_an_entry_that_the_journal_has_lost_may_be_said_again() -> None:
    """The read began after the entry was taken, and finds nothing. Otherwise the agent would speak in vain for ever."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Appended()),
        Row(NOTHING, (IDLE,)),
        Row(Append(A)),
        Row(NOTHING, (IDLE,)),
        Row(Append(A), (SendEntry("n-2", A),)),
    )


def test_an_entry_whose_answer_was_lost_may_be_meant_again_when_it_was_read() -> None:
    """The second is another: the first is repeated until the journal answers."""
    link = played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(fails(Lane.SAY), (SendEntry("n-1", A, pause_s=0.05),), (FAILED,)),
        Row(NOTHING),
        Row(Append(B)),
        Row(Appended(), (SendEntry("n-2", B), AGAIN)),
        Row(found(A, at=1), (), (EntriesRead(AT, (A,)),)),
        Row(Append(A)),
        Row(Appended(), (SendEntry("n-3", A),)),
    )
    assert link.saying.taken == {B}


def test_entries_that_were_skipped_over_are_no_longer_on_their_way() -> None:
    """Nobody reads them back. What the journal has not taken yet is not among them."""
    base = Job(epoch=5)
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Appended()),
        Row(Append(B), (SendEntry("n-2", B),)),
        Row(found(at=9, base=base), (), (EntriesRead(AT, (), base),)),
        Row(Append(B)),
        Row(Append(A)),
        Row(Appended(), (SendEntry("n-3", A),)),
    )


# ---- another life of the journal (rule 8) ----


def test_an_entry_belongs_to_the_life_that_the_agent_has_folded() -> None:
    """An agent that has yet to fold another life wants what held in the one before. There the other node was silent, or
    the round had enough nodes."""
    played(
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(FOLDED, (Read(9, LOOK_S),)),
        Row(Append(B)),
        Row(Appended(is_taken=False), (SendEntry("n-2", B, NEXT),)),
    )


def test_what_was_wanted_before_another_life_was_folded_is_forgotten() -> None:
    """The journal would refuse it. If it still holds, the agent wants it anew, and then it is another entry with a
    token of its own."""
    link = played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Append(B)),
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(FOLDED, (Read(9, LOOK_S),)),
        Row(Appended(is_taken=False)),
        Row(Append(B), (SendEntry("n-3", B, NEXT),)),
    )
    assert link.saying.underway == {B}


def test_the_call_that_is_under_way_goes_on_alone() -> None:
    """It cannot be called back. Its entry may be wanted in the next life at once, and waits for the answer."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Append(B)),
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(FOLDED, (Read(9, LOOK_S),)),
        Row(Append(A)),
        Row(Appended(is_taken=False), (SendEntry("n-3", A, NEXT),)),
        Row(Appended()),
        Row(Append(A)),
        Row(found(A, at=10, life=NEXT), (), (EntriesRead(AT, (A,), life=NEXT),)),
    )


@pytest.mark.parametrize("is_taken", [True, False])
def test_the_answer_for_the_life_before_says_nothing_about_the_next_one(*, is_taken: bool) -> None:
    """The journal has taken the entry just before its store was lost. The same entry of the next life is on its way
    until it was read back from there. A read that finds nothing does not show that it was lost."""
    link = played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(FOLDED, (Read(9, LOOK_S),)),
        Row(Append(A)),
        Row(Appended(is_taken), (SendEntry("n-2", A, NEXT),)),
        Row(BatchRead(Batch(9, life=NEXT)), (Read(9, LOOK_S),)),
        Row(Append(A)),
        Row(BatchRead(Batch(9, life=NEXT)), (Read(9, LOOK_S),)),
        Row(Append(A)),
    )
    assert link.saying.underway == {A}


def test_a_call_that_fails_is_made_again_for_the_life_in_which_it_was_wanted() -> None:
    """Its first try may have written the entry. The journal tells a repetition by its token, and only in that life. The
    agent may fold another one meanwhile."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(fails(Lane.SAY), (SendEntry("n-1", A, pause_s=0.05),), (FAILED,)),
        Row(FOLDED),
        Row(fails(Lane.SAY), (SendEntry("n-1", A, pause_s=0.1),), (FAILED,)),
        Row(Append(A)),
        Row(Appended(is_taken=False), (SendEntry("n-2", A, NEXT), Read(9, 0.0))),
    )


def test_an_entry_that_the_journal_has_not_written_may_be_said_again() -> None:
    """The writer has found another life that the agent has not folded. Until it has, each entry is refused."""
    link = played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Appended(is_taken=False)),
        Row(Append(A), (SendEntry("n-2", A),)),
        Row(Appended(is_taken=False)),
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(FOLDED, (Read(9, LOOK_S),)),
        Row(Append(A), (SendEntry("n-3", A, NEXT),)),
        Row(Appended()),
    )
    assert link.saying.taken == {A}


def test_another_life_is_told_even_if_nothing_was_said_there() -> None:
    """The agent had read nothing in the life before, so there is no fold with which this one begins. (1) The agent
    wants `Opened`. (2) Its writer finds the store lost, begins another journal, and refuses the entry. (3) The reader,
    whose connection was closed between two reads, finds the new journal empty. If the agent is not told, it says
    `Opened` for the life before for ever."""
    empty = BatchRead(Batch(0, life=NEXT))
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Appended(is_taken=False)),
        Row(empty, (), (EntriesRead(AT, life=NEXT),)),
        Row(FOLDED, (IDLE,)),
        Row(Append(A), (SendEntry("n-2", A, NEXT),)),
    )


def test_a_read_that_was_dropped_is_of_no_life() -> None:
    """Something could not be said meanwhile. The agent was not told of the next life, so what it wants belongs to the
    one before, also after it has folded what it was told earlier."""
    played(
        Row(BEAT, (SendBeat(BEAT),)),
        Row(fails(Lane.BEAT), (SendBeat(BEAT, 0.05),), (FAILED,)),
        Row(IN_NEXT),
        Row(FOLDED),
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(Beaten({}), (AGAIN,), (Counters(AT, {}),)),
        Row(IN_NEXT, (), (READ_NEXT,)),
        Row(FOLDED, (Read(9, LOOK_S),)),
        Row(Appended(is_taken=False)),
        Row(Append(A), (SendEntry("n-2", A, NEXT),)),
    )


# ---- beats ----


def test_a_beat_does_not_wait_for_an_append() -> None:
    """A node that waits for its turn to write is not silent."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(BEAT, (SendBeat(BEAT),)),
        Row(Beaten({ME: 1}), (), (Counters(AT, {ME: 1}),)),
        Row(LATER, (SendBeat(LATER),)),
    )


def test_a_beat_on_its_way_is_not_added_and_the_newest_takes_its_place() -> None:
    """A store that comes back must not be flooded with what was due while it was away."""
    played(
        Row(BEAT, (SendBeat(BEAT),)),
        Row(LATER),
        Row(fails(Lane.BEAT), (SendBeat(LATER, 0.05),), (FAILED,)),
        Row(Beaten({ME: 2}), (), (Counters(AT, {ME: 2}),)),
    )


def test_the_beat_of_another_incarnation_follows_at_once() -> None:
    """A node that has come back is heard as soon as possible. What was acknowledged is the beat of the one before."""
    renewed = Beat(Node(NodeId("me"), 1), 3, ())
    played(
        Row(BEAT, (SendBeat(BEAT),)),
        Row(LATER),
        Row(renewed),
        Row(Beaten({ME: 1}), (SendBeat(renewed),), (Counters(AT, {ME: 1}),)),
    )


def test_after_a_beat_a_read_is_told() -> None:
    """After a gap the agent waits for exactly that. The first beat ends no gap."""
    played(
        Row(BEAT, (SendBeat(BEAT),)),
        Row(Beaten({ME: 1}), (), (Counters(AT, {ME: 1}),)),
        Row(NOTHING, (IDLE,)),
        Row(LATER, (SendBeat(LATER),)),
        Row(Beaten({ME: 2}), (), (Counters(AT, {ME: 2}),)),
        Row(NOTHING, (AGAIN,)),
        Row(NOTHING, (), (READ,)),
        Row(FOLDED, (IDLE,)),
    )


@pytest.mark.parametrize("lane", [Lane.SAY, Lane.BEAT])
def test_while_something_cannot_be_said_nothing_is_read(lane: Lane) -> None:
    """The agent would take each read for the end of the outage. Afterwards it is told of a read at any rate."""
    wish, call = (Append(A), SendEntry("n-1", A)) if lane is Lane.SAY else (BEAT, SendBeat(BEAT))
    answer: Input = Appended() if lane is Lane.SAY else Beaten({})
    counters = () if lane is Lane.SAY else (Counters(AT, {}),)
    played(
        Row(wish, (call,)),
        Row(fails(lane), (call._replace(pause_s=0.05),), (FAILED,)),
        Row(found(B, at=1)),
        Row(fails(lane), (call._replace(pause_s=0.1),), (FAILED,)),
        Row(answer, (AGAIN,), counters),
        Row(NOTHING, (), (READ,)),
    )


def test_what_was_under_way_during_an_outage_is_read_again() -> None:
    """The read began before the outage and ends after it. What it found may be out of date."""
    played(
        Row(BEAT, (SendBeat(BEAT),)),
        Row(fails(Lane.BEAT), (SendBeat(BEAT, 0.05),), (FAILED,)),
        Row(Beaten({}), (), (Counters(AT, {}),)),
        Row(found(A, at=1), (AGAIN,)),
        Row(found(A, at=1), (), (EntriesRead(AT, (A,)),)),
    )


def test_beats_go_on_while_something_cannot_be_said() -> None:
    """On a full disk: the node lives, and must not be taken for dead."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(fails(Lane.SAY), (SendEntry("n-1", A, pause_s=0.05),), (FAILED,)),
        Row(NOTHING),
        Row(BEAT, (SendBeat(BEAT),)),
        Row(Beaten({}), (), (Counters(AT, {}),)),
        Row(LATER, (SendBeat(LATER),)),
        Row(Beaten({}), (), (Counters(AT, {}),)),
    )


def test_the_end_of_an_outage_of_reads_is_told() -> None:
    """A job on one node has no other news: without the read, its outage would never end."""
    played(
        Row(fails(Lane.READ), (Read(0, 0.0, 1, 0.05),), (FAILED,)),
        Row(fails(Lane.READ), (Read(0, 0.0, 1, 0.1),), (FAILED,)),
        Row(NOTHING, (), (READ,)),
        Row(FOLDED, (IDLE,)),
    )


def test_pauses_grow_to_a_second() -> None:
    """However long the outage is: the agent decides when it has lasted too long."""
    link = played()
    pauses = []
    for _ in range(2000):
        link, (call,) = step(link, fails(Lane.READ), AT)
        pauses.append(call.pause_s)
    assert pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert pauses[-1] == 1.0
    assert link.news == (FAILED,), "an agent that does not run is told once"


def test_a_refusal_is_the_end() -> None:
    """There is no use in trying. What was under way returns, and nobody is told."""
    played(
        Row(Append(A), (SendEntry("n-1", A),)),
        Row(BEAT, (SendBeat(BEAT),)),
        Row(Forbidden(Refusal.SECRET, "another secret"), (), (JournalFailed(AT, "another secret", Refusal.SECRET),)),
        *(Row(after) for after in (Appended(), Beaten({}), found(A, at=1), fails(Lane.SAY), Append(B), LATER, FOLDED)),
    )


def test_the_close_is_the_end() -> None:
    """Nobody listens any more."""
    played(Row(LinkClosed()), Row(found(A, at=1)), Row(Append(A)), Row(Forbidden(Refusal.SECRET, "no")))


# ---- how much is waited for ----


def test_a_reader_waits_for_as_many_entries_as_are_lacking() -> None:
    """A thousand nodes that join at once would wake each other a million times."""
    job = Job()
    link = played(Row(found(A, at=1), (), (EntriesRead(AT, (A,)),)), Row(Folded(job), (Read(1, LOOK_S),)))
    assert link.reading.enough_at == 1 + 1, "the job is unopened: one entry may change that"
