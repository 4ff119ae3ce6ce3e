"""The journal in etcd when it is long, and when many join at once: segments, folds, and readers that wait for many."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from reknit.adapters.envelope import Envelope
from reknit.adapters.gateway import Gateway, put
from reknit.adapters.journals import etcd
from reknit.adapters.journals.etcd import EtcdJournal
from reknit.adapters.link import MANY
from reknit.core.entries import Aborted, Opened, Terms
from reknit.core.fold import fold_all
from reknit.core.job import Job
from tests.etcd import Etcd

Make = Callable[[], EtcdJournal]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def journal(server: Etcd, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """One more agent's journal of the test's own job, in short segments."""
    monkeypatch.setattr(etcd, "_SEGMENT", 3)
    with ExitStack() as stack:
        envelope = Envelope(request.node.name)
        yield lambda: stack.enter_context(closing(EtcdJournal(server.endpoints, envelope, timeout_s=30.0)))


def append(journal: EtcdJournal, *names: str) -> None:
    for name in names:
        journal.append(name, Aborted(name))


def read(journal: EtcdJournal, after: int = 0) -> tuple[list[str], int]:
    batch = journal.read(after, 0.0)
    return [entry.why for entry in batch.entries if isinstance(entry, Aborted)], batch.position


def test_two_writers_and_two_readers_go_through_the_segments(journal: Make) -> None:
    """The order is that in which entries were put, whoever began a segment, whoever is behind."""
    writers, follower, names, followed, position = [journal(), journal()], journal(), "abcdefghijkl", "", 0
    for i, name in enumerate(names):
        append(writers[i % 2], name)
        if i % 3 != 1:
            found, position = read(follower, position)
            followed += "".join(found)
    assert followed == names
    assert follower._reached[1] == 4, "that is as many as were begun"
    assert read(journal()) == ([*names], position)


def test_a_reader_may_begin_anywhere(journal: Make) -> None:
    """Positions are the caller's, not the journal's."""
    writer, reader, ends = journal(), journal(), [0]
    for name in "abcdefg":
        append(writer, name)
        ends.append(read(reader, ends[-1])[1])
    for i in (4, 0, 3, 6, 7, 2):
        assert read(reader, ends[i])[0] == [*"abcdefg"[i:]]


def test_a_call_that_is_repeated_segments_later_finds_its_entry(journal: Make) -> None:
    """Its first answer was lost, and the others went on."""
    slow, others = journal(), journal()
    append(slow, "slow")
    append(others, *"abcdefg")
    append(slow, "slow", "next")
    assert read(journal())[0] == ["slow", *"abcdefg", "next"]


def test_a_segment_that_ends_between_two_looks_loses_nothing(journal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer finds its segment at an end; the reader, in the other thread, has found the next one by then."""
    ours, others = journal(), journal()
    append(ours, "first")
    append(others, *"abc")
    find = ours._segment_of

    def find_late(gateway: Gateway, position: int | None = None) -> int:
        found = find(gateway, position)
        ours.read(0, 0.0)
        return found

    monkeypatch.setattr(ours, "_segment_of", find_late)
    append(ours, "last")
    assert read(journal())[0] == ["first", *"abc", "last"]


def test_who_was_to_begin_the_next_segment_and_died_is_not_missed(
    journal: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer does it."""
    with monkeypatch.context() as patch:
        patch.setattr(etcd, "_SEGMENT", 1000)
        append(journal(), *"abcde")
    append(journal(), *"fg")
    reader = journal()
    assert read(reader)[0] == [*"abcdefg"]
    assert reader._reached[1] == 1


def test_a_fold_ends_in_any_segment(journal: Make) -> None:
    """Whoever is far behind begins there, and reads what follows."""
    writer, names = journal(), [str(i) for i in range(MANY + 9)]
    append(writer, *names[:-4])
    batch = writer.read(0, 0.0)
    job = fold_all(Job(), batch.entries)
    writer.publish(batch.position, job)
    append(writer, *names[-4:])
    late = journal().read(0, 0.0)
    assert (late.base, late.entries) == (job, tuple(map(Aborted, names[-4:])))
    assert read(journal(), batch.position)[0] == names[-4:]


def test_a_fold_that_is_replaced_while_it_is_fetched(server: Etcd, journal: Make) -> None:
    """It ends later than was said: what it holds must not be folded twice."""
    writer, names = journal(), [str(i) for i in range(MANY + 9)]
    append(writer, *names[:-6])
    _, earlier = read(writer)
    append(writer, *names[-6:-4])
    batch = writer.read(0, 0.0)
    writer.publish(batch.position, fold_all(Job(), batch.entries))
    with closing(Gateway(server.endpoints, 30.0)) as gateway:
        gateway.transact([], [put(writer._fold_at_key, b"%d" % earlier)], [])
    append(writer, *names[-4:])
    late = journal().read(0, 0.0)
    assert late.base is not None
    assert late.entries == tuple(map(Aborted, names[-4:]))


def test_one_of_many_publishes(journal: Make) -> None:
    """A thousand that join at once read the same at once."""
    first, second = journal(), journal()
    first.append("open", Opened(Terms(), "j"))
    append(first, *map(str, range(MANY + 1)))
    batches = [reader.read(0, 0.0) for reader in (first, second)]
    job = fold_all(Job(), batches[0].entries)
    first.publish(batches[0].position, job)
    second.publish(batches[1].position, Job())
    assert journal().read(0, 0.0).base == job != Job()


def test_a_segment_that_the_store_has_lost_is_not_written_to(server: Etcd, journal: Make) -> None:
    """It was put back to an older state. Nobody would look there."""
    writer = journal()
    append(writer, *"abc")
    lost = {"request_delete_range": {"key": b64encode(writer._segment_key(1).encode()).decode()}}
    with closing(Gateway(server.endpoints, 30.0)) as gateway:
        append(writer, "d")
        gateway.transact([], [lost], [])
    append(writer, "e")
    assert read(journal())[0] == [*"abce"]


def test_a_fold_that_cannot_be_used_is_no_loss(server: Etcd, journal: Make) -> None:
    """The entries are all there still. One of an older version, or damaged, costs time."""
    writer, names = journal(), [str(i) for i in range(MANY + 1)]
    append(writer, *names)
    _, position = read(writer)
    with closing(Gateway(server.endpoints, 30.0)) as gateway:
        gateway.transact([], [put(writer._fold_key, b"{"), put(writer._fold_at_key, b"%d" % position)], [])
    assert read(journal())[0] == names


def test_who_waits_for_many_watches_none(journal: Make) -> None:
    """Each of a thousand would be told of each."""
    writer, reader = journal(), journal()
    while reader._watch is None:
        reader.read(0, 0.01)
    append(writer, "a")
    batch = reader.read(0, 10.0, MANY + 1)
    assert batch.entries == (Aborted("a"),), "one that it did not wait for is told all the same"
    assert reader._watch is None
    assert reader.read(batch.position, 0.01, MANY + 1).entries == ()
    assert reader._watch is None
