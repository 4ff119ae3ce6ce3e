"""The journal in etcd, beside what `test_journals` demands of all: servers that die, hang, or lose their data."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, KeyWatch
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Aborted, Node, NodeId
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.etcd import Etcd, EtcdCluster, patiently, watch_of, watches
from tests.support.waiting import PATIENCE_S, descriptors, until

T = TypeVar("T")

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))

WRITER = """
import select
import sys
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.runtime.ports import Unavailable
from reknit.core.job.entries import Aborted

job, name, count, *ports = sys.argv[1:]
journal = EtcdJournal(Cluster([("127.0.0.1", int(port)) for port in ports]), Envelope(job))
i = 0
while i < int(count) or count == "0" and not select.select([sys.stdin], [], [], 0)[0]:
    try:
        journal.append(f"{name}-{i}", Aborted(f"{name} {i}"))
        i += 1
    except Unavailable:
        pass
journal.close()
print(i)
"""
"""Appends `count` entries; 0: until its standard input ends. Prints how many."""


@pytest.fixture
def journals() -> Iterator[Callable[..., EtcdJournal]]:
    """Makes journals, and closes them."""
    made = []

    def make(servers: Etcd | EtcdCluster, job: str, timeout_s: float = 30.0) -> EtcdJournal:
        made.append(EtcdJournal(Cluster(servers.endpoints), Envelope(job), timeout_s=timeout_s))
        return made[-1]

    yield make
    for journal in made:
        journal.close()


@contextmanager
def writer(servers: Etcd | EtcdCluster, job: str, name: str, count: int = 0) -> Iterator[Callable[[], int]]:
    """A process that appends. What this gives waits for its end: how many it has appended."""
    ports = [str(port) for _, port in servers.endpoints]
    command = [sys.executable, "-c", WRITER, job, name, str(count), *ports]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield lambda: int(process.communicate(timeout=PATIENCE_S)[0])
        finally:
            process.kill()


def texts(batch: Batch) -> list[str]:
    return [entry.why for entry in batch.entries if isinstance(entry, Aborted)]


def read_until(journal: EtcdJournal, is_enough: Callable[[list[str]], bool]) -> list[str]:
    """Follow the journal from the start, through outages."""
    position, found = 0, list[str]()

    def has_enough() -> bool:
        nonlocal position
        batch = patiently(lambda: journal.read(position, 1.0))
        position = batch.position
        found.extend(texts(batch))
        return is_enough(found)

    until(has_enough, "enough entries")
    return found


def in_thread(call: Callable[[], T]) -> Callable[[], T]:
    """Call it in a thread; the result waits for it."""
    results: list[T | Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as e:
            results.append(e)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> T:
        thread.join(60)
        assert results, "the thread is stuck"
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    return result


# ---- reading and waiting ----


def test_processes_that_append_at_once_lose_nothing_and_all_readers_see_one_order(
    server: Etcd, journals: Callable[..., EtcdJournal]
) -> None:
    """The job is the fold of this order: two readers with two orders are two jobs."""
    one, other = journals(server, "crowd"), journals(server, "crowd")
    with ExitStack() as stack:
        writers = [stack.enter_context(writer(server, "crowd", name, 50)) for name in "abcd"]
        result = in_thread(lambda: read_until(one, lambda found: len(found) >= 200))
        followed = read_until(other, lambda found: len(found) >= 200)
        assert [finish() for finish in writers] == [50] * 4
    assert result() == followed == texts(journals(server, "crowd").read(0, 0))
    for name in "abcd":
        assert [t for t in followed if t.startswith(name)] == [f"{name} {i}" for i in range(50)]


def test_a_reader_that_waits_is_woken_by_the_watch(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """A round starts when its last entry is read. Nobody shall wait for the next look."""
    reader, peer = journals(server, "wake"), journals(server, "wake")
    assert reader.read(0, 0.01) == Batch(0)
    position = 0
    for i in range(3):
        waiting = in_thread(partial(reader.read, position, 600.0))
        peer.append(str(i), Aborted(str(i)))
        batch = waiting()
        assert texts(batch) == [str(i)]
        position = batch.position


def test_one_watch_serves_many_reads(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """An idle agent looks once a second; a new connection and a new stream each time would be a load on the store."""
    reader = journals(server, "idle")
    watch_of(reader)
    with watches() as opened:
        for _ in range(3):
            reader.read(0, 0.05)
    assert opened == []


def test_a_reader_whose_watch_cannot_be_had_looks_by_itself(
    server: Etcd, journals: Callable[..., EtcdJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may not let streams through. The journal is slower then, and no less right."""
    reader = journals(server, "no watch")
    monkeypatch.setattr(Gateway, "watch", lambda gateway, prefix, revision: None)
    waiting = in_thread(lambda: reader.read(0, 600.0))
    journals(server, "no watch").append("t", Aborted("x"))
    assert texts(waiting()) == ["x"]


