"""A language for scenarios of one agent, modelled on that of mitmproxy.

    assert (
        Playbook(agent)
        >> start()                                            # an event goes in
        << Append(Opened(TERMS, "nonce"))                     # a command comes out
        >> echo()                                             # what it appended is read back
        << Placeholder(Append, entry=Placeholder(Joined, round=0))
        >> after(5)                                           # and nothing comes out
    )

1. Every command must be named, in order. Commands of a hidden kind are left out (`Beat`, unless asked for).
2. A mismatch prints the difference between the expected and the real list.
3. A playbook that no test asserts raises an error when it is collected.
4. Builders give events their time and round. Only `after` moves the playbook's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import ndiff
from typing import Any, Self

from attrs import evolve

from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Append, Beat, Command
from reknit.core.agent.events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    RestartsLimited,
    Started,
    StopRequested,
    Woken,
)
from reknit.core.agent.step import step
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import PortReserved, WorkerExit, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.entries import Entry, Failed, Joined, LastCall, Lost, Node, NodeId, Opened, Succeeded, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import Life
from reknit.core.job.job import Gathering, Job
from reknit.core.job.reasons import Refusal
from reknit.core.job.workers import Assignment, WorkerFailure


class Placeholder:
    """Stands for any object of `kind` that has these attributes. After the first match it stands for that object alone.
    Call the placeholder to get the object."""

    def __init__(self, kind: type, /, **attributes: Any):
        self.kind, self.attributes = kind, attributes
        self.met: list[Any] = []

    def __eq__(self, other: object) -> bool:
        if self.met:
            return bool(self.met[0] == other)
        if not isinstance(other, self.kind):
            return False
        if any(getattr(other, name) != value for name, value in self.attributes.items()):
            return False
        self.met.append(other)
        return True

    __hash__ = None  # type: ignore[assignment]  # as Python has it for a class with `__eq__`

    def __call__(self) -> Any:
        assert self.met, f"{self} was not met"
        return self.met[0]

    def __repr__(self) -> str:
        inside = "".join(f", {k}={v!r}" for k, v in self.attributes.items())
        return repr(self.met[0]) if self.met else f"Placeholder({self.kind.__name__}{inside})"


Builder = Callable[["Playbook"], Event]
"""Makes an event when its turn comes, because its time, round or content is not known earlier."""


class Playbook:
    """A script of events and of the commands that they must cause. `assert` plays it. Then more may be added."""

    def __init__(self, agent: Agent, *, hide: tuple[type, ...] = (Beat,)):
        self.agent = agent
        self.at = agent.at
        self.hide = hide
        self.appended: list[Entry] = []
        """The entries that the agent has appended since the last `echo`."""
        self.script: list[tuple[str, Any]] = []
        self.expected: list[str] = []
        self.actual: list[str] = []
        self.played = True

    def __rshift__(self, event: Event | Builder) -> Self:
        self.script.append((">>", event))
        self.played = False
        return self

    def __lshift__(self, command: Command | Placeholder) -> Self:
        self.script.append(("<<", command))
        self.played = False
        return self

    def __bool__(self) -> bool:
        """Play what was added since the last call. Raises an error that shows a mismatch."""
        self.played = True
        script, self.script = self.script, []
        pending: list[Command] = []
        for arrow, item in script:
            if arrow == ">>":
                self._leave(pending)
                pending = self.feed(item)
                continue
            command = pending.pop(0) if pending else None
            if command is not None:
                self.actual.append(f"<< {command!r}")
            # Compared before it is shown: a placeholder that has found its object is shown as that object.
            is_equal = item == command
            self.expected.append(f"<< {command!r}" if is_equal else f"<< {item!r}")
        self._leave(pending)
        if self.expected == self.actual:
            return True
        raise AssertionError("the playbook differs (- wanted, + happened):\n" + diff(self.expected, self.actual))

    @property
    def wakes_at(self) -> float | None:
        return next_wake(self.agent)

    def feed(self, item: Event | Builder) -> list[Command]:
        """Play one event now. Returns the commands that answer it, and compares them with nothing."""
        event = item(self) if callable(item) else item
        self.at = max(self.at, event.at)
        self.expected.append(f">> {event!r}")
        self.actual.append(f">> {event!r}")
        result = step(self.agent, event)
        self.agent = result.agent
        self.appended += [c.entry for c in result.commands if isinstance(c, Append)]
        return [c for c in result.commands if not isinstance(c, self.hide)]

    def _leave(self, pending: Sequence[Command]) -> None:
        self.actual += [f"<< {command!r}" for command in pending]

    def __del__(self) -> None:
        if not getattr(self, "played", True):
            raise RuntimeError(f"a playbook was never asserted: {len(self.script)} arrows were not played")


def diff(expected: Sequence[str], actual: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in ndiff(expected, actual))


# ---- builders of events ----------------------------------------------------------------------------------------------


def start(nonce: str = "nonce", port: int = 29500) -> Builder:
    return lambda p: Started(p.at, nonce, port)


def read(*entries: Entry, life: Life | None = None, base: Job | None = None, is_anew: bool = False) -> Builder:
    """The agent reads entries that other nodes have written. `life`: of the journal. By default as before."""
    return lambda p: EntriesRead(p.at, entries, base, p.agent.life if life is None else life, is_anew)


def echo(*others: Entry) -> Builder:
    """The agent reads, in one read, what it has appended since the last echo, and then entries of other nodes."""

    def build(p: Playbook) -> Event:
        mine, p.appended = p.appended, []
        return EntriesRead(p.at, (*mine, *others), life=p.agent.life)

    return build


def ack(**peers: int) -> Builder:
    """The agent's beat is acknowledged. Its own counter has moved. The peers (incarnation 0) have these counters."""
    counts = {Node(NodeId(name)): count for name, count in peers.items()}
    return lambda p: Counters(p.at, {p.agent.me: p.agent.contact.sent, **counts})


