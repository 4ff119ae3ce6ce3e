"""Founding a journal again whose store has lost it: what an agent does at a store, and which agent founds (rule 16)."""

from __future__ import annotations

from itertools import permutations
from math import inf

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from reknit.core.job.entries import Aborted, Entry, Leaving, Opened, RestartPolicy, Succeeded, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import (
    DEAD_S,
    ELDERS_S,
    OFFERED_S,
    OFFERS_S,
    TURNS,
    Candidate,
    Choice,
    FoundingMove,
    Held,
    Life,
    Offer,
    Origin,
    choice,
    common,
    has_sealed,
    judged,
    looked,
    moved,
    next_life,
    offer_of,
    overruled,
    waits_s,
)
from reknit.core.job.job import Closed, Gathering, Job, Running
from reknit.core.job.reasons import BudgetSpent
from tests.support.playbook import failed, folded, joined, lost, names, node, running

PAIR = Terms(2, 2)


def followed(origin: Origin, name: str, records: int, digest: str = "") -> Origin:
    """The life that goes on from this one after so many of its records."""
    life = Life(origin.life.journal, name)
    return Origin(life, origin.position + records, digest, origin.number + 1, origin.line)


# ---- the lives of a journal ----

ROOT = Origin(Life("old"))


@st.composite
def trees(draw: st.DrawFn) -> list[Origin]:
    """Lives of one journal. Each goes on from one of those before it."""
    found = [ROOT]
    for number in range(draw(st.integers(1, 6))):
        found.append(followed(draw(st.sampled_from(found)), f"life {number}", draw(st.integers(0, 3))))
    return found


def writers(origin: Origin, up_to: int) -> list[str]:
    """For each position, the name of the life in which its record was written."""
    return [[name for name, begins in origin.line if begins <= position][-1] for position in range(up_to)]


def parted_at(one: Origin, other: Origin) -> float:
    """The first position at which the two lives have records of different lives."""
    up_to = max(one.position, other.position) + 1
    pairs = zip(writers(one, up_to), writers(other, up_to), strict=True)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), inf)


@given(trees(), st.data())
def test_two_lives_have_in_common_what_was_written_before_they_parted(tree: list[Origin], data: st.DataObject) -> None:
    """Whichever way they parted: one goes on from the other, or both from a third."""
    one, other = data.draw(st.sampled_from(tree)), data.draw(st.sampled_from(tree))
    assert common(one, other) == common(other, one) == parted_at(one, other)


def test_a_life_that_this_agent_has_not_met_may_lie_between() -> None:
    """The agent has read a life that begins at 10. The other life goes on from one that the agent does not know."""
    mine, unknown = followed(ROOT, "mine", 10), followed(ROOT, "unknown", 12)
    assert common(mine, followed(unknown, "theirs", 2)) == 10


def test_only_the_latest_lives_are_named() -> None:
    """The header stays small. An agent that has missed all that are named does not know what it has in common."""
    origin, early = ROOT, followed(ROOT, "early", 1)
    for number in range(70):
        origin = followed(origin, f"life {number}", 1)
    assert len(origin.line) == 64
    assert common(ROOT, origin) == common(origin, early) == -1
    assert common(origin, followed(origin, "next", 5)) == origin.position + 5


# ---- what an agent does at a store ----

GATHERED = folded(PAIR, joined("n0"))
SEALED = running(2, PAIR)
OVER = running(2, PAIR, Aborted("over"))
SUCCEEDED = running(1, Terms(), Succeeded(node("n0"), 0))
SECOND_EPOCH = fold_all(OVER, (Opened(PAIR, "x", 1),))

YOUNG = Origin(Life("young"))
AT_10 = followed(ROOT, "goes on at 10", 10, "ten")
"""The agent has read at least so far, and goes on."""
AT_9 = followed(ROOT, "goes on at 9", 9, "nine")
THROUGH_8 = followed(followed(ROOT, "missed", 8, "eight"), "goes on at 12", 4, "twelve")
"""The agent has missed the life before this one."""


def held(job: Job = SEALED, position: int = 10, origin: Origin = ROOT, **fields: bool) -> Held:
    return Held(origin, position, job, "ten", **fields)


