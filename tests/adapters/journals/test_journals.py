"""What every journal promises: one suite with real processes, for memory, a folder, torch's TCPStore and etcd."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import get_args

import pytest

from reknit.adapters.journals import envelope
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Batch, Journal, Refused, Remembers, Unavailable
from reknit.core.job.entries import (
    Aborted,
    Admission,
    Admit,
    Entry,
    Failed,
    Filler,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    NodeId,
    Opened,
    RestartPolicy,
    Steady,
    Succeeded,
    Terms,
)
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from reknit.core.job.workers import WorkerFailure
from tests.support.journals import (
    KINDS,
    SHARED,
    MemoryStore,
    Proxy,
    SharedStore,
    Store,
    Writer,
    append,
    entry,
    everything,
    opened,
    served,
    whose,
)
from tests.support.waiting import PATIENCE_S, until

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))
UGLY = 'ä \x00\x1f\x7f \u2028 \U0001f600 \ud800 "quoted" \'so\' {json} %s \\n \r\n\n \t</script>,"mac":"'
EVERY_KIND: tuple[Entry, ...] = (
    Opened(Terms(2, 4, RestartPolicy(3, 5, 0.1, 1e9), Admission.NEVER, fence_s=3.5), journal=UGLY, epoch=7),
    Joined(Node(NodeId(UGLY), 3), "nonce", 2, "fe80::1%eth0", 65535, UGLY, 8, rank_hint=1),
    LastCall(1, 2),
    Steady(1, 2),
    Admit(2),
    GaveUp(3),
    Failed(ME, 0, tuple(WorkerFailure(i, i, -9, 4, UGLY, 200 * f"{UGLY}\n", (UGLY, ""), "/l o g") for i in range(8))),
    Succeeded(ME, 10**12),
    Lost(ME, PEER),
    Leaving(ME),
    Left(ME, stuck=(1, 2)),
    Aborted(UGLY),
    Filler(),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """One store of each kind, for all tests here."""
    found: dict[str, str] = {}
    with ExitStack() as stack:

        def place(kind: str) -> str:
            if kind not in found:
                found[kind] = stack.enter_context(served(kind, tmp_path_factory.mktemp(kind)))
            return found[kind]

        yield place


@pytest.fixture(params=SHARED)
def shared(request: pytest.FixtureRequest, places: Callable[[str], str]) -> Iterator[SharedStore]:
    """A store that several processes can reach."""
    store = SharedStore(request.param, places(request.param))
    yield store
    store.close()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, places: Callable[[str], str]) -> Iterator[Store]:
    """Any store."""
    if request.param == "memory":
        yield MemoryStore()
        return
    shared = SharedStore(request.param, places(request.param))
    yield shared
    shared.close()


@pytest.fixture
def job() -> str:
    """Of this test alone."""
    return uuid.uuid4().hex


# ---- order ----


def test_every_kind_of_entry_survives_whatever_its_texts_hold(store: Store, job: str) -> None:
    """Tracebacks and hostnames hold anything, and the fold trusts what it is given."""
    assert {type(e) for e in EVERY_KIND} == set(get_args(Entry))
    journal = store.journal(job)
    for i, e in enumerate(EVERY_KIND):
        journal.append(f"t-{i}", e)
    assert everything(store.journal(job)) == [*EVERY_KIND]


def test_all_read_the_same_order_from_wherever_they_begin(store: Store, job: str) -> None:
    """Folds of different orders are different jobs."""
    agents = [store.journal(job) for _ in range(3)]
    positions, read = [0], list[Entry]()
    for i in range(12):
        agents[i % 3].append(f"{i % 3}-{i}", entry("w", i))
        batch = agents[0].read(positions[-1], PATIENCE_S)
        read += batch.entries
        positions.append(batch.position)
    assert read == [entry("w", i) for i in range(12)]
    assert positions == sorted(set(positions))
    for agent in agents:
        for i, position in enumerate(positions):
            assert everything(agent, position) == read[i:]


def test_threads_that_append_at_once_lose_and_double_nothing(store: Store, job: str) -> None:
    """An embedder's agents share a process; a link's three threads share a journal."""

    def write(name: str, journal: Journal) -> None:
        for i in range(20):
            append(journal, f"{name}-{i}", entry(name, i))

    threads = [threading.Thread(target=write, args=(name, store.journal(job))) for name in "abcd"]
    for thread in threads:
        thread.start()
    reader, position, found = store.journal(job), 0, list[Entry]()
    while len(found) < 80:
        batch = reader.read(position, wait_s=PATIENCE_S)
        position, found = batch.position, [*found, *batch.entries]
    for thread in threads:
        thread.join()
    assert [whose(found, name) for name in "abcd"] == [[*range(20)]] * 4
    assert everything(store.journal(job)) == found


@pytest.mark.slow
def test_processes_that_append_at_once_lose_and_double_nothing(shared: SharedStore, job: str) -> None:
    """All nodes of a job join at once."""
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(shared, job, name, 50)) for name in "abcd"]
        for writer in writers:
            writer.go()
        assert [writer.end() for writer in writers] == [[*range(50)]] * 4
    found = everything(shared.journal(job))
    assert [whose(found, name) for name in "abcd"] == [[*range(50)]] * 4
    assert len(found) == 200
    assert everything(shared.journal(job)) == found


# ---- waiting ----


def test_a_waiting_read_wakes_for_what_another_process_says(shared: SharedStore, job: str) -> None:
    """Every round would take as long as the longest wait."""
    journal = shared.journal(job)
    found: list[Batch] = []

    def read() -> None:
        found.append(journal.read(0, wait_s=10 * PATIENCE_S))

    reader = threading.Thread(target=read, daemon=True)
    with Writer(shared, job, "w", 1) as writer:
        reader.start()  # the writer is still starting, so the read usually waits. If it does not, that is right as well
        writer.go()
        assert writer.end() == [0]
        reader.join(PATIENCE_S)
        assert [batch.entries for batch in found] == [(entry("w", 0),)], "the end of the wait is much later"


def test_a_read_that_waits_in_vain_is_empty_and_says_where_to_go_on(store: Store, job: str) -> None:
    """Deadlines go on although nobody says anything."""
    journal = store.journal(job)
    nothing = journal.read(0, wait_s=0.0)
    journal.append("t", ME_SUCCEEDED)
    batch = journal.read(nothing.position, wait_s=0.0)
    assert batch.entries == (ME_SUCCEEDED,)
    assert journal.read(batch.position, wait_s=0.05) == Batch(batch.position, life=batch.life)


def test_closing_ends_a_read_that_waits(store: Store, job: str) -> None:
    """An agent that is done must not be held up by its reader."""
    journal = store.journal(job)
    ended: list[object] = []

    def read() -> None:
        try:
            while not ended:
                batch = journal.read(0, wait_s=10 * PATIENCE_S)
                ended.append(batch.entries)
        except Unavailable as e:
            ended.append(e)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    journal.beat(ME, 1, ())  # the reader may not be waiting yet: closing must do then, too
    journal.close()
    thread.join(PATIENCE_S)
    assert ended
    assert ended[0] == () or isinstance(ended[0], Unavailable)
    journal.close()


# ---- what goes wrong ----


def test_what_is_said_again_because_the_answer_was_lost_is_there_once(shared: SharedStore, job: str) -> None:
    """A failure said twice could be counted twice; one that is lost is never counted."""
    if shared.kind == "file":
        pytest.skip("has no answers to lose: test_file breaks its writes one by one")
    with Proxy(shared.where) as proxy:
        journal = opened(shared.kind, proxy.where, Envelope(job))
        journal.append("t-0", entry("w", 0))
        for i in range(1, 9):
            proxy.passes = i % 4
            append(journal, f"t-{i}", entry("w", i))
            proxy.passes = None
        journal.close()
    assert whose(everything(shared.journal(job)), "w") == [*range(9)]


@pytest.mark.slow
def test_writers_that_are_killed_at_any_moment_hold_nobody_up(shared: SharedStore, job: str) -> None:
    """Nodes die in the middle of a word, and the others must hear of it through the same journal."""
    dice = random.Random(7)
    returned: dict[str, list[int]] = {}
    reader, position, found = shared.journal(job), 0, list[Entry]()
    for generation in range(2):
        names = [f"{generation}{i}" for i in "abcd"]
        with ExitStack() as stack:
            writers = [stack.enter_context(Writer(shared, job, name, 10**6)) for name in names]
            for writer in writers:
                writer.go()
            for name, writer in zip(names, writers, strict=True):
                returned[name] = writer.kill_after(dice.uniform(0.0, 0.1))
        batch = reader.read(position, wait_s=PATIENCE_S)
        position, found = batch.position, [*found, *batch.entries]
    shared.journal(job).append("last", ME_SUCCEEDED)
    found += everything(reader, position)
    assert found[-1] == ME_SUCCEEDED
    for name, numbers in returned.items():
        # One more may be there: it was killed before it could say so.
        assert whose(found, name) in (numbers, [*range(len(numbers) + 1)])
    assert any(returned.values())
    assert everything(shared.journal(job)) == found


def test_a_record_that_no_agent_wrote_is_a_filler_for_all(shared: SharedStore, job: str) -> None:
    """Whoever can reach the store must neither end the job nor decide over it."""
    journal = shared.journal(job, "secret")
    journal.append("t-0", ME_SUCCEEDED)
    place = "somewhere else"
    for forged in (
        Envelope(job, "").wrap("f-0", Aborted("forged"), place),
        Envelope(job, "guessed").wrap("f-1", Aborted("forged"), place),
        Envelope(job, "secret").wrap("f-2", Aborted("said elsewhere"), place),
    ):
        shared.write_raw(job, forged)
    journal.append("t-1", Leaving(ME))
    found = everything(shared.journal(job, "secret"))
    assert found == everything(journal)
    assert [e for e in found if e != Filler()] == [ME_SUCCEEDED, Leaving(ME)]
    assert Filler() in found


@pytest.mark.parametrize("rubbish", [b'{"token":"t","en', b'{"token":"t","entry":{"kind":"Promoted"}}'])
def test_rubbish_without_a_secret_is_a_filler_too(shared: SharedStore, job: str, rubbish: bytes) -> None:
    """A torn record, or one of another program, is no reason to end a job."""
    journal = shared.journal(job)
    journal.append("t-0", ME_SUCCEEDED)
    shared.write_raw(job, rubbish)
    journal.append("t-1", Leaving(ME))
    assert everything(shared.journal(job)) == [ME_SUCCEEDED, Filler(), Leaving(ME)]


def test_a_kind_that_is_not_known_ends_the_reader(
    shared: SharedStore, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of a newer version has written it, and folds another job."""
    journal = shared.journal(job)
    journal.append("t-0", ME_SUCCEEDED)
    monkeypatch.setattr(envelope, "dumps", lambda entry: '{"kind":"Promoted","node":"me"}')
    journal.append("t-1", ME_SUCCEEDED)
    with pytest.raises(Refused, match="Promoted") as refused:
        everything(shared.journal(job))
    assert refused.value.refusal is Refusal.FORMAT


