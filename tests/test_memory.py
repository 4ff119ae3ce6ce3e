"""The journal in one process, beside what `test_journals` demands of all; and the link to it that has no threads."""

from __future__ import annotations

from reknit.adapters.clock import Clock
from reknit.adapters.journals.memory import MemoryJournal, MemoryLink
from reknit.core.entries import Aborted, Node, NodeId
from reknit.core.events import Counters, EntriesRead

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))


def test_a_read_that_waits_in_vain_leaves_nothing_behind() -> None:
    """Deadlines go on although nobody says anything."""
    journal = MemoryJournal()
    assert journal.read(0, wait_s=0.01).entries == ()
    assert journal._waiting == []


def test_the_link_tells_of_the_first_read_and_then_of_news_only() -> None:
    """The agent must learn that there is nothing; once."""
    link = MemoryLink(MemoryJournal(), Clock())
    assert link.events(1.0) == [EntriesRead(1.0)]
    assert link.events(2.0) == []
    link.append(Aborted("x"))
    assert link.events(3.0) == [EntriesRead(3.0, (Aborted("x"),))]


def test_a_beat_is_answered_by_counters_and_a_fresh_read() -> None:
    """Both show that the journal answers."""
    journal = MemoryJournal()
    link = MemoryLink(journal, Clock())
    link.events(0.0)
    journal.beat(PEER, ())
    link.beat(ME, (PEER, Node(NodeId("unheard"))))
    counters, read = link.events(1.0)
    assert isinstance(counters, Counters)
    assert counters.counts == {ME: 1, PEER: 1}
    assert read == EntriesRead(1.0)