NOTHING, MORE = held(Job(), 0), held(has_unfolded=True)
STORIES = {
    # the agent has read nothing
    "a job begins": (None, None, "", Choice.BEGIN),
    "an agent comes to a job that runs": (None, ROOT, "", Choice.ENTER),
    "an agent comes to a journal that was founded again": (None, AT_10, "", Choice.ENTER),
    "the store was lost before anybody said anything": (NOTHING, None, "", Choice.BEGIN),
    "the store was lost before this agent read anything, and another job has begun": (NOTHING, YOUNG, "", Choice.ENTER),
    "the young journal that this agent has read makes way, and it goes on as if it had read nothing": (
        held(Job(), 0, YOUNG), ROOT, "", Choice.ENTER),
    "it was about to read the life that others have founded, and that store is lost too": (
        held(Job(), 0, AT_10), None, "", Choice.BEGIN),
    # the journal is there
    "a connection was lost": (held(), ROOT, "ten", Choice.ENTER),
    "a connection was lost while the agent folds": (MORE, ROOT, "", Choice.ENTER),
    "a connection was lost before anything was read": (NOTHING, ROOT, "", Choice.ENTER),
    "a connection was lost in a life that was founded again": (held(origin=AT_10), AT_10, "", Choice.ENTER),
    # the store has lost the journal
    "the host was started again, and the workers run": (held(), None, "", Choice.FOUND),
    "the host was started again while nodes gathered": (held(GATHERED, 2), None, "", Choice.FOUND),
    "the host was started again, and the job is over for this agent": (held(OVER), None, "", Choice.FOUND),
    "the agent was given the seal, and its workers may start in the next moment": (MORE, None, "", Choice.WAIT),
    "it was given its first entries": (held(Job(), 0, has_unfolded=True), None, "", Choice.WAIT),
    # another agent has founded it again
    "an agent with the same entries has founded it": (held(), AT_10, "ten", Choice.ENTER),
    "an agent has founded it that has read more": (held(position=8), AT_10, "", Choice.ENTER),
    "an agent that has read from the middle on knows no digest": (held(), AT_10, "", Choice.ENTER),
    "the agents with more entries came too late": (held(), AT_9, "nine", Choice.END),
    "they came too late, and no round was sealed": (held(GATHERED), AT_9, "nine", Choice.ANEW),
    "the two have read different entries before the same position": (held(), AT_10, "other", Choice.END),
    "this agent missed a life, which goes on from less than it has read": (held(), THROUGH_8, "", Choice.END),
    "others have founded it without the end that this agent has read": (held(OVER), AT_9, "nine", Choice.END),
    "this agent missed a life, and has read nothing that is not in it": (held(position=8), THROUGH_8, "", Choice.ENTER),
    "two agents have founded it in two stores": (held(origin=AT_10, position=11), AT_9, "", Choice.END),
    "what the agent was given may not be in the other life": (MORE, AT_10, "", Choice.WAIT),
    # another journal has begun
    "the host does not know that its store was lost, and workers run": (held(), YOUNG, "", Choice.OBJECT),
    "the workers have ended, and the next round is gathered": (
        held(running(2, PAIR, failed("n0"))), YOUNG, "", Choice.OBJECT),
    "in a second epoch no round was sealed yet": (held(SECOND_EPOCH), YOUNG, "", Choice.OBJECT),
    "no round was sealed in what this agent has read": (held(GATHERED, 2), YOUNG, "", Choice.ANEW),
    "the seal may be in what this agent was given": (held(GATHERED, 2, has_unfolded=True), YOUNG, "", Choice.WAIT),
    "the job has failed, and its workers may still be stopping": (held(OVER), YOUNG, "", Choice.OBJECT),
    "the job has succeeded, and somebody runs it again": (held(SUCCEEDED), YOUNG, "", Choice.END),
    "the young journal was founded again itself": (held(), followed(YOUNG, "again", 2), "", Choice.OBJECT),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_what_an_agent_does_at_a_store(story: str) -> None:
    """Each agent decides alone, and all decisions together must keep one group of workers."""
    mine, found, known, expected = STORIES[story]
    assert choice(mine, found, known) is expected


def test_the_stories_reach_every_choice() -> None:
    """A choice without a story is not held by anything."""
    assert {expected for *_, expected in STORIES.values()} == {*Choice}


def test_an_agent_that_cannot_go_on_begins_anew_only_if_it_can_have_no_workers() -> None:
    """Nor does it if it has read the end of the job: its result is what it has read."""
    jobs = (SEALED, OVER, SECOND_EPOCH, folded(PAIR, joined("n0"), Aborted("early")), GATHERED)
    assert [overruled(held(job)) for job in jobs] == [Choice.END] * 4 + [Choice.ANEW]


def test_a_round_was_sealed_in_this_epoch_or_before() -> None:
    """Workers may run because of it. A job that is given up in its first round has none."""
    jobs = (Job(), GATHERED, SEALED, running(2, PAIR, failed("n0")), OVER, SECOND_EPOCH)
    assert [has_sealed(job) for job in jobs] == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("is_remembered", "has_offers", "expected"),
    [
        (False, False, 0.0),
        (True, False, ELDERS_S),
        (False, True, ELDERS_S + OFFERED_S),
        (True, True, ELDERS_S + OFFERED_S),
    ],
)
def test_how_long_a_host_waits(is_remembered: bool, has_offers: bool, expected: float) -> None:
    """A new job begins at once. A host that was here before gives others the time to come, and who has come the time to
    found the journal again."""
    assert waits_s(is_remembered=is_remembered, has_offers=has_offers) == expected


