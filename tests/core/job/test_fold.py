"""What the entries of the journal mean: rounds and outcomes. Rule numbers are those of docs/protocol.md.

Who is in and who is out: `test_fold_membership`.
"""

from __future__ import annotations

from functools import reduce

import pytest

from reknit.core.job.entries import (
    Aborted,
    Admission,
    Admit,
    Entry,
    Failed,
    Filler,
    GaveUp,
    LastCall,
    Leaving,
    Left,
    Opened,
    RestartPolicy,
    Terms,
)
from reknit.core.job.fold import fold, fold_all
from reknit.core.job.job import Closed, Gathering, Job, Running, Unopened, Verdict
from reknit.core.job.reasons import AbortedByOperator, AllSucceeded, NodesAdmitted, TooFewNodes
from tests.support.playbook import failed, folded, joined, lost, names, node, running, succeeded

PAIR = Terms(2, 2, RestartPolicy(max_restarts=3))
FLEX = Terms(1, 3, RestartPolicy(max_restarts=3))
BACK = joined("n0", 1), joined("n1", 1), joined("n2", 1)


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_all_that_is_said_before_the_terms_is_ignored() -> None:
    """An agent that joined without knowing the terms might have joined another job."""
    job = fold_all(Job(), [joined("n0"), LastCall(0), Aborted("x")])
    assert job == Job()


def test_the_first_opening_counts() -> None:
    """Several agents open at once, and all must read the same terms."""
    job = fold_all(Job(), [Opened(PAIR, "a"), Opened(FLEX, "b")])
    assert (job.terms, job.journal) == (PAIR, "a")


def test_terms_may_ask_for_more_nodes_than_an_index_can_count() -> None:
    """The fold accepts everything: terms that nobody can meet must not end the agents that read them."""
    most = 10**30
    job = fold_all(Job(), [Opened(Terms(most, most), "a"), joined("n0"), joined("n1")])
    assert len(job.live) == 2
    assert isinstance(job.phase, Gathering)


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_opening_of_an_epoch_that_nobody_waits_for_is_ignored(epoch: int) -> None:
    """A late copy of another epoch's opening must not wipe the job."""
    assert fold(Job(), Opened(PAIR, "a", epoch)) == Job()
    job = folded(PAIR, joined("n0"))
    assert fold(job, Opened(FLEX, "a", epoch)) is job


def test_a_failed_journal_is_used_again_as_a_new_epoch() -> None:
    """A job id can be used again after a failure; all nodes of the old epoch are gone, and their seats with them."""
    job = running(2, PAIR, Aborted("x"), Opened(FLEX, "other", 1))
    assert (job.epoch, job.terms, job.journal, job.seats) == (1, FLEX, "journal", {})
    assert [o.verdict for o in job.past] == [Verdict.ABORTED]
    assert fold(job, joined("n0")) is job
    assert fold(job, joined("n0", incarnation=1)).is_live(node("n0", 1))


def test_a_succeeded_journal_stays_closed() -> None:
    """A late node must not run a finished training a second time."""
    job = running(1, Terms(), succeeded("n0"))
    assert fold(job, Opened(Terms(), "journal", 1)) is job


# ---- gathering and sealing -------------------------------------------------------------------------------------------


def test_the_first_round_is_sealed_at_the_maximum() -> None:
    """Nobody new is possible, so there is nothing to wait for."""
    assert isinstance(folded(PAIR, joined("n0")).phase, Gathering)
    assert isinstance(folded(PAIR, joined("n0"), joined("n1")).phase, Running)


def test_a_last_call_below_the_minimum_is_void() -> None:
    """A timer may fire just as a node goes; it is said again when its condition holds again."""
    job = folded(PAIR, joined("n0"), LastCall(0))
    assert isinstance(job.phase, Gathering)
    assert isinstance(fold(job, joined("n1")).phase, Running)


@pytest.mark.parametrize("round", [-1, 1, 7])
def test_a_last_call_of_another_round_is_void(round: int) -> None:
    """It ended the wait for newcomers of that round alone."""
    job = folded(FLEX, joined("n0"))
    assert fold(job, LastCall(round)) == job


def test_nobody_is_sealed_while_anyone_is_expected() -> None:
    """Rule 1: even with the maximum ready, a member's workers may still run on the old round."""
    full = running(2, PAIR, joined("n2", 1), joined("n3", 1), failed("n0"), joined("n0", 1))
    assert isinstance(full.phase, Gathering)
    assert isinstance(fold(full, LastCall(1)).phase, Gathering)
    assert names(fold(full, joined("n1", 1))) == "n0 n1"


