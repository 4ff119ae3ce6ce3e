"""A store that was lost: the journal is founded again, or begins anew and makes way (rule 16).

What an agent decides, and when: test_founding. Here agents do it in real stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import pytest
from attrs import evolve

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import connections as connections_module
from reknit.adapters.journals.tcpstore import recovery
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.journals.tcpstore.keys import StoreKeys
from reknit.adapters.runtime.ports import Batch, Refused, Unavailable
from reknit.core.job import founding
from reknit.core.job.entries import Aborted, Entry, Filler, Joined, Lost, Node, NodeId, Opened, Succeeded, Terms
from reknit.core.job.founding import Held, Offer, moved
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.stores import HOST, JobStore, SlowLink, folded, hosted, many, plain, stubborn
from tests.support.waiting import PATIENCE_S, until

T = TypeVar("T")
ME = Node(NodeId("me"))


@pytest.fixture(scope="module")
def ports(port: int) -> Iterator[list[int]]:
    """Of three stores, for jobs that lose theirs twice."""
    with hosted() as (_, second), hosted() as (_, third):
        yield [port, second, third]


@pytest.fixture
def lost(ports: list[int]) -> Iterator[LostStore]:
    with ExitStack() as closing:
        yield LostStore(ports, closing)


class LostStore:
    """The endpoint of a job whose store loses everything now and then. In truth the endpoint leads to another store
    then, which takes no time to start."""

    def __init__(self, ports: list[int], closing: ExitStack) -> None:
        self._link = closing.enter_context(SlowLink(ports[0]))
        self._closing = closing
        self._ports = ports
        self._at_endpoint = JobStore(self._link.port, closing)
        self.store = self._there(ports[0])
        """The store that is there now."""

    def _there(self, port: int) -> JobStore:
        return JobStore(port, self._closing, self._at_endpoint.job)

    def journal(self, **settings: Any) -> TCPStoreJournal:
        return self._at_endpoint.journal(**settings)

    def lose(self) -> None:
        """The store is empty, and the connections to it are broken."""
        after = self._ports[self._ports.index(self.store.port) + 1]
        self.store = self._there(after)
        self._link.lead_to(after)

    def reconnect(self) -> None:
        """The connections break, and nothing is lost."""
        self._link.lead_to(self.store.port)

    def readers(
        self, agents: int = 2, *, entries: Sequence[Entry] = tuple(many(4)), behind: int = 0
    ) -> list[TCPStoreJournal]:
        """Agents that have read and folded these entries. Only the first of them may begin a journal. `behind`: the
        last of them has not read so many of the entries."""
        journals = [self.journal(founds=i == 0) for i in range(agents)]
        unread = len(entries) - behind
        say(journals[0], entries[:unread])
        go_on(journals[-1], 0)
        say(journals[0], entries[unread:])
        for journal in journals[1 : -1 if behind else None]:
            go_on(journal, 0)
        return journals

    def elders(self, agents: int = 2, **settings: Any) -> list[TCPStoreJournal]:
        """The same, after the store was lost."""
        journals = self.readers(agents, **settings)
        self.lose()
        return journals


def at_once(*calls: Callable[[], T]) -> list[T]:
    """The calls, each in a thread."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(stubborn, call) for call in calls]]


def after_an_offer(store: JobStore, call: Callable[[], T]) -> T:
    """The call, as soon as another agent has offered something."""
    until(lambda: store.client.get(StoreKeys(store.job).best), "an offer")
    return stubborn(call)


def go_on(journal: TCPStoreJournal, after: int, wait_s: float = 0.0, *, job: Job = Job()) -> Batch:
    """What an agent does that reads and folds. `job`: what it has folded before."""
    batch = journal.read(after, wait_s)
    journal.remember(batch.position, folded([*batch.entries], job if batch.base is None else batch.base))
    return batch


def say(journal: TCPStoreJournal, entries: Sequence[Entry]) -> None:
    """What an agent does that says all that is said, and reads it."""
    for entry in entries:
        journal.append(repr(entry), entry)
    go_on(journal, 0)


def next_life(*batches: Batch) -> Batch:
    """What agents have read first of the next life. All have read the same."""
    assert len(set(map(repr, batches))) == 1
    assert batches[0].life.name
    return plain(batches[0])


def base_of(entries: Sequence[Entry]) -> Batch:
    """What an agent reads first that goes on after these entries."""
    return Batch(len(entries), base=moved(folded([*entries])))


