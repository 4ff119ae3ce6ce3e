"""The journal in etcd after another program has changed its keys: whoever finds out says so and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.entries import Aborted
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.etcd import Etcd, change, delete

Make = Callable[[], EtcdJournal]


@pytest.fixture
def journal(server: Etcd, request: pytest.FixtureRequest) -> Iterator[Make]:
    """One more agent's journal of the test's own job."""
    with ExitStack() as stack:
        envelope = Envelope(request.node.name, author=f"agent of {request.node.name}")
        yield lambda: stack.enter_context(closing(EtcdJournal(Cluster(server.endpoints), envelope, timeout_s=30.0)))


def say(journal: EtcdJournal, *names: str) -> None:
    """Append an entry for each name, and read it as an agent does."""
    for name in names:
        journal.append(name, Aborted(name))
        follow(journal)


def follow(journal: EtcdJournal) -> list[str]:
    """What this journal has to tell after what it has told."""
    batch = journal.read(journal._reached[0], 0.0)
    return [entry.why for entry in batch.entries if isinstance(entry, Aborted)]


def refused(journal: EtcdJournal) -> str:
    with pytest.raises(Refused) as found:
        journal.read(0, 0.0)
    assert found.value.refusal is Refusal.IDENTITY
    return str(found.value)


def test_an_entry_that_was_overwritten_is_refused_by_who_reads_it_and_not_by_who_has_read_it(
    server: Etcd, journal: Make
) -> None:
    """The new value may even be signed: it is one of another place in the history of the job."""
    right = journal()
    say(right, *"abc")
    change(server, put(right._keys.entry(0, "b"), right._envelope.wrap("b", Aborted("B"), "entry b")))
    key = f"{right._keys.root}entries/0/b"
    assert f"was changed by another program: {key} was written 2 times, and agents write it once" in refused(journal())
    say(right, "d")
    assert follow(right) == []


def test_an_entry_that_was_removed_shows_by_what_its_readers_say_later(server: Etcd, journal: Make) -> None:
    """A hole alone looks like nothing. The second record after it says what its writer had read behind the hole."""
    right = journal()
    say(right, *"abcd")
    change(server, delete(right._keys.entry(0, "b")))
    assert "agent of test_an_entry_that_was_removed" in refused(journal())
    say(right, "e")


def test_entries_that_lie_in_another_order_are_refused(server: Etcd, journal: Make) -> None:
    """A key that is deleted and put again is new for etcd, and its record is still signed for its place."""
    right = journal()
    say(right, *"abc")
    key = right._keys.entry(0, "a")
    record = right._envelope.wrap("a", Aborted("a"), "entry a")
    change(server, delete(key))
    change(server, put(key, record))
    say(right, "d")
    assert "has read other entries than this node" in refused(journal())


def test_a_reader_that_began_with_a_fold_checks_what_follows(server: Etcd, journal: Make) -> None:
    """The fold brings the digest of all that the reader has skipped."""
    right = journal()
    names = [str(i) for i in range(MANY + 1)]
    for name in names:
        right.append(name, Aborted(name))
    batch = right.read(0, 0.0)
    right.publish(batch.position, fold_all(Job(), batch.entries))
    say(right, *"abcd")
    late = journal()
    assert late.read(0, 0.0).base is not None
    assert late._seen == right._seen != ""
    change(server, delete(right._keys.entry(late._reached[1], "b")))
    assert "has read other entries" in refused(journal())


def test_a_reader_that_begins_in_the_middle_contradicts_nobody(journal: Make) -> None:
    """It has not read what was before, so it neither says nor checks anything."""
    right, other = journal(), journal()
    say(right, *"ab")
    middle = right._reached[0]
    say(right, *"cd")
    assert [entry.why for entry in other.read(middle, 0.0).entries if isinstance(entry, Aborted)] == [*"cd"]
    say(other, "e")
    assert follow(right) == ["e"]
    assert follow(other) == []
    assert len(journal().read(0, 0.0).entries) == 5
