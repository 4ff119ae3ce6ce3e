"""A journal in torch's store that may be at two endpoints: where it goes on, and where a newcomer looks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from attrs import evolve

from reknit.adapters.clock import is_readable
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import beginning as beginning_module
from reknit.adapters.journals.tcpstore import places as places_module
from reknit.adapters.journals.tcpstore import votes as votes_module
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.journals.tcpstore.places import Places
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import (
    Aborted,
    Filler,
    Joined,
    Leaving,
    Left,
    Lost,
    Node,
    NodeId,
    Opened,
    Succeeded,
)
from reknit.core.job.job import Job, Running
from reknit.core.job.majority import moved
from tests.endpoints import ENTRIES, OVER, TERMS, Agent, at_once, at_work, cut_off, is_in_vain, joined, reconnect
from tests.stores import HOST, JobStore, folded, free_port, hosted, stubborn


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these tests everybody who remembers a journal is there at once."""
    monkeypatch.setattr(Places, "wait_for_elders_s", lambda places, timeout_s: 0.3)
    monkeypatch.setattr(beginning_module, "ELDERS_S", 0.3)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents do not stay long where they find no majority."""
    monkeypatch.setattr(votes_module, "_STAY_S", (0.1, 0.1))
    monkeypatch.setattr(places_module, "_PAUSE_S", 0.0)


def test_a_majority_founds_the_journal_again_at_the_second_endpoint(stores: list[JobStore]) -> None:
    """The host of the first one stays away. Those who know the journal go on in it, and a newcomer finds it."""
    b, c = at_work(stores, "b", "c")
    cut_off(b, c)
    job = b.job
    assert at_once(b.read, c.read) == [Batch(4, base=job, is_other_life=True)] * 2
    b.say(Aborted("x"))
    newcomer = Agent("d", stores)
    newcomer.lose_home()
    assert stubborn(newcomer.read) == Batch(4, base=job)
    assert newcomer.read().entries == (Aborted("x"),)


def test_who_has_joined_the_next_round_goes_on_as_well(stores: list[JobStore]) -> None:
    """The first store is lost after all have joined round 1, and before it is sealed. In the journal that is founded
    again all are expected, and join again."""
    a, b, c = at_work(stores, "a", "b", "c", entries=[*OVER, joined("c", round=1)])
    b.say(joined("b", round=1))
    cut_off(b, c)
    job = c.job
    at_once(b.read, c.read)
    assert b.job == c.job == moved(job)
    b.say(joined("b", round=1))
    c.say(joined("c", round=1), Lost(a.joined.node, c.joined.node))
    c.read()
    assert c.job.phase == Running(1)
    assert [m.nonce for m in c.job.members] == ["b", "c"]


def test_who_has_read_more_begins_anew(stores: list[JobStore]) -> None:
    """c has read its `Joined` at the first endpoint. a and b found the journal again without it. c has no workers."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    c.say(joined("c", round=1))
    c.read()
    cut_off(a, b, c)
    at_once(a.read, b.read)
    assert stubborn(c.read) == Batch(0, base=Job()), "c is told to begin anew"
    assert c.read().base == a.job
    c.say(joined("c", round=1))
    assert c.read().entries == (), "what c wanted to say before is not said any more"
    c.say(evolve(joined("c", round=1), nonce="c+"))
    assert [entry.nonce for entry in c.read().entries if isinstance(entry, Joined)] == ["c+"]


def test_what_the_link_has_dropped_holds_nobody_up(stores: list[JobStore]) -> None:
    """No agent was told of it."""
    b, c = at_work(stores, "b", "c", entries=OVER)
    b.say(joined("b", round=1))
    c.journal.read(c.position, 0.0)
    c.journal.take_back(c.position)
    cut_off(b, c)
    assert [batch.position for batch in at_once(b.read, c.read)] == [5, 5]


def test_a_fold_of_the_life_before_is_not_remembered_in_the_next_one(stores: list[JobStore]) -> None:
    """c has yet to fold an answer when its beats come to another life. With a memory of two lives it would found a
    journal that never was."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    a.say(Filler())
    at_once(a.read, b.read)
    c.say(joined("c", round=1))
    c.read()
    cut_off(a, b, c)
    at_once(a.read, b.read)
    stubborn(lambda: c.journal.beat(c.joined.node, 1, ()))
    c.journal.remember(c.position, c.job)
    assert c.journal._connections._memory is None


def test_who_may_have_workers_of_another_round_ends(stores: list[JobStore]) -> None:
    """b and c go on without a, which has read that its workers shall start."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    stubborn(lambda: [agent.say(joined(name, round=1)) for name, agent in zip("bca", (b, c, a), strict=True)])
    a.read()
    assert a.job.phase == Running(1)
    cut_off(a, b, c)
    at_once(b.read, c.read)
    with pytest.raises(Refused, match="without something that this node has read; start this agent again"):
        stubborn(a.read)


