"""What the end of a round costs, and which failure is to blame."""

from __future__ import annotations

import pytest
from attrs import evolve

from reknit.core.job.entries import Admit, Entry, Failed, LastCall, Leaving, Left, Opened, RestartPolicy, Steady, Terms
from reknit.core.job.fold import fold, fold_all
from reknit.core.job.hanging import blamed
from reknit.core.job.job import Closed, Gathering, Job, Running
from reknit.core.job.reasons import BudgetSpent, Departure, NodeGone, Unstable, WorkerFailed
from reknit.core.job.restart import Sequel, backoff_s, is_echo, root_cause, root_cause_of, sequel, suggests_hang
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure
from tests.support.playbook import failed, failure, joined, lost, node, running

TERMS = Terms(min_nodes=1, max_nodes=3, restarts=RestartPolicy(max_restarts=2))
BACK = joined("n0", 1), joined("n1", 1), joined("n2", 1)


def counted(job: Job) -> tuple[int, int]:
    return job.spent, job.unspent


def test_several_failures_of_one_round_spend_one_restart() -> None:
    """A crash of one worker is followed by crashes of its peers: one incident, one restart."""
    job = running(3, TERMS, failed("n0"), failed("n1"), failed("n2"), *BACK)
    assert counted(job) == (1, 0)


def test_nothing_is_counted_while_anybody_is_expected() -> None:
    """The missing one may be dead, and then the failure was an echo of its death."""
    job = running(3, TERMS, failed("n0"), *BACK[:2])
    assert counted(job) == (0, 0)


@pytest.mark.parametrize(("renews", "counts"), [(True, (1, 2, 3)), (False, (3, 0, 3))])
def test_a_steady_round_gives_restarts_back_if_the_terms_say_so(renews: bool, counts: tuple[int, int, int]) -> None:
    """Those that were given back are counted beside the others, so that a round has a number for its workers."""
    job = running(1, Terms(restarts=RestartPolicy(max_restarts=5, renews=renews)))
    for round in range(2):
        job = fold_all(job, (failed("n0", round), joined("n0", round + 1)))
    assert (job.spent, job.renewed, job.restarts) == (2, 0, 2)
    assert fold(job, Steady(1)) == job, "another round runs"
    job = fold_all(job, (Steady(2), failed("n0", 2), joined("n0", 3)))
    assert (job.spent, job.renewed, job.restarts) == counts


def test_a_loss_before_or_after_the_failures_of_others_excuses_them() -> None:
    """A node's death crashes its peers' collectives first: the loss is the cause, in whichever order they are said."""
    before = running(3, TERMS, lost("n2", by="n0"), failed("n0"), *BACK[:2])
    after = running(3, TERMS, failed("n0"), lost("n2", by="n1"), *BACK[:2])
    assert (counted(before), counted(after)) == ((0, 1), (0, 1))


def test_leaving_and_being_replaced_excuse_like_a_loss() -> None:
    """Preemption must not use up the restarts that are meant for bugs."""
    leaving = running(3, TERMS, failed("n0"), Leaving(node("n2")), *BACK[:2], Left(node("n2")))
    replaced = running(3, TERMS, failed("n0"), joined("n2", 0, incarnation=1), *BACK[:2])
    assert (counted(leaving), counted(replaced)) == ((0, 1), (0, 1))


def test_a_node_that_failed_itself_before_it_went_excuses_nobody() -> None:
    """Else a worker that takes its whole host down with it would be restarted for ever."""
    job = running(3, TERMS, failed("n2"), lost("n2", by="n0"), *BACK[:2])
    assert counted(job) == (1, 0)
    job = running(3, TERMS, failed("n2"), Leaving(node("n2")), Left(node("n2")), *BACK[:2])
    assert counted(job) == (1, 0)


def test_a_loss_after_a_node_is_back_excuses_nobody() -> None:
    """Its workers were gone already, so its death cannot have crashed anybody's."""
    job = running(3, TERMS, failed("n0"), joined("n2", 1), lost("n2", by="n1"), *BACK[:2])
    assert counted(job) == (1, 0)


def test_a_loss_excuses_also_if_its_node_came_with_a_late_joined() -> None:
    """The `Joined` of a new node may land in the next epoch, and name a round that is far away there."""
    job = fold_all(Job(), [Opened(TERMS, "j"), joined("n0"), joined("n1"), joined("n2", 1), LastCall(0)])
    job = fold_all(job, [failed("n0"), lost("n2", by="n1"), *BACK[:2], LastCall(1)])
    assert counted(job) == (0, 1)


