"""Which entries an agent wants in the journal."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from reknit.core.agent.commands import Append, Finish, StopWorkers
from reknit.core.agent.sayings import farewell, owed
from reknit.core.agent.worker_words import ReservePort, StartWorkers
from reknit.core.job.entries import (
    Aborted,
    Admit,
    Failed,
    Joined,
    LastCall,
    Leaving,
    Left,
    Opened,
    RestartPolicy,
    Succeeded,
    Terms,
)
from tests.support.playbook import (
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
    lost,
    node,
    playing,
    read,
    reserved,
    start,
    stopped,
)

ALONE = Terms(restarts=RestartPolicy(max_restarts=1))
PAIR = Terms(2, 2, RestartPolicy(max_restarts=1))
ME = node("n0")


def joining(round: int, **fields: object) -> Placeholder:
    return Placeholder(Append, entry=Placeholder(Joined, round=round, **fields))


def fresh(terms: Terms = PAIR, **fields: object) -> Playbook:
    """An agent that has read a journal with no entries, and has opened it."""
    playbook = Playbook(an_agent("n0", terms, **fields)) >> start() >> read() << Append(Opened(terms, "nonce"))
    assert playbook
    return playbook


def test_nothing_is_said_before_the_journal_was_read() -> None:
    """An agent that joins without having read the terms may join another job."""
    assert Playbook(an_agent()) >> start() >> after(60)


def test_joining_tells_all_that_ranks_need() -> None:
    """Nothing is exchanged after the rendezvous."""
    said = joining(0)
    playbook = fresh(role="ps", local_world_size=3, rank_hint=1) >> echo() << said
    assert playbook
    entry = said().entry
    assert (entry.node, entry.nonce, entry.address, entry.port) == (ME, "nonce", "n0", 29500)
    assert (entry.role, entry.local_world_size, entry.rank_hint) == ("ps", 3, 1)


def test_an_entry_that_does_not_show_up_is_said_again_after_a_while() -> None:
    """A lost append costs time, never the job."""
    playbook = fresh() >> echo() << joining(0)
    assert playbook >> read() >> after(1.9) >> read()
    assert playbook >> after(0.1) << joining(0) >> after(1.0) >> after(1.0) << joining(0)


def test_an_entry_that_shows_up_is_never_said_again() -> None:
    """L3: a round costs O(nodes) entries."""
    assert fresh() >> echo() << joining(0) >> echo() >> ack() >> after(3) >> ack() >> after(3) >> ack()


def test_the_agent_is_woken_to_say_it_again() -> None:
    """Nothing else may happen in a quiet job."""
    playbook = fresh() >> echo() << joining(0) >> after(1)
    assert playbook
    assert playbook.wakes_at == 2.0
    alone = Playbook(an_agent(shares_journal=False)) >> start() >> after(3) >> read() << Placeholder(Append)
    assert alone
    assert alone.wakes_at == 5.0


def test_a_late_node_joins_the_round_after_the_running_one() -> None:
    """Rule 8: `Joined(r+1)` while r runs is a standby."""
    playbook = Playbook(an_agent("n2", PAIR)) >> start()
    assert playbook >> read(Opened(PAIR, "x"), joined("n0"), joined("n1")) << joining(1)


def test_a_failure_is_seen_before_the_next_joining_is_said() -> None:
    """Rule 8: a `Joined` that overtook its `Failed` would make the failure stale, and free."""
    playbook = playing("n0", ALONE) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> stopped() >> read() >> echo() << joining(1, port=29501)


def test_joining_promises_that_no_worker_runs() -> None:
    """S2 rests on this promise alone: there is no second exchange."""
    playbook = playing("n0", PAIR, joined("n1")) >> read(failed("n1")) << Placeholder(StopWorkers)
    assert playbook >> after(1) >> ack() >> stopped() << joining(1)


def test_each_joining_brings_the_fresh_port() -> None:
    """The old one may still be bound by a dying rank 0."""
    playbook = playing("n0", PAIR, joined("n1")) >> read(failed("n1")) << Placeholder(StopWorkers)
    assert playbook >> stopped(port=31000) << joining(1, port=31000)


def test_a_port_that_was_offered_for_one_round_is_not_offered_for_another() -> None:
    """n0 reads that round 0 was sealed and is over: n1's workers may have dialled its port, and dial it still."""
    mine = joined("n0", nonce="nonce")
    playbook = Playbook(an_agent("n0", PAIR)) >> start() >> read(Opened(PAIR, "j")) << joining(0, port=29500)
    playbook = playbook >> read(mine, joined("n1"), failed("n1")) << ReservePort()
    assert playbook >> after(0.1) >> reserved(7) << joining(1, port=7)
    assert playbook >> reserved(8), "an answer too many changes nothing"