def test_a_later_round_needs_no_last_call() -> None:
    """All are back and nobody new is known: waiting would cost every restart half a minute."""
    assert isinstance(running(2, FLEX, failed("n0"), *BACK[:2]).phase, Running)


def test_old_members_come_before_standbys_whatever_the_order() -> None:
    """A surplus node must not push out one that has the checkpoint's shard in its cache."""
    job = running(2, PAIR, joined("n2", 1), failed("n0"), *BACK[:2])
    assert names(job) == "n0 n1"
    assert job.is_live(node("n2"))


def test_a_standby_takes_a_lost_ones_place_without_joining_again() -> None:
    """Rule 8: standbys carry over at every seal."""
    job = running(2, PAIR, joined("n2", 1), failed("n0"), *BACK[:2], lost("n0", by="n1"), joined("n1", 2))
    assert names(job) == "n1 n2"


def test_a_returning_node_comes_before_a_standby_that_never_had_a_seat() -> None:
    """Members, then old seats, then the journal's order."""
    comeback = joined("n0", 1, incarnation=1)
    job = running(2, PAIR, joined("n2", 1), lost("n0", by="n1"), comeback, joined("n1", 1))
    assert names(job) == "n0.1 n1"


def test_too_few_nodes_make_the_round_gather_like_the_first() -> None:
    """Rule 9: below the minimum at any moment, the next round waits for newcomers instead of taking the first."""
    job = running(2, Terms(2, 3), lost("n1", by="n0"), joined("n0", 1), joined("n2", 1))
    assert isinstance(job.phase, Gathering)
    assert job.phase.short
    assert names(fold(job, LastCall(1))) == "n0 n2"


def test_giving_up_closes_only_if_too_few_are_still_gathered() -> None:
    """A node that joined while `GaveUp` was on its way saves the job."""
    closed = folded(PAIR, joined("n0"), GaveUp(0))
    assert closed.outcome is not None
    assert closed.outcome.why == TooFewNodes(have=1, need=2)
    assert isinstance(folded(PAIR, joined("n0"), joined("n1"), GaveUp(0)).phase, Running)
    assert isinstance(running(2, PAIR, failed("n0"), GaveUp(1)).phase, Gathering)
    trio = folded(Terms(2, 9), joined("n0"), joined("n1"), joined("n2"))
    assert fold(trio, GaveUp(0)) == trio


def test_giving_up_another_round_is_void() -> None:
    """A late copy must not close the round that succeeded in gathering."""
    assert isinstance(folded(PAIR, joined("n0"), GaveUp(1)).phase, Gathering)


@pytest.mark.parametrize("entry", [Left(node("n0")), Leaving(node("n0")), lost("n0", by="n1"), joined("n0")])
def test_nodes_that_join_together_are_taken_in_one_by_one_as_well(entry: Entry) -> None:
    """Any other entry between them has its effect."""
    journal = [Opened(Terms(9, 9), "journal"), joined("n0"), joined("n1"), entry, joined("n2"), joined("n3")]
    together, apart = fold_all(Job(), journal), reduce(fold, journal, Job())
    assert (together, list(together.live)) == (apart, list(apart.live))


# ---- failing, succeeding, closing ------------------------------------------------------------------------------------


def test_a_failure_of_another_round_is_void() -> None:
    """A late copy must not end a round that it is not about."""
    job = running(2, PAIR, failed("n0"), *BACK[:2])
    assert fold(job, failed("n0", 0)) == job
    assert fold(job, failed("n0", 2)) == job


def test_a_failure_of_a_standby_or_without_a_worker_is_void() -> None:
    """Only members have workers, and somebody must be to blame."""
    job = running(2, PAIR, joined("n2", 1))
    assert fold(job, failed("n2")) == job
    assert fold(job, Failed(node("n0"), 0, ())) == job


def test_a_repeated_failure_is_in_the_ledger_once() -> None:
    """The journal is at-least-once, and the report is made of the ledger."""
    job = running(2, PAIR, failed("n0"))
    assert fold(job, failed("n0")) == job


def test_a_success_of_a_node_that_is_back_already_is_a_late_copy() -> None:
    """It has said that it starts again; counted, it could close a job whose next round is forming."""
    job = running(2, PAIR, failed("n1"), joined("n0", 1))
    assert fold(job, succeeded("n0")) == job


def test_the_job_succeeds_when_all_members_have() -> None:
    """A standby has nothing to succeed with."""
    job = running(2, PAIR, joined("n2", 1), succeeded("n0"), succeeded("n1"))
    assert job.outcome is not None
    assert (job.outcome.verdict, job.outcome.why) == (Verdict.SUCCEEDED, AllSucceeded())