# ---- who may use it ----


def test_agents_with_the_same_secret_understand_each_other(shared: SharedStore, job: str) -> None:
    """The secret keeps others out, not those who have it."""
    shared.journal(job, "s3cret ä").append("t", ME_SUCCEEDED)
    assert everything(shared.journal(job, "s3cret ä")) == [ME_SUCCEEDED]


@pytest.mark.parametrize(("theirs", "mine"), [("right", "wrong"), ("right", ""), ("", "superfluous")])
def test_another_secret_is_refused_before_anything_is_said(
    shared: SharedStore, job: str, theirs: str, mine: str
) -> None:
    """What it said would be nothing to the others, and they nothing to it."""
    shared.journal(job, theirs).append("t", ME_SUCCEEDED)
    calls: list[Callable[[Journal], object]] = [
        lambda journal: journal.append("u", Aborted("x")),
        lambda journal: journal.read(0, wait_s=0.0),
        lambda journal: journal.beat(ME, 1, ()),
    ]
    for call in calls:
        with pytest.raises(Refused, match="--rdzv-secret") as refused:
            call(shared.journal(job, mine))
        assert refused.value.refusal is Refusal.SECRET
    assert everything(shared.journal(job, theirs)) == [ME_SUCCEEDED]


AWKWARD = ("a", "A", "a/b", "a/", "../x", "..", ".", "x", "ä %", "%2E", "a.b", "a b\n", "*", "0")
LONG = (300 * "long", 301 * "long")