# ---- which offer is the best ----


def test_the_order_of_offers() -> None:
    """(1) The host is started again twice. (2) b was cut off in between, and has read the first life up to 10. (3) c is
    at 9 in the second life, which has gone on from 8. If b won, the healthy workers of c would end. Workers count most:
    a life of another journal has none, however often it was founded."""
    best_first = (
        Offer(True, 1, 9, "c"),
        Offer(True, 0, 10, "a"),
        Offer(True, 0, 10, "b"),
        Offer(True, 0, 9, "a"),
        Offer(False, 7, 100, "a"),
        Offer(False, 0, 100, "a"),
    )
    for i, one in enumerate(best_first):
        assert [one.is_better_than(other) for other in best_first] == [False] * (i + 1) + [True] * (5 - i)
        assert one.is_better_than(None)


OFFERS = st.builds(Offer, st.booleans(), st.integers(0, 2), st.integers(0, 2), st.sampled_from("abc"))


@given(st.lists(OFFERS, unique=True, max_size=4))
def test_all_agents_agree_which_offer_is_the_best(offers: list[Offer]) -> None:
    """Whichever they see first. Otherwise two of them would replace each other's offer for ever."""
    for order in permutations(offers):
        best: Offer | None = None
        for offer in order:
            best = offer if offer.is_better_than(best) else best
        assert best == min(offers, key=lambda o: (not o.has_workers, -o.number, -o.position, o.name), default=None)


@pytest.mark.parametrize(
    ("job", "has_workers"),
    [(GATHERED, False), (SEALED, True), (OVER, True), (running(2, PAIR, failed("n0")), True), (SECOND_EPOCH, True)],
)
def test_an_offer_tells_what_its_agent_has_read(job: Job, has_workers: bool) -> None:
    """Between two rounds workers may still be stopping, and so they may when the job is over. An agent that has read
    the end of the job knows more than one that has not."""
    assert offer_of(held(job, 7, AT_9), "mine") == Offer(has_workers, 1, 7, "mine")


# ---- who founds the journal, and when ----

MINE, BETTER, WORSE = Offer(True, 0, 5, "m"), Offer(True, 0, 9, "b"), Offer(True, 0, 3, "w")


class Looks:
    """An agent that looks at the best offer again and again."""

    def __init__(self, offer: Offer = MINE, round_trip_s: float = 0.0) -> None:
        self.candidate = Candidate(offer)
        self.round_trip_s = round_trip_s

    def at(self, at: float, best: Offer | None) -> FoundingMove:
        """What it does after a look at this time. In these tests the clock begins anywhere."""
        self.candidate, move = looked(self.candidate, best, 1000.0 + at, self.round_trip_s)
        return move

    def founds_after(self, at: float, best: Offer) -> float:
        """How many seconds after `at` this agent founds the journal, in steps of 0.1 s. Nothing changes meanwhile."""
        for tenths in range(200):
            if self.at(at + tenths * 0.100001, best) is FoundingMove.FOUND:
                return tenths / 10
        raise AssertionError("it never does")


def test_the_first_agent_offers_at_once() -> None:
    """The others see that somebody has come."""
    assert Looks().at(0, None) is FoundingMove.OFFER


def test_the_best_waits_for_those_who_have_not_come() -> None:
    """c would found the journal without the seal of b, which comes a second later. Nobody counts who has come: c may
    come twice, and may not know b."""
    looks = Looks()
    looks.at(0, None)
    assert looks.founds_after(0.0, MINE) == pytest.approx(OFFERS_S)


