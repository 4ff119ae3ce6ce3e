"""A journal in torch's store that may be at two endpoints: what an agent takes along from one life to another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from reknit.adapters.journals.tcpstore import places as places_module
from reknit.adapters.journals.tcpstore import rebirth as rebirth_module
from reknit.adapters.journals.tcpstore import votes as votes_module
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.places import Places
from reknit.adapters.ports import Unavailable
from reknit.core.job.entries import Entry, Joined, LastCall, Left, Lost, Opened
from reknit.core.job.job import Running
from tests.endpoints import OVER, TERMS, Agent, at_once, at_work, cut_off, is_in_vain, joined, reconnect
from tests.stores import HOST, JobStore, free_port, hosted, stubborn
from tests.waiting import PATIENCE_S, until

ONE = evolve(TERMS, min_nodes=1, max_nodes=5)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents do not stay long where they find no majority, and no host waits for agents that are there at once."""
    monkeypatch.setattr(votes_module, "_STAY_S", (2.5, 2.5))
    monkeypatch.setattr(places_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(Places, "wait_for_elders_s", lambda places, timeout_s: 0.3)


def is_repeated(agent: Agent, entry: Entry) -> None:
    """The call that a link repeats until it succeeds, in whichever life of the journal."""
    stubborn(lambda: agent.journal.append("the token of the first try", entry))


@contextmanager
def at_another_first_endpoint(*agents: Agent) -> Iterator[None]:
    """The first server has ended alone, and is back, empty."""
    with hosted() as (_, port):
        for agent in agents:
            agent.places._endpoints = [(HOST, port), agent.places._endpoints[1]]
        reconnect(*agents)
        yield


def without_learning(monkeypatch: pytest.MonkeyPatch, founder: Agent, *voters: Agent) -> None:
    """The voters are cut off in the moment in which the founder writes the header."""

    def cut(*_: object) -> None:
        raise Unavailable("cut off")

    with monkeypatch.context() as patch, ThreadPoolExecutor(1 + len(voters)) as pool:
        for voter in voters:
            patch.setattr(voter.journal._connections, "_entered", cut)
        tried = [pool.submit(is_in_vain, voter.read, "cut off") for voter in voters]
        pool.submit(stubborn, founder.read).result()
        for each in tried:
            each.result()


def go_to_the_second(*agents: Agent) -> None:
    second = agents[0].places._endpoints[1]
    cut_off(*agents)
    for agent in agents:
        agent.places._endpoints = [(HOST, free_port()), second]
    at_once(*(agent.read for agent in agents))


def test_nobody_is_declared_lost_where_nobody_has_listened(stores: list[JobStore]) -> None:
    """a has said so at the first endpoint, in the moment in which its store was lost. b is well at the second one."""
    a, b, c = at_work(stores, "a", "b", "c")
    cut_off(a, b, c)
    accusation = Lost(b.joined.node, a.joined.node)
    with pytest.raises(Unavailable):
        a.journal.append("the token of the first try", accusation)
    at_once(b.read, c.read)
    is_repeated(a, accusation)
    b.read()
    assert b.job.is_live(b.joined.node)
    stubborn(a.read)
    is_repeated(a, accusation)
    b.read()
    assert b.job.is_live(b.joined.node), "a has wanted it in the life before"
    a.say(accusation)
    b.read()
    assert not b.job.is_live(b.joined.node), "a has read this life"


def test_a_goodbye_to_a_void_journal_is_none_to_the_one_that_takes_its_place(stores: list[JobStore]) -> None:
    """The new agent of a is told to leave. The old one may be cut off, and a member of the last round."""
    _, b, c = at_work(stores, "a", "b", "c", entries=OVER)
    new = Agent("a", stores, founds=True)
    new.joined = evolve(new.joined, nonce="new")
    with at_another_first_endpoint(new, b, c):
        stubborn(new.read)
        new.say(Opened(TERMS, "new"), new.joined)
        new.read()
        at_once(b.read, c.read)
        stubborn(new.read)
        is_repeated(new, Left(new.joined.node, seen=0))
        b.read()
        assert b.job.farewells == frozenset()


def test_the_note_of_a_journal_that_has_begun_since_stays(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b founds the journal again, and is suspended. Meanwhile the host is lost. Another one begins a new journal."""
    _, b, c = at_work(stores, "a", "b", "c")
    new, again = Agent("d", stores, founds=True), Places.note_again
    new.joined = evolve(new.joined, nonce="new")

    def late(places: Places, *args: Any) -> None:
        new.places._endpoints = [(HOST, free_port()), b.places._endpoints[1]]
        with hosted() as (_, port):
            new.places._endpoints = [(HOST, port), b.places._endpoints[1]]
            stubborn(new.read)
        again(places, *args)

    with at_another_first_endpoint(b, c), ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            reading = pool.submit(stubborn, c.read)
            patch.setattr(b.places, "note_again", partial(late, b.places))
            stubborn(b.read)
        reading.result()
    note = stores[1].client.get(stores[1].key("header"))
    assert new.journal._envelope.is_elsewhere(note)
    assert not new.journal._envelope.is_foreign(note)


def test_a_host_that_comes_back_writes_no_note_in_vain(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal was founded again while it waited. If it died now, nobody could go to the second endpoint."""
    b, c = at_work(stores, "b", "c")
    note = stores[1].client.get(stores[1].key("header"))
    host = Agent("a", stores, founds=True)
    monkeypatch.setattr(Places, "note_again", lambda *_: None)
    with at_another_first_endpoint(b, c, host):
        at_once(b.read, c.read, host.read)
    assert stores[1].client.get(stores[1].key("header")) == note


def test_of_two_lives_the_one_that_was_founded_later_counts(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b has voted for both, and knows only of the second one. a is alone in the first one."""
    monkeypatch.setattr(places_module, "_STRAYED_S", 0.0)
    a, b, c = at_work(stores, "a", "b", "c")
    with at_another_first_endpoint(a, b):
        without_learning(monkeypatch, a, b)
        go_to_the_second(b, c)
        assert b.number > a.number > 0
        b.places._endpoints = c.places._endpoints = a.places._endpoints
        a.say(Lost(b.joined.node, a.joined.node), Lost(c.joined.node, a.joined.node))
        newcomer = Agent("d", stores)
        newcomer.places._endpoints = a.places._endpoints
        stubborn(newcomer.read)
        assert newcomer.places.home == 1


def parted(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch, names: str, voters: str) -> dict[str, Agent]:
    """Agents that were in round 0. The first of them has founded a life for which the voters have voted, and is there
    alone. The others have founded another one at the second endpoint. Each life has an entry that the other has not."""
    agents = {name: Agent(name, stores, founds=name == names[0]) for name in names}
    first, *others = agents.values()
    stubborn(lambda: first.say(Opened(ONE, "x")))
    for agent in agents.values():
        stubborn(partial(agent.say, agent.joined))
    stubborn(lambda: first.say(LastCall(0)))
    for agent in agents.values():
        agent.read()
    assert first.job.phase == Running(0)
    with at_another_first_endpoint(*agents.values()):
        without_learning(monkeypatch, first, *(agents[name] for name in voters))
        first.say(*(Lost(other.joined.node, first.joined.node) for other in others), *map(new_node, "uvwxyz"))
        first.read()
    go_to_the_second(*others)
    others[0].say(Lost(first.joined.node, others[0].joined.node))
    for other in others:
        other.read()
    return agents


def new_node(name: str) -> Joined:
    return joined(name, round=1)


def test_who_has_read_something_else_does_not_keep_a_majority_from_going_on(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """a has read more than the others, so its offer is the best. Nobody can vote for it."""
    a, b, c, d, _ = parted(stores, monkeypatch, "abcde", "bc").values()
    with hosted() as (_, port):
        for agent in (a, b, c, d):
            agent.places._endpoints = [(HOST, port), (HOST, free_port())]
            agent.places._reached_at = float("-inf")
        reconnect(a, b, c, d)
        at_once(b.read, c.read, d.read, a.read)
        assert b.job.is_live(c.joined.node)


def test_agents_that_have_read_different_things_make_no_new_journal_void(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither could found the old one again."""
    a, b, _ = parted(stores, monkeypatch, "abc", "b").values()
    host = Agent("d", stores, founds=True)
    with hosted() as (_, first), hosted() as (_, second):
        for agent in (host, a, b):
            agent.places._endpoints = [(HOST, first), (HOST, second)]
            agent.places.home = 0
        stubborn(host.read)
        reconnect(a, b)
        with ThreadPoolExecutor(2) as pool:
            for tried in [pool.submit(is_in_vain, agent.read, "of the 3 nodes") for agent in (a, b)]:
                tried.result()
        host.say(Opened(ONE, "new"))
        assert stubborn(host.read).entries == (Opened(ONE, "new"),)


def test_what_was_wanted_in_another_life_is_not_said_however_long_its_way(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a that writes still connects, while a reads and folds the next life."""
    a, b, c = at_work(stores, "a", "b", "c")
    cut_off(a, b, c)
    connected = a.journal._connections.client

    def late(role: str) -> Any:
        if role == "writer":
            monkeypatch.setattr(a.journal._connections, "client", connected)
            at_once(a.read, b.read, c.read)
        return connected(role)

    monkeypatch.setattr(a.journal._connections, "client", late)
    a.say(Lost(b.joined.node, a.joined.node))
    b.read()
    assert b.job.is_live(b.joined.node)


def test_a_note_that_is_corrected_sends_those_who_wait_to_the_other_endpoint(stores: list[JobStore]) -> None:
    """c waits for a majority at the second endpoint. Meanwhile the others found the journal again at the first one."""
    a, b, c = at_work(stores, "a", "b", "c")
    first = c.places._endpoints
    cut_off(c)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(is_in_vain, c.read, "begins at the other endpoint")
        until(lambda: stores[1].client.get(stores[1].key("best")) != b"")
        stores[0].client.set(stores[0].key("header"), b"")
        reconnect(a, b)
        at_once(a.read, b.read)
        waiting.result()
    c.places._endpoints = first
    stubborn(c.read)
    assert a.number == b.number == c.number > 0
    assert c.job == a.job


@pytest.mark.parametrize("place", [0, 1])
def test_no_job_begins_anew_while_an_agent_that_remembers_it_waits(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """b waits for a majority, at either endpoint. The host of the first one was started again on another machine. At
    the first endpoint a founder that was too slow has taken its header back: the store holds an empty value."""
    monkeypatch.setattr(Places, "wait_for_elders_s", lambda places, timeout_s: PATIENCE_S)
    monkeypatch.setattr(votes_module, "_STAY_S", (1.0, 1.0))
    (b,) = at_work(stores, "b")
    with hosted() as (_, port), ThreadPoolExecutor(1) as pool:
        client = Client(HOST, port, PATIENCE_S)
        client.set(stores[0].key("header"), b"")
        client.close()
        b.places._endpoints = [(HOST, free_port() if place else port), b.places._endpoints[1]]
        b.places._reached_at = float("-inf")
        reconnect(b)
        host, is_over = Agent("a", stores, founds=True), threading.Event()
        host.places._endpoints = [(HOST, port), b.places._endpoints[1]]

        def wait() -> None:
            while not is_over.is_set():
                is_in_vain(b.read, "of the 3 nodes of the last round|connection refused")

        waiting = pool.submit(wait)
        is_in_vain(host.read, "agents of the job are here or at the second endpoint")
        is_over.set()
        waiting.result()


def test_no_journal_begins_at_the_second_endpoint(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The store there is lost between the look of a new host and its connection."""
    _, b, c = at_work(stores, "a", "b", "c")
    cut_off(b, c)
    at_once(b.read, c.read)
    host, latest = Agent("a", stores, founds=True), Places.latest
    with hosted() as (_, first), hosted() as (_, second):
        host.places._endpoints = [(HOST, first), b.places._endpoints[1]]

        def and_lost(places: Places, *args: Any) -> Any:
            found = latest(places, *args)
            places._endpoints = [places._endpoints[0], (HOST, second)]
            return found

        monkeypatch.setattr(Places, "latest", and_lost)
        is_in_vain(host.read, "the journal was at .* just now")


def test_a_founder_that_is_too_slow_takes_the_header_back(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b and c have lost the first endpoint for a while. One of them is chosen, and is suspended. The other one does not
    wait for it, and goes back to a. Nobody must wait in the life that is founded then."""
    _, b, c = at_work(stores, "a", "b", "c")
    first, note = b.places._endpoints, stores[1].client.get(stores[1].key("header"))
    cut_off(b, c)
    is_chosen, goes_on, founded = threading.Event(), threading.Event(), rebirth_module._founded

    def late(*args: Any) -> bytes:
        is_chosen.set()
        assert goes_on.wait(PATIENCE_S)
        return founded(*args)

    monkeypatch.setattr(rebirth_module, "_founded", late)
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(is_in_vain, agent.read, "[01] of the 3 nodes of the last round") for agent in (b, c)]
        assert is_chosen.wait(PATIENCE_S)
        wait(tries, PATIENCE_S, return_when=FIRST_COMPLETED)
        goes_on.set()
        for each in tries:
            each.result()
    assert stores[1].client.get(stores[1].key("header")) == note
    for agent in (b, c):
        agent.places._endpoints = first
        stubborn(agent.read)
        assert (agent.number, agent.places.home) == (0, 0)
