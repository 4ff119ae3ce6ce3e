"""The link with threads, over fake journals: what the agent's loop sees. What a link decides: test_link_machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from queue import SimpleQueue

import pytest

from reknit.adapters.journals.in_memory import MemoryJournal
from reknit.adapters.link import ThreadedLink
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.ports import Batch, Refused, Unavailable
from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.job.entries import Aborted, Entry, Node, NodeId
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.waiting import PATIENCE_S, descriptors, until

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))


class Told(MemoryJournal):
    """A journal in memory whose calls fail or wait if a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, Exception] = {}
        """By the name of the call."""
        self.gates: dict[str, threading.Event] = {}
        """A call with this name waits for the gate."""
        self.calls: SimpleQueue[str] = SimpleQueue()
        self.said: list[tuple[str, Entry]] = []
        self.folds: dict[int, Job] = {}
        """By position."""
        self.taken_back = threading.Event()

    def _obey(self, name: str) -> None:
        self.calls.put(name)
        if name in self.gates:
            assert self.gates[name].wait(PATIENCE_S)
        if name in self.fails:
            raise self.fails[name]

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        self.said.append((token, entry))
        self._obey("append")
        return super().append(token, entry, life)

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        self._obey("read")
        return super().read(after, wait_s)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        self._obey("beat")
        return super().beat(node, count, watch)

    def remember(self, position: int, job: Job) -> None:
        self.folds[position] = job

    def take_back(self) -> None:
        self.taken_back.set()


class Agent:
    """The agent's side of a link: keeps what it is told."""

    def __init__(self, journal: MemoryJournal, look_s: float = 0.02) -> None:
        self.clock = SystemClock()
        self.link = ThreadedLink(journal, self.clock, "nonce", look_s=look_s)
        self.seen: list[Event] = []
        self.count_read = 0
        """Reads that it has taken in; the fold of each is a job of that epoch."""

    def look(self) -> list[Event]:
        self.clock.wait(self.clock.now() + 0.02)
        for event in self.link.events(self.clock.now()):
            self.seen.append(event)
            if isinstance(event, EntriesRead):
                self.link.folded(Job(epoch=self.count_read))
                self.count_read += 1
        return self.seen

    def until(self, condition: Callable[[list[Event]], object], what: str = "") -> list[Event]:
        until(lambda: condition(self.look()), what)
        return self.seen

    @property
    def entries(self) -> list[Entry]:
        return [entry for event in self.seen if isinstance(event, EntriesRead) for entry in event.entries]

    def forget(self) -> None:
        self.seen = []


def is_read(event: Event) -> bool:
    return isinstance(event, EntriesRead)


def is_failed(event: Event) -> bool:
    return isinstance(event, JournalFailed)


@pytest.fixture
def agents() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(journal: MemoryJournal, look_s: float = 0.02, **settings: bool) -> Agent:
        made.append(Agent(journal, look_s, **settings))
        return made[-1]

    yield make
    for agent in made:
        agent.link.close()
        agent.clock.close()


def test_the_first_read_is_told_at_once_even_if_there_is_nothing(agents: Callable[..., Agent]) -> None:
    """The first agent of a job would not begin; and waiting for somebody to speak is waiting for oneself."""
    agent = agents(MemoryJournal(), look_s=10 * PATIENCE_S)
    (read,) = agent.until(lambda seen: seen)
    assert isinstance(read, EntriesRead)
    assert read.entries == ()


def test_what_is_said_is_said_in_order_and_read_back(agents: Callable[..., Agent]) -> None:
    """`Failed` comes before `Joined`, and the journal wakes the loop."""
    journal = Told()
    agent = agents(journal, look_s=10 * PATIENCE_S)
    said = [Aborted(str(i)) for i in range(50)]
    for entry in said:
        agent.link.append(entry)
    agent.until(lambda _: len(agent.entries) == 50)
    assert agent.entries == said
    assert len({token for token, _ in journal.said}) == 50
    assert all(token.startswith("nonce-") for token, _ in journal.said)


def test_a_beat_is_answered_by_counters_and_then_by_a_read_that_began_after_it(agents: Callable[..., Agent]) -> None:
    """After a gap the agent waits for exactly that: whether it was declared lost meanwhile. The first ends no gap."""
    journal = Told()
    journal.beat(PEER, 1, ())
    agent = agents(journal)
    agent.until(lambda seen: any(map(is_read, seen)))
    agent.link.beat(ME, 1, [PEER])
    agent.until(lambda seen: any(isinstance(event, Counters) for event in seen))
    for count in range(2, 20):
        agent.forget()
        agent.link.beat(ME, count, [PEER])
        counters, read, *_ = agent.until(lambda seen: any(map(is_read, seen)))
        assert isinstance(counters, Counters)
        assert counters.counts == {ME: count, PEER: 1}
        assert isinstance(read, EntriesRead)


