"""The timers of an agent: which run, and when each is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from reknit.core.agent.agent import Timer
from reknit.core.agent.commands import Append, Beat, Finish, StopWorkers
from reknit.core.agent.contact import fence_at
from reknit.core.agent.lifecycle import UNSAID
from reknit.core.agent.reasons import CutOff, StoreLost
from reknit.core.agent.silence import RETURN_S
from reknit.core.agent.states import WorkerState
from reknit.core.agent.timers import LEAST_S
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import (
    Aborted,
    Admission,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Opened,
    RestartPolicy,
    Steady,
    Terms,
)
from tests.support.playbook import (
    Placeholder,
    Playbook,
    ack,
    after,
    an_agent,
    ask_to_leave,
    awake,
    cut_off,
    echo,
    exits,
    failed,
    failure,
    joined,
    lost,
    node,
    playing,
    read,
    start,
    stopped,
    up,
)

# Silence is not the subject here: time passes in large steps without acknowledged beats.
TRIO = Terms(2, 3, silence_s=1e6, last_call_s=10.0, join_timeout_s=60.0)
ANY: Any = Placeholder


def gathering(terms: Terms = TRIO, *before: Joined) -> Playbook:
    """n0 has joined the first round, after these."""
    playbook = Playbook(an_agent(terms=terms)) >> start() >> read(Opened(terms, "x"), *before) << ANY(Append) >> echo()
    assert playbook >> ack()
    return playbook


def timers(playbook: Playbook) -> set[Timer]:
    return {*playbook.agent.since}


def test_a_timer_runs_while_its_condition_holds() -> None:
    """Nothing is ever cancelled, so nothing can be forgotten to be cancelled."""
    playbook = gathering()
    assert timers(playbook) == {Timer.GIVE_UP}
    assert playbook >> read(joined("n1"))
    assert timers(playbook) == {Timer.LAST_CALL}
    assert playbook >> read(Leaving(node("n1")))
    assert timers(playbook) == {Timer.GIVE_UP}
    assert playbook >> read(Left(node("n1")), joined("n2"), LastCall(0)) << ANY(StartWorkers)
    assert timers(playbook) == set()


def test_a_condition_that_comes_again_starts_its_timer_anew() -> None:
    """A newcomer that replaces a lost one is given the whole wait."""
    playbook = (
        gathering() >> read(joined("n1")) >> after(9) >> read(lost("n1", by="n0")) >> after(1) >> read(joined("n2"))
    )
    assert playbook >> after(9.9) >> after(0.2) << Append(LastCall(0))


def test_the_wait_for_the_last_call_begins_with_the_minimum() -> None:
    """Not with the first node: hosts of one job may boot minutes apart."""
    playbook = gathering() >> after(50) >> read(joined("n1")) >> after(9.9)
    assert playbook >> after(0.1) << Append(LastCall(0))


def test_too_few_for_too_long_is_given_up() -> None:
    """A job that cannot form must end, and say why."""
    assert gathering() >> after(59.9) >> after(0.1) << Append(GaveUp(0))


def test_the_timers_of_a_round_are_its_own() -> None:
    """A wait that began in an earlier round must not shorten this one's."""
    terms = Terms(2, 2, RestartPolicy(max_restarts=2, backoff_s=8.0), silence_s=1e6)
    playbook = playing("n0", terms, joined("n1")) >> exits(failure()) << ANY(StopWorkers) << ANY(Append) >> echo()
    assert playbook >> stopped() >> after(8) << Append(ANY(Joined, round=1))
    assert playbook >> echo(joined("n1", 1)) << ANY(StartWorkers) >> read(failed("n1", 1)) << ANY(StopWorkers)
    assert playbook >> stopped() >> after(15.9) >> after(0.1) << Append(ANY(Joined, round=2))


