"""The journal in one process, beside what `test_journals` demands of all, and its link, which has no threads."""

from __future__ import annotations

import threading

from reknit.adapters.journals.in_memory import MemoryJournal, MemoryLink
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.events import Counters, EntriesRead
from reknit.core.job.entries import Aborted, Node, NodeId
from tests.support.waiting import PATIENCE_S, until

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))


def test_a_read_that_waits_in_vain_ends() -> None:
    """Deadlines go on although nobody says anything."""
    journal = MemoryJournal()
    assert journal.read(0, wait_s=0.01).entries == ()


def test_closing_ends_the_reads_that_wait_and_the_others_go_on() -> None:
    """Agents in several threads share the journal; one of them ends."""
    journal = MemoryJournal()
    reader = threading.Thread(target=journal.read, args=(0, 100 * PATIENCE_S), daemon=True)
    reader.start()

    def has_ended() -> bool:
        journal.close()  # again: the reader may not have begun to wait
        return not reader.is_alive()

    until(has_ended)
    journal.append("t", Aborted("x"))
    assert journal.read(0, wait_s=0.0).entries == (Aborted("x"),)


def test_the_link_tells_of_the_first_read_and_then_of_news_only() -> None:
    """The agent must learn that there is nothing; once."""
    link = MemoryLink(MemoryJournal(), SystemClock())
    assert link.events(1.0) == [EntriesRead(1.0)]
    assert link.events(2.0) == []
    link.append(Aborted("x"))
    assert link.events(3.0) == [EntriesRead(3.0, (Aborted("x"),))]


def test_a_beat_is_answered_by_counters_and_a_fresh_read() -> None:
    """Both show that the journal answers."""
    journal = MemoryJournal()
    link = MemoryLink(journal, SystemClock())
    link.events(0.0)
    journal.beat(PEER, 1, ())
    link.beat(ME, 1, (PEER, Node(NodeId("unheard"))))
    counters, read = link.events(1.0)
    assert isinstance(counters, Counters)
    assert counters.counts == {ME: 1, PEER: 1}
    assert read == EntriesRead(1.0)