def test_backoff_withholds_the_joining() -> None:
    """Rule 13: each member waits for itself, with no entry for it."""
    terms = Terms(2, 2, RestartPolicy(max_restarts=1, backoff_s=3.0))
    playbook = playing("n0", terms, joined("n1")) >> read(failed("n1")) << Placeholder(StopWorkers)
    assert playbook >> stopped() >> after(2.9) >> ack()
    assert playbook >> after(0.1) << joining(1)


def test_a_failure_is_said_again_until_the_ledger_shows_it() -> None:
    """The peers would wait for this node's report, and judge without it."""
    playbook = playing("n0", ALONE) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> stopped() >> after(2) << Append(failed("n0")) >> read() >> after(2) << Append(failed("n0"))


def test_a_failure_is_owed_also_when_the_round_was_ended_by_a_peer() -> None:
    """Root causes are found in the whole ledger."""
    playbook = playing("n0", PAIR, joined("n1")) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> read(failed("n1")) >> stopped()
    assert owed(playbook.agent) == failed("n0")
    assert playbook >> echo() << joining(1)


def test_no_report_is_owed_once_the_job_has_moved_on() -> None:
    """It would be stale, and nobody waits for it."""
    playbook = playing("n0", PAIR, joined("n1")) >> exits(0) << Placeholder(StopWorkers) << Append(Succeeded(ME, 0))
    assert playbook >> read(Aborted("x")) >> stopped() << Append(Left(ME))
    assert owed(playbook.agent) is None


def test_no_report_of_an_earlier_round_is_owed() -> None:
    """Round 1 was sealed and ended in one batch, so this node has no workers of it. Its failure in round 0 is known."""
    playbook = playing("n0", PAIR, joined("n1")) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> stopped() >> ack() >> echo() << joining(1)
    assert playbook >> echo(joined("n1", 1), failed("n1", 1)) << Placeholder(ReservePort)
    assert owed(playbook.agent) is None


def test_a_leaving_node_says_so_before_its_workers_are_gone() -> None:
    """Its peers crash on its workers' going, and would spend a restart."""
    playbook = playing("n0", PAIR, joined("n1")) >> ask_to_leave() << Placeholder(StopWorkers) << Append(Leaving(ME))
    assert playbook >> echo() >> stopped() << Append(Left(ME))


def test_leaving_before_the_joining_is_seen_says_goodbye_all_the_same() -> None:
    """The `Joined` on its way would make the others wait for a node that is gone."""
    playbook = fresh() >> echo() << joining(0) >> ask_to_leave() << Append(Left(ME))
    assert playbook >> echo() << Placeholder(Finish)


def test_a_node_that_never_joined_owes_nothing() -> None:
    """It can go at once."""
    assert fresh() >> ask_to_leave() << Placeholder(Finish)


def test_nothing_is_said_in_a_gap_of_the_own_beats() -> None:
    """Rule 5: it may have been declared lost, and must read first."""
    playbook = playing("n0", PAIR, joined("n1")) >> after(4.1) >> exits(failure()) << Placeholder(StopWorkers)
    assert playbook >> stopped() >> ack() >> read() << Append(failed("n0"))


def test_an_outage_silences_nobody_for_ever() -> None:
    """What was said into the void is said again."""
    playbook = playing("n0", ALONE) >> cut_off() >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> stopped() >> after(2) << Append(failed("n0")) >> echo() << joining(1)