def test_a_failure_during_an_admission_spends_nothing() -> None:
    """Workers that are being stopped for a newcomer may crash on their peers' going."""
    terms = Terms(min_nodes=1, max_nodes=3)
    job = running(2, terms, joined("n2", 1), Admit(1), failed("n0"), *BACK[:2])
    assert isinstance(job.phase, Running)
    assert counted(job) == (0, 1)


def test_the_budget_is_the_whole_jobs() -> None:
    """As in torchelastic: any member's failure takes from the same restarts."""
    terms = Terms(2, 2, RestartPolicy(max_restarts=1))
    job = running(2, terms, failed("n0"), *BACK[:2], failed("n1", 1), joined("n0", 2), joined("n1", 2))
    assert isinstance(job.phase, Closed)
    assert job.phase.outcome.why == BudgetSpent(1, WorkerFailed(node("n1"), failure()))
    assert counted(job) == (1, 0)


def test_unspent_rounds_are_capped() -> None:
    """A node that dies every round would let the job go on for ever without doing anything."""
    terms = Terms(1, 3, RestartPolicy(max_unspent=1))
    job = running(3, terms, lost("n2", by="n0"), *BACK[:2], lost("n1", by="n0"), joined("n0", 2))
    assert isinstance(job.phase, Closed)
    assert job.phase.outcome.why == Unstable(max_unspent=1)


def test_no_restart_is_the_default() -> None:
    """torchrun's --max-restarts is 0."""
    job = running(1, Terms(), failed("n0"), joined("n0", 1))
    assert isinstance(job.phase, Closed)


SPENT = Terms(1, 3, RestartPolicy(max_restarts=0))
CAPPED = Terms(1, 3, RestartPolicy(max_restarts=2, max_unspent=0))
NOTHING_LEFT = Terms(1, 3, RestartPolicy(max_restarts=0, max_unspent=0))


@pytest.mark.parametrize(
    ("terms", "entries", "answer"),
    [
        (TERMS, (), Sequel.ROUND),
        (TERMS, (failed("n0"),), Sequel.ROUND),
        (TERMS, (failed("n0"), lost("n1", by="n2")), Sequel.ROUND),
        (SPENT, (), Sequel.UNKNOWN),
        (SPENT, (failed("n0"),), Sequel.UNKNOWN),
        (SPENT, (failed("n0"), lost("n1", by="n2")), Sequel.ROUND),
        (SPENT, (lost("n1", by="n2"), failed("n0")), Sequel.ROUND),
        (CAPPED, (), Sequel.UNKNOWN),
        (CAPPED, (failed("n0"),), Sequel.UNKNOWN),
        (CAPPED, (lost("n1", by="n2"),), Sequel.END),
        (CAPPED, (failed("n0"), Leaving(node("n1"))), Sequel.END),
        (NOTHING_LEFT, (), Sequel.END),
        (NOTHING_LEFT, (failed("n0"),), Sequel.END),
    ],
)
def test_what_follows_is_known_as_soon_as_nothing_can_change_it(
    terms: Terms, entries: tuple[Entry, ...], answer: Sequel
) -> None:
    """Whoever stops workers would like to know before the judgement whether they are started again. The answer must
    hold, so an excuse that may still come makes it unknown."""
    assert sequel(running(3, terms, *entries), 0) is answer


RENEWED = Terms(1, 3, RestartPolicy(max_restarts=1, max_unspent=0, renews=True))


@pytest.mark.parametrize(
    ("entries", "answer"),
    [((), Sequel.UNKNOWN), ((Steady(1),), Sequel.UNKNOWN), ((failed("n0", 1),), Sequel.END)],
)
def test_a_round_that_runs_may_yet_give_restarts_back(entries: tuple[Entry, ...], answer: Sequel) -> None:
    """Its end is far, and may cost nothing then. A round that has ended gives nothing back."""
    job = running(3, RENEWED, failed("n0"), *BACK, *entries)
    assert sequel(job, 1) is answer


def test_what_follows_is_known_of_every_round() -> None:
    """Of an odd round as well as of an even one."""
    job = running(3, Terms(1, 3, RestartPolicy(max_restarts=9)))
    for round in range(4):
        assert sequel(job, round) is Sequel.ROUND
        ended = fold_all(job, [failed("n0", round)])
        assert sequel(ended, round) is Sequel.ROUND
        job = fold_all(ended, [joined(name, round + 1) for name in ("n0", "n1", "n2")])


