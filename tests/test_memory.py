"""The journal in one process."""

from __future__ import annotations

import threading

from reknit.adapters.journals.memory import MemoryJournal
from reknit.core.entries import Aborted, Entry


def test_what_is_appended_is_read_in_order_from_any_position() -> None:
    """The order is the job: all agents fold the same."""
    journal = MemoryJournal()
    entries: list[Entry] = [Aborted(str(i)) for i in range(5)]
    for entry in entries:
        journal.append(entry)
    assert list(journal.read(0)) == entries
    assert list(journal.read(3)) == entries[3:]
    assert list(journal.read(5)) == []


def test_a_read_is_not_changed_by_later_appends() -> None:
    """A reader keeps what it got while others append."""
    journal = MemoryJournal()
    journal.append(Aborted("a"))
    before = journal.read(0)
    journal.append(Aborted("b"))
    assert len(before) == 1


def test_a_waiting_read_wakes_for_an_append() -> None:
    """An agent must not sleep through a failure of another one."""
    journal = MemoryJournal()
    found: list[Entry] = []
    reader = threading.Thread(target=lambda: found.extend(journal.read(0, wait_s=60.0)))
    reader.start()
    while not journal._waiting:
        pass
    journal.append(Aborted("now"))
    reader.join(60)
    assert found == [Aborted("now")]


def test_a_read_that_waits_in_vain_ends_empty() -> None:
    """Deadlines go on although nobody says anything."""
    journal = MemoryJournal()
    assert list(journal.read(0, wait_s=0.01)) == []
    assert journal._waiting == [], "and leaves nothing behind"


def test_many_threads_lose_nothing() -> None:
    """Many agents in one process append at the same time."""
    journal = MemoryJournal()

    def speak(name: int) -> None:
        for i in range(200):
            journal.append(Aborted(f"{name}.{i}"))

    threads = [threading.Thread(target=speak, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    seen: list[Entry] = []
    while len(seen) < 1600:
        seen += journal.read(len(seen), wait_s=60.0)
    for thread in threads:
        thread.join()
    assert len(set(map(str, seen))) == 1600
    for name in range(8):
        own = [e.why for e in seen if isinstance(e, Aborted) and e.why.startswith(f"{name}.")]
        assert own == [f"{name}.{i}" for i in range(200)]