def test_a_succeeded_member_may_go() -> None:
    """Rule 10: its work is done; its loss does not undo it, and does not end the round of the others."""
    job = running(2, PAIR, succeeded("n0"), lost("n0", by="n1"))
    assert isinstance(job.phase, Running)
    assert isinstance(fold(job, succeeded("n1")).phase, Closed)


def test_a_later_failure_reopens_the_round_for_those_that_succeeded() -> None:
    """All or nothing: the collective work of the round has to be done by all again."""
    job = running(2, PAIR, succeeded("n0"), failed("n1"), *BACK[:2])
    assert (job.round, job.succeeded, names(job)) == (1, frozenset(), "n0 n1")


def test_successes_that_cross_an_admission_close_the_job() -> None:
    """`Admit` and the last `Succeeded` race: what is done is done."""
    job = running(2, Terms(1, 3), joined("n2", 1), Admit(1), succeeded("n0"), succeeded("n1"))
    assert isinstance(job.phase, Closed)


def test_closed_is_for_ever() -> None:
    """S6: whatever comes late, the outcome that one agent has reported stays true."""
    job = running(2, PAIR, succeeded("n0"), succeeded("n1"))
    late = fold_all(
        job, [failed("n0"), Aborted("x"), GaveUp(1), LastCall(1), Admit(1), joined("n9"), lost("n0", by="n1")]
    )
    assert late.outcome == job.outcome
    assert not late.is_live(node("n9"))


def test_an_operator_ends_the_job_in_any_phase() -> None:
    """Also one that hangs for want of nodes."""
    for job in (folded(PAIR), running(2, PAIR), running(2, PAIR, failed("n0"))):
        outcome = fold(job, Aborted("wrong data")).outcome
        assert outcome is not None
        assert (outcome.verdict, outcome.why) == (Verdict.ABORTED, AbortedByOperator("wrong data"))


# ---- admission -------------------------------------------------------------------------------------------------------


def test_all_waiting_standbys_are_admitted_at_once() -> None:
    """Rule 11: ten arrivals cost one round."""
    job = running(1, FLEX, joined("n1", 1), joined("n2", 1), Admit(1))
    assert job.why == NodesAdmitted((node("n1"), node("n2")))
    assert names(fold(job, BACK[0])) == "n0 n1 n2"


@pytest.mark.parametrize(
    "entries",
    [
        (Admit(1),),
        (joined("n2", 1), lost("n2", by="n0"), Admit(1)),
        (joined("n2", 1), Admit(2)),
        (joined("n2", 1), succeeded("n0"), Admit(1)),
    ],
    ids=["nobody waits", "the standby went", "another round", "a member has succeeded"],
)
def test_an_admission_without_its_condition_is_void(entries: tuple[Entry, ...]) -> None:
    """It was said by a timer, and the world may have moved on."""
    assert isinstance(running(2, FLEX, *entries).phase, Running)


def test_no_admission_into_a_full_round() -> None:
    """A surplus node would restart everybody for nothing."""
    assert isinstance(running(2, PAIR, joined("n2", 1), Admit(1)).phase, Running)


def test_a_newcomer_that_is_never_admitted_still_replaces() -> None:
    """Admission.NEVER keeps the size, not the nodes."""
    terms = Terms(1, 3, admission=Admission.NEVER)
    job = folded(terms, joined("n0"), joined("n1"), LastCall(0), joined("n2", 1))
    assert isinstance(fold(job, Admit(1)).phase, Running)
    assert names(fold_all(job, [lost("n0", by="n1"), joined("n1", 1)])) == "n1 n2"


# ---- in general ------------------------------------------------------------------------------------------------------


def test_a_filler_means_nothing() -> None:
    """It plugs the slot of a writer that died."""
    for job in (Job(), running(2, PAIR), folded(PAIR, joined("n0"))):
        assert fold(job, Filler()) is job


def test_the_fold_does_not_change_its_argument() -> None:
    """Agents compare a job with the one before: a shared mapping that changed would change the past."""
    job = running(2, PAIR)
    live, seats, gone = dict(job.live), dict(job.seats), dict(job.gone)
    fold_all(job, [lost("n0", by="n1"), joined("n1", 1), joined("n5", 1), joined("n1", 1, incarnation=1)])
    assert (job.live, job.seats, job.gone) == (live, seats, gone)
    assert isinstance(Job().phase, Unopened)


def test_a_batch_of_any_size_is_folded_to_its_end() -> None:
    """The first read of a late node brings thousands of entries."""
    job = fold_all(Job(), [Opened(Terms(1, 1), "j"), *[Filler()] * 998, joined("n0")])
    assert job.phase == Running(0)