@pytest.mark.parametrize("others", range(6))
def test_deadlines_that_any_agent_may_announce_are_staggered(others: int) -> None:
    """Usually one speaks. The stagger is capped, so that a large job is not slow."""
    terms = evolve(TRIO, min_nodes=others + 1, max_nodes=9)
    playbook = gathering(terms, *(joined(f"n{i}") for i in range(1, others + 1)))
    stagger = 0.2 * min(others, 4)
    assert playbook >> after(10 + stagger - 0.01) >> after(0.02) << Append(LastCall(0))


def test_giving_up_is_staggered_too() -> None:
    """Nobody gives a round up before its time, and usually one agent says so."""
    terms = evolve(TRIO, min_nodes=4, max_nodes=9, join_timeout_s=20.0)
    playbook = gathering(terms, joined("n1"), joined("n2"))
    assert playbook >> after(20.39) >> after(0.02) << Append(GaveUp(0))


def test_an_admission_has_no_timer_unless_it_is_to_be_soon() -> None:
    """At a failure, or never, means: not by the clock."""
    for admission, expected in (
        (Admission.SOON, {Timer.ADMIT}),
        (Admission.AT_FAILURE, set()),
        (Admission.NEVER, set()),
    ):
        terms = evolve(TRIO, admission=admission)
        playbook = playing("n0", terms, joined("n1")) >> read(joined("n2", 1))
        assert playbook
        assert timers(playbook) == expected


def test_an_outage_that_lasts_too_long_ends_the_agent() -> None:
    """Not the job: the others may see the journal. The workers are stopped first."""
    playbook = playing("n0", TRIO, joined("n1"), store_timeout_s=100.0) >> cut_off("a") >> after(60) >> cut_off("b")
    assert awake(playbook, 39)
    assert playbook >> after(1) << ANY(StopWorkers, why=StoreLost("b"))
    finish = ANY(Finish)
    assert playbook >> stopped() << finish
    assert (finish().result.state, finish().result.why) == (WorkerState.FAILED, StoreLost("b"))


def test_a_long_wait_for_the_first_read_is_over_with_it() -> None:
    """The host of the store came late. The store timeout is shorter, and does not count from the start of the agent."""
    agent = an_agent(terms=evolve(TRIO, join_timeout_s=60.0), store_timeout_s=20.0)
    playbook = Playbook(agent) >> start() >> cut_off("a") >> after(50) >> cut_off("a")
    assert playbook >> read() << ANY(Append, entry=ANY(Opened))
    assert playbook.agent.causes.unable is None


@pytest.mark.parametrize(
    ("playbook", "why"),
    [
        (lambda: Playbook(an_agent(terms=evolve(TRIO, join_timeout_s=0.0))) >> start(), StoreLost(UNSAID)),
        (lambda: playing("n0", TRIO, joined("n1"), store_timeout_s=0.0) >> cut_off("a"), StoreLost("a")),
    ],
    ids=["join", "store"],
)
def test_a_timeout_of_zero_ends_no_agent_in_the_step_of_the_outage(
    playbook: Callable[[], Playbook], why: StoreLost
) -> None:
    """The store has to answer first, and a beat that is late for a moment is no outage."""
    play = playbook()
    assert play
    assert play.agent.causes.unable is None
    assert play.wakes_at == play.at + LEAST_S
    play.feed(after(LEAST_S))
    assert play.agent.causes.unable == why


def test_an_agent_that_was_suspended_until_its_patience_was_over_tries_once_more() -> None:
    """Rule 15: the store may be back for long, and the agent could not notice. A program that polls is late each time,
    and gets the time once."""
    playbook = playing("n0", TRIO, joined("n1"), store_timeout_s=100.0) >> cut_off("a") >> after(60) >> after(1000)
    assert playbook >> cut_off("a")
    assert awake(playbook, RETURN_S - 1)
    assert playbook >> after(500) << ANY(StopWorkers, why=StoreLost("a"))
    short = playing("n0", TRIO, joined("n1"), store_timeout_s=3.0) >> cut_off("a") >> after(1000)
    assert awake(short, 2)
    assert short >> after(1) << ANY(StopWorkers, why=StoreLost("a"))


