"""A journal in torch's store that may be at two endpoints: whose votes count when it is founded again (rule 17)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from attrs import evolve

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.history import Life
from reknit.adapters.journals.tcpstore import places as places_module
from reknit.adapters.journals.tcpstore import rebirth as rebirth_module
from reknit.adapters.journals.tcpstore import votes as votes_module
from reknit.adapters.journals.tcpstore.keys import Keys
from reknit.adapters.ports import Unavailable
from reknit.core.job.entries import Failed, LastCall, Left, Lost, Node, NodeId, Opened
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure
from tests.endpoints import ENTRIES, OVER, TERMS, at_work, cut_off, is_in_vain, joined, reconnect
from tests.stores import JobStore, folded


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents stay only as long where they find no majority as they would need to use one."""
    monkeypatch.setattr(votes_module, "_STAY_S", (2.5, 2.5))
    monkeypatch.setattr(places_module, "_PAUSE_S", 0.0)


def test_less_than_a_majority_does_not(stores: list[JobStore]) -> None:
    """The others may go on at the first endpoint, which this agent cannot reach."""
    (b,) = at_work(stores, "b")
    cut_off(b)
    for _ in range(2):
        is_in_vain(b.read, "[01] of the 3 nodes of the last round can go on from here, and more than half are needed")
    assert stores[1].client.get(stores[1].key("vote/b")) == b"", "an agent that has gone elsewhere does not count"
    assert stores[1].client.get(stores[1].key("best")) == b""


def test_who_has_read_more_votes_for_nobody_who_has_not(stores: list[JobStore]) -> None:
    """b has the best offer. But c could not come."""
    b, c = at_work(stores, "b", "c", entries=OVER)
    memory = c.journal._connections._memory
    c.say(joined("c", round=1))
    c.read()
    c.journal._connections._memory = memory  # without a digest of more
    cut_off(b, c)
    with ThreadPoolExecutor(2) as pool:
        for tried in [pool.submit(agent.read) for agent in (b, c)]:
            with pytest.raises(Unavailable, match="of the 3 nodes"):
                tried.result()


def test_the_vote_of_a_dead_agent_counts_for_nobody_who_comes_later(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b dies while it waits for a majority, and takes nothing back. c alone is no majority."""
    b, c = at_work(stores, "b", "c")
    cut_off(b, c)
    with monkeypatch.context() as patch:
        patch.setattr(rebirth_module, "withdraw", lambda *_: None)
        is_in_vain(b.read, "1 of the 3 nodes")
    is_in_vain(c.read, "1 of the 3 nodes")


def test_a_goodbye_counts_for_nobody_who_founds_the_journal_again(stores: list[JobStore]) -> None:
    """It agrees to what follows in the life in which it was said. In another life c must not count: neither its goodbye
    that b has read, nor a vote that c gives now."""
    b, c = at_work(stores, "b", "c")
    c.say(Left(c.joined.node))
    b.read()
    c.read()
    assert b.job.farewells == {"c"}
    stores[0].client.set(stores[0].key("header"), b"")  # the server ended alone, and is back
    reconnect(b, c)
    is_in_vain(b.read, "1 of the 3 nodes")
    with ThreadPoolExecutor(2) as pool:
        for tried in [pool.submit(is_in_vain, agent.read, "[01] of the 3 nodes") for agent in (b, c)]:
            tried.result()


def votes(store: JobStore, job: Job, *voters: str) -> tuple[int, bool]:
    """How many members of the last round have voted for an offer, and whether they can go on from this fold."""
    keys, envelope = Keys(store.job), Envelope(store.job)
    for voter in voters:
        votes_module.vote(store.client, keys.vote, envelope, voter, "the offer")
    count = votes_module.counted(job, votes_module.cast(store.client, keys.vote, envelope, job, "the offer"))
    return count.have, count.is_majority


def test_members_of_the_round_before_vote_too(store: JobStore) -> None:
    """Nobody has shown yet that it has read the seal of round 1. So a majority of round 0 is needed as well, and a is
    one of them."""
    terms = evolve(TERMS, max_nodes=5)
    failure = Failed(Node(NodeId("b")), 0, (WorkerFailure(0, 0, 1),))
    lost = Lost(Node(NodeId("a")), Node(NodeId("b")))
    newer = [joined(name, round=1) for name in "defbc"]
    job = folded([Opened(terms, "x"), *map(joined, "abc"), LastCall(0), failure, lost, *newer])
    assert job.former == ("a", "b", "c")
    assert votes(store, job, "b", "d", "e") == (1, False)
    assert votes(store, job, "a") == (3, True)


def test_a_vote_counts_for_the_agent_that_has_given_it(store: JobStore) -> None:
    """Whoever can write to the store cannot make two votes of one."""
    job = folded(ENTRIES)
    assert votes(store, job, "b") == (1, False)
    store.client.set(store.key("vote/c"), store.client.get(store.key("vote/b")))
    assert votes(store, job) == (1, False)
    assert votes(store, job, "c") == (2, True)


def test_a_majority_is_seen_beside_others_that_are_as_many() -> None:
    """A network cut has divided four nodes. Half of them with group rank 0 are a majority, and the others are none."""
    job = folded([Opened(evolve(TERMS, max_nodes=4), "x"), *map(joined, "abcd")], Job())
    earlier, later = (Life(), 7), (Life("x", 5, "digest", 1, Life().line), 7)
    for names in ("abcd", "cdab"):
        read = {name: later if name in "ab" else earlier for name in names}
        assert votes_module._on_one_line(job, read).is_majority
        others = {name: earlier if name in "ab" else later for name in names}
        assert votes_module._on_one_line(job, others).is_majority
    assert not votes_module._on_one_line(job, {"c": earlier, "d": earlier, "b": later}).is_majority