def test_jobs_in_one_store_do_not_see_each_other(shared: SharedStore) -> None:
    """Whatever they are called: the operator chooses the names."""
    for i, name in enumerate(AWKWARD + LONG):
        journal = shared.journal(name)
        journal.append("t", entry("w", i))
        journal.beat(ME, 1, ())
    for i, name in enumerate(AWKWARD + LONG):
        journal = shared.journal(name)
        assert everything(journal) == [entry("w", i)]
        assert journal.beat(PEER, 1, [ME]) == {ME: 1, PEER: 1}


# ---- counters ----


def test_counters_are_set_and_are_seen_by_those_who_watch(store: Store, job: str) -> None:
    """Silence is counted by them alone."""
    one, other = store.journal(job), store.journal(job)
    assert [one.beat(ME, count, ())[ME] for count in (1, 7, 7)] == [1, 7, 7]
    assert other.beat(PEER, 1, [ME]) == {ME: 7, PEER: 1}
    assert other.beat(PEER, 2, [ME, PEER]) == {ME: 7, PEER: 2}
    assert one.beat(ME, 10**18, [PEER]) == {ME: 10**18, PEER: 2}


def test_a_node_that_never_beat_has_no_count(store: Store, job: str) -> None:
    """It may have died before it could; its silence begins now."""
    counts = store.journal(job).beat(ME, 1, [PEER])
    assert not counts.get(PEER)
    assert counts[ME] == 1