def test_a_watch_that_is_deaf_is_replaced(
    server: Etcd, journals: Callable[..., EtcdJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that went without a word leaves a connection on which nothing ever comes."""
    reader = journals(server, "deaf")
    deaf = watch_of(reader)
    append = journals(server, "deaf").append

    def hear_nothing(wait_s: float, gate: int) -> bool:
        append("t", Aborted("x"))
        return False

    monkeypatch.setattr(deaf, "wait", hear_nothing)
    batch = reader.read(0, 600.0)
    assert texts(batch) == ["x"]
    assert watch_of(reader, batch.position) is not deaf


def test_a_waiting_read_ends_when_the_journal_is_closed(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """An agent that is done must not wait for its reader."""
    before = descriptors()
    journal = journals(server, "close")
    with watches() as opened:
        waiting = in_thread(lambda: journal.read(0, 600.0))
        until(lambda: opened, "the watch")
    journal.close()
    with pytest.raises(Unavailable, match="closed"):
        waiting()
    assert descriptors() <= before
    journal.close()
    with pytest.raises(Unavailable, match="closed"):
        journal.append("t", Aborted("x"))


def test_compaction_does_not_break_a_reader(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """etcd forgets its history every few hours; entries are no history, but the revisions they came with are."""
    reader, peer = journals(server, "compacted"), journals(server, "compacted")
    for i in range(5):
        peer.append(str(i), Aborted(str(i)))
        peer.beat(ME, 1, ())
    server.compact()
    batch = reader.read(0, 0)
    assert texts(batch) == list("01234")
    with watches() as opened:
        waiting = in_thread(lambda: reader.read(batch.position, 600.0))
        until(lambda: opened, "the watch")
    peer.beat(ME, 1, ())
    server.compact()
    peer.append("5", Aborted("5"))
    assert texts(waiting()) == ["5"]


def test_a_cancelled_watch_is_opened_again(
    server: Etcd, journals: Callable[..., EtcdJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that starts at a compacted revision is told so once, and is silent from then on."""
    reader, peer = journals(server, "cancelled"), journals(server, "cancelled")
    peer.append("0", Aborted("0"))
    server.compact()
    position = reader.read(0, 0).position
    with watches() as opened, monkeypatch.context() as patched:
        watch = Gateway.watch
        patched.setattr(Gateway, "watch", lambda gateway, prefix, now: watch(gateway, prefix, now if opened else 1))
        waiting = in_thread(lambda: reader.read(position, 600.0))
        until(lambda: len(opened) > 1, "another watch")
        peer.append("1", Aborted("1"))
        assert texts(waiting()) == ["1"]


# ---- what lies where ----


def test_jobs_whose_names_nest_do_not_see_each_other(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """Names are the users': one that looks like a path must not be one."""
    names = ["n", "n/", "n/entries", "n%2Fentries", "n/entries/t", "", "ñ"]
    for name in names:
        journal = journals(server, name)
        journal.append("t", Aborted(f"of {name}"))
        journal.append("../t", Aborted("second"))
        assert journal.beat(Node(NodeId("../a/b"), 1), 1, ()) == {Node(NodeId("../a/b"), 1): 1}
    for name in names:
        assert texts(journals(server, name).read(0, 0)) == [f"of {name}", "second"]


def test_a_reader_that_is_far_behind_begins_with_the_fold(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """Of a thousand nodes that join, each would have to read and decode a thousand entries."""
    journal = journals(server, "far")
    for i in range(MANY + 1):
        journal.append(str(i), Aborted(str(i)))
    first = journals(server, "far").read(0, 0)
    assert first.base is None
    assert len(first.entries) == MANY + 1
    job = fold_all(Job(), first.entries)
    journal.publish(first.position, job)
    assert journals(server, "far").read(0, 0) == Batch(first.position, (), job)
    journal.append("last", Aborted("last"))
    reader = journals(server, "far")
    batch = reader.read(0, 0)
    assert (texts(batch), batch.base) == (["last"], job)
    near = reader.read(first.position, 0)
    assert (texts(near), near.base) == (["last"], None)


def test_a_beat_counts_its_own_node_and_tells_of_the_others(server: Etcd, journals: Callable[..., EtcdJournal]) -> None:
    """A silent peer is one whose counter stands while mine moves. Its next incarnation is another peer."""
    mine, theirs = journals(server, "beats"), journals(server, "beats")
    assert mine.beat(ME, 1, (PEER,)) == {ME: 1}
    assert theirs.beat(PEER, 1, (ME,)) == {PEER: 1, ME: 1}
    assert mine.beat(ME, 2, (PEER, ME, Node(PEER.id, 1))) == {ME: 2, PEER: 1}


def test_a_beat_that_watches_a_whole_cluster_is_still_one_transaction(
    server: Etcd, journals: Callable[..., EtcdJournal]
) -> None:
    """etcd takes 128 operations in one; while a round gathers, all that are expected are watched."""
    journal = journals(server, "many")
    nodes = [Node(NodeId(f"n{i}")) for i in range(200)]
    for node in nodes[:150]:
        journal.beat(node, 1, ())
    assert journal.beat(ME, 1, nodes) == {ME: 1, **dict.fromkeys(nodes[:150], 1)}


# ---- servers that fail ----


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_the_leader_is_killed(
    tmp_path: Path, journals: Callable[..., EtcdJournal]
) -> None:
    """That is what a cluster is for."""
    with EtcdCluster(tmp_path) as cluster, writer(cluster, "j", "a") as a, writer(cluster, "j", "b") as b:
        reader, observer = journals(cluster, "j", 5.0), journals(cluster, "j", 5.0)
        following = in_thread(lambda: read_until(reader, lambda found: "end" in found))
        some = len(read_until(observer, lambda found: len(found) > 50))
        leader = cluster.leader()
        cluster.kill(leader)
        some = len(read_until(observer, lambda found: len(found) > some + 50))
        cluster.revive(leader)
        read_until(observer, lambda found: len(found) > some + 50)
        expected = [f"a {i}" for i in range(a())] + [f"b {i}" for i in range(b())]
        patiently(lambda: observer.append("end", Aborted("end")))
        found = following()
        assert sorted(found) == sorted([*expected, "end"])
        alone = journals(cluster.members[leader], "j")
        assert texts(patiently(lambda: alone.read(0, 0))) == found


def test_a_cluster_that_hangs_is_unavailable_and_then_what_it_was(
    tmp_path: Path, journals: Callable[..., EtcdJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append may have been written although nobody said so: said again, it is there once."""
    with EtcdCluster(tmp_path) as cluster:
        journal = journals(cluster, "j", 0.9)
        patiently(lambda: journal.append("before", Aborted("before")))
        position = patiently(lambda: journal.read(0, 0)).position
        watch_of(journal, position)

        def hang(watch: KeyWatch, wait_s: float, gate: int) -> bool:
            for i in range(3):
                cluster.stop(i)
            return False

        monkeypatch.setattr(KeyWatch, "wait", hang)
        with pytest.raises(Unavailable, match="no answer"):
            journal.read(position, 600.0)
        with pytest.raises(Unavailable) as e:
            journal.append("during", Aborted("during"))
        for _, port in cluster.endpoints:
            assert f"http://127.0.0.1:{port}: no answer" in str(e.value)
        with pytest.raises(Unavailable, match="no answer"):
            journal.beat(ME, 1, ())
        for i in range(3):
            cluster.cont(i)
        patiently(lambda: journal.append("during", Aborted("during")))
        patiently(lambda: journal.append("during", Aborted("during")))
        assert texts(patiently(lambda: journal.read(0, 0))) == ["before", "during"]


def test_a_server_that_comes_back_with_its_data_goes_on(tmp_path: Path, journals: Callable[..., EtcdJournal]) -> None:
    """A store that restarts is an outage, and no end."""
    with Etcd(tmp_path) as server:
        journal = journals(server, "j")
        journal.append("0", Aborted("0"))
        position = journal.read(0, 0.05).position
        server.kill()
        with pytest.raises(Unavailable, match="Connection refused"):
            journal.append("1", Aborted("1"))
        with pytest.raises(Unavailable, match="Connection refused"):
            journal.read(position, 1.0)
        server.start()
        server.wait()
        journal.append("1", Aborted("1"))
        assert texts(journal.read(position, 0)) == ["1"]


def test_a_server_that_comes_back_empty_is_refused(tmp_path: Path, journals: Callable[..., EtcdJournal]) -> None:
    """An agent that went on would be alone in a job of its own; and it must leave nothing behind there."""
    with Etcd(tmp_path) as server:
        appending, beating, reading = (journals(server, "j") for _ in range(3))
        appending.append("0", Aborted("0"))
        beating.beat(ME, 1, ())
        position = reading.read(0, 0).position
        server.kill()
        shutil.rmtree(server.data)
        server.start()
        server.wait()
        calls: list[Callable[[], object]] = [
            lambda: appending.append("1", Aborted("1")),
            lambda: beating.beat(ME, 1, ()),
            lambda: reading.read(position, 0),
            lambda: appending.publish(position, Job()),
        ]
        for call in calls:
            with pytest.raises(Refused, match="is gone") as e:
                call()
            assert e.value.refusal is Refusal.IDENTITY
        assert server.post("/v3/kv/range", {"key": "AA==", "range_end": "AA=="}).get("count") is None
        journals(server, "j").append("other", Aborted("other"))
        with pytest.raises(Refused, match="another one"):
            reading.read(position, 0)


def test_a_server_that_was_put_back_to_an_older_state_is_refused(
    tmp_path: Path, journals: Callable[..., EtcdJournal]
) -> None:
    """Its header is right, and what some agents have acted upon is gone. Beats have made its revision high again."""
    with Etcd(tmp_path) as server:
        journal = journals(server, "j")
        journal.append("0", Aborted("0"))
        server.kill()
        shutil.copytree(server.data, tmp_path / "backup")
        server.start()
        server.wait()
        journal.append("1", Aborted("1"))
        position = journal.read(0, 0).position
        server.kill()
        shutil.rmtree(server.data)
        (tmp_path / "backup").rename(server.data)
        server.start()
        server.wait()
        for _ in range(5):
            journal.beat(ME, 1, ())
        assert server.revision() > position
        with pytest.raises(Refused, match="lost entries") as e:
            journal.read(position, 0)
        assert e.value.refusal is Refusal.IDENTITY