def after(seconds: float) -> Builder:
    """Time passes, and the agent is woken."""
    return lambda p: Woken(p.at + seconds)


def awake(playbook: Playbook, seconds: float) -> Playbook:
    """Time passes, and the agent is woken whenever it wants to be. Last comes a wake-up that is to be asserted."""
    assert playbook
    end = playbook.at + seconds
    while (at := playbook.wakes_at) is not None and at < end:
        assert playbook >> Woken(at)
    return playbook >> Woken(end)


def up(round: int | None = None, assignment: Assignment | None = None) -> Builder:
    return lambda p: WorkersStarted(p.at, _round(p, round), assignment)


def exits(*exits: WorkerFailure | int, round: int | None = None) -> Builder:
    """Workers end. Each is given as its failure, or as its local rank if it exited with 0."""
    each = tuple(WorkerExit(e) if isinstance(e, int) else WorkerExit(e.local_rank, e) for e in exits)
    return lambda p: WorkersExited(p.at, _round(p, round), each)


def stopped(round: int | None = None, *, port: int = 29501, stuck: tuple[int, ...] = ()) -> Builder:
    return lambda p: WorkersStopped(p.at, _round(p, round), port, stuck)


def reserved(port: int = 29502) -> Builder:
    return lambda p: PortReserved(p.at, port)


def ask_to_leave(signal: int = 15) -> Builder:
    return lambda p: StopRequested(p.at, signal)


def limit(left: int) -> Builder:
    return lambda p: RestartsLimited(p.at, left)


def cut_off(why: str = "refused", *, refusal: Refusal | None = None, answers: bool = False) -> Builder:
    return lambda p: JournalFailed(p.at, why, refusal, answers)


def _round(p: Playbook, round: int | None) -> int:
    return p.agent.workers.round if round is None else round


# ---- builders of values ----------------------------------------------------------------------------------------------


def node(name: str, incarnation: int = 0) -> Node:
    return Node(NodeId(name), incarnation)


def joined(name: str, round: int = 0, incarnation: int = 0, **fields: Any) -> Joined:
    """The entry `Joined` of a peer. Its address is its name, and its port is 29500."""
    default: dict[str, Any] = {
        "nonce": f"{name}.{incarnation}",
        "address": name,
        "port": 29500,
        "seen": incarnation - 1,
    }
    return Joined(node=node(name, incarnation), round=round, **(default | fields))


def lost(name: str, *, by: str, incarnation: int = 0) -> Lost:
    return Lost(node(name, incarnation), node(by))


def folded(terms: Terms, *entries: Entry) -> Job:
    """The job after a journal that begins with these terms and goes on with these entries."""
    return fold_all(Job(), (Opened(terms, "journal"), *entries))


def running(size: int, terms: Terms | None = None, *entries: Entry) -> Job:
    """The job that runs round 0 on n0, n1 and so on, and then these entries. Default: the maximum of nodes."""
    terms = Terms(min_nodes=1, max_nodes=size) if terms is None else terms
    return folded(terms, *(joined(f"n{i}") for i in range(size)), LastCall(0), *entries)


def failed(name: str, round: int = 0, *failures: WorkerFailure) -> Failed:
    return Failed(node(name), round, failures or (failure(),))


def succeeded(name: str, round: int = 0) -> Succeeded:
    return Succeeded(node(name), round)


def names(job: Job) -> str:
    """The members of the job's round, in the order of their ranks."""
    return " ".join(str(m.node) for m in job.members)


def failure(local_rank: int = 0, exitcode: int = 1, *, rank: int | None = None, message: str = "") -> WorkerFailure:
    return WorkerFailure(local_rank, local_rank if rank is None else rank, exitcode, message=message)


def an_agent(name: str = "n0", terms: Terms = Terms(), **fields: Any) -> Agent:
    """A new agent. Its address is its name."""
    return Agent(evolve(Spec(NodeId(name), name, terms, shares_journal=terms.max_nodes > 1), **fields))


def playing(name: str = "n0", terms: Terms = Terms(), *peers: Joined, **fields: Any) -> Playbook:
    """The playbook of an agent that runs round 0 with these peers, which have joined before it. It was asserted
    already.
    """
    playbook = Playbook(an_agent(name, terms, **fields))
    for event in (start(), read(), echo(*peers), echo()):
        playbook.feed(event)
    if isinstance(playbook.agent.job.phase, Gathering):
        playbook.feed(read(LastCall(0)))
    for event in (ack(), up()):
        playbook.feed(event)
    playbook.expected, playbook.actual, playbook.appended = [], [], []
    # The workers have run for long. After a quick failure the agent would wait before it joins again.
    playbook.agent = evolve(playbook.agent, workers=evolve(playbook.agent.workers, up_at=float("-inf")))
    assert playbook.agent.workers.alive, f"{name} should run: {playbook.agent.job}"
    return playbook