def test_incarnations_are_counted_apart_and_so_are_awkward_names(store: Store, job: str) -> None:
    """One that came back starts anew; "n.1" is not the second incarnation of "n"."""
    journal = store.journal(job)
    nodes = [Node(NodeId(name), i) for name in ("n", "n.1", "n/1", "../n", ".", "ä %", 300 * "n") for i in (0, 1, 11)]
    for i, node in enumerate(nodes):
        journal.beat(node, i + 1, ())
    counts = journal.beat(ME, 1, nodes)
    assert [counts[node] for node in nodes] == [*range(1, len(nodes) + 1)]


# ---- many ----


EACH = {"file": 2500, "c10d": 2500, "etcd": 600}
"""Entries of each of four writers. etcd takes some milliseconds for one."""


@pytest.mark.slow
def test_thousands_of_entries_are_read_by_who_comes_late(shared: SharedStore, job: str) -> None:
    """A job may run for months; and who joins then must come to the same fold as all others."""
    opening, each = Opened(Terms(1, 8), journal="j"), EACH[shared.kind]
    shared.journal(job).append("open", opening)
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(shared, job, name, each, is_safe=False)) for name in "abcd"]
        for writer in writers:
            writer.go()
        until(lambda: len(everything(shared.journal(job))) > 4)
        for writer in writers:
            assert writer.end() == [*range(each)]
    found = everything(shared.journal(job))
    assert found[0] == opening
    assert [whose(found, name) for name in "abcd"] == [[*range(each)]] * 4
    assert len(found) == 4 * each + 1
    publisher = shared.journal(job)
    batch = publisher.read(0, wait_s=0.0)
    assert batch.entries == tuple(found)
    assert isinstance(publisher, Remembers)
    publisher.remember(batch.position, fold_all(Job(), found))
    publisher.read(batch.position, wait_s=0.0)  # this publishes the fold
    late = [entry("late", i) for i in range(10)]
    for i, e in enumerate(late):
        publisher.append(f"late-{i}", e)
    reader = shared.journal(job)
    batch = reader.read(0, wait_s=0.0)
    assert batch.base is not None
    assert [*batch.entries, *everything(reader, batch.position)] == late
    assert fold_all(batch.base, late) == fold_all(Job(), [*found, *late])


def test_the_fold_of_little_is_not_published(shared: SharedStore, job: str) -> None:
    """A job has many small reads, and each reader would overwrite the others' folds."""
    publisher, reader = shared.journal(job), shared.journal(job)
    position = 0
    for i in range(2 * MANY):
        publisher.append(str(i), entry("a", i))
        if i % MANY == MANY - 1:
            position = publisher.read(position, 0.0).position
            assert isinstance(publisher, Remembers)
            publisher.remember(position, Job())
    publisher.read(position, 0.0)
    assert reader.read(0, 0.0).base is None


ME_SUCCEEDED = Succeeded(ME, 0)
