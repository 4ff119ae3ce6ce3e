"""What is true of every step of an agent, and the events that `step` decides on itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from reknit.core.agent import events
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Append, Finish, StopWorkers
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.step import step
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Leaving, RestartPolicy, Terms
from reknit.core.job.reasons import Departure, NodeGone, Refusal
from tests.support.playbook import (
    Builder,
    Placeholder,
    Playbook,
    ack,
    after,
    an_agent,
    ask_to_leave,
    cut_off,
    echo,
    exits,
    failed,
    failure,
    joined,
    limit,
    lost,
    node,
    playing,
    read,
    reserved,
    start,
    stopped,
    up,
)

PAIR = Terms(2, 2, RestartPolicy(max_restarts=1))
TRIO = Terms(1, 3)
ME, N1, N2 = node("n0"), node("n1"), node("n2")
ANY = Placeholder
EVERYTHING: tuple[Builder, ...] = (
    start(),
    read(),
    read(failed("n1")),
    ack(n1=3),
    cut_off(),
    cut_off(refusal=Refusal.FORMAT),
    up(),
    exits(0),
    exits(failure()),
    exits(failure(7), 9),
    stopped(),
    stopped(stuck=(1,)),
    reserved(),
    ask_to_leave(),
    limit(0),
    after(0),
    after(1e9),
)


def unborn() -> Playbook:
    return Playbook(an_agent(terms=PAIR))


def waiting() -> Playbook:
    playbook = Playbook(an_agent(terms=PAIR)) >> start() >> read() << ANY(Append) >> echo() << ANY(Append) >> echo()
    assert playbook
    return playbook


def at_work() -> Playbook:
    return playing("n0", PAIR, joined("n1"))


def stopping() -> Playbook:
    playbook = at_work() >> read(failed("n1")) << ANY(StopWorkers)
    assert playbook
    return playbook


def leaving() -> Playbook:
    playbook = at_work() >> ask_to_leave() << ANY(StopWorkers) << ANY(Append)
    assert playbook
    return playbook


# ---- every step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("situation", [unborn, waiting, at_work, stopping, leaving])
@pytest.mark.parametrize("event", EVERYTHING, ids=lambda e: e.__qualname__.split(".")[0])
def test_every_event_in_every_situation_is_survived(situation: Callable[[], Playbook], event: Builder) -> None:
    """S8: the world misbehaving is an event, never an exception. S9: the same step again is the same."""
    playbook = situation()
    made = event(playbook)
    result = step(playbook.agent, made)
    again = step(playbook.agent, made)
    assert (result.agent, result.commands) == (again.agent, again.commands)
    assert sum(isinstance(c, StartWorkers | StopWorkers) for c in result.commands) <= 1
    assert next_wake(result.agent) is None or next_wake(result.agent) > result.agent.at


def test_the_builders_know_every_event() -> None:
    """A new kind of event must come into the test above."""
    kinds = {type(event(at_work())) for event in EVERYTHING}
    assert kinds == set(get_args(events.Event))


def test_time_does_not_run_backwards() -> None:
    """Two adapters' events may overtake each other by a little; a deadline that was met stays met."""
    playbook = at_work() >> after(2)
    assert playbook
    agent = step(playbook.agent, events.Woken(1.0)).agent
    assert agent.at == 2.0


def test_the_argument_is_left_as_it_was() -> None:
    """Traces keep the states of the past: a shared mapping that changed would change them."""
    playbook = at_work()
    before: Agent = playbook.agent
    exits_before, said_before = dict(before.workers.exits), dict(before.said)
    assert playbook >> exits(failure()) << ANY(StopWorkers) << ANY(Append)
    assert (dict(before.workers.exits), dict(before.said)) == (exits_before, said_before)


def test_a_batch_of_entries_is_decided_on_once() -> None:
    """Rule 13: what the batch began and ended is never acted on."""
    playbook = playing("n0", TRIO, joined("n1"), joined("n2"))
    assert (
        playbook
        >> read(lost("n1", by="n2"), joined("n2", 1), failed("n2", 1))
        << StopWorkers(0, 15, 30.0, NodeGone(N1, Departure.LOST, N2))
    )


def test_workers_are_stopped_before_anything_is_said() -> None:
    """The commands of a step keep an order: a slow journal must not delay a stop."""
    assert at_work() >> ask_to_leave() << ANY(StopWorkers) << Append(Leaving(ME))


# ---- requests to leave -----------------------------------------------------------------------------------------------


def request(signal: int, grace_s: float) -> StopWorkers:
    return StopWorkers(0, signal, grace_s, SignalReceived(15))


def test_the_same_signal_within_half_a_second_is_the_same_request() -> None:
    """Schedulers signal an agent and its parent alike, and a terminal its whole process group."""
    assert leaving() >> ask_to_leave() >> after(0.4) >> ask_to_leave()


def test_a_second_request_leaves_five_seconds_and_a_third_none() -> None:
    """An operator who asks again has lost patience."""
    playbook = leaving() >> after(1) >> ask_to_leave() << request(15, 5.0)
    assert playbook >> after(0.9) >> ask_to_leave() << request(15, 0.0)


def test_another_request_never_makes_the_grace_longer() -> None:
    """The scheduler's own kill is on its way."""
    playbook = playing("n0", PAIR, joined("n1"), grace_s=3.0) >> ask_to_leave() << ANY(StopWorkers) << ANY(Append)
    assert playbook >> after(1) >> ask_to_leave() >> after(0.9) >> ask_to_leave() << request(15, 0.0)


def test_sigkill_as_a_wish_leaves_no_grace() -> None:
    """An embedder that has no time says so with the signal that gives none."""
    playbook = at_work() >> ask_to_leave(9)
    assert playbook << StopWorkers(0, 9, 0.0, SignalReceived(9)) << Append(Leaving(ME))
    assert leaving() >> after(1) >> ask_to_leave(9) << request(15, 0.0)


@pytest.mark.parametrize("signal", [1, 2, 15])
def test_every_other_wish_leaves_the_grace(signal: int) -> None:
    """Ctrl-C has a smaller number than SIGKILL, and workers may write a checkpoint all the same."""
    stop = StopWorkers(0, signal, 30.0, SignalReceived(signal))
    assert at_work() >> ask_to_leave(signal) << stop << Append(Leaving(ME))


# ---- the journal's failures ------------------------------------------------------------------------------------------


def test_the_first_reason_of_an_outage_is_kept() -> None:
    """Later errors are usually consequences of the first, and would only repeat it."""
    playbook = at_work() >> cut_off("first") >> after(1) >> cut_off("second")
    assert playbook
    assert playbook.agent.contact.outage == "second", "the latest is what an operator can act on"


def test_a_fatal_failure_of_the_journal_ends_the_agent_not_the_job() -> None:
    """A journal of another format would be folded into another job: nothing is said any more."""
    playbook = at_work() >> cut_off("unknown kind", refusal=Refusal.FORMAT) << ANY(StopWorkers)
    assert playbook >> stopped() << ANY(Finish)


def test_a_repetition_of_the_second_signal_is_none_of_the_third() -> None:
    """SIGTERM, then Ctrl-C that arrives twice: five seconds, not none."""
    playbook = leaving() >> after(1) >> ask_to_leave(2) << request(15, 5.0)
    assert playbook >> after(0.1) >> ask_to_leave(2)
