"""What an adapter owes the core: kept by the simulated ports, and each rule speaks if an adapter breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from typing import Any, NamedTuple

import pytest
from attrs import evolve

from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.owed import OWES, Owed
from reknit.app.testing.play import play
from reknit.app.testing.script import parse
from reknit.app.testing.violation import Violation
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command, Finish, StopWorkers
from reknit.core.agent.events import Counters, EntriesRead, Event, Started, Woken
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.worker_words import StartWorkers, WorkerExit, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.entries import Aborted, Entry, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.fold import fold
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.workers import NoProgress, WorkerFailure


class Made(NamedTuple):
    """A step that an agent has made."""

    before: Agent
    event: Event
    after: Agent
    commands: Sequence[Command]


def made_by(proc: CheckedProc) -> list[Made]:
    """All steps of one agent of a simulated cluster, in order."""
    return [Made(*step) for step in proc.steps()]


@pytest.fixture(scope="module")
def procs() -> list[CheckedProc]:
    """Three agents. A worker of the first one fails, and the job ends well."""
    return play(parse("setup\nfail a\nwait 12")).procs


def told(owed: Owed, steps: Iterable[Made], name: str = "a") -> Any:
    observer = owed.by(name)
    for made in steps:
        observer(*made)
    return observer


def place(steps: Sequence[Made], kind: type) -> int:
    """Of the first event of this kind."""
    return next(i for i, made in enumerate(steps) if isinstance(made.event, kind))


def changed(steps: list[Made], kind: type, change: Callable[[Any], Event], which: int = 0) -> list[Made]:
    """With another event in the place of one of this kind."""
    i = [i for i, made in enumerate(steps) if isinstance(made.event, kind)][which]
    return [*steps[:i], steps[i]._replace(event=change(steps[i].event)), *steps[i + 1 :]]


def twice(steps: list[Made], kind: type) -> list[Made]:
    """With the first event of this kind twice, one right after the other."""
    i = place(steps, kind)
    return [*steps[: i + 1], steps[i]._replace(commands=()), *steps[i + 1 :]]


def later(steps: list[Made], kind: type, by_s: float) -> list[Made]:
    """The first event of this kind, and all that follow, so much later."""
    i = place(steps, kind)
    return [*steps[:i], *(made._replace(event=evolve(made.event, at=made.event.at + by_s)) for made in steps[i:])]


def failing(exited: WorkersExited, **changes: int) -> WorkersExited:
    (exit,) = exited.exits
    failure = exit.failure or WorkerFailure(0, 0, 1)
    return evolve(exited, exits=(evolve(exit, failure=evolve(failure, **changes)),))


def killed_by_the_adapter(steps: list[Made]) -> list[Made]:
    """An adapter that reports a worker which it has just stopped."""
    stopped = place(steps, WorkersStopped)
    i = next(i for i, made in enumerate(steps[stopped + 1 :], stopped + 1) if isinstance(made.event, WorkersStarted))
    started = steps[i].event
    assert isinstance(started, WorkersStarted)
    stop = StopWorkers(started.round, 15, 1.0, SignalReceived(15))
    exited = WorkersExited(started.at, started.round, (WorkerExit(0, WorkerFailure(0, 0, -15)),))
    agent = steps[i].after
    return [*steps[:i], steps[i]._replace(commands=(stop,)), Made(agent, exited, agent, ())]


def unanswered(steps: list[Made], *kinds: type) -> list[Made]:
    """Without events of these kinds, from the first one on, up to a wake-up long after."""
    i = next(i for i, made in enumerate(steps) if isinstance(made.event, kinds))
    woken = steps[place(steps, Woken)]
    return [*steps[:i], woken._replace(event=Woken(steps[i].event.at + 99.0))]


BROKEN: dict[str, tuple[str, Callable[[list[Made]], list[Made]]]] = {
    "woken much too late": ("owes 2", lambda steps: later(steps, Woken, 30.0)),
    "fed after the end": ("owes 3", lambda steps: [*steps, steps[-1]]),
    "not started": ("owes 4", lambda steps: steps[1:]),
    "started twice": (
        "owes 4",
        lambda steps: changed(twice(steps, Started), Started, lambda e: evolve(e, nonce="x"), 1),
    ),
    "a clock that goes back": ("owes 4", lambda steps: changed(steps, Counters, lambda e: evolve(e, at=e.at - 99.0))),
    "counters without a beat": ("owes 6", lambda steps: twice(steps, Counters)),
    "no read after the counters": (
        "owes 6",
        lambda steps: [*(first := steps[: place(steps, Counters) + 1]), *unanswered(steps[len(first) :], EntriesRead)],
    ),
    "a beat without an answer": ("owes 6", lambda steps: unanswered(steps, Counters)),
    "beats without answers, and reads": (
        "owes 6",
        lambda steps: [made for made in steps if not isinstance(made.event, Counters)],
    ),
    "workers that start twice": ("owes 7", lambda steps: twice(steps, WorkersStarted)),
    "an exit twice": ("owes 7", lambda steps: twice(steps, WorkersExited)),
    "an exit of another round": (
        "owes 7",
        lambda steps: changed(steps, WorkersExited, lambda e: evolve(e, round=e.round + 3)),
    ),
    "an exit that is the adapter's own": ("owes 7", killed_by_the_adapter),
    "stopped, and nobody asked": ("owes 8", lambda steps: twice(steps, WorkersStopped)),
    "the same port again": (
        "owes 8",
        lambda steps: changed(steps, WorkersStopped, lambda e: evolve(e, port=port(steps))),
    ),
    "never stopped": (
        "owes 8",
        lambda steps: [*(first := steps[: place(steps, WorkersExited) + 1]), *unanswered(steps[len(first) :], Woken)],
    ),
    "never started": ("owes 9", lambda steps: unanswered(steps, WorkersStarted)),
    "a failure of another rank": (
        "owes 9",
        lambda steps: changed(steps, WorkersExited, lambda e: failing(e, rank=2)),
    ),
}
"""What an adapter could do wrong, and the rule that must speak."""


def port(steps: list[Made]) -> int:
    started = steps[0].event
    assert isinstance(started, Started)
    return started.port


@pytest.mark.parametrize("wrong", BROKEN)
def test_an_adapter_that_breaks_a_rule_is_found(wrong: str, procs: list[CheckedProc]) -> None:
    """Each is a mistake that somebody would make who writes an adapter."""
    rule, breaks = BROKEN[wrong]
    owed = Owed(late_s=5.0 if rule == "owes 2" else inf, answer_s=20.0)
    with pytest.raises(Violation) as caught:
        told(owed, breaks(made_by(procs[0])))
    assert caught.value.check == rule, caught.value


def test_good_adapters_owe_nothing(procs: list[CheckedProc]) -> None:
    """Otherwise the rules would say nothing."""
    owed = Owed(late_s=0.5, answer_s=4.0)
    for proc in procs:
        told(owed, made_by(proc), proc.name).ended()


def test_all_agents_of_a_job_read_the_same(procs: list[CheckedProc]) -> None:
    """An adapter may read the journal in another order than the others."""
    owed = Owed()
    told(owed, made_by(procs[0]))
    steps = made_by(procs[1])
    i = next(i for i, made in enumerate(steps) if len(getattr(made.event, "entries", ())) > 1)
    event = steps[i].event
    assert isinstance(event, EntriesRead)
    steps[i] = steps[i]._replace(event=evolve(event, entries=tuple(reversed(tuple(event.entries)))))
    with pytest.raises(Violation, match="owes 5"):
        told(owed, steps, "b")


NUMBERS = count()


def reads(*entries: Entry, base: Job | None = None, life: Life = Life()) -> list[Made]:
    """An agent that starts, and reads these entries."""
    agent = Agent(Spec(NodeId("a"), "a.net", Terms()))
    return [
        Made(agent, Started(0.0, f"reader {next(NUMBERS)}", 0), agent, ()),
        Made(agent, EntriesRead(1.0, entries, base=base, life=life), agent, ()),
    ]


WORDS = tuple(Aborted(word) for word in "abc")


def test_in_another_life_of_the_journal_they_read_the_same_as_well() -> None:
    """It begins with a fold, which nobody has made from entries."""
    owed, base, life = Owed(), fold(Job(), Opened(Terms(), journal="j")), Life("other")
    told(owed, reads(*WORDS[:2], base=base, life=life))
    told(owed, reads(*WORDS, base=base, life=life))
    with pytest.raises(Violation, match="owes 5"):
        told(owed, reads(*reversed(WORDS[:2]), base=base, life=life))


def test_a_fold_may_have_been_there_twice() -> None:
    """An entry that is in the journal twice changes nothing. Who skips to its fold may read it again."""
    owed, opened = Owed(), Opened(Terms(), journal="j")
    first, second, third = (Joined(Node(NodeId(name)), name, 0, f"{name}.net", 1) for name in "xyz")
    told(owed, reads(opened, first, first, second))
    base = fold(fold(Job(), opened), first)
    for entries in ((first, second), (second,)):
        told(owed, reads(*entries, base=base))
    with pytest.raises(Violation, match="owes 5"):
        told(owed, reads(third, base=base))


def test_hung_workers_are_ended_and_reported(procs: list[CheckedProc]) -> None:
    """The agent has asked for it with the stop. So it is no exit of which nobody must hear."""
    steps = killed_by_the_adapter(made_by(procs[0]))
    event = steps[-1].event
    assert isinstance(event, WorkersExited)
    (exit,) = event.exits
    assert exit.failure is not None
    hung = evolve(exit, failure=evolve(exit.failure, cause=NoProgress(30.0, 1)))
    told(Owed(), [*steps[:-1], steps[-1]._replace(event=evolve(event, exits=(hung,)))])


def test_a_look_tells_what_is_late(procs: list[CheckedProc]) -> None:
    """A program whose agent waits for an answer that never comes gets no event, at which an observer could speak."""
    steps = made_by(procs[0])
    start = next(i for i, made in enumerate(steps) for c in made.commands if isinstance(c, StartWorkers))
    observer, at = told(Owed(answer_s=20.0), steps[: start + 1]), steps[start].event.at
    observer.look(at + 19.0)
    with pytest.raises(Violation, match="owes 9: a waits for the workers of 0"):
        observer.look(at + 21.0)
    stop = place(steps, WorkersExited)
    observer = told(Owed(answer_s=20.0), steps[: stop + 1])
    with pytest.raises(Violation, match="owes 8: a waits for the stop of round 0"):
        observer.look(steps[stop].event.at + 7.0 + 21.0)


def test_a_nonce_is_taken_once(procs: list[CheckedProc]) -> None:
    """A program that counts its agents from 0 again after each start gives a nonce twice."""
    owed = Owed()
    told(owed, made_by(procs[0])[:3])
    with pytest.raises(Violation, match="owes 4"):
        told(owed, made_by(procs[0])[:1], "again")


def test_processes_that_are_left(procs: list[CheckedProc]) -> None:
    """The adapter says that a round is stopped, and the program knows better."""
    with pytest.raises(Violation, match=r"owes 8: a was told that its workers are stopped, and \[7\] live"):
        told(Owed(alive=lambda name, round: [7]), made_by(procs[0]))


@pytest.mark.parametrize("carried_out", [slice(None), slice(1, None), slice(None, None, -1)])
def test_commands_that_are_not_carried_out(carried_out: slice, procs: list[CheckedProc]) -> None:
    """All of them, in their order, before the next event."""
    observer = Owed(is_told=True).by("a")

    def run() -> None:
        for made in made_by(procs[0]):
            observer(*made)
            for command in list(made.commands)[carried_out]:
                observer.done(command)

    if carried_out == slice(None):
        run()
        observer.ended()
    else:
        with pytest.raises(Violation, match="owes 1"):
            run()


def test_who_gives_up_before_the_end(procs: list[CheckedProc]) -> None:
    """`Finish` is what says that nothing of the node is left."""
    steps = made_by(procs[0])
    end = next(i for i, made in enumerate(steps) for c in made.commands if isinstance(c, Finish))
    with pytest.raises(Violation, match="owes 3"):
        told(Owed(), steps[:end]).ended()


def test_each_rule_is_broken_here() -> None:
    """A rule that nothing breaks may be one that never speaks."""
    elsewhere = {"owes 1", "owes 5"}
    assert {rule for rule, _ in BROKEN.values()} | elsewhere == OWES.keys()
