"""The journal in etcd when it is long or many nodes join at once: segments, folds, and readers that wait for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import count
from random import Random
from threading import Thread
from typing import Any, TypeVar

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd import journal as journal_module
from reknit.adapters.journals.etcd.gateway import Answer, Cluster, Gateway, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.etcd.keys import EtcdKeys
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job.entries import Aborted, Opened, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from tests.support.etcd import Etcd, change, delete, patiently, there, watch_of, watches
from tests.support.waiting import descriptors, until

T = TypeVar("T")
Make = Callable[[], EtcdJournal]


@pytest.fixture
def journal(server: Etcd, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """One more agent's journal of the test's own job, in short segments."""
    monkeypatch.setattr(journal_module, "SEGMENT", 3)
    with ExitStack() as stack:
        envelope = Envelope(request.node.name)
        yield lambda: stack.enter_context(closing(EtcdJournal(Cluster(server.endpoints), envelope, timeout_s=30.0)))


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> EtcdKeys:
    """The keys of this job."""
    return EtcdKeys(request.node.name)


def append(journal: EtcdJournal, *names: str) -> None:
    for name in names:
        journal.append(name, Aborted(name))


def read(journal: EtcdJournal, after: int = 0) -> tuple[list[str], int]:
    batch = journal.read(after, 0.0)
    return [entry.why for entry in batch.entries if isinstance(entry, Aborted)], batch.position


class LossyGateway(Gateway):
    """Loses every fourth answer to a writer and every tenth to a reader, half of them after the request was carried
    out."""

    made = count()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.random = Random(next(self.made))

    def transact(self, compare: Sequence[Any], then: Sequence[Any], otherwise: Sequence[Any]) -> Answer:
        share, drawn = 0.25 if any("request_put" in operation for operation in then) else 0.1, self.random.random()
        if drawn < share / 2:
            raise Unavailable("lost on the way there")
        answer = super().transact(compare, then, otherwise)
        if drawn < share:
            raise Unavailable("lost on the way back")
        return answer


def test_two_writers_and_two_readers_go_through_the_segments(server: Etcd, journal: Make, keys: EtcdKeys) -> None:
    """The order is that in which entries were put, whoever began a segment, whoever is behind."""
    writers, follower, names, followed, position = [journal(), journal()], journal(), "abcdefghijkl", "", 0
    for i, name in enumerate(names):
        append(writers[i % 2], name)
        if i % 3 != 1:
            found, position = read(follower, position)
            followed += "".join(found)
    assert followed == names
    assert len(there(server, keys.segments)) == 4
    assert read(journal()) == ([*names], position)


def test_answers_that_get_lost_lose_and_double_nothing(journal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each agent's two threads, which retry as the link does, while others begin segment after segment."""
    names = [[f"{agent}-{i}" for i in range(60)] for agent in range(4)]
    found: list[list[str]] = [[] for _ in names]

    def write(own: EtcdJournal, agent: int) -> None:
        for name in names[agent]:
            patiently(append, own, name)

    def follow(own: EtcdJournal, agent: int) -> None:
        position = 0
        while len(found[agent]) < 240:
            texts, position = patiently(read, own, position)
            found[agent] += texts

    threads = []
    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "Gateway", LossyGateway)
        agents = [journal() for _ in names]
    for agent, own in enumerate(agents):
        threads += [Thread(target=run, args=(own, agent), daemon=True) for run in (write, follow)]
    for thread in threads:
        thread.start()
    until(lambda: not any(thread.is_alive() for thread in threads), "everybody to have read everything")
    assert found[0] == found[1] == found[2] == found[3] == read(journal())[0]
    assert [[name for name in found[0] if name.startswith(f"{agent}-")] for agent in range(4)] == names


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
    read(slow)
    append(slow, "slow", "next")
    assert read(journal())[0] == ["slow", *"abcdefg", "next"]