# ---- outages ----


@pytest.mark.parametrize("call", ["append", "beat", "read"])
def test_an_outage_is_told_and_its_end_by_a_read(agents: Callable[..., Agent], call: str) -> None:
    """A job on one node has no other news: without the read, its outage would never end."""
    journal = Told()
    agent = agents(journal)
    agent.until(lambda seen: any(map(is_read, seen)))
    journal.fails[call] = Unavailable("gone fishing")
    if call == "append":
        agent.link.append(Aborted("x"))
    elif call == "beat":
        agent.link.beat(ME, 1, [])
    agent.until(lambda seen: any(map(is_failed, seen)))
    failed = next(e for e in agent.seen if isinstance(e, JournalFailed))
    assert (failed.why, failed.refusal) == ("gone fishing", None)
    agent.forget()
    journal.fails.clear()
    agent.until(lambda seen: any(map(is_read, seen)))
    assert not any(map(is_failed, agent.seen[agent.seen.index(next(filter(is_read, agent.seen))) :]))


def test_what_could_not_be_said_is_said_again_as_the_same(agents: Callable[..., Agent]) -> None:
    """The journal tells a repetition by its token; and nothing overtakes it."""
    journal = Told()
    agent = agents(journal)
    journal.fails["append"] = Unavailable("no")
    agent.link.append(Aborted("first"))
    agent.link.append(Aborted("second"))
    until(lambda: len(journal.said) > 2)
    journal.fails.clear()
    agent.until(lambda _: len(agent.entries) == 2)
    assert agent.entries == [Aborted("first"), Aborted("second")]
    assert {token for token, entry in journal.said if entry == Aborted("first")} == {"nonce-1"}


# ---- the end ----


@pytest.mark.parametrize("call", ["append", "beat", "read"])
def test_a_refusal_is_told_once_and_nothing_follows(agents: Callable[..., Agent], call: str) -> None:
    """There is no use in trying: the agent ends."""
    journal = Told()
    journal.fails[call] = Refused(Refusal.SECRET, "another secret")
    agent = agents(journal)
    agent.link.append(Aborted("x")) if call == "append" else agent.link.beat(ME, 1, [])
    agent.until(lambda seen: any(map(is_failed, seen)))
    assert [(e.why, e.refusal) for e in agent.seen if isinstance(e, JournalFailed)] == [
        ("another secret", Refusal.SECRET)
    ]
    journal.fails.clear()
    agent.forget()
    agent.link.append(Aborted("y"))
    assert not any(map(is_failed, agent.look()))
    assert journal.since(0) == ()


@pytest.mark.parametrize("call", ["append", "beat", "read"])
def test_a_bug_in_a_journal_is_raised_where_the_loop_is(agents: Callable[..., Agent], call: str) -> None:
    """A thread that died unheard would leave an agent that waits for ever."""
    journal = Told()
    journal.fails[call] = KeyError("oops")
    agent = agents(journal)
    agent.link.append(Aborted("x"))
    agent.link.beat(ME, 1, [])

    def raised() -> bool:
        try:
            agent.look()
        except KeyError:
            return True
        return False

    until(raised)
    assert raised()  # and again, as long as somebody asks


def test_closing_leaves_no_thread_and_no_descriptor(agents: Callable[..., Agent]) -> None:
    """Whatever the threads do: in a read, with nothing to say, or in the pause between two tries of an outage."""
    before = set(threading.enumerate()), descriptors()
    journal = Told()
    journal.fails["append"] = Unavailable("no")
    agent = agents(journal, look_s=10 * PATIENCE_S)
    agent.link.append(Aborted("x"))
    agent.until(lambda seen: any(map(is_failed, seen)))
    del journal.fails["append"]
    agent.until(lambda _: agent.entries)
    journal.fails["beat"] = Unavailable("no")
    agent.link.beat(ME, 1, [])
    agent.until(lambda seen: sum(map(is_failed, seen)) > 1)
    agent.link.close()
    agent.link.close()
    agent.clock.close()
    assert not set(threading.enumerate()) - before[0]
    assert not descriptors() - before[1]


