"""Beats and silence: how a node is found to be lost without comparing two clocks."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.agent.agent import Stage
from reknit.core.agent.commands import Append, Beat, StopWorkers
from reknit.core.agent.contact import is_beating, is_fresh, is_out
from reknit.core.agent.events import Counters
from reknit.core.agent.silence import RETURN_S, spare_s, watched
from reknit.core.agent.worker_words import ReservePort, StartWorkers
from reknit.core.job.entries import Joined, LastCall, Lost, Node, Terms
from tests.support.playbook import (
    Placeholder,
    Playbook,
    ack,
    after,
    an_agent,
    cut_off,
    echo,
    failed,
    folded,
    joined,
    lost,
    node,
    playing,
    read,
    reserved,
    running,
    start,
    stopped,
)

PAIR = Terms(2, 2)
TRIO = Terms(1, 3)
ME, N1 = node("n0"), node("n1")


def beat(*watch: Node) -> Placeholder:
    """A beat of n0, whatever its count."""
    return Placeholder(Beat, node=ME, watch=watch)


def pair() -> Playbook:
    """n0 runs with n1, whose counter it has seen at 1."""
    playbook = playing("n0", PAIR, joined("n1")) >> after(1) >> ack(n1=1)
    assert playbook
    return playbook


# ---- whom to watch ---------------------------------------------------------------------------------------------------


def test_each_watches_the_next_two_in_seat_order() -> None:
    """The cost per node stays constant, and everyone is watched by two."""
    job = running(5)
    assert [n.id for n in watched(job, node("n1"))] == ["n2", "n3"]
    assert [n.id for n in watched(job, node("n4"))] == ["n0", "n1"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nobody_watches_itself_or_anybody_twice(size: int) -> None:
    """A ring of two or three closes early."""
    for name in ("n0", "n1", "n2")[:size]:
        ring = watched(running(size), node(name))
        assert node(name) not in ring
        assert len(ring) == len(set(ring)) == min(2, size - 1)


def test_standbys_are_in_the_ring() -> None:
    """Rule 7: all members may be dead, and only a standby be left to say so."""
    job = running(1, TRIO, joined("n1", 1), joined("n2", 1))
    assert watched(job, node("n2")) == (ME, N1)
    assert watched(job, ME) == (N1, node("n2"))


def test_everyone_expected_is_watched_while_gathering() -> None:
    """Else k dead in a row would be found one by one, each after its own silence."""
    job = running(6, None, failed("n0"), joined("n0", 1))
    assert [n.id for n in watched(job, ME)] == ["n1", "n2", "n3", "n4", "n5"]


def test_joined_nodes_watch_each_other_before_the_first_round() -> None:
    """A node that dies while the first round gathers would be sealed into it."""
    assert watched(folded(TRIO, joined("n0"), joined("n1")), ME) == (N1,)


# ---- beating ---------------------------------------------------------------------------------------------------------


def test_a_node_beats_as_soon_as_it_has_said_joined() -> None:
    """Others may read that before it does; a slow reader that waited for its own entry was declared lost."""
    playbook = Playbook(an_agent(terms=TRIO), hide=()) >> start() >> read() << Placeholder(Append)
    assert playbook >> echo() << Placeholder(Append, entry=Placeholder(Joined)) << beat() >> after(0.9)
    assert playbook >> after(0.1) << beat() >> echo()


def test_it_beats_at_its_interval_whatever_else_happens() -> None:
    """Neither a busy nor a quiet agent may look dead, and the store is shared by thousands."""
    playbook = playing("n0", PAIR, joined("n1"))
    playbook.hide = ()
    assert playbook >> after(0.5) >> read() >> after(0.4) >> ack(n1=1)
    assert playbook >> after(0.1) << beat(N1) >> after(0.1) >> after(0.9) << beat(N1)


def test_a_standalone_agent_has_no_beats() -> None:
    """It needs no store, and nobody could hear."""
    playbook = playing("n0", Terms())
    playbook.hide = ()
    assert playbook >> after(1) >> after(100) >> read()
    assert not is_beating(playbook.agent)


def test_a_node_that_is_alone_beats_if_others_may_come() -> None:
    """A standby would count it out, or wait for ever for a dead one's seat; and a fence would not fall."""
    playbook = playing("n0", Terms(), shares_journal=True)
    playbook.hide = ()
    assert playbook >> after(5) << beat()
    assert playbook >> ack() >> read(joined("n1", 1)) >> after(1) << beat(N1)