def test_the_last_call_is_said_by_the_one_whose_timer_fires() -> None:
    """A deadline that matters becomes an entry."""
    terms = Terms(1, 2, last_call_s=10.0)
    playbook = fresh(terms) >> echo() << joining(0) >> ack() >> echo() >> after(3) >> ack() >> after(3) >> ack()
    assert playbook >> after(3) >> ack() >> read() >> after(1) << Append(LastCall(0))
    assert playbook >> ack() >> echo() << Placeholder(StartWorkers, round=0)


def test_who_is_not_seen_in_the_journal_announces_nothing() -> None:
    """It counts neither itself nor its deadline: its own `Joined` may be what the others wait for."""
    terms = Terms(1, 3, last_call_s=1.0)
    playbook = Playbook(an_agent("n0", terms)) >> start() >> read(Opened(terms, "x"), joined("n1")) << joining(0)
    assert playbook >> after(1.9) >> read()


def test_a_standby_is_admitted_after_the_settling_time() -> None:
    """Rule 11: ten arrivals within it cost one restart."""
    playbook = playing("n0", Terms(1, 3), joined("n1")) >> read(joined("n2", 1)) >> after(0.5)
    # n1 joined first and is the first to speak; this node leaves it a head start.
    assert playbook >> ack() >> after(0.6) >> ack() >> after(0.1) << Append(Admit(1))


@pytest.mark.parametrize("hosts", [False, True])
def test_the_host_of_the_journal_says_goodbye_last(hosts: bool) -> None:
    """Rule 12: the journal ends with it, and others may not have read the end yet."""
    playbook = playing("n0", PAIR, joined("n1"), hosts_journal=hosts) >> read(Aborted("x")) << Placeholder(StopWorkers)
    playbook >> stopped()
    assert playbook if hosts else playbook << Append(Left(ME))
    assert (farewell(playbook.agent) is None) == hosts
    if hosts:
        assert playbook >> read(Left(node("n1"))) << Append(Left(ME)) >> echo() << Placeholder(Finish)


def test_a_report_is_not_forgotten_on_leaving() -> None:
    """n0 fails, its word is lost, and it is told to leave: silent, the failure would have cost nothing."""
    playbook = playing("n0", PAIR, joined("n1")) >> exits(failure()) << Placeholder(StopWorkers) << Placeholder(Append)
    assert playbook >> ask_to_leave() << Append(Leaving(ME)) >> read(Leaving(ME))
    assert playbook >> stopped() >> after(2) << Append(failed("n0", 0, failure()))
    assert playbook >> read(failed("n0", 0, failure())) << Append(Left(ME))


def test_an_accusation_is_said_again_only_after_a_while() -> None:
    """A beat a second must not make an entry a second."""
    playbook = playing("n0", PAIR, joined("n1"))
    for _ in range(3):
        assert playbook >> after(1) >> ack()
    assert playbook >> after(1) >> ack() << Append(lost("n1", by="n0"))
    assert playbook >> after(1) >> ack()
    assert playbook >> after(1) >> ack() << Append(lost("n1", by="n0"))


def test_the_whole_story_is_told_of_a_few_failures_only() -> None:
    """A hundred tracebacks fit into no journal: etcd takes 1.5 MiB, and what cannot be said is never heard."""
    noise = [
        evolve(failure(i, message="Connection reset by peer"), traceback="t" * 1976, stderr=("s" * 1000, "s" * 1000))
        for i in range(9)
    ]
    cause = evolve(failure(9, message="ValueError: x"), traceback="t" * 32_000, stderr=("s",))
    playbook = playing("n0", PAIR, joined("n1"), local_world_size=10) >> exits(*noise, cause)
    said: Any = Placeholder(Failed)
    assert playbook << Placeholder(StopWorkers) << Append(said)
    assert [bool(f.traceback) for f in said().failures] == [True] * 4 + [False] * 5 + [True]
    assert [f.message for f in said().failures] == [f.message for f in (*noise, cause)]
