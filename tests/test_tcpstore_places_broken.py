"""A journal that may be at two endpoints: histories of threads and stores that go wrong."""

from __future__ import annotations

from attrs import evolve

from reknit.adapters.ports import Unavailable
from reknit.core.job.entries import LastCall, Leaving, Left
from reknit.core.job.job import Job
from tests.stores import HOST, JobStore, hosted, stubborn
from tests.test_tcpstore_places import (
    ENTRIES,
    OVER,
    Agent,
    at_once,
    at_work,
    cut_off,
    joined,
    ports,
    stores,
)

__all__ = ["ports", "stores"]


def reconnect(*agents: Agent) -> None:
    for agent in agents:
        for client in agent.journal._connections._clients.values():
            client.close()


def test_who_begins_anew_does_not_say_goodbye_as_the_old_one(stores: list[JobStore]) -> None:
    """c counts at the first endpoint by its `Joined`. Its goodbye must not count at the second one as well."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    c.say(joined("c", round=1))
    cut_off(a, b, c)
    at_once(a.read, b.read)
    stubborn(lambda: c.say(Leaving(c.joined.node), Left(c.joined.node)))  # the writer comes before the reader
    b.read()
    assert b.job.farewells == frozenset()


def test_who_begins_anew_is_told_so_if_the_life_changes_at_once(stores: list[JobStore]) -> None:
    """Otherwise all that c says is dropped, and nobody tells c why."""
    a, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    c.say(joined("c", round=1))
    cut_off(a, b, c)
    at_once(a.read, b.read)
    stubborn(lambda: c.journal.beat(c.joined.node, 1, ()))  # the beats come before the reader
    stores[1].client.set(stores[1].key("header"), b"")  # the second server ends alone, and is back
    reconnect(a, b)
    at_once(a.read, b.read)
    reconnect(c)
    assert stubborn(c.read).base == Job()


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
    stubborn(c.read)
    newcomer = Agent("n", stores)
    stubborn(newcomer.read)
    newcomer.say(joined("n"), LastCall(0))
    newcomer.read()
    assert not newcomer.job.members