def test_the_first_read_ends_the_outage_that_was_slept_through() -> None:
    """The agent stands by then, and waits for nothing: no other timer starts in this step."""
    playbook = Playbook(an_agent(terms=evolve(TRIO, max_nodes=2, join_timeout_s=90.0))) >> start() >> cut_off("a")
    assert playbook >> after(60) >> after(1000)
    assert playbook.agent.contact.overslept
    full = read(Opened(evolve(TRIO, max_nodes=2, join_timeout_s=90.0), "x"), joined("n1"), joined("n2"))
    assert playbook >> full << ANY(Append, entry=ANY(Joined))
    assert timers(playbook) == set()
    assert not playbook.agent.contact.overslept


def test_a_second_outage_may_be_slept_through_as_well() -> None:
    """Rule 15: the agent tries once in each."""
    playbook = playing("n0", TRIO, joined("n1"), store_timeout_s=30.0)
    for _ in range(2):
        assert playbook >> cut_off("a") >> after(1000) >> after(1) >> ack() >> read()


def test_a_fence_is_not_put_off_by_a_sleep() -> None:
    """S2: only the end of the agent is. Its workers die as soon as it runs again."""
    playbook = playing("n0", evolve(TRIO, fence_s=2.0), joined("n1"), store_timeout_s=30.0) >> cut_off("a")
    assert playbook >> after(1000) << ANY(StopWorkers, signal=9, why=CutOff(2.0))


def test_a_read_ends_an_outage() -> None:
    """Short outages must not add up."""
    playbook = playing("n0", TRIO, joined("n1"), store_timeout_s=100.0)
    for _ in range(3):
        assert playbook >> cut_off() >> after(90) >> read() >> ack(n1=1)
    assert timers(playbook) == set()


def test_a_store_that_was_never_reached_is_an_outage_too() -> None:
    """A wrong endpoint must end with a sentence about the store; late nodes are waited for as long."""
    patient = an_agent(terms=evolve(TRIO, join_timeout_s=10.0), store_timeout_s=1.0)
    playbook = Playbook(patient) >> start() >> cut_off("refused") >> after(9)
    assert playbook >> after(1) << ANY(Finish)


def test_a_farewell_that_nobody_hears_is_not_waited_for_for_ever() -> None:
    """The scheduler would kill the agent, and it would look like a crash."""
    playbook = playing("n0", TRIO, joined("n1"), store_timeout_s=10.0, resay_s=100.0) >> read(Aborted("x"))
    assert (
        playbook << ANY(StopWorkers) >> stopped() << Append(Left(node("n0"))) >> after(9.9) >> after(0.1) << ANY(Finish)
    )


def test_a_leaving_node_does_not_wait_for_ever_either() -> None:
    """Its goodbye may be swallowed just as well."""
    playbook = gathering() >> ask_to_leave() << ANY(Append) << ANY(Append)
    assert playbook
    playbook.hide = (Append, Beat)
    assert playbook >> after(299) >> after(1) << ANY(Finish)


def test_an_outage_after_the_close_does_not_change_the_result() -> None:
    """S5: how the job ended is known, though workers still take their time to die."""
    playbook = playing("n0", TRIO, joined("n1"), store_timeout_s=10.0) >> read(Aborted("x")) << ANY(StopWorkers)
    finish = ANY(Finish)
    assert playbook >> cut_off() >> after(20) >> stopped() << Append(Left(node("n0"))) << finish
    assert finish().result.state is WorkerState.STOPPED


# ---- being woken -----------------------------------------------------------------------------------------------------


def test_early_late_and_repeated_wake_ups_change_nothing() -> None:
    """Drivers may wake an agent whenever they like."""
    playbook = gathering()
    before = playbook.agent
    assert playbook >> after(0) >> after(0)
    assert playbook.agent == before
    assert playbook >> after(1000) << Append(GaveUp(0)) >> after(0) >> after(0)


