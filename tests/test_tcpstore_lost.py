"""A store that was lost: who founds the journal again, and which journal makes way (`rebirth`, `young`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import beginning as beginning_module
from reknit.adapters.journals.tcpstore import rebirth as rebirth_module
from reknit.adapters.journals.tcpstore import young as young_module
from reknit.adapters.journals.tcpstore.client import Client
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.journals.tcpstore.keys import Keys
from reknit.adapters.journals.tcpstore.rebirth import Memory, found_again
from reknit.adapters.journals.tcpstore.young import is_void_now
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Aborted, Entry, Filler, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.job import Job
from reknit.core.job.majority import moved
from reknit.core.job.reasons import Refusal
from tests.stores import HOST, JobStore, folded, hosted, many, stubborn
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")
ME = Node(NodeId("me"))
Lost = Callable[..., tuple[JobStore, list[TCPStoreJournal]]]


@pytest.fixture(scope="module")
def other_port() -> Iterator[int]:
    with hosted() as (_, port):
        yield port


@pytest.fixture
def lost(port: int, other_port: int) -> Iterator[Lost]:
    """Makes agents that have read `entries` from a store that has lost everything since. Only the first of them may
    begin a journal. In truth their endpoint now leads to another store, which takes no time to start."""
    with ExitStack() as closing:

        def lose(
            agents: int = 2, *, is_remembered: bool = True, entries: Sequence[Entry] = tuple(many(4))
        ) -> tuple[JobStore, list[TCPStoreJournal]]:
            store = JobStore(port, closing)
            journals = [store.journal(founds=i == 0) for i in range(agents)]
            for i, entry in enumerate(entries):
                journals[0].append(str(i), entry)
            for journal in journals:
                batch = journal.read(0, 0.0)
                if is_remembered:
                    journal.remember(batch.position, folded([*batch.entries]))
            for journal in journals:
                journal._connections._lines.address = HOST, other_port
                for client in journal._connections._lines.clients.values():
                    client.close()
            return JobStore(other_port, closing, store.job), journals

        yield lose


def at_once(*calls: Callable[[], T]) -> list[T]:
    """The calls, each in a thread."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(stubborn, call) for call in calls]]


def go_on(journal: TCPStoreJournal, after: int, wait_s: float = 0.0) -> Batch:
    """What an agent does that comes to the next life of the journal, or to another journal."""
    batch = journal.read(after, wait_s)
    if batch.base is not None:
        journal.remember(batch.position, batch.base)
    return batch


def next_life(entries: Sequence[Entry]) -> Batch:
    """What an agent reads first that goes on after these entries."""
    return Batch(len(entries), base=moved(folded([*entries])), is_other_life=True)


def test_a_store_that_came_back_empty_is_refused_by_an_agent_that_remembers_nothing(lost: Lost) -> None:
    """An agent that went on would be in another job than those who remember."""
    for journal in lost(is_remembered=False)[1]:
        with pytest.raises(Refused) as refused:
            stubborn(partial(journal.read, 4, 0.0))
        assert refused.value.refusal is Refusal.IDENTITY


def test_agents_that_remember_found_the_journal_again(lost: Lost) -> None:
    """Their workers run. The journal goes on where it was, for them and for those who come later."""
    store, journals = lost(3)
    assert at_once(*(partial(go_on, journal, 4) for journal in journals)) == [next_life(many(4))] * 3
    stubborn(lambda: journals[1].append("5", Aborted("x")))
    assert [stubborn(partial(journal.read, 4, 0.0)) for journal in journals] == [Batch(5, (Aborted("x"),))] * 3
    assert journals[2].beat(ME, 7, ()) == {ME: 7}
    late = store.journal(founds=False)
    base = late.read(0, 0.0)
    assert base == Batch(4, base=moved(folded(many(4))))
    assert late.read(4, 0.0) == Batch(5, (Aborted("x"),))