def test_what_follows_for_a_node_that_a_judgement_has_passed_over_is_unknown() -> None:
    """The others went on without it. They may succeed before it is taken in again."""
    job = running(3, TERMS, lost("n2", by="n0"), *BACK[:2])
    assert (job.round, sequel(job, 0), sequel(job, 1)) == (1, Sequel.UNKNOWN, Sequel.ROUND)


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/…/pair.cc:534] Connection closed by peer [127.0.1.1]:4242",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "DistBackendError: NCCL communicator was aborted on rank 3",
        "DistNetworkError: recvValue failed on SocketImpl(fd=3)",
        "RuntimeError: [/…/unbound_buffer.cc:83] Timed out waiting 4000ms for recv operation to complete",
        "DistStoreError: wait timeout after 300000ms, keys: /worker/group_info",
        "DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.",
    ],
)
def test_what_a_dead_peer_causes_is_an_echo(message: str) -> None:
    """The user wants the exception that began it, not the 63 that followed."""
    assert is_echo(failure(message=message))


def test_a_workers_own_exception_is_no_echo() -> None:
    """Even if its last output mentions a connection: the exception is the better witness."""
    own = WorkerFailure(0, 0, 1, message="ValueError: loss is NaN", stderr=("retrying: connection reset",))
    assert not is_echo(own)
    assert is_echo(WorkerFailure(0, 0, 1, stderr=("connection reset",)))
    assert [is_echo(WorkerFailure(0, 0, 1, stderr=("connection reset", *"." * n))) for n in (4, 5)] == [True, False]


def test_a_worker_that_reknit_has_ended_is_no_echo() -> None:
    """What it has printed before is not why it was ended."""
    hung = WorkerFailure(0, 0, -6, stderr=("connection reset",), cause=NoProgress(30))
    assert not is_echo(hung)


def test_only_the_end_of_the_output_is_looked_at() -> None:
    """A reset that was survived long ago says nothing about the death."""
    assert not is_echo(WorkerFailure(0, 0, 1, stderr=("connection reset", "a", "b", "c", "d", "e")))


def test_a_time_limit_of_torch_suggests_that_another_worker_hangs() -> None:
    """A broken connection does not: that worker is dead."""
    assert suggests_hang(failure(message="Timed out waiting 4000ms for recv operation to complete"))
    assert suggests_hang(evolve(failure(), cause=NoProgress(30)))
    assert not suggests_hang(failure(message="Connection closed by peer"))
    assert not suggests_hang(evolve(failure(), cause=TimerExpired("t")))


def test_the_root_is_the_first_that_is_no_echo_else_the_first() -> None:
    """Somebody is always blamed."""
    echo, other, own = failure(0, message="broken pipe"), failure(1, message="socket closed"), failure(2)
    assert root_cause_of([echo, own]) == own
    assert root_cause_of([echo, other]) == echo


def hung(step: int | None = None, for_s: float = 30.0, *, since_start: bool = False) -> WorkerFailure:
    return evolve(failure(), cause=NoProgress(for_s, step, since_start))


@pytest.mark.parametrize(
    ("behind", "others"),
    [
        (hung(3), [hung(5), hung(4)]),
        (hung(3, 29.2), [hung(4, 30.0)]),  # it was slow, and the others have waited for it since before
        (hung(3, 30.0), [hung(3, 29.2)]),
        (hung(None, 30.0), [hung(None, 29.2)]),
        (hung(5, 30.0), [hung(None, 29.2), hung(4, 29.2)]),  # steps of some workers say nothing
        (hung(None, 29.2, since_start=True), [hung(0, 30.0)]),
    ],
)
def test_of_workers_without_progress_the_one_behind_is_to_blame(
    behind: WorkerFailure, others: list[WorkerFailure]
) -> None:
    """The others wait for it, and which of them is found first is chance: on one node and on several."""
    for failures in ([behind, *others], [*others, behind]):
        assert root_cause_of(failures) == behind
        ledger = [Failed(node(f"n{i}"), 0, (one,)) for i, one in enumerate(failures)]
        root = root_cause(ledger)
        assert (root.node, root.failure) == (node(f"n{failures.index(behind)}"), behind)
        assert root.hang == blamed(failures)[1]