def test_a_host_beats_for_its_guests_when_it_ends_and_not_before_it_joins() -> None:
    """Whoever hears a node counts on it."""
    playbook = Playbook(an_agent(terms=TRIO, hosts_journal=True, opens_after_s=5.0)) >> start() >> read(joined("n1"))
    assert playbook
    playbook.agent = evolve(playbook.agent, job=folded(TRIO, joined("n1")))
    assert not is_beating(playbook.agent)


def test_a_closed_job_goes_on_beating_until_the_agent_is_done() -> None:
    """The journal's host waits for guests, and must notice if one dies on its way out."""
    playbook = playing("n0", PAIR, joined("n1"), hosts_journal=True)
    assert is_beating(playbook.agent)


# ---- silence ---------------------------------------------------------------------------------------------------------


def test_a_counter_that_stands_still_for_the_silence_limit_is_a_lost_node() -> None:
    """L2: a dead node is noticed in bounded time."""
    playbook = pair()
    for _ in range(3):
        assert playbook >> after(1) >> ack(n1=1)
    assert playbook >> after(1) >> ack(n1=1) << Append(Lost(N1, ME))


def test_one_beat_in_time_starts_the_silence_anew() -> None:
    """A slow node is not a dead one."""
    playbook = pair()
    for count in (1, 1, 1, 2, 2, 2, 2, 3):
        assert playbook >> after(1) >> ack(n1=count)


def test_a_node_that_never_beats_is_lost_too() -> None:
    """It may die between its `Joined` and its first beat."""
    playbook = playing("n0", PAIR, joined("n1"))
    assert playbook >> after(1) >> ack() >> after(1) >> ack() >> after(1) >> ack()
    assert playbook >> after(1) >> ack() << Append(Lost(N1, ME))


def test_a_stale_read_accuses_nobody() -> None:
    """Rule 6: if my own counter has not moved, nothing is known about anybody's."""
    playbook = pair()
    same = {ME: playbook.agent.contact.count, N1: 1}
    for _ in range(9):
        assert playbook >> after(1) >> (lambda p: Counters(p.at, same))


def test_an_older_value_is_no_sign_of_life() -> None:
    """A read that is not fresh may be answered with a counter from before the last fresh one."""
    playbook = pair()
    for _ in range(3):
        assert playbook >> after(1) >> ack(n1=1)
    assert playbook >> (lambda p: Counters(p.at, {ME: p.agent.contact.count, N1: 0}))
    assert playbook >> after(1) >> ack(n1=1) << Append(Lost(N1, ME))


def test_silence_begins_with_the_last_sign_of_life() -> None:
    """Also if it was seen in a read that is not fresh. The time before that read is no silence."""
    playbook = pair() >> after(1) >> ack(n1=1) >> after(1)
    assert playbook >> (lambda p: Counters(p.at, {ME: p.agent.contact.count, N1: 2}))
    assert playbook
    for _ in range(3):
        assert playbook >> after(1) >> ack(n1=2)
    assert playbook >> after(1) >> ack(n1=2) << Append(Lost(N1, ME))


def test_a_total_outage_accuses_nobody() -> None:
    """When the store is back after a minute, all counters have stood still."""
    playbook = pair() >> cut_off() >> after(60) >> ack(n1=1) >> read()
    assert playbook
    assert playbook >> after(1) >> ack(n1=2)