def test_who_was_to_begin_the_next_segment_and_died_is_not_missed(
    server: Etcd, journal: Make, keys: EtcdKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer does it."""
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "SEGMENT", 1000)
        append(journal(), *"abcde")
    append(journal(), *"fg")
    assert read(journal())[0] == [*"abcdefg"]
    assert [found.key for found in there(server, keys.segments)] == [keys.segment(1)]


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


def test_a_fold_that_is_replaced_while_it_is_fetched(server: Etcd, journal: Make, keys: EtcdKeys) -> None:
    """It ends later than was said: what it holds must not be folded twice."""
    writer, names = journal(), [str(i) for i in range(MANY + 9)]
    append(writer, *names[:-6])
    _, earlier = read(writer)
    append(writer, names[-6])
    batch = writer.read(0, 0.0)
    writer.publish(batch.position, fold_all(Job(), batch.entries))
    change(server, put(keys.fold_at, b"%d" % earlier))
    append(writer, *names[-5:])
    late = journal().read(0, 0.0)
    assert late.base is not None
    assert late.entries == tuple(map(Aborted, names[-5:]))


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


def test_a_segment_that_the_store_has_lost_is_not_written_to(server: Etcd, journal: Make, keys: EtcdKeys) -> None:
    """It was put back to an older state. Nobody would look there."""
    writer, others = journal(), journal()
    append(writer, *"abc")
    assert read(writer)[0] == [*"abc"]
    change(server, delete(keys.segment(1)))
    append(writer, "x")
    append(others, *"yz")
    append(writer, "x", "last")
    assert read(journal())[0] == [*"abcxyz", "last"], "and what is repeated is still recognised"


def test_an_entry_that_went_with_its_segment_is_said_again(server: Etcd, journal: Make, keys: EtcdKeys) -> None:
    """The store was put back while the answer was on its way."""
    writer = journal()
    append(writer, *"abcd")
    change(server, delete(keys.segment(1)), delete(keys.entry(1, "d")))
    assert read(writer)[0] == [*"abc"]
    append(writer, "d")
    assert read(journal())[0] == [*"abcd"]


def test_who_began_with_a_fold_finds_out_that_the_store_was_put_back(
    server: Etcd, journal: Make, keys: EtcdKeys
) -> None:
    """Though nothing was to be read after the fold."""
    writer = journal()
    append(writer, *map(str, range(MANY + 9)))
    batch = writer.read(0, 0.0)
    writer.publish(batch.position, fold_all(Job(), batch.entries))
    reader = journal()
    late = reader.read(0, 0.0)
    assert (late.position, late.entries) == (batch.position, ())
    change(server, delete(there(server, keys.entries)[-1].key))
    with pytest.raises(Refused, match="put back to an older state"):
        reader.read(late.position, 0.0)


def test_who_is_only_a_few_behind_needs_no_fold(journal: Make) -> None:
    """It is large; and the end of a segment is no distance."""
    writer, reader = journal(), journal()
    append(writer, *"ab")
    position = read(reader)[1]
    append(writer, *"cde")
    batch = writer.read(0, 0.0)
    writer.publish(batch.position, fold_all(Job(), batch.entries))
    assert reader.read(position, 0.0).base is None


def test_an_older_fold_does_not_replace_a_newer_one(journal: Make) -> None:
    """Its reader may have been suspended meanwhile."""
    slow, quick = journal(), journal()
    append(slow, *map(str, range(MANY + 1)))
    old = slow.read(0, 0.0)
    append(quick, *"abcdefg")
    new = quick.read(0, 0.0)
    quick.publish(new.position, fold_all(Job(), new.entries))
    slow.read(old.position, 0.0)
    slow.publish(old.position, fold_all(Job(), old.entries))
    assert journal().read(0, 0.0).position == new.position
    assert journal().read(0, 0.0).entries == ()


@pytest.mark.parametrize("fold_at", [b"", b"x", b"1" * 5000, b"1", b"0"])
def test_a_fold_that_cannot_be_used_is_no_loss(server: Etcd, journal: Make, keys: EtcdKeys, fold_at: bytes) -> None:
    """The entries are all there still. One of an older version, or damaged, costs time."""
    writer, names = journal(), [str(i) for i in range(MANY + 1)]
    append(writer, *names)
    _, position = read(writer)
    change(server, put(keys.fold, b"{"), put(keys.fold_at, fold_at or b"%d" % position))
    assert read(journal())[0] == names


def test_who_waits_for_many_watches_none(journal: Make) -> None:
    """Each of a thousand would be told of each."""
    writer, reader = journal(), journal()
    append(writer, "a")
    batch = reader.read(0, 0.0)
    before = descriptors()
    watch_of(reader, batch.position)
    append(writer, "b")
    with watches() as opened:
        after = reader.read(batch.position, 10.0, MANY + 1)
        assert after.entries == (Aborted("b"),), "one that it did not wait for is told all the same"
        assert descriptors() <= before, "the watch that was open is closed"
        assert reader.read(after.position, 0.01, MANY + 1).entries == ()
    assert opened == []