def test_a_link_whose_threads_cannot_all_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have reached its limit. Otherwise threads would use a journal that nobody closes."""
    before = set(threading.enumerate())
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith("appends and beats"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    clock = SystemClock()
    with pytest.raises(RuntimeError, match="can't start"):
        ThreadedLink(MemoryJournal(), clock, "n")
    clock.close()
    assert set(threading.enumerate()) == before


def test_closing_does_not_wait_for_ever_for_a_call_that_hangs(
    agents: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is gone keeps a thread in the kernel. The agent ends all the same; the thread wakes nobody."""
    monkeypatch.setattr("reknit.adapters.link.lanes.CLOSE_S", 0.05)
    journal = Told()
    gate = journal.gates["append"] = threading.Event()
    agent = agents(journal)
    agent.link.append(Aborted("x"))
    until(lambda: journal.said)
    agent.link.close()
    agent.clock.close()
    gate.set()


# ---- folds ----


def test_a_journal_that_remembers_is_told_of_each_fold_with_its_position(agents: Callable[..., Agent]) -> None:
    """It publishes the fold, or founds itself again with it. With another position, readers would miss entries."""
    journal = Told()
    agent = agents(journal)
    for begin, end in ((0, 1), (1, 50), (50, 53)):
        for i in range(begin, end):
            agent.link.append(Aborted(str(i)))
        agent.until(lambda _, end=end: len(agent.entries) == end)
    counts = [len(read.entries) for read in agent.seen if isinstance(read, EntriesRead)]
    assert journal.folds == {position: Job(epoch=i) for i, position in enumerate(accumulate(counts))}


def test_a_journal_that_remembers_is_told_what_the_link_has_dropped(agents: Callable[..., Agent]) -> None:
    """A beat fails while a read is under way. The agent is not told of this read, and the journal must not take it for
    one that has read it: it could not come to another life of the journal then."""
    journal = Told()
    agent = agents(journal)
    agent.link.append(Aborted("read"))
    agent.until(lambda _: len(agent.entries) == 1)
    journal.gates["read"] = threading.Event()
    while not journal.calls.empty():
        journal.calls.get()
    until(lambda: not journal.calls.empty() and journal.calls.get() == "read", "a read that waits")
    MemoryJournal.append(journal, "other", Aborted("dropped"))
    journal.fails["beat"] = Unavailable("no beat gets through")
    agent.link.beat(ME, 1, ())
    agent.until(lambda seen: any(map(is_failed, seen)))
    journal.gates.pop("read").set()
    assert journal.taken_back.wait(PATIENCE_S)
    assert 2 not in journal.folds, "the agent has folded nothing of it"


def test_quick_appends_and_beats_share_a_thread(agents: Callable[..., Agent]) -> None:
    """When hundreds of nodes meet, one thread and one connection more for each of them take much of the time."""
    agent = agents(Told())
    before = set(threading.enumerate())
    for count in range(1, 4):
        agent.link.append(Aborted(str(count)))
        agent.link.beat(ME, count, [])
        agent.until(lambda seen, n=count: sum(isinstance(e, Counters) for e in seen) == n)
        agent.until(lambda _, n=count: len(agent.entries) == n)
    assert set(threading.enumerate()) == before


def test_no_thread_to_be_had_is_no_reason_to_end(agents: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers run by then, and the process may have reached its limit. The thread is started when it can be."""

    def start(thread: threading.Thread) -> None:
        tried.append(thread)
        raise RuntimeError("can't start new thread")

    tried: list[threading.Thread] = []
    journal = Told()
    gate = journal.gates["append"] = threading.Event()
    agent = agents(journal)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        agent.link.append(Aborted("x"))
        agent.link.beat(ME, 1, [])
        agent.until(lambda _: tried)
    agent.until(lambda seen: any(isinstance(e, Counters) for e in seen))
    gate.set()


def test_beats_go_on_while_an_append_waits_for_its_turn(agents: Callable[..., Agent]) -> None:
    """Eight nodes write to one file, each for half a second: who waits for four is alive."""
    journal = Told()
    gate = journal.gates["append"] = threading.Event()
    agent = agents(journal)
    agent.link.append(Aborted("x"))
    for count in range(1, 4):
        agent.link.beat(ME, 1, [])
        agent.until(lambda seen, n=count: sum(isinstance(e, Counters) for e in seen) == n)
    assert not agent.entries
    gate.set()
    agent.until(lambda _: agent.entries)
    assert not any(map(is_failed, agent.seen))
