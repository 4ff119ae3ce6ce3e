"""Taking part: a node's count of beats grows only while its round trips to the store and its workers' stops succeed."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.agent.commands import Append, Beat, StopWorkers
from reknit.core.agent.contact import is_entry_late, is_read_late, late_s, takes_part
from reknit.core.agent.reasons import StoreLost
from reknit.core.job.entries import Joined, LastCall, Lost, Opened, RestartPolicy, Terms
from reknit.core.job.job import Job
from tests.support.playbook import (
    Placeholder,
    Playbook,
    ack,
    after,
    an_agent,
    ask_to_leave,
    echo,
    exits,
    failed,
    failure,
    folded,
    joined,
    node,
    playing,
    read,
    start,
    stopped,
)

PAIR = Terms(2, 2)
ME, N1 = node("n0"), node("n1")
LATE_S = 3 * PAIR.silence_s + 3 + 2 * 0.02


def pair(**fields: float) -> Playbook:
    """n0 runs with n1, which beats on."""
    return playing("n0", PAIR, joined("n1"), **fields)


def pass_time(playbook: Playbook, seconds: float, *, reads: bool = True) -> None:
    """Each second a beat is answered, and n1 is heard. The journal has no news."""
    for _ in range(int(seconds)):
        events = (after(1), ack(n1=int(playbook.at) + 1), *([read()] if reads else []))
        for event in events:
            playbook.feed(event)
    playbook.expected, playbook.actual = [], []


def sent(playbook: Playbook) -> int:
    return playbook.agent.contact.sent


def test_an_unanswered_beat_is_repeated_with_its_count() -> None:
    """Rule 6: a node that hears no answers must look as silent as it is deaf."""
    playbook = pair() >> after(1)
    assert playbook
    count = sent(playbook)
    playbook.hide = ()
    for _ in range(3):
        assert playbook >> after(1) << Beat(ME, count, (N1,))
    assert playbook >> ack(n1=1) >> after(1) << Beat(ME, count + 1, (N1,))


def test_a_node_that_reads_nothing_holds_its_count_back() -> None:
    """Its beats land and are answered; but it would never see that a round has ended."""
    playbook = pair()
    pass_time(playbook, LATE_S + 1, reads=False)
    count = sent(playbook)
    assert count > LATE_S - 1
    pass_time(playbook, 10, reads=False)
    assert sent(playbook) == count
    assert playbook.agent.contact.gap
    assert playbook >> read() >> after(1) >> ack(n1=99) >> read()
    assert sent(playbook) == count + 1
    assert not playbook.agent.contact.gap


def test_a_node_whose_entry_does_not_show_up_holds_its_count_back_and_says_it_again() -> None:
    """The others wait for what it has to say. In its gap it must go on saying that, or the gap would never end."""
    playbook = pair() >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> stopped()
    pass_time(playbook, LATE_S + 1)
    count = sent(playbook)
    pass_time(playbook, 6)
    assert sent(playbook) == count
    assert playbook.agent.contact.gap
    assert playbook >> after(2) << Append(failed("n0"))
    assert playbook >> echo() >> after(1) >> ack(n1=99) >> read() << Placeholder(Append, entry=Placeholder(Joined))
    assert sent(playbook) == count + 1


def test_a_node_that_has_come_back_once_holds_its_count_back_too() -> None:
    """With a fence it is not fresh between two beats. It wants its `Joined` said all the same, so this becomes late."""
    playbook = playing("n0", evolve(PAIR, fence_s=0.9), joined("n1"))
    playbook.agent = evolve(playbook.agent, is_renewed=True)
    assert playbook >> read(failed("n1")) << Placeholder(StopWorkers)
    assert playbook >> stopped() << Placeholder(Append, entry=Placeholder(Joined))
    pass_time(playbook, LATE_S + 1)
    count = sent(playbook)
    pass_time(playbook, 6)
    assert sent(playbook) == count


def test_an_entry_that_was_read_back_holds_nothing_back_whatever_the_fold_makes_of_it() -> None:
    """The journal takes what this node says: that is all that counts."""
    playbook = pair() >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook
    assert playbook.agent.unread
    assert playbook >> echo() >> stopped() << Placeholder(Append, entry=Placeholder(Joined))
    ignored = playbook.appended
    pass_time(playbook, 1)
    playbook.appended = ignored
    assert playbook >> read(*ignored)
    assert not playbook.agent.unread


def test_a_skip_to_a_fold_clears_nothing_that_is_still_wanted() -> None:
    """The entry may be among those that were skipped. But a node whose entries vanish would never be lost if it took a
    published fold again and again."""
    playbook = pair() >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook
    unread, job = playbook.agent.unread, playbook.agent.job
    assert playbook >> (lambda p: evolve(read()(p), base=job))
    assert playbook.agent.unread == unread


def test_an_accusation_that_vanishes_counts_too() -> None:
    """A mute watcher would be the only one who knows of a death."""
    playbook = pair()
    for i in range(int(LATE_S) + 8):
        for event in (after(1), ack(n1=1), read()):
            playbook.feed(event)
        if i > 6:
            assert Lost(N1, ME) in playbook.agent.unread
    playbook.expected, playbook.actual = [], []
    assert not takes_part(playbook.agent)


def mute() -> Playbook:
    """An agent whose accusation has vanished for so long that it takes part no more."""
    playbook = pair()
    for _ in range(int(LATE_S) + 8):
        for event in (after(1), ack(n1=1), read()):
            playbook.feed(event)
    playbook.expected, playbook.actual = [], []
    return playbook


def test_an_accusation_that_vanished_is_said_again_although_no_read_is_fresh() -> None:
    """The last survivor was mute for a while. Nobody else says it, and its own count stands still because of it."""
    playbook = mute()
    assert playbook >> after(3) >> ack(n1=1) << Append(Lost(N1, ME))
    assert playbook >> read(Lost(N1, ME)) << Placeholder(StopWorkers)
    assert takes_part(playbook.agent)


def test_an_accusation_that_vanished_is_forgotten_if_the_accused_lives() -> None:
    """It was suspended meanwhile."""
    playbook = mute()
    assert playbook >> after(3) >> ack(n1=2)
    assert not playbook.agent.unread
    assert takes_part(playbook.agent)


def test_a_node_that_waits_for_its_turn_to_join_is_not_held_back() -> None:
    """A thousand nodes join at once, and a journal takes them one after another: nobody waits for this one yet."""
    playbook = Playbook(an_agent(terms=PAIR)) >> start() >> read() << Placeholder(Append) >> echo()
    assert playbook << Placeholder(Append, entry=Placeholder(Joined))
    pass_time(playbook, 2 * LATE_S)
    assert sent(playbook) > 2 * LATE_S - 2
    assert not playbook.agent.contact.gap


def test_joining_one_round_after_the_other_in_vain_is_one_wait() -> None:
    """Rule 15: the job goes on without a node whose entries vanish. Each round that begins must not begin its wait."""
    terms = evolve(PAIR, max_nodes=3, restarts=RestartPolicy(9))
    playbook = Playbook(an_agent(terms=terms, store_timeout_s=20.0)) >> start() >> read(Opened(terms, "n1"))
    assert playbook << Placeholder(Append, entry=Placeholder(Joined))
    for round in range(8):
        entries = [joined("n1", round), joined("n2", round), LastCall(round), failed("n1", round)]
        playbook.feed(read(*entries)(playbook))
        pass_time(playbook, 5)
    assert isinstance(playbook.agent.causes.unable, StoreLost)


def test_hooks_may_take_their_time() -> None:
    """A program that stops its workers itself is not taken for a keeper that hangs."""
    playbook = pair(grace_s=5.0, stop_s=float("inf")) >> exits(failure()) << Placeholder(StopWorkers)
    assert playbook << Append(failed("n0")) >> echo()
    pass_time(playbook, 100)
    assert takes_part(playbook.agent)


def test_a_keeper_that_hangs_holds_the_count_back_and_is_no_outage() -> None:
    """Nobody knows whether its workers are gone; but the others can go on. When it stirs, the node joins again."""
    playbook = pair(grace_s=5.0, store_timeout_s=20.0) >> exits(failure()) << Placeholder(StopWorkers)
    assert playbook << Append(failed("n0")) >> echo()
    pass_time(playbook, 4 + playbook.agent.spec.stop_s)
    assert takes_part(playbook.agent)
    pass_time(playbook, 60)
    assert not takes_part(playbook.agent)
    assert playbook.agent.contact.gap
    assert playbook.agent.causes.unable is None
    assert playbook >> stopped() >> after(1) >> ack(n1=99) >> read() << Placeholder(Append, entry=Placeholder(Joined))


def test_patience_ends_though_something_else_is_answered() -> None:
    """Rule 15: reads that work do not make up for beats that nobody hears."""
    playbook = pair(store_timeout_s=20.0)
    for _ in range(26):
        playbook.feed(after(1))
        playbook.feed(read())
    assert isinstance(playbook.agent.causes.unable, StoreLost)
    assert playbook.agent.workers.stopping == playbook.agent.causes.unable


def test_a_node_that_leaves_still_takes_part() -> None:
    """The others hear it until its goodbye is there."""
    playbook = pair() >> ask_to_leave() << Placeholder(StopWorkers) << Placeholder(Append) >> read(LastCall(9))
    assert playbook
    assert takes_part(playbook.agent)


def test_what_is_late_is_a_sum() -> None:
    """Three silence limits, a journal's waits, and the turn of each live node."""
    assert late_s(folded(PAIR, joined("n0"), joined("n1"))) == pytest.approx(LATE_S)
    assert late_s(Job()) == pytest.approx(3 * Job().terms.silence_s + 3)


def test_late_is_what_has_waited_for_that_sum() -> None:
    """The agent is woken at that time, and must find it late."""
    agent = evolve(pair().agent, unread={failed("n0"): 0.0})
    limit_s = late_s(agent.job)
    for late, at in ((False, limit_s - 0.01), (True, limit_s)):
        asked = evolve(agent, at=at, contact=evolve(agent.contact, read_at=0.0))
        assert (is_entry_late(asked), is_read_late(asked)) == (late, late)