def test_what_is_just_being_read_counts_as_read(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """c was given its `Joined` and has not folded it yet, when its writer comes to the other journal."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    c.say(joined("c", round=1))
    batch = c.journal.read(c.position, 0.0)
    cut_off(a, b, c)
    at_once(a.read, b.read)
    monkeypatch.setattr(places_module, "_PAUSE_S", 0.0)
    is_in_vain(lambda: c.say(joined("c", round=1)), "this node is just reading what the store has lost")
    c.position, c.job = batch.position, folded([*batch.entries], c.job)
    c.journal.remember(c.position, c.job)
    assert c.read() == Batch(0, base=Job())


def test_nothing_is_said_or_read_in_a_life_that_the_agent_has_left(stores: list[JobStore]) -> None:
    """One thread of c has moved to the other journal. The others are still at work in the one before."""
    a, b, c = at_work(stores, "a", "b", "c")
    before = c.journal._connections._course
    assert before is not None
    cut_off(a, b, c)
    at_once(a.read, b.read, c.read)
    is_in_vain(lambda: c.journal._connections.give(before, 9), "the journal has begun another life")
    is_in_vain(lambda: c.journal._connections.may_say(c.joined, before, None), "the journal has begun another life")


def test_who_has_left_goes_nowhere(stores: list[JobStore]) -> None:
    """Its goodbye agrees to what follows in the first journal. It must not agree in another one as well."""
    a, b, c = at_work(stores, "a", "b", "c")
    c.say(Left(c.joined.node))
    cut_off(a, b, c)
    at_once(a.read, b.read)
    is_in_vain(c.read, "connection refused")


def test_a_journal_without_a_majority_is_left_for_a_later_one(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """a was cut off, and declares the others lost in its store. Then it finds out that they go on, and begins anew."""
    monkeypatch.setattr(places_module, "_STRAYED_S", 0.0)
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    cut_off(b, c)
    at_once(b.read, c.read)
    a.say(joined("a", round=1))
    a.read()
    a.read()
    a.job = evolve(a.job, live={name: each for name, each in a.job.live.items() if name == "a"})
    a.journal.remember(a.position, a.job)
    is_in_vain(lambda: [a.read() for _ in range(2)], "the job may go on in another journal at")
    assert stubborn(a.read) == Batch(0, base=Job())
    assert a.read().base == b.job


def test_a_round_without_a_majority_ends_when_the_others_go_on_elsewhere(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b and c have succeeded, and go on without a. In the journal that a reads their loss does not end the round."""
    monkeypatch.setattr(places_module, "_STRAYED_S", 0.0)
    done = [Succeeded(Node(NodeId(name)), 0) for name in "bc"]
    a, b, c = at_work(stores, "a", "b", "c", entries=[*ENTRIES, *done])
    cut_off(b, c)
    at_once(b.read, c.read)
    a.say(Lost(b.joined.node, a.joined.node), Lost(c.joined.node, a.joined.node))
    a.read()
    assert isinstance(a.job.phase, Running)
    is_in_vain(lambda: [a.read() for _ in range(3)], "the job may go on in another journal at")
    with pytest.raises(Refused, match="without something that this node has read; start this agent again"):
        stubborn(a.read)


def test_who_has_read_no_sealed_round_comes_when_the_others_have_gone(stores: list[JobStore]) -> None:
    """c has joined, and has not read the seal. d has read nothing. They have no vote, and the host stays away."""
    a, b, c, d = (Agent(name, stores, founds=name == "a") for name in "abcd")
    stubborn(lambda: a.say(*ENTRIES[:2]))
    stubborn(c.read)
    for agent in (b, c):
        stubborn(partial(agent.say, agent.joined))
    d.journal._connections.client("reader")
    stubborn(a.read)
    stubborn(b.read)
    cut_off(a, b, c, d)
    at_once(a.read, b.read)
    stubborn(c.read)
    assert c.job == b.job
    assert c.journal._connections._voice.joined == c.joined, "the same process"
    assert stubborn(d.read).base == b.job


def test_who_has_left_looks_for_no_later_journal(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has agreed to what follows here."""
    monkeypatch.setattr(places_module, "_STRAYED_S", 0.0)
    a, b, c = at_work(stores, "a", "b", "c")
    cut_off(b, c)
    at_once(b.read, c.read)
    lost = [Lost(node, a.joined.node) for node in (b.joined.node, c.joined.node)]
    a.say(*lost, Left(a.joined.node))
    assert [len(a.read().entries) for _ in range(3)] == [3, 0, 0]


def test_the_journal_goes_back_over_what_was_left_there(stores: list[JobStore]) -> None:
    """The first store may still hold the old journal when the second one is lost."""
    a, b, c = at_work(stores, "a", "b", "c")
    first = a.places._endpoints
    cut_off(a, b, c)
    at_once(a.read, b.read, c.read)
    for agent in (a, b, c):
        agent.places._endpoints = [first[0], agent.places._endpoints[1]]
    cut_off(a, b, c)
    a_batch, *_ = at_once(a.read, b.read, c.read)
    assert a_batch.base == a.job
    assert a.places.home == 0
    a.say(Aborted("x"))
    assert stubborn(b.read).entries == (Aborted("x"),)


# ---- the beginning ----


def test_a_host_begins_nothing_while_the_second_endpoint_does_not_answer(stores: list[JobStore], hasty: None) -> None:
    """The job may go on there."""
    host = Agent("a", stores, founds=True)
    second = host.places._endpoints[1]
    host.places._endpoints = [host.places._endpoints[0], (HOST, free_port())]
    is_in_vain(
        host.read,
        "no store answers at the second endpoint .* begins when both hosts are there",
    )
    assert stores[0].client.get(stores[0].key("header")) == b""
    host.places._endpoints = [host.places._endpoints[0], second]
    assert stubborn(host.read) == Batch(0)


def test_a_new_journal_and_an_old_one_cannot_both_begin(stores: list[JobStore], hasty: None) -> None:
    """The host of the first endpoint was started again on another machine, while b and c go to the second one. Both
    write in the place of the header there, and the first of them has decided."""
    b, c = at_work(stores, "b", "c")
    stores[0].client.set(stores[0].key("header"), b"")  # the store of a was lost
    stores[0].client.set(stores[0].key("slot/0"), b"")
    stores[1].client.set(stores[1].key("header"), b"")  # b's host was started again as well
    host = Agent("a", stores, founds=True)
    stubborn(host.read)
    cut_off(b, c)
    is_in_vain(b.read, "the journal of job .* begins at the other endpoint")


def test_the_objection_of_a_dead_agent_counts_for_nobody_who_comes_later(
    stores: list[JobStore], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c alone would make the new journal void, and could not found the old one again. Then nobody has a journal."""
    b, c = at_work(stores, "b", "c")
    host, second = Agent("d", stores, founds=True), b.places._endpoints[1]
    with hosted() as (_, port):
        for agent in (host, b, c):
            agent.places._endpoints = [(HOST, port), second]
        stubborn(host.read)
        reconnect(b, c)
        with monkeypatch.context() as patch:
            patch.setattr(votes_module, "withdraw", lambda *_: None)
            is_in_vain(b.read, "1 of the 3 nodes")
        is_in_vain(c.read, "1 of the 3 nodes")
        host.say(Opened(TERMS, "new"))
        assert stubborn(host.read).entries == (Opened(TERMS, "new"),)


def test_an_agent_with_one_endpoint_takes_no_note_for_a_journal(stores: list[JobStore]) -> None:
    """Otherwise it would begin a second job at the second endpoint."""
    at_work(stores, "a")
    with pytest.raises(Refused, match="begins at another endpoint: give all nodes the same --rdzv-endpoint=HOST,HOST"):
        stores[1].journal().read(0, 0.0)


# ---- threads and stores at bad moments ----


def test_who_begins_anew_does_not_say_goodbye_as_the_old_one(stores: list[JobStore]) -> None:
    """The process that has read the first journal goes nowhere. What it wanted to say there is not said elsewhere."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    c.say(joined("c", round=1))
    c.read()
    cut_off(a, b, c)
    at_once(a.read, b.read)
    stubborn(lambda: c.say(Leaving(c.joined.node), Left(c.joined.node)))  # the writer comes before the reader
    b.read()
    assert b.job.farewells == frozenset()


def test_who_begins_anew_is_told_so_if_the_life_changes_at_once(stores: list[JobStore]) -> None:
    """Otherwise all that c says is dropped, and nobody tells c why."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    c.say(joined("c", round=1))
    c.read()
    cut_off(a, b, c)
    at_once(a.read, b.read)
    stubborn(lambda: c.journal.beat(c.joined.node, 1, ()))  # the beats come before the reader
    stores[1].client.set(stores[1].key("header"), b"")  # the second server ends alone, and is back
    reconnect(a, b)
    at_once(a.read, b.read)
    reconnect(c)
    assert stubborn(c.read).base == Job()


def test_a_look_at_an_endpoint_ends_when_the_journal_is_closed() -> None:
    """An agent that is told to leave must not wait for both endpoints, one after the other, that do not answer."""
    with socket.create_server((HOST, 0)) as first, socket.create_server((HOST, 0)) as second:
        places = Places([listener.getsockname() for listener in (first, second)])
        journal = TCPStoreJournal(*first.getsockname(), Envelope("job"), founds=False, places=places)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(journal.read, 0, 0.0)
            with first.accept()[0]:
                journal.close()
                with pytest.raises(Unavailable, match="closed here"):
                    reading.result()
        assert not is_readable(second.fileno(), 0.0)


def test_the_note_of_a_journal_that_was_lost_bars_nobody(stores: list[JobStore]) -> None:
    """A new host began a journal, whose store was lost at once. The old one is founded again at the first endpoint.
    When that host is lost too, the job goes to the second one."""
    _, b, c = at_work(stores, "a", "b", "c")
    second = b.places._endpoints[1]
    stores[1].client.set(stores[1].key("header"), b.journal._envelope.elsewhere(Envelope(stores[1].job).header()))
    with hosted() as (_, port):
        for agent in (b, c):
            agent.places._endpoints = [(HOST, port), second]
        reconnect(b, c)
        at_once(b.read, c.read)
    cut_off(b, c)
    at_once(b.read, c.read)
    assert b.places.home == 1


def test_a_job_does_not_begin_beside_another_one_at_the_second_endpoint(stores: list[JobStore]) -> None:
    """Its store could not be used when the first host is lost."""
    with hosted() as (_, first), hosted() as (_, second):
        other = TCPStoreJournal(HOST, second, Envelope("other"), exclusive=True, founds=True)
        other.read(0, 0.0)
        places = Places([(HOST, first), (HOST, second)], exclusive=True)
        host = TCPStoreJournal(HOST, first, Envelope("mine"), exclusive=True, founds=True, places=places)
        with pytest.raises(Refused, match="serves job other, not mine: give --rdzv-id=other, or another endpoint"):
            host.read(0, 0.0)
        other.close()
        host.close()


def test_a_void_journal_leaves_no_note(stores: list[JobStore]) -> None:
    """The first host has begun a new journal, which made way. When that host is lost, the job goes to the second."""
    _, b, c = at_work(stores, "a", "b", "c")
    second = b.places._endpoints[1]
    host = Agent("a", stores, founds=True)
    with hosted() as (_, port):
        for agent in (host, b, c):
            agent.places._endpoints = [(HOST, port), second]
        stubborn(host.read)
        reconnect(b, c)
        at_once(b.read, c.read)
    cut_off(b, c)
    at_once(b.read, c.read)
    assert b.places.home == 1


def test_an_agent_that_makes_way_corrects_the_note(stores: list[JobStore]) -> None:
    """The agent that has founded the old journal again may have died before it did this."""
    _, b, c = at_work(stores, "a", "b", "c")
    with hosted() as (_, port):
        host = Agent("a", stores, founds=True)
        for agent in (host, b, c):
            agent.places._endpoints = [(HOST, port), agent.places._endpoints[1]]
        stubborn(host.read)
        note = stores[1].client.get(stores[1].key("header"))
        reconnect(b, c)
        at_once(b.read, c.read)
        stores[1].client.set(stores[1].key("header"), note)
        stubborn(host.read)
        assert stores[1].client.get(stores[1].key("header")) != note


def test_a_minority_makes_no_journal_void(stores: list[JobStore]) -> None:
    """It cannot found the old journal again. Then neither journal goes on, and all nodes wait in vain."""
    (b,) = at_work(stores, "b")
    with hosted() as (_, port):
        host = Agent("a", stores, founds=True)
        for agent in (host, b):
            agent.places._endpoints = [(HOST, port), agent.places._endpoints[1]]
        stubborn(host.read)
        host.say(evolve(ENTRIES[0], journal="new"))
        reconnect(b)
        try:
            b.read()
        except Unavailable:
            pass
        assert host.read().entries


def test_no_round_is_formed_from_a_fold_without_members(stores: list[JobStore]) -> None:
    """b has read the seal of round 0, and c has not. c alone founds the journal again, and round 0 is sealed anew."""
    b, c = at_work(stores, "b", "c", entries=ENTRIES[:3])
    stubborn(lambda: Agent("c", stores).say(joined("c")))
    b.read()
    assert b.job.members
    stores[0].client.set(stores[0].key("header"), b"")  # the first store was lost, and only c reaches it
    reconnect(c)
    with pytest.raises(Unavailable, match="the store has lost the journal"):
        c.read()
    assert stores[0].client.get(stores[0].key("header")) == b""