def test_the_agent_that_has_read_furthest_founds_the_journal_again(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have read must not be undone. Those behind take the fold."""
    monkeypatch.setattr(rebirth_module, "_ONE_MISSING_S", PATIENCE_S)
    monkeypatch.setattr(rebirth_module, "_OFFERS_S", PATIENCE_S)
    _, journals = lost(3)
    journals[2].take_back(3)
    journals[2].remember(3, folded(many(4)[:3]))
    readings = (partial(journal.read, at, 0.0) for journal, at in zip(journals, (4, 4, 3), strict=True))
    assert at_once(*readings) == [next_life(many(4))] * 3


def test_an_agent_that_has_read_further_than_those_who_went_on_is_refused(lost: Lost) -> None:
    """It came too late to be asked. What it has read, and may have acted on, never happened for the others."""
    _, (late, early) = lost()
    early.take_back(3)
    early.remember(3, folded(many(4)[:3]))
    assert stubborn(lambda: early.read(3, 0.0)) == next_life(many(4)[:3])
    with pytest.raises(Refused, match="again without something that this node has read") as refused:
        stubborn(lambda: late.read(4, 0.0))
    assert refused.value.refusal is Refusal.IDENTITY


def test_a_large_fold_founds_the_journal_again(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's server takes no value of 8 MiB. Thousands of nodes make such a fold."""
    monkeypatch.setattr(rebirth_module, "LARGEST", 100)
    store, journals = lost()
    assert at_once(*(partial(journal.read, 4, 0.0) for journal in journals)) == [next_life(many(4))] * 2
    assert len(store.journal(founds=False).read(0, 0.0).base.live) == 3


def test_a_host_that_has_lost_its_store_waits_for_those_who_remember(lost: Lost) -> None:
    """It has read nothing itself. A journal that it began at once would leave the others behind."""
    store, (_, guest) = lost()
    host = store.journal(has_elders=True)
    found, _ = at_once(lambda: host.read(0, 0.0), lambda: guest.read(4, 0.0))
    assert found == Batch(4, base=moved(folded(many(4))))


def test_a_host_that_has_lost_its_store_does_not_wait_for_ever(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the others may have died with it."""
    monkeypatch.setattr(beginning_module, "ELDERS_S", 0.05)
    assert store.journal(has_elders=True).read(0, 0.0) == Batch(0)


def test_the_best_offer_of_an_agent_that_has_died_is_passed_over(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot found the journal again any more, and nobody may wait for it for ever."""
    monkeypatch.setattr(rebirth_module, "_OFFERS_S", 0.1)
    store, (dead, alive) = lost()
    envelope = Envelope(store.job)
    envelope._key = dead._envelope._key
    offer = envelope.seal({"position": 9, "digest": "", "name": "dead"}, "offer")
    store.client.set(store.key("best"), offer)
    assert stubborn(lambda: alive.read(4, 0.0)) == next_life(many(4))


def test_who_takes_the_place_of_a_dead_agent_waits_for_those_whom_its_offer_has_hidden(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have offered less than the dead one. The one that is first to pass it over has read less than the other."""
    monkeypatch.setattr(rebirth_module, "_OFFERS_S", 0.5)
    store, (further, behind) = lost()
    behind.take_back(3)
    behind.remember(3, folded(many(4)[:3]))
    envelope = Envelope(store.job)
    envelope._key = further._envelope._key
    offer = envelope.seal({"position": 9, "digest": "", "name": "dead"}, "offer")
    store.client.set(store.key("best"), offer)
    store.client.add(store.key("offers"), 1)

    def later() -> Batch:
        until(lambda: store.client.add(store.key("offers"), 0) > 1)  # the other begins to wait first
        return stubborn(lambda: further.read(4, 0.0))

    found, base = at_once(later, lambda: behind.read(3, 0.0))
    assert found == base == next_life(many(4))


def test_a_host_that_has_lost_its_store_waits_longer_for_those_who_have_offered(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several agents are dead, so the only one that remembers waits for them, and its way is long."""
    monkeypatch.setattr(beginning_module, "ELDERS_S", 0.3)
    monkeypatch.setattr(rebirth_module, "_ONE_MISSING_S", 1.0)
    store, (_, guest) = lost()
    host = store.journal(has_elders=True)
    found, _ = at_once(lambda: host.read(0, 0.0), lambda: guest.read(4, 0.0))
    assert found == Batch(4, base=moved(folded(many(4))))


def test_what_was_under_way_when_the_store_was_lost_is_said_anew(lost: Lost) -> None:
    """Its slot belonged to the life before."""
    _, (host, guest) = lost()
    assert host._connections._course is not None
    host._connections._course.taken = "5", 4, b"a record"
    at_once(partial(go_on, host, 4), partial(go_on, guest, 4))
    stubborn(lambda: host.append("5", Aborted("x")))
    assert guest.read(4, 0.0) == Batch(5, (Aborted("x"),))


def test_a_connection_that_was_greeted_by_the_journal_before_asks_again(lost: Lost) -> None:
    """It waited while another thread of the agent found out that this journal was void. The agent must not end."""
    _, (journal, _) = lost()
    stubborn(lambda: journal.read(4, 0.0))
    client, course = journal._connections.client("reader")
    envelope = Envelope(journal._envelope.job)
    client.greeting = [b"", envelope.header(), b"", b""]
    assert journal._connections._greeted(client) is course


# ---- a journal that was begun in place of one that others remember ----


def opened(nonce: str, *names: str) -> list[Entry]:
    """A job for two nodes that these nodes have joined."""
    terms = Terms(min_nodes=2, max_nodes=2)
    joined = (Joined(Node(NodeId(name)), nonce=nonce, round=0, address="10.0.0.1", port=1) for name in names)
    return [Opened(terms, nonce), *joined]


SEALED = opened("old", "a", "b")


def say(journal: TCPStoreJournal, entries: Sequence[Entry]) -> None:
    """What an agent does that reads what it says."""
    for entry in entries:
        journal.append(repr(entry), entry)
    batch = journal.read(0, 0.0)
    journal.remember(batch.position, folded([*batch.entries]))


def test_a_young_journal_makes_way(lost: Lost) -> None:
    """The host cannot know that others remember a journal. It has begun another one when they come, and a new node has
    joined there. No round was sealed, so both begin anew, with the journal of those whose workers run."""
    store, elders = lost(entries=SEALED)
    host, guest = store.journal(), store.journal(founds=False)
    say(host, opened("new", "a"))
    say(guest, [])
    old = folded(SEALED)
    found = at_once(
        *(partial(go_on, journal, 3) for journal in elders),
        *(partial(go_on, journal, 2, PATIENCE_S) for journal in (host, guest)),
    )
    assert found == [next_life(SEALED), next_life(SEALED), Batch(3, base=old), Batch(3, base=old)]
    elders[0].append("later", Aborted("x"))
    for journal in (*elders, host, guest, store.journal(founds=False)):
        batch = stubborn(partial(journal.read, 3, 0.0))
        assert batch.entries == (Aborted("x"),)


def test_a_hole_in_a_young_journal_does_not_delay_its_end(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its agents have died, one of them between taking a slot and filling it. Nobody reads that journal, so nobody
    else fills the slot."""
    monkeypatch.setattr(young_module, "_HOLE_S", 0.05)
    store, elders = lost(entries=SEALED)
    host = store.journal()
    say(host, opened("new", "a"))
    host.close()
    store.client.add(store.key("head"), 2)
    assert at_once(*(partial(journal.read, 3, 0.0) for journal in elders)) == [next_life(SEALED)] * 2


def test_a_journal_with_a_sealed_round_stays(lost: Lost) -> None:
    """Its workers run. The agent that remembers another journal would form a second group beside them."""
    store, (elder, _) = lost(entries=SEALED)
    host = store.journal()
    say(host, opened("new", "a", "c"))
    with pytest.raises(Refused, match="its store was replaced") as refused:
        stubborn(lambda: elder.read(3, 0.0))
    assert refused.value.refusal is Refusal.IDENTITY
    late = host._envelope.seal({"journal": "old"}, "3 veto")
    store.client.set(store.key("slot/3"), late)
    store.client.add(store.key("head"), 1)
    assert host.read(3, 0.0).entries == (Filler(),)


def test_an_agent_whose_job_is_over_makes_no_journal_void(lost: Lost) -> None:
    """The new journal may be another run of the job."""
    store, (elder, _) = lost(entries=[*SEALED, Aborted("over")])
    host = store.journal()
    say(host, opened("new", "a"))
    with pytest.raises(Refused, match="its store was replaced"):
        stubborn(lambda: elder.read(4, 0.0))
    assert host.read(2, 0.0) == Batch(2)


def test_an_agent_that_remembers_no_sealed_round_takes_part_in_another_journal(lost: Lost) -> None:
    """It has no workers, so it loses nothing by beginning anew."""
    store, (elder, _) = lost(entries=opened("old", "a"))
    host = store.journal()
    say(host, opened("new", "c"))
    assert stubborn(lambda: go_on(elder, 2)) == Batch(0, base=Job())
    assert list(elder.read(0, 0.0).entries) == opened("new", "c")


def test_an_agent_that_is_about_to_go_on_in_a_life_with_a_name_bears_another_loss(lost: Lost) -> None:
    """The link has dropped the fold with which that life begins, and the store is lost again."""
    store, (elder, _) = lost(entries=opened("old", "a"))
    found(store, opened("new", "c"))
    assert stubborn(lambda: elder.read(2, 0.0)).base is not None
    elder.take_back(2)
    store.client.set(store.key("header"), b"")
    for client in elder._connections._lines.clients.values():
        client.close()
    say(store.journal(), opened("newer", "d"))
    assert stubborn(lambda: go_on(elder, 2)) == Batch(0, base=Job())


@pytest.mark.parametrize("is_founded_again", [False, True])
def test_an_agent_that_begins_anew_is_told_so_until_it_has_folded_it(lost: Lost, *, is_founded_again: bool) -> None:
    """Its link drops what it has read while an append or a beat fails. Then the agent would fold the entries of the new
    journal onto what it has folded of the old one, and could start the workers of a round that nobody has sealed."""
    store, (elder, _) = lost(entries=opened("old", "a"))
    if is_founded_again:
        found(store, opened("new", "c"))
    host = store.journal()
    begun = host.read(0, 0.0) if is_founded_again else Batch(0, base=Job())
    say(host, [] if is_founded_again else opened("new", "c"))
    for _ in range(2):
        assert stubborn(lambda: elder.read(2, 0.0)) == begun
        elder.take_back(2)
    go_on(elder, 2)
    host.append("later", Aborted("x"))
    assert elder.read(begun.position, 0.0).entries[-1] == Aborted("x")


def test_an_agent_that_is_about_to_begin_anew_bears_another_loss(lost: Lost) -> None:
    """Its beats have come to a new journal, whose host is killed as well before the agent has read it."""
    store, (elder, _) = lost(entries=opened("old", "a"))
    store.journal().append("opened", opened("new")[0])
    stubborn(lambda: elder.beat(ME, 1, ()))
    store.client.set(store.key("header"), b"")
    for client in elder._connections._lines.clients.values():
        client.close()
    say(store.journal(), opened("newer", "c"))
    assert stubborn(lambda: go_on(elder, 2)) == Batch(0, base=Job())
    found = elder.read(0, 0.0).entries
    assert [*found] == [Filler(), *opened("newer", "c")], "in truth the store holds the first record of the one before"


def test_who_comes_to_a_journal_that_makes_way_waits_for_the_other_one(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents that remember have made it void, and have not founded theirs yet."""
    monkeypatch.setattr(beginning_module, "_VOID_S", 0.05)
    store, (elder, _) = lost(entries=SEALED)
    host = store.journal()
    say(host, opened("new", "a"))
    header = store.client.get(store.key("header"))
    assert is_void_now(store.client, Keys(store.job), header, elder._envelope)
    for _ in range(2):
        with pytest.raises(Unavailable, match="makes way for the one that other agents remember"):
            host.read(2, 0.0)
    found, _ = at_once(lambda: host.read(2, 0.0), lambda: elder.read(3, 0.0))
    assert found == Batch(3, base=folded(SEALED))


def found(store: JobStore, entries: Sequence[Entry]) -> bytes:
    """What an agent does that remembers these entries of a journal of its own, and finds the store empty. The header
    that is there then."""
    envelope = Envelope(store.job)
    envelope.admit(envelope.header())
    client = Client(HOST, store.port, PATIENCE_S)
    try:
        return found_again(client, Keys(store.job), envelope, Memory(len(entries), folded([*entries]), "digest"))
    finally:
        client.close()


def test_a_young_journal_that_was_founded_again_makes_way(lost: Lost) -> None:
    """The store was lost twice: (1) with the old journal, (2) while nodes gathered in the new one. The agents that
    remember the old journal come only then. They have workers, and nobody has workers in the new journal."""
    store, elders = lost(entries=SEALED)
    found(store, opened("new", "a"))
    host, late = store.journal(), store.journal(founds=False)
    assert host.read(0, 0.0) == Batch(2, base=moved(folded(opened("new", "a"))))
    assert late.read(0, 0.0).position == 2  # its agent has not folded this yet
    host.remember(2, folded(opened("new", "a")))
    host.append("again", opened("new", "a")[1])
    assert host.read(2, 0.0).position == 3
    readings = at_once(
        *(partial(go_on, journal, 3) for journal in elders),
        *(partial(go_on, journal, 3, PATIENCE_S) for journal in (host, late)),
    )
    assert readings == [
        next_life(SEALED),
        next_life(SEALED),
        Batch(3, base=folded(SEALED)),
        Batch(3, base=folded(SEALED)),
    ]
    elders[0].append("later", Aborted("x"))
    for journal in (*elders, host, late, store.journal(founds=False)):
        assert stubborn(partial(journal.read, 3, 0.0)).entries == (Aborted("x"),)


def test_a_journal_that_was_founded_again_with_a_sealed_round_stays(lost: Lost) -> None:
    """Its workers run, whichever life sealed the round."""
    store, (before, after) = lost(entries=SEALED)
    found(store, opened("new", "a"))
    host = store.journal()
    say(host, [opened("new", "a")[1], *opened("new", "c")[1:]])
    for elder in (before, after):
        with pytest.raises(Refused, match="its store was replaced"):
            stubborn(partial(elder.read, 3, 0.0))
        base = folded([*opened("new", "a"), opened("new", "c")[1]])
        host.publish(3, base)  # judged by a later fold as well


def test_agents_that_remember_two_journals_agree_which_one_is_founded_again(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store was lost while a young journal was in it, before those came who remember the old one. All find an empty
    store. The journal with workers wins, however much was said in the young one."""
    monkeypatch.setattr(rebirth_module, "_ONE_MISSING_S", PATIENCE_S)
    monkeypatch.setattr(rebirth_module, "_OFFERS_S", PATIENCE_S)
    store, elders = lost(3, entries=[*SEALED, *opened("old", "c")[1:]])
    header, *rest = at_once(
        partial(found, store, many(10)),
        *(partial(journal.read, 4, 0.0) for journal in elders),
    )
    assert rest == [next_life([*SEALED, *opened("old", "c")[1:]])] * 3
    assert not elders[0]._envelope.is_foreign(header)