def test_a_pause_of_this_agent_is_not_the_silence_of_another() -> None:
    """A laptop's sleep or a debugger must not cost the job a node: no read counts for more than two beats. And if it
    was the store that was away, the other may take twice as long to find it again."""
    playbook = pair() >> after(3.9) >> ack(n1=1) >> read()
    for _ in range(11):  # the pause counts for two seconds, and 9.8 s are forgiven: twice the pause, and two beats
        assert playbook >> after(1) >> ack(n1=1)
    assert playbook >> after(1) >> ack(n1=1) << Append(Lost(N1, ME))


@pytest.mark.parametrize(("beat_s", "spared_s"), [(0.5, [0.0, 4.0]), (1.0, [0.0, 0.0, 7.0])])
def test_a_pause_is_longer_than_two_beats(beat_s: float, spared_s: list[float]) -> None:
    """An agent may beat every second or every minute."""
    agent = evolve(an_agent(), job=folded(Terms(1, 2, beat_s=beat_s)))
    assert [spare_s(agent, apart_s) for apart_s in (1.0, 1.5, 2.5)[: len(spared_s)]] == spared_s


def test_one_that_comes_back_after_an_outage_still_spares_the_others() -> None:
    """It has no workers, so it is another incarnation, and has seen the same outage."""
    playbook = Playbook(an_agent(terms=Terms(1, 3))) >> start() >> read() << Placeholder(Append)
    assert playbook >> echo() << Placeholder(Append) >> echo() >> ack()
    assert playbook >> after(20) >> cut_off() >> read() >> after(1) >> ack() >> read()
    assert playbook.agent.me == node("n0", 1)
    assert playbook.agent.silence.spares_until == playbook.agent.at + RETURN_S + 2


def test_one_whose_first_beats_were_not_answered_spares_the_others() -> None:
    """Its own outage is all that it knows of the store."""
    playbook = Playbook(an_agent(terms=Terms(1, 3))) >> start() >> read() << Placeholder(Append)
    assert playbook >> echo() << Placeholder(Append) >> cut_off() >> after(7) << Placeholder(Append) >> read()
    assert playbook.agent.silence.spares_until == playbook.at + RETURN_S + 2


def test_silence_starts_anew_per_incarnation() -> None:
    """A node that has just come back must not inherit the silence of the one before."""
    playbook = pair() >> after(1) >> ack(n1=1) >> after(1) >> ack(n1=1) >> after(1) >> ack(n1=1)
    assert (
        playbook >> read(joined("n1", 1, incarnation=1)) << Placeholder(StopWorkers) >> stopped() << Placeholder(Append)
    )
    assert playbook >> echo() << Placeholder(StartWorkers)
    for _ in range(4):  # the first of these asks for the new one's counter, the others find it standing still
        assert playbook >> after(1) >> ack()
    assert playbook >> after(1) >> ack() << Append(Lost(node("n1", 1), ME))


def test_an_accusation_needs_a_fresh_read_of_its_own() -> None:
    """A `Lost` that is said later may meet a node that has beaten since."""
    playbook = pair()
    for _ in range(3):
        assert playbook >> after(1) >> ack(n1=1)
    assert playbook >> after(1) >> ack(n1=1) << Append(Lost(N1, ME))
    stale = Counters(playbook.at + 2.5, {ME: playbook.agent.contact.count, N1: 1})
    assert playbook >> after(2.5) >> stale >> read() >> after(1)


def test_who_is_gone_already_is_not_accused() -> None:
    """One `Lost` per node is enough: L3."""
    playbook = playing("n0", TRIO, joined("n1"), joined("n2")) >> after(1) >> ack(n1=1, n2=1)
    for count in (2, 3, 4):
        assert playbook >> after(1) >> ack(n1=1, n2=count)
    assert playbook >> after(1) >> read(lost("n1", by="n2")) << Placeholder(StopWorkers) >> ack(n1=1, n2=5)


# ---- gaps in the own beats -------------------------------------------------------------------------------------------


