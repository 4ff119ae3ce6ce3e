"""The journal in etcd after another program has changed its keys: whoever finds out says so and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.etcd.keys import EtcdKeys
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Batch, Refused
from reknit.core.job.entries import Aborted
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.etcd import Etcd, change, delete, there


class Follower:
    """One agent: its journal, and the position up to which the agent has read."""

    def __init__(self, journal: EtcdJournal) -> None:
        self.journal = journal
        self.position = 0

    def say(self, *names: str) -> None:
        """Append an entry for each name, and read it as an agent does."""
        for name in names:
            self.journal.append(name, Aborted(name))
            self.follow()

    def read(self) -> Batch:
        """What the journal has to tell after what it has told."""
        batch = self.journal.read(self.position, 0.0)
        self.position = batch.position
        return batch

    def follow(self) -> list[str]:
        return [entry.why for entry in self.read().entries if isinstance(entry, Aborted)]

    def refusal(self) -> str:
        with pytest.raises(Refused) as found:
            self.read()
        assert found.value.refusal is Refusal.IDENTITY
        return str(found.value)


Make = Callable[[], Follower]


@pytest.fixture
def envelope(request: pytest.FixtureRequest) -> Envelope:
    """The envelope of all agents of this job."""
    return Envelope(request.node.name, author=f"agent of {request.node.name}")


@pytest.fixture
def keys(envelope: Envelope) -> EtcdKeys:
    """The keys of this job."""
    return EtcdKeys(envelope.job)


@pytest.fixture
def agent(server: Etcd, envelope: Envelope) -> Iterator[Make]:
    """One more agent of the test's own job."""
    with ExitStack() as stack:

        def make() -> Follower:
            journal = EtcdJournal(Cluster(server.endpoints), envelope, timeout_s=30.0)
            return Follower(stack.enter_context(closing(journal)))

        yield make


def test_an_entry_that_was_overwritten_is_refused_by_who_reads_it_and_not_by_who_has_read_it(
    server: Etcd, agent: Make, envelope: Envelope, keys: EtcdKeys
) -> None:
    """The new value may even be signed: it is one of another place in the history of the job."""
    right = agent()
    right.say(*"abc")
    key = keys.entry(0, "b")
    change(server, put(key, envelope.wrap("b", Aborted("B"), "entry b")))
    what = f"was changed by another program: {key} was written 2 times, and agents write it once"
    assert what in agent().refusal()
    right.say("d")
    assert right.follow() == []


def test_an_entry_that_was_removed_shows_by_what_its_readers_say_later(
    server: Etcd, agent: Make, keys: EtcdKeys
) -> None:
    """A hole alone looks like nothing. The second record after it says what its writer had read behind the hole."""
    right = agent()
    right.say(*"abcd")
    change(server, delete(keys.entry(0, "b")))
    assert "agent of test_an_entry_that_was_removed" in agent().refusal()
    right.say("e")


def test_entries_that_lie_in_another_order_are_refused(
    server: Etcd, agent: Make, envelope: Envelope, keys: EtcdKeys
) -> None:
    """A key that is deleted and put again is new for etcd, and its record is still signed for its place."""
    right = agent()
    right.say(*"abc")
    key = keys.entry(0, "a")
    record = envelope.wrap("a", Aborted("a"), "entry a")
    change(server, delete(key))
    change(server, put(key, record))
    right.say("d")
    assert "has read other entries than this node" in agent().refusal()


def test_a_reader_that_began_with_a_fold_checks_what_follows(
    server: Etcd, agent: Make, envelope: Envelope, keys: EtcdKeys
) -> None:
    """The fold brings the digest of all that the reader has skipped."""
    right = agent()
    names = [str(i) for i in range(MANY + 1)]
    for name in names:
        right.journal.append(name, Aborted(name))
    batch = right.read()
    right.journal.publish(batch.position, fold_all(Job(), batch.entries))
    right.say(*"abcd")
    late = agent()
    assert late.read().base is not None
    late.say("e")
    *_, b, _, _, e = there(server, keys.entries)
    record = envelope.unwrap(e.value, "entry e")
    assert record is not None
    assert record.seen, "it says what it has read"
    assert right.follow() == ["e"], "and that is what the others have read"
    change(server, delete(b.key))
    assert "has read other entries" in agent().refusal()


def test_a_reader_that_begins_in_the_middle_contradicts_nobody(agent: Make) -> None:
    """It has not read what was before, so it neither says nor checks anything."""
    right, other = agent(), agent()
    right.say(*"ab")
    other.position = right.position
    right.say(*"cd")
    assert other.follow() == [*"cd"]
    other.say("e")
    assert right.follow() == ["e"]
    assert other.follow() == []
    assert len(agent().read().entries) == 5