def anew(entries: Sequence[Entry]) -> Batch:
    """What an agent reads first that begins anew in another journal."""
    return Batch(len(entries), (*entries,), Job(), is_anew=True)


# ---- the journal is founded again ----


def test_an_agent_founds_nothing_while_it_folds(lost: LostStore) -> None:
    """It was given the seal, and is about to start workers. If its writer founded the journal without the seal at this
    moment, two rounds would run."""
    agent = lost.journal()
    for i, entry in enumerate(many(4)):
        agent.append(str(i), entry)
    batch = agent.read(0, 0.0)
    lost.lose()
    calls: list[Callable[[], object]] = [lambda: agent.append("5", Aborted("x")), lambda: agent.beat(ME, 1, ())]
    for call in calls:
        with pytest.raises(Unavailable):
            call()  # the connection is broken
        with pytest.raises(Unavailable, match="just reading what the store has lost"):
            call()
    agent.remember(batch.position, folded([*batch.entries]))
    assert stubborn(calls[0]) is True
    assert next_life(agent.read(4, 0.0)) == Batch(5, (Aborted("x"),), base_of(many(4)).base)


def test_agents_that_remember_found_the_journal_again(lost: LostStore) -> None:
    """Their workers run. The journal goes on where it was, for them and for those who come later."""
    journals = lost.elders(3)
    assert next_life(*at_once(*(partial(go_on, journal, 4) for journal in journals))) == base_of(many(4))
    stubborn(lambda: journals[1].append("5", Aborted("x")))
    readings = [stubborn(partial(journal.read, 4, 0.0)) for journal in journals]
    assert [*map(plain, readings)] == [Batch(5, (Aborted("x"),))] * 3
    assert stubborn(lambda: journals[2].beat(ME, 7, ())) == {ME: 7}
    late = lost.journal(founds=False)
    # In one read: otherwise its agent would join a round that is over, and give its port to it.
    assert plain(late.read(0, 0.0)) == Batch(5, (Aborted("x"),), base_of(many(4)).base)


def test_all_are_told_of_one_life(lost: LostStore) -> None:
    """By its name an agent knows that it has come to another life, and says what still holds for this one."""
    journals = lost.readers()
    assert len({journal.read(0, 0.0).life for journal in journals}) == 1
    first = journals[0].read(0, 0.0).life
    for journal in journals:
        go_on(journal, 0)
    lost.lose()
    (second,) = {batch.life for batch in at_once(*(partial(go_on, journal, 4) for journal in journals))}
    assert (first.journal, first.name == second.name) == (second.journal, False)