def test_no_workers_are_started_without_a_fresh_beat() -> None:
    """Rule 13: the other nodes may have declared this node lost meanwhile."""
    playbook = (
        Playbook(an_agent(terms=TRIO)) >> start() >> read() << Placeholder(Append) >> echo() << Placeholder(Append)
    )
    assert playbook >> echo() >> ack() >> after(4.1) >> read(LastCall(0))
    assert not is_fresh(playbook.agent)
    # The read after the gap brings it back as another incarnation, as a `Lost` of it may be on its way.
    playbook = playbook >> ack() >> read() >> ack() << ReservePort() >> reserved()
    assert playbook << Placeholder(Append, entry=Placeholder(Joined, node=node("n0", 1)))


def test_a_beat_within_the_limit_leaves_no_gap() -> None:
    """The limit is what the others go by."""
    playbook = (
        Playbook(an_agent(terms=TRIO)) >> start() >> read() << Placeholder(Append) >> echo() << Placeholder(Append)
    )
    assert playbook >> echo() >> ack() >> after(3.9) >> read(LastCall(0)) << Placeholder(StartWorkers)


def test_a_beat_that_is_answered_within_the_limit_is_no_outage() -> None:
    """Rule 15: the wait for the store begins when the others may have noticed."""
    agent = pair().agent
    acked_at = agent.contact.acked_at or 0.0
    within, after_it = (evolve(agent, at=acked_at + silence_s) for silence_s in (3.99, 4.0))
    assert not is_out(within)
    assert is_out(after_it)


def test_a_gap_ends_with_an_acknowledged_beat_and_then_a_read() -> None:
    """Rule 5: either alone does not show where this node stands."""
    playbook = pair() >> after(5)
    assert playbook
    assert playbook.agent.contact.gap
    assert playbook >> read()
    assert playbook.agent.contact.gap
    assert playbook >> ack(n1=2)
    assert playbook.agent.contact.gap
    assert playbook >> read()
    assert not playbook.agent.contact.gap


def test_workers_run_through_a_gap() -> None:
    """Rule 15: an outage of the store is nobody's failure, and if it was declared lost the journal says so."""
    playbook = pair() >> after(30) >> ack(n1=2) >> read()
    assert playbook
    assert playbook.agent.me == ME
    assert playbook.agent.workers.alive


def test_a_node_is_fresh_until_its_fence_falls() -> None:
    """Workers that start in this moment would be killed in the next."""
    agent = playing("n0", evolve(PAIR, fence_s=2.0), joined("n1")).agent
    assert [is_fresh(evolve(agent, at=at)) for at in (0.0, 1.9, 2.0)] == [True, True, False]


def test_a_node_that_was_never_heard_is_not_fresh() -> None:
    """It may have been slow to join, and be declared lost by those who saw its `Joined` long ago."""
    agent = evolve(an_agent(terms=TRIO), job=folded(TRIO), stage=Stage.JOINING)
    assert not is_fresh(agent)


def test_a_hole_in_the_ring_is_watched_as_a_whole_by_two() -> None:
    """A rack that died at once is found at once, and not by everybody."""
    back = [joined(f"n{i}", 1, nonce=f"n{i}.0") for i in range(40) if i not in (20, 21, 22)]
    job = running(40, None, failed("n3"), *back)
    assert [n.id for n in watched(job, node("n19"))] == ["n20", "n21", "n22", "n23", "n24"]
    assert [n.id for n in watched(job, node("n18"))] == ["n19", "n20", "n21", "n22", "n23"]
    assert [n.id for n in watched(job, node("n17"))] == ["n18", "n19"]
    assert [n.id for n in watched(job, node("n20"))] == ["n21", "n22"]


def test_a_large_job_is_watched_at_a_bounded_cost() -> None:
    """The first who is back from a round of a hundred watches the next ones in the ring, and not all."""
    job = running(100, None, failed("n3"), joined("n98", 1, nonce="n98.0"))
    seen = watched(job, node("n98"))
    assert len(set(seen)) == len(seen) == 64 + 2
    assert node("n98") not in seen
    assert [n.id for n in watched(job, node("n50"))] == ["n51", "n52"]