def test_the_wait_begins_when_the_own_offer_is_seen_as_the_best() -> None:
    """A better offer vanished, for example because the store was lost again. Whoever has come to this store had no time
    to offer anything."""
    looks = Looks()
    looks.at(0, BETTER)
    assert looks.at(2.5, None) is FoundingMove.OFFER
    assert looks.founds_after(2.6, MINE) == pytest.approx(OFFERS_S)


def test_a_better_offer_is_waited_for() -> None:
    """Its agent founds the journal. What it has read must not be undone."""
    looks = Looks()
    assert looks.at(0, BETTER) is FoundingMove.LOOK
    assert looks.at(DEAD_S - 0.1, BETTER) is FoundingMove.LOOK


def test_the_offer_of_a_dead_agent_is_replaced_and_then_others_have_time_again() -> None:
    """If nobody replaced it, all workers would end at the store timeout. Without the second wait a third agent would
    end, whose offer was hidden by the dead one."""
    looks = Looks()
    assert looks.at(0, BETTER) is FoundingMove.LOOK
    assert looks.at(DEAD_S, BETTER) is FoundingMove.OFFER
    assert looks.founds_after(DEAD_S, MINE) == pytest.approx(OFFERS_S)


def test_whoever_was_hidden_by_a_dead_offer_comes_forward() -> None:
    """`MINE` replaces the dead offer. The third agent is better than `MINE`, and founds the journal after a wait of its
    own: a fourth may have been hidden as well."""
    third = Looks(Offer(True, 0, 7, "t"))
    assert third.at(0, BETTER) is FoundingMove.LOOK
    assert third.at(DEAD_S, MINE) is FoundingMove.OFFER
    assert third.founds_after(DEAD_S, third.candidate.offer) == pytest.approx(OFFERS_S)


def test_an_offer_that_changes_is_that_of_a_live_agent() -> None:
    """The time counts anew for each best offer."""
    looks, best = Looks(), Offer(True, 1, 1, "another")
    assert looks.at(0, BETTER) is FoundingMove.LOOK
    assert looks.at(DEAD_S - 0.1, best) is FoundingMove.LOOK
    assert looks.at(2 * DEAD_S - 0.2, best) is FoundingMove.LOOK
    assert looks.at(2 * DEAD_S - 0.1, best) is FoundingMove.OFFER


def test_a_worse_offer_in_the_place_of_the_own_one_is_replaced_again() -> None:
    """Its agent took this one for dead, for example because this agent was suspended. Others may have come meanwhile.
    So it waits anew."""
    looks = Looks()
    looks.at(0, None)
    assert looks.at(0.1, MINE) is FoundingMove.LOOK
    assert looks.at(DEAD_S + 1, WORSE) is FoundingMove.OFFER
    assert looks.founds_after(DEAD_S + 1, MINE) == pytest.approx(OFFERS_S)


def test_an_offer_that_was_not_written_is_offered_again() -> None:
    """Another agent was faster, with something worse. All come at the same time when their store is back."""
    looks = Looks()
    assert looks.at(0, None) is FoundingMove.OFFER
    assert looks.at(0.1, WORSE) is FoundingMove.OFFER
    assert looks.at(0.2, MINE) is FoundingMove.LOOK


@pytest.mark.parametrize("round_trip_s", [0.5, 3.0])
def test_a_store_that_is_far_away_takes_longer(round_trip_s: float) -> None:
    """The wait is for others, whose offers are on their way as long. Founding a journal takes some round trips, and its
    agent must not count as dead meanwhile."""
    far = Looks(round_trip_s=round_trip_s)
    far.at(0, None)
    assert far.founds_after(0.0, MINE) == pytest.approx(OFFERS_S + round_trip_s)
    far = Looks(round_trip_s=round_trip_s)
    dead_s = DEAD_S + TURNS * round_trip_s
    assert far.at(0, BETTER) is FoundingMove.LOOK
    assert far.at(dead_s - 0.1, BETTER) is FoundingMove.LOOK
    assert far.at(dead_s, BETTER) is FoundingMove.OFFER


# ---- a young journal makes way ----


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([Opened(PAIR, "x"), joined("n0"), None, joined("n1")], True),
        ([Opened(PAIR, "x"), joined("n0"), joined("n1"), None], False),
        ([Opened(PAIR, "x"), joined("n0")], None),
        ([None], True),
    ],
)
def test_a_veto_before_the_seal_makes_a_young_journal_void(entries: list[Entry | None], expected: bool | None) -> None:
    """After the seal it means nothing: workers may run. All who read the journal find the same."""
    job, verdict = Job(), None
    for entry in entries:
        if verdict is None:
            job, verdict = judged(job, entry)
    assert verdict is expected