def dying(playbook: Playbook, *, lived_s: float, is_up: bool = True) -> float | None:
    """How long the node waits after a failure of workers that lived that long, before it joins again."""
    if is_up:
        assert playbook >> up() >> after(lived_s)
    assert playbook >> exits(failure()) << Placeholder(StopWorkers) << Placeholder(Append) >> stopped()
    playbook.feed(echo())
    ended_at = playbook.at
    while not playbook.appended:
        assert playbook.wakes_at is not None, "the node never joins again"
        playbook.feed(after(playbook.wakes_at - playbook.at))
    waited_s = playbook.at - ended_at
    for _ in range(2):
        playbook.feed(echo())
    playbook.expected, playbook.actual = [], []
    return round(waited_s, 3)


def test_the_pause_after_quick_failures_doubles_up_to_its_maximum() -> None:
    """Workers that die at once would spend every restart before anybody has read the first line."""
    playbook = playing("n0", Terms(restarts=RestartPolicy(max_restarts=20)))
    assert dying(playbook, lived_s=0.0, is_up=False) == 0.0, "they had run for long"
    assert [dying(playbook, lived_s=0.5) for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert dying(playbook, lived_s=1.0) == 0.0
    assert dying(playbook, lived_s=0.9) == 0.2, "a round that lasted ends the series"


@pytest.mark.parametrize(("lived_s", "quick"), [(0.9, 3), (1.0, 0)])
def test_a_round_that_lasted_and_was_stopped_ends_the_series_too(lived_s: float, quick: int) -> None:
    """The failure of another node ended it, and the workers of this node were well."""
    playbook = playing("n0", TRIO, joined("n1"))
    agent = playbook.agent
    playbook.agent = evolve(agent, quick=3, workers=evolve(agent.workers, up_at=agent.at))
    assert playbook >> after(lived_s) >> read(failed("n1")) << ANY(StopWorkers) >> stopped() << ANY(Append)
    assert playbook.agent.quick == quick


def test_workers_that_cannot_be_started_are_a_quick_failure() -> None:
    """A missing interpreter is the commonest of them, and `WorkersStarted` never comes."""
    playbook = playing("n0", Terms(restarts=RestartPolicy(max_restarts=20)))
    dying(playbook, lived_s=0.0, is_up=False)
    assert [dying(playbook, lived_s=0.0, is_up=False) for _ in range(2)] == [0.2, 0.4]


def test_of_pause_and_backoff_the_longer_counts() -> None:
    """An operator's backoff stays what it is."""
    policy = RestartPolicy(max_restarts=20, backoff_s=0.3, backoff_max_s=0.3)
    playbook = playing("n0", Terms(restarts=policy))
    dying(playbook, lived_s=0.0, is_up=False)
    assert [dying(playbook, lived_s=0.0) for _ in range(3)] == [0.3, 0.4, 0.8]


def test_nobody_pauses_when_no_restart_is_left() -> None:
    """The end of the job must not be told late."""
    playbook = playing("n0", Terms(restarts=RestartPolicy(max_restarts=1)))
    dying(playbook, lived_s=0.0, is_up=False)
    assert playbook >> up() >> exits(failure()) << Placeholder(StopWorkers) << Placeholder(Append)
    assert playbook >> stopped() >> echo() << Placeholder(Append, entry=Placeholder(Joined, round=2))


def test_it_is_woken_at_the_earliest_of_its_deadlines() -> None:
    """A deadline that is not in `wakes_at` would wait for an accident."""
    playbook = gathering(evolve(TRIO, beat_s=1e6, silence_s=1e7))
    assert playbook
    assert playbook.wakes_at == 60.0
    assert playbook >> read(joined("n1"))
    assert playbook.wakes_at == 10.0
    assert playbook >> cut_off()
    assert playbook.wakes_at == 10.0


def test_a_quiet_agent_needs_no_waking() -> None:
    """Standalone, an idle launcher must not burn cycles."""
    assert playing("n0", Terms()).wakes_at is None


def test_deadlines_that_have_passed_without_effect_do_not_spin() -> None:
    """A loop that is told to wake at once, always, would eat a processor."""
    playbook = playing("n0", TRIO, joined("n1")) >> ask_to_leave() << ANY(StopWorkers) << ANY(Append)
    assert playbook >> after(1e5) << ANY(Append)
    wakes_at = playbook.wakes_at
    assert wakes_at is None or wakes_at > playbook.at


def test_an_infinite_wait_has_no_deadline() -> None:
    """ "For ever" is a wait that an operator may choose, and no clock can sleep until then."""
    terms = Terms(2, 2, join_timeout_s=float("inf"))
    playbook = Playbook(an_agent(terms=terms, shares_journal=False)) >> start() >> read(Opened(terms, "x"))
    assert playbook << ANY(Append) >> echo()
    assert (timers(playbook), playbook.wakes_at) == ({Timer.GIVE_UP}, None)


def test_a_finished_agent_is_never_woken() -> None:
    """Its loop ends."""
    playbook = gathering() >> ask_to_leave() << Append(Leaving(node("n0"))) << Append(Left(node("n0")))
    assert playbook >> echo() << ANY(Finish) >> after(1e5)
    assert playbook.wakes_at is None


def test_a_store_that_neither_answers_nor_fails_has_a_deadline_too() -> None:
    """A hung file system: the call never returns, so nobody says that there is an outage."""
    playbook = Playbook(an_agent(terms=evolve(TRIO, join_timeout_s=10.0))) >> start() >> after(9.9)
    finish = ANY(Finish)
    assert playbook >> after(0.1) << finish
    assert finish().result.why == StoreLost(UNSAID)
    playbook = playing("n0", Terms(1, 3), joined("n1"), store_timeout_s=50.0) >> after(5)
    assert awake(playbook, 50) << ANY(StopWorkers, why=StoreLost(UNSAID))


def test_the_next_epoch_waits_for_the_nodes_of_the_one_before() -> None:
    """Rule 16: a node that has not read the end stops its workers within its grace, or is silent by then."""
    terms = evolve(TRIO, silence_s=4.0)
    playbook = Playbook(an_agent(terms=terms, grace_s=30.0)) >> start()
    assert playbook >> read(Opened(terms, "x"), joined("n1"), joined("n2"), Aborted("because"))
    assert playbook.wakes_at == 34.0
    assert playbook >> after(33.9) >> after(0.1) << Append(ANY(Opened, epoch=1))


def test_each_agent_speaks_a_little_after_the_one_before() -> None:
    """The second live node says that a round is steady only if the first has not."""
    terms = evolve(TRIO, restarts=RestartPolicy(max_unspent=5))
    playbook = playing("n0", terms, joined("n1"), joined("n2"))
    assert playbook >> read(lost("n2", by="n1")) << ANY(StopWorkers) >> stopped() << ANY(Append)
    assert playbook >> echo(joined("n1", 1)) << ANY(StartWorkers) >> up()
    second = [*playbook.agent.job.live].index(node("n0").id)
    assert playbook >> after(59.9 + 0.2 * second) >> after(0.2) << Append(ANY(Steady))


def test_the_fence_falls_on_workers_only() -> None:
    """A node without workers need not be woken for it."""
    playbook = playing("n0", evolve(TRIO, fence_s=50.0, beat_s=1e4), joined("n1"))
    assert playbook.wakes_at == fence_at(playbook.agent) == 50.0
    assert playbook >> read(Aborted("because")) << ANY(StopWorkers) >> stopped() << ANY(Append)
    assert fence_at(playbook.agent) is None


def test_the_terms_are_left_to_the_host_of_the_journal() -> None:
    """If they differ, those of the one agent must hold without which there is no job."""
    playbook = Playbook(an_agent(terms=TRIO, opens_after_s=3.0)) >> start() >> read() >> after(2.9)
    assert playbook >> after(0.1) << Append(ANY(Opened))