def test_the_agent_that_has_read_furthest_founds_the_journal_again(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have read must not be undone. Those behind take the fold."""
    monkeypatch.setattr(founding, "DEAD_S", PATIENCE_S)
    *further, behind = lost.elders(3, behind=1)
    readings = (partial(after_an_offer, lost.store, partial(journal.read, 4, 0.0)) for journal in further)
    assert next_life(*at_once(partial(behind.read, 3, 0.0), *readings)) == base_of(many(4))


def test_an_agent_with_workers_that_has_read_further_than_those_who_went_on_is_refused(lost: LostStore) -> None:
    """It came too late to be asked. What it has read, and may have acted on, never happened for the others."""
    late, early = lost.elders(entries=[*SEALED, Filler()], behind=1)
    assert stubborn(lambda: early.read(3, 0.0)).base is not None
    with pytest.raises(Refused, match="again without something that this node has read") as refused:
        stubborn(lambda: late.read(4, 0.0))
    assert refused.value.refusal is Refusal.LEFT_BEHIND


def test_an_agent_without_workers_that_has_read_further_begins_anew(lost: LostStore) -> None:
    """It loses nothing. The agent is told so until it has folded it."""
    late, early = lost.elders(behind=1)
    assert next_life(stubborn(lambda: early.read(3, 0.0))) == base_of(many(4)[:3])
    for _ in range(2):
        batch = stubborn(lambda: late.read(4, 0.0))
        assert plain(batch) == evolve(base_of(many(4)[:3]), is_anew=True)
        late.take_back()
    go_on(late, 4)
    assert late.append("later", Aborted("x"))
    assert plain(late.read(3, 0.0)) == Batch(4, (Aborted("x"),))


def test_an_agent_that_has_read_the_end_of_the_job_never_begins_anew(lost: LostStore) -> None:
    """The others have founded the journal without it. The agent ends with the result that it has read."""
    late, early = lost.elders(entries=[*many(4), Aborted("over")], behind=1)
    assert stubborn(lambda: early.read(4, 0.0)).base is not None
    with pytest.raises(Refused, match="again without something that this node has read"):
        stubborn(lambda: late.read(5, 0.0))


def test_an_agent_that_missed_a_life_begins_anew_if_that_one_went_on_from_less(lost: LostStore) -> None:
    """(1) `late` has read four entries, and `early` three of them. (2) The store is lost. `early` founds the journal
    again, and two other entries follow. (3) The store is lost again. The next life begins after five entries, and its
    digest says nothing about the fourth one that `late` has read."""
    late, early = lost.elders(behind=1)
    base = stubborn(lambda: go_on(early, 3)).base
    assert base is not None
    for i in range(2):
        early.append(str(i), Filler())
    assert go_on(early, 3, job=base).position == 5
    lost.lose()
    assert stubborn(lambda: early.read(5, 0.0)).position == 5
    assert stubborn(lambda: late.read(4, 0.0)).is_anew


def test_an_agent_that_missed_a_life_goes_on_if_it_has_read_nothing_else(lost: LostStore) -> None:
    """It was cut off from the store for long, and its workers run."""
    late, early = lost.elders()
    base = stubborn(lambda: go_on(early, 4)).base
    assert base is not None
    early.append("5", Filler())
    assert go_on(early, 4, job=base).position == 5
    lost.lose()
    assert stubborn(lambda: go_on(early, 5)).position == 5
    assert stubborn(lambda: late.read(4, 0.0)).position == 5


def test_of_two_agents_that_found_the_journal_the_first_to_write_the_header_has(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(1) `slow` has the best offer, and is suspended before it writes the header. (2) `other` takes it for dead, and
    founds the journal. (3) `slow` goes on. It must take part in what `other` has founded."""
    monkeypatch.setattr(founding, "DEAD_S", 0.1)
    monkeypatch.setattr(founding, "OFFERS_S", 0.1)
    slow, other = lost.elders()
    real, header = StoreClient.compare_set, StoreKeys(lost.store.job).header
    lives: list[Batch] = []

    def suspended(client: StoreClient, key: str, expected: bytes, desired: bytes) -> bytes:
        if key == header and not lives:
            lives.append(Batch(0))
            lives[0] = stubborn(lambda: go_on(other, 4))
        return real(client, key, expected, desired)

    monkeypatch.setattr(StoreClient, "compare_set", suspended)
    assert next_life(stubborn(lambda: go_on(slow, 4)), *lives) == base_of(many(4))
    slow.append("5", Aborted("x"))
    assert plain(other.read(4, 0.0)) == Batch(5, (Aborted("x"),))


def test_a_large_fold_founds_the_journal_again(lost: LostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's server takes no value of 8 MiB. Thousands of nodes make such a fold."""
    monkeypatch.setattr(recovery, "LARGEST", 100)
    journals = lost.elders()
    assert next_life(*at_once(*(partial(journal.read, 4, 0.0) for journal in journals))) == base_of(many(4))
    assert plain(lost.journal(founds=False).read(0, 0.0)) == base_of(many(4))


def test_a_host_that_has_lost_its_store_waits_for_those_who_remember(lost: LostStore) -> None:
    """It has read nothing itself. A journal that it began at once would leave the others behind."""
    _, guest = lost.elders()
    host = lost.journal(has_elders=True)
    found, _ = at_once(lambda: host.read(0, 0.0), lambda: guest.read(4, 0.0))
    assert next_life(found) == base_of(many(4))


def test_a_host_that_has_lost_its_store_does_not_wait_for_ever(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the others may have died with it."""
    monkeypatch.setattr(founding, "ELDERS_S", 0.05)
    assert plain(store.journal(has_elders=True).read(0, 0.0)) == Batch(0)


def test_a_host_that_has_lost_its_store_waits_longer_for_those_who_have_offered(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several agents are dead, so the only one that remembers waits for them, and its way is long."""
    monkeypatch.setattr(founding, "ELDERS_S", 0.05)
    _, guest = lost.elders()
    host = lost.journal(has_elders=True)
    found, base = at_once(lambda: after_an_offer(lost.store, lambda: host.read(0, 0.0)), lambda: guest.read(4, 0.0))
    assert next_life(found, base) == base_of(many(4))


def dead_offer(store: JobStore) -> None:
    """An agent that has read more than all others has offered to found the journal again, and has died."""
    store.client.set(StoreKeys(store.job).best, Envelope(store.job).wrap_offer(Offer(True, 0, 9, "dead")))


def test_the_best_offer_of_an_agent_that_has_died_is_passed_over(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot found the journal again any more, and nobody may wait for it for ever."""
    monkeypatch.setattr(founding, "OFFERS_S", 0.1)
    monkeypatch.setattr(founding, "DEAD_S", 0.1)
    _, alive = lost.elders()
    dead_offer(lost.store)
    assert next_life(stubborn(lambda: alive.read(4, 0.0))) == base_of(many(4))


def test_who_takes_the_place_of_a_dead_agent_waits_for_those_whom_its_offer_has_hidden(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have offered less than the dead one. The one that is first to pass it over has read less than the other."""
    monkeypatch.setattr(founding, "OFFERS_S", 0.8)
    monkeypatch.setattr(founding, "DEAD_S", 1.6)
    further, behind = lost.elders(behind=1)
    dead_offer(lost.store)
    found, base = at_once(lambda: further.read(4, 0.0), lambda: behind.read(3, 0.0))
    assert next_life(found, base) == base_of(many(4))


def test_an_offer_that_nobody_of_the_job_has_made_is_none(lost: LostStore) -> None:
    """Anybody who reaches the store can write there. The job must not wait for such an agent."""
    _, alive = lost.elders()
    forged = Envelope(lost.store.job, "a secret").wrap_offer(Offer(True, 9, 9, "forged"))
    lost.store.client.set(StoreKeys(lost.store.job).best, forged)
    assert next_life(stubborn(lambda: alive.read(4, 0.0))) == base_of(many(4))


# ---- what may be said in another life ----


def test_nothing_is_said_in_another_life_than_that_in_which_it_was_wanted(lost: LostStore) -> None:
    """`host` has declared `guest` lost in the moment in which the store was lost. In the next life `guest` is well, and
    nobody has listened to it there."""
    host, guest = lost.readers()
    first = host.read(0, 0.0).life
    go_on(host, 0)
    accusation = Lost(Node(NodeId("n001")), Node(NodeId("n000")))
    lost.lose()
    with pytest.raises(Unavailable):
        host.append("the token of the first try", accusation, first)
    second = at_once(partial(go_on, host, 4), partial(go_on, guest, 4))[0].life
    assert stubborn(lambda: host.append("the token of the first try", accusation, first)) is False
    assert stubborn(lambda: host.append("another token", accusation, first)) is False
    assert plain(stubborn(lambda: guest.read(4, 0.0))) == Batch(4), "not even a hole"
    assert host.append("wanted in this life", accusation, second) is True
    assert plain(guest.read(4, 0.0)) == Batch(5, (accusation,))


def test_an_entry_is_dropped_however_far_the_agent_is(lost: LostStore) -> None:
    """The writer comes to the next life before the reader. The agent has folded nothing of it, and wants what held in
    the life before."""
    host, guest = lost.readers()
    first = host.read(0, 0.0).life
    go_on(host, 0)
    lost.lose()
    at_once(partial(go_on, guest, 4), lambda: host.beat(ME, 1, ()))
    assert host.append("5", Aborted("x"), first) is False
    assert plain(stubborn(lambda: guest.read(4, 0.0))) == Batch(4)


def test_what_was_under_way_when_the_store_was_lost_is_said_anew(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot belonged to the life before."""
    host, guest = lost.readers()
    real = StoreClient.compare_set

    def breaking(client: StoreClient, key: str, expected: bytes, desired: bytes) -> bytes:
        if "/slot/" in key:
            client.close()
            raise Unavailable("as if the connection was lost")
        return real(client, key, expected, desired)

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "compare_set", breaking)
        with pytest.raises(Unavailable):
            host.append("5", Aborted("x"))
    lost.lose()
    at_once(partial(go_on, host, 4), partial(go_on, guest, 4))
    stubborn(lambda: host.append("5", Aborted("x")))
    assert plain(stubborn(lambda: guest.read(4, 0.0))) == Batch(5, (Aborted("x"),))


def test_a_connection_that_was_greeted_before_the_journal_was_founded_asks_again(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer was greeted by the empty store. Meanwhile the reader of the same agent has founded the journal again.
    The writer must take part in that, and found nothing itself."""
    agent, _ = lost.elders()
    real = connections_module.StoreClient
    greeted: list[StoreClient] = []

    def slow(*args: Any) -> StoreClient:
        client = real(*args)
        if not greeted:
            greeted.append(client)
            stubborn(lambda: go_on(agent, 4))
        return client

    with pytest.raises(Unavailable):
        agent.append("5", Aborted("x"))  # the connection is broken
    with monkeypatch.context() as patch:
        patch.setattr(connections_module, "StoreClient", slow)
        stubborn(lambda: agent.append("5", Aborted("x")))
    assert greeted[0].greeting[1] == b""
    assert plain(stubborn(lambda: agent.read(4, 0.0))) == Batch(5, (Aborted("x"),))


# ---- a journal that was begun in place of one that others remember ----


def opened(nonce: str, *names: str) -> list[Entry]:
    """A job for two nodes that these nodes have joined."""
    terms = Terms(min_nodes=2, max_nodes=2)
    joined = (Joined(Node(NodeId(name)), nonce=nonce, round=0, address="10.0.0.1", port=1) for name in names)
    return [Opened(terms, nonce), *joined]


SEALED = opened("old", "a", "b")
OF_OLD = Batch(len(SEALED), base=folded(SEALED))
"""What an agent reads first that comes to the journal in which a round was sealed."""


def found(store: JobStore, entries: Sequence[Entry]) -> bytes:
    """What an agent does that remembers these entries of a journal of its own, and finds the store empty. The header
    that is there then."""
    envelope = Envelope(store.job)
    origin = envelope.admit(envelope.header())
    client = StoreClient(HOST, store.port, PATIENCE_S)
    try:
        held = Held(origin, len(entries), folded([*entries]), "digest")
        return recovery.found_again(client, StoreKeys(store.job), envelope, held, 1)
    finally:
        client.close()


def test_a_young_journal_makes_way(lost: LostStore) -> None:
    """The host cannot know that others remember a journal. It has begun another one when they come, and a new node has
    joined there. No round was sealed, so both begin anew, with the journal of those whose workers run."""
    elders = lost.elders(entries=SEALED)
    host, guest = lost.journal(), lost.journal(founds=False)
    say(host, opened("new", "a"))
    say(guest, [])
    batches = at_once(
        *(partial(go_on, journal, 3) for journal in elders),
        *(partial(go_on, journal, 2, PATIENCE_S) for journal in (host, guest)),
    )
    assert next_life(*batches) == OF_OLD
    elders[0].append("later", Aborted("x"))
    for journal in (*elders, host, guest, lost.journal(founds=False)):
        assert stubborn(partial(journal.read, 3, 0.0)).entries == (Aborted("x"),)


def test_a_hole_in_a_young_journal_does_not_delay_its_end(lost: LostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its agents have died, one of them between taking a slot and filling it. Nobody reads that journal, so nobody
    else fills the slot."""
    monkeypatch.setattr(recovery, "HOLE_S", 0.05)
    elders = lost.elders(entries=SEALED)
    host = lost.journal()
    say(host, opened("new", "a"))
    host.close()
    lost.store.client.add(lost.store.key("head"), 2)
    assert next_life(*at_once(*(partial(journal.read, 3, 0.0) for journal in elders))) == OF_OLD


def test_a_journal_with_a_sealed_round_stays(lost: LostStore) -> None:
    """Its workers run. The agent that remembers another journal would form a second group beside them."""
    elder, _ = lost.elders(entries=SEALED)
    host = lost.journal()
    say(host, opened("new", "a", "c"))
    with pytest.raises(Refused, match="again without something that this node has read") as refused:
        stubborn(lambda: elder.read(3, 0.0))
    assert refused.value.refusal is Refusal.LEFT_BEHIND
    envelope = Envelope(lost.store.job)
    envelope.admit(lost.store.client.get(lost.store.key("header")))
    lost.store.client.set(lost.store.key("slot/3"), envelope.seal({"journal": "old"}, "3 veto"))
    lost.store.client.add(lost.store.key("head"), 1)
    assert host.read(3, 0.0).entries == (Filler(),), "a veto that comes later means nothing"


def test_a_host_that_comes_back_with_another_secret_ends_no_other_agent(lost: LostStore) -> None:
    """Its agent was started by mistake with another secret, or by another version. The agents of the others have
    workers, and go on when it is started right. An agent that has read nothing ends at once: it may be the wrong one.
    """
    (with_workers,) = lost.elders(1, entries=SEALED)
    say(lost.journal(secret="another"), many(1))
    with pytest.raises(Unavailable):
        with_workers.read(len(SEALED), 0.0)  # the connection of before is broken
    for _ in range(2):
        with pytest.raises(Unavailable, match="is signed"):
            with_workers.read(len(SEALED), 0.0)
    with pytest.raises(Refused, match="is signed"):
        lost.journal(founds=False).read(0, 0.0)


def test_an_agent_whose_job_has_succeeded_makes_no_journal_void(lost: LostStore) -> None:
    """The new journal is another run of the job."""
    elder, _ = lost.elders(entries=[*SEALED, *(Succeeded(Node(NodeId(name)), 0) for name in "ab")])
    host = lost.journal()
    say(host, opened("new", "a"))
    with pytest.raises(Refused, match="again without something that this node has read"):
        stubborn(lambda: elder.read(5, 0.0))
    assert plain(host.read(2, 0.0)) == Batch(2)


def test_an_agent_whose_job_has_failed_makes_a_young_journal_void(lost: LostStore) -> None:
    """Its workers may still be stopping. In the old journal the next run waits for them."""
    entries = [*SEALED, Aborted("over")]
    elders = lost.elders(entries=entries)
    host = lost.journal()
    say(host, opened("new", "a"))
    batches = at_once(*(partial(go_on, journal, 4) for journal in elders), partial(go_on, host, 2, PATIENCE_S))
    assert [batch.base for batch in batches] == [moved(folded(entries))] * 3


def test_an_agent_whose_job_has_failed_ends_where_another_run_has_begun(lost: LostStore) -> None:
    """The result of the agent is what it has read."""
    elder, _ = lost.elders(entries=[*SEALED, Aborted("over")])
    say(lost.journal(), opened("new", "a", "c"))
    with pytest.raises(Refused, match="again without something that this node has read"):
        stubborn(lambda: elder.read(4, 0.0))


def test_an_agent_that_remembers_no_sealed_round_takes_part_in_another_journal(lost: LostStore) -> None:
    """It has no workers, so it loses nothing by beginning anew."""
    elder, _ = lost.elders(entries=opened("old", "a"))
    host = lost.journal()
    say(host, opened("new", "c"))
    assert plain(stubborn(lambda: go_on(elder, 2))) == anew(opened("new", "c"))
    host.append("later", Aborted("x"))
    assert plain(elder.read(2, 0.0)) == Batch(3, (Aborted("x"),))


def test_an_agent_that_is_about_to_go_on_in_a_life_with_a_name_bears_another_loss(lost: LostStore) -> None:
    """The link has dropped the fold with which that life begins, and the store is lost again."""
    elder, _ = lost.elders(entries=opened("old", "a"))
    found(lost.store, opened("new", "c"))
    assert stubborn(lambda: elder.read(2, 0.0)).base is not None
    elder.take_back()
    lost.lose()
    say(lost.journal(), opened("newer", "d"))
    assert plain(stubborn(lambda: go_on(elder, 2))) == anew(opened("newer", "d"))


@pytest.mark.parametrize("is_founded_again", [False, True])
def test_an_agent_that_begins_anew_is_told_so_until_it_has_folded_it(
    lost: LostStore, *, is_founded_again: bool
) -> None:
    """Its link drops what it has read while an append or a beat fails. Then the agent would fold the entries of the new
    journal onto what it has folded of the old one, and could start the workers of a round that nobody has sealed."""
    elder, _ = lost.elders(entries=opened("old", "a"))
    if is_founded_again:
        found(lost.store, opened("new", "c"))
    host = lost.journal()
    begun = evolve(plain(host.read(0, 0.0)), is_anew=True) if is_founded_again else anew(opened("new", "c"))
    say(host, [] if is_founded_again else opened("new", "c"))
    for _ in range(2):
        assert plain(stubborn(lambda: elder.read(2, 0.0))) == begun
        elder.take_back()
    go_on(elder, 2)
    host.append("later", Aborted("x"))
    assert elder.read(begun.position, 0.0).entries[-1] == Aborted("x")


def test_an_agent_that_is_about_to_begin_anew_bears_another_loss(lost: LostStore) -> None:
    """Its beats have come to a new journal, whose host is killed as well before the agent has read it."""
    elder, _ = lost.elders(entries=opened("old", "a"))
    lost.journal().append("opened", opened("new")[0])
    stubborn(lambda: elder.beat(ME, 1, ()))
    lost.lose()
    say(lost.journal(), opened("newer", "c"))
    assert plain(stubborn(lambda: go_on(elder, 2))) == anew(opened("newer", "c"))


def test_who_comes_to_a_journal_that_makes_way_waits_for_the_other_one(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent that remembers has made it void, and has not founded its own yet."""
    monkeypatch.setattr(connections_module, "VOID_S", 0.05)
    elder, _ = lost.elders(entries=SEALED)
    host = lost.journal()
    say(host, opened("new", "a"))

    def suspended(*_: object) -> bytes:
        raise Unavailable("suspended before it founds the journal")

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "found_again", suspended)
        with pytest.raises(Unavailable):
            elder.read(3, 0.0)  # the connection is broken
        with pytest.raises(Unavailable, match="suspended"):
            elder.read(3, 0.0)
    for _ in range(2):
        with pytest.raises(Unavailable, match="makes way for the one that other agents remember"):
            host.read(2, 0.0)
    assert next_life(*at_once(lambda: host.read(2, 0.0), lambda: elder.read(3, 0.0))) == OF_OLD


def test_a_young_journal_that_was_founded_again_makes_way(lost: LostStore) -> None:
    """The store was lost twice: (1) with the old journal, (2) while nodes gathered in the new one. The agents that
    remember the old journal come only then. They have workers, and nobody has workers in the new journal."""
    elders = lost.elders(entries=SEALED)
    found(lost.store, opened("new", "a"))
    host, late = lost.journal(), lost.journal(founds=False)
    assert plain(host.read(0, 0.0)) == base_of(opened("new", "a"))
    assert late.read(0, 0.0).position == 2  # its agent has not folded this yet
    host.remember(2, folded(opened("new", "a")))
    host.append("again", opened("new", "a")[1])
    assert host.read(2, 0.0).position == 3
    batches = at_once(
        *(partial(go_on, journal, 3) for journal in elders),
        *(partial(go_on, journal, 3, PATIENCE_S) for journal in (host, late)),
    )
    assert next_life(*batches) == OF_OLD
    elders[0].append("later", Aborted("x"))
    for journal in (*elders, host, late, lost.journal(founds=False)):
        assert stubborn(partial(journal.read, 3, 0.0)).entries == (Aborted("x"),)


def test_a_journal_that_was_founded_again_with_a_sealed_round_stays(lost: LostStore) -> None:
    """Its workers run, whichever life sealed the round."""
    before, after = lost.elders(entries=SEALED)
    found(lost.store, opened("new", "a"))
    host = lost.journal()
    say(host, [opened("new", "a")[1], *opened("new", "c")[1:]])
    for elder in (before, after):
        with pytest.raises(Refused, match="again without something that this node has read"):
            stubborn(partial(elder.read, 3, 0.0))
        base = folded([*opened("new", "a"), opened("new", "c")[1]])
        host.publish(3, base)  # judged by a later fold as well


def test_agents_that_remember_two_journals_agree_which_one_is_founded_again(
    lost: LostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store was lost while a young journal was in it, before those came who remember the old one. All find an empty
    store. The journal with workers wins, however much was said in the young one."""
    monkeypatch.setattr(founding, "DEAD_S", PATIENCE_S)
    three = [Opened(Terms(min_nodes=3, max_nodes=3), "old"), *opened("old", "a", "b", "c")[1:]]
    elders = lost.elders(3, entries=three)
    headers: list[bytes] = []

    def young() -> Batch:
        headers.append(found(lost.store, many(10)))
        return Batch(0)

    at_once(young, *(partial(after_an_offer, lost.store, partial(go_on, journal, 4)) for journal in elders))
    batches = [journal.read(4, 0.0) for journal in elders]
    assert {batch.life for batch in batches} == {Envelope(lost.store.job).read_header(headers[0]).life}
    assert plain(lost.journal(founds=False).read(0, 0.0)) == base_of(three)