# ---- the fold with which another life begins ----


def test_a_life_has_a_higher_number_than_all_that_its_founder_knows() -> None:
    """So its offers are better than those of agents that have missed it."""
    assert next_life(held(origin=AT_10, position=12), "next") == followed(AT_10, "next", 2, "ten")
    assert next_life(held(), "next", number=7).number == 8


def test_whoever_has_joined_joins_again() -> None:
    """b has joined round 1 in the life before. The round may have been sealed there, and workers dial the port of b. A
    node that does not come is lost there like any other, and those that come stay who they are."""
    job = running(3, None, failed("n0"), joined("n1", 1), joined("n3", 1))
    base = moved(job)
    assert isinstance(base.phase, Gathering)
    assert base.phase.expected == {node("n0"), node("n1"), node("n2"), node("n3")}
    assert list(base.live) == list(job.live)
    assert fold_all(base, [joined("n3", 1), joined("n1", 1)]) == job


def test_before_the_first_round_everybody_joins_again() -> None:
    """It is the same with a round that has no members yet."""
    base = moved(folded(Terms(1, 3), joined("n0"), joined("n1")))
    assert isinstance(base.phase, Gathering)
    assert base.phase.expected == {node("n0"), node("n1")}
    again = fold_all(base, [joined("n0"), joined("n1", port=7)])
    assert isinstance(again.phase, Gathering)
    assert not again.phase.expected
    assert again.live[node("n1").id].port == 7


def test_a_node_that_does_not_come_is_missed_by_the_others() -> None:
    """The round of the life before may run with it. Only when it is lost may the others go on without it."""
    job = moved(folded(Terms(1, 3), joined("n0"), joined("n1")))
    job = fold_all(job, [joined("n1")])
    assert isinstance(job.phase, Gathering)
    assert job.phase.expected == {node("n0")}
    assert fold_all(job, [lost("n0", by="n1")]).live.keys() == {node("n1").id}


def test_a_round_that_runs_goes_on_as_it_is() -> None:
    """Its workers do."""
    for job in (SEALED, folded(PAIR), Job(), OVER, SUCCEEDED):
        assert moved(job) == job


def test_standbys_come_back_as_new_incarnations() -> None:
    """n2 has succeeded, was declared lost, and is a standby with seat 0. The next round may have been sealed with it in
    the life before, and its workers dial the port of n2."""
    job = running(2, Terms(1, 2), joined("n2", 1))
    base = moved(job)
    assert (job.is_live(node("n2")), base.is_live(node("n2")), base.is_gone(node("n2"))) == (True, False, True)
    assert (base.phase, names(base)) == (Running(0), names(job))
    assert fold_all(base, [joined("n2", 1, seen=-1)]) == base
    assert fold_all(base, [joined("n2", 1, incarnation=1)]).is_live(node("n2", 1))


def test_a_member_that_is_about_to_leave_is_still_a_member() -> None:
    """Its `Leaving` counts in the next life too."""
    job = running(2, Terms(1, 2), Leaving(node("n1")))
    assert moved(job).leaving == job.leaving


def test_a_node_that_was_back_excuses_no_failure_in_the_next_life() -> None:
    """n3 is a standby, and n2 has joined the next round already. Both are expected again. If one of them goes now, that
    is not why the worker of n1 has failed before."""
    terms = Terms(2, 3, RestartPolicy(0))
    job = running(3, terms, joined("n3", 1), failed("n1"), joined("n2", 1))
    for gone in ("n3", "n2"):
        for base in (job, moved(job)):
            back = [joined(name, 1) for name in ("n0", "n1", "n2", "n3") if name != gone]
            end = fold_all(base, [lost(gone, by="n0"), *back])
            assert isinstance(end.phase, Closed), gone
            assert isinstance(end.phase.outcome.why, BudgetSpent)


def test_a_candidate_that_has_not_looked_has_seen_no_best_offer() -> None:
    """The first look begins the time of the best offer, whatever the clock shows."""
    candidate, move = looked(Candidate(MINE), BETTER, 1e6)
    assert (candidate, move) == (evolve(Candidate(MINE), best=BETTER, best_at=1e6), FoundingMove.LOOK)