def test_workers_without_progress_may_wait_for_one_that_failed_before() -> None:
    """Its failure is in the journal first. A failure that follows is a consequence."""
    own, behind = failure(1, message="ValueError: x"), hung(3)
    assert root_cause_of([own, hung(5), behind]) == own
    assert root_cause_of([hung(5), own, behind]) == behind
    assert root_cause_of([failure(0, message="connection reset"), hung(5), behind]) == behind


def test_the_root_is_found_across_nodes_in_the_journals_order() -> None:
    """All agents must blame the same worker, and the echo's agent may be the faster one."""
    echo, own = failure(0, message="connection reset"), failure(0, rank=1, message="ValueError: x")
    ledger = [Failed(node("n0"), 0, (echo,)), Failed(node("n1"), 0, (own,)), failed("n2")]
    assert root_cause(ledger) == WorkerFailed(node("n1"), own)


def test_the_outcome_blames_the_root_and_keeps_all_failures() -> None:
    """What came first in the journal ended the round, but need not be what the user has to fix."""
    echo, own = failure(0, message="connection reset"), failure(0, rank=1, message="ValueError: x")
    job = running(2, Terms(2, 2), failed("n0", 0, echo), failed("n1", 0, own), *BACK[:2])
    assert job.outcome is not None
    assert job.outcome.why == BudgetSpent(0, WorkerFailed(node("n1"), own))
    assert [f.node.id for f in job.outcome.failures] == ["n0", "n1"]


@pytest.mark.parametrize(("spent", "wait"), [(0, 2.0), (1, 4.0), (2, 8.0), (3, 10.0), (4, 10.0)])
def test_backoff_doubles_up_to_its_maximum(spent: int, wait: float) -> None:
    """A job that crashes at once must not hammer the cluster, and must not sleep for ever either."""
    policy = RestartPolicy(max_restarts=5, backoff_s=2.0, backoff_max_s=10.0)
    assert backoff_s(Job(terms=Terms(restarts=policy), spent=spent, why=WorkerFailed(node("n0"), failure()))) == wait


def test_backoff_of_a_thousand_restarts_is_a_number() -> None:
    """The fold and the step never raise, whatever the policy says."""
    policy = RestartPolicy(max_restarts=5000, backoff_s=1.0)
    assert backoff_s(Job(terms=Terms(restarts=policy), spent=4000, why=WorkerFailed(node("n0"), failure()))) == 60.0


def test_nobody_waits_for_a_restart_that_will_not_be() -> None:
    """A spent budget must be told at once, and a membership change is nobody's fault."""
    policy = RestartPolicy(max_restarts=1, backoff_s=2.0)
    why = WorkerFailed(node("n0"), failure())
    assert backoff_s(Job(terms=Terms(restarts=policy), spent=1, why=why)) == 0.0
    assert backoff_s(running(2, Terms(1, 2, policy), lost("n1", by="n0"))) == 0.0


def test_the_reason_of_a_restart_is_the_root_cause_not_the_first_word() -> None:
    """Rule 14: n0's echo is journalled first, and the next round must not be said to be due to it."""
    terms = Terms(2, 2, RestartPolicy(max_restarts=1))
    echo, root = failure(message="connection reset by peer"), failure(message="ValueError: boom", rank=1)
    job = running(2, terms, failed("n0", 0, echo), failed("n1", 0, root), joined("n0", 1), joined("n1", 1))
    assert job.why == WorkerFailed(node("n1"), root)


def test_an_excuse_is_why_the_round_ended() -> None:
    """Who reads the line of the next round must learn which node went, not what its peers died of."""
    job = running(3, TERMS, failed("n0"), lost("n1", by="n2"), joined("n0", 1), joined("n2", 1))
    assert (job.round, counted(job), job.why) == (1, (0, 1), NodeGone(node("n1"), Departure.LOST, node("n2")))


def test_failures_that_a_node_names_later_come_after_the_first() -> None:
    """The worker that failed first stays the one to blame, whatever its rank. A repetition changes nothing."""
    first, later = failure(1, rank=1, message="ValueError: x"), failure(0, rank=0, message="EOFError: y")
    entries = (Failed(node("n0"), 0, (first,)), Failed(node("n0"), 0, (later, first)))
    job = running(2, TERMS, *entries)
    assert isinstance(job.phase, Gathering)
    assert job.phase.ledger == (Failed(node("n0"), 0, (first, later)),)
    assert fold_all(job, entries) == job
    assert root_cause(job.phase.ledger).failure == first
