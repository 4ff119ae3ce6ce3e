"""What the entries of the journal mean: joining, losing and leaving. Rule numbers are those of docs/protocol.md."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.job.entries import (
    Entry,
    Leaving,
    Left,
    Lost,
    RestartPolicy,
    Terms,
)
from reknit.core.job.fold import fold
from reknit.core.job.job import Gathering, Running
from reknit.core.job.reasons import Departure, NodeGone
from tests.support.playbook import failed, folded, joined, lost, names, node, running, succeeded

PAIR = Terms(2, 2, RestartPolicy(max_restarts=3))
FLEX = Terms(1, 3, RestartPolicy(max_restarts=3))
BACK = joined("n0", 1), joined("n1", 1), joined("n2", 1)


# ---- joining ---------------------------------------------------------------------------------------------------------


def test_a_repeated_joining_changes_nothing() -> None:
    """The journal is at-least-once."""
    job = folded(PAIR, joined("n0"))
    assert fold(job, joined("n0")) == job


def test_a_second_agent_of_the_same_incarnation_is_ignored() -> None:
    """Rule 4: the same incarnation with another nonce is not a repetition; its speaker must come as a higher one."""
    job = running(2, PAIR, failed("n0"))
    assert fold(job, joined("n0", 1, nonce="another")) == job


def test_a_late_joining_of_a_dead_process_ousts_nobody() -> None:
    """Rule 4: n0.2 was said by a process that has not read n0.1. Its agent, if it lives, says so anew."""
    late = joined("n0", 1, 2, nonce="n0.0", seen=0)
    job = running(2, PAIR, lost("n0", by="n1"), joined("n0", 1, 1, nonce="successor", seen=0))
    assert fold(job, late) == job
    assert fold(job, evolve(late, seen=1)).is_live(late.node)


def test_a_late_joining_does_not_take_the_place_of_one_that_is_about_to_come_back() -> None:
    """n0.1 was declared lost and would read that another process has replaced it."""
    late = joined("n0", 1, 2, nonce="n0.0", seen=0)
    successor = joined("n0", 1, 1, nonce="successor", seen=0)
    job = running(3, FLEX, lost("n0", by="n1"), successor, lost("n0", by="n1", incarnation=1))
    assert fold(job, late) == job


def test_an_agent_need_not_have_read_its_own_joining() -> None:
    """It was lost twice while its `Joined` was under way. It is the same process."""
    job = running(2, PAIR, joined("n0", 1, 1, nonce="n0.0", seen=0))
    assert fold(job, joined("n0", 1, 2, nonce="n0.0", seen=0)).is_live(node("n0", 2))


def test_a_late_goodbye_of_a_dead_process_takes_nobody_along() -> None:
    """Likewise the goodbye of an incarnation that the journal has never shown."""
    job = running(2, PAIR, lost("n0", by="n1"), joined("n0", 1, 1, nonce="successor", seen=0))
    assert fold(job, Left(node("n0", 2), seen=0)) == job
    assert fold(job, Left(node("n0", 2), seen=1)).is_gone(node("n0", 1))


def test_a_member_is_back_only_for_the_gathered_round() -> None:
    """A late copy of its first `Joined` does not say that the workers of the ended round are gone."""
    job = running(2, PAIR, failed("n0"), joined("n0", 0))
    assert isinstance(job.phase, Gathering)
    assert node("n0") in job.phase.expected


def test_a_higher_incarnation_supersedes_a_member_and_ends_the_round() -> None:
    """Its host was started again, so the old workers are gone; by name alone it would be a member already."""
    job = running(2, PAIR, joined("n1", 1, incarnation=1))
    assert isinstance(job.phase, Gathering)
    assert job.why == NodeGone(node("n1"), Departure.REPLACED)
    assert (job.is_gone(node("n1")), job.is_live(node("n1", 1))) == (True, True)


@pytest.mark.parametrize(
    "entry", [joined("n1", 1), failed("n1"), succeeded("n1"), Leaving(node("n1")), Left(node("n1"))]
)
def test_the_gone_are_not_heard(entry: Entry) -> None:
    """Its entries may still be on their way; the others have gone on without it."""
    job = running(3, FLEX, lost("n1", by="n0"))
    assert fold(job, entry) == job


# ---- losing and leaving ----------------------------------------------------------------------------------------------


def test_of_two_that_accuse_each_other_the_first_stays() -> None:
    """Rule: the gone accuse nobody. Else a partition healing would lose both."""
    job = running(3, FLEX, lost("n0", by="n1"), lost("n1", by="n0"))
    assert (job.is_live(node("n0")), job.is_live(node("n1"))) == (False, True)


@pytest.mark.parametrize("entry", [lost("n0", by="n0"), lost("n0", by="stranger"), lost("stranger", by="n0")])
def test_accusations_by_or_of_nobody_are_void(entry: Lost) -> None:
    """Only the live watch, and only the live can be lost."""
    job = running(2, PAIR)
    assert fold(job, entry) == job


def test_a_lost_standby_ends_no_round() -> None:
    """Its absence changes nothing for those who run."""
    job = running(2, PAIR, joined("n2", 1), lost("n2", by="n0"))
    assert isinstance(job.phase, Running)
    assert not job.is_live(node("n2"))


def test_a_leaving_node_is_expected_until_it_has_left() -> None:
    """Its workers may use their grace to write a checkpoint; the others must not start over them."""
    job = running(3, FLEX, Leaving(node("n1")), *BACK[:1], BACK[2])
    assert isinstance(job.phase, Gathering)
    assert job.phase.expected == {node("n1")}
    assert names(fold(job, Left(node("n1")))) == "n0 n2"


def test_a_leaving_standby_is_never_seated() -> None:
    """It would be a member that stops at once."""
    job = running(2, PAIR, joined("n2", 1), Leaving(node("n2")), lost("n1", by="n0"), BACK[0])
    assert isinstance(job.phase, Gathering)
    assert job.phase.short


def test_a_goodbye_before_the_hello_closes_the_door() -> None:
    """A node that left before its `Joined` arrived must not be waited for."""
    job = folded(PAIR, Left(node("n0")), joined("n0"))
    assert not job.live


def test_a_goodbye_that_names_nothing_read_takes_nobody_along() -> None:
    """Its speaker has read no incarnation of its id, unless it says so."""
    job = running(2, Terms(2, 2))
    assert fold(job, Left(node("n0", 1))) == job


def test_a_goodbye_of_one_that_was_never_seen_takes_its_predecessor_along() -> None:
    """n0.1 came to replace n0.0 and left before its `Joined` was seen: void, it would say goodbye for ever."""
    job = running(2, Terms(2, 2), Left(node("n0", 1), seen=0))
    assert job.is_gone(node("n0"))
    assert job.is_gone(node("n0", 1))
