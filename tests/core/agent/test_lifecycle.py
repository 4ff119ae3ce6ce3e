"""When the agent is done, and with which result."""

from __future__ import annotations

import pytest

from reknit.core.agent.agent import Spec
from reknit.core.agent.commands import Append, Finish, Result, StopWorkers
from reknit.core.agent.events import Counters, EntriesRead
from reknit.core.agent.lifecycle import sequel
from reknit.core.agent.reasons import JournalRefused, SignalReceived, TermsDiffer
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import (
    Aborted,
    Failed,
    Joined,
    LastCall,
    Leaving,
    Left,
    Node,
    Opened,
    RestartPolicy,
    Succeeded,
    Terms,
)
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import Life
from reknit.core.job.job import Job, Running
from reknit.core.job.reasons import AbortedByOperator, AllSucceeded, BudgetSpent, Refusal, TooFewNodes, WorkerFailed
from reknit.core.job.restart import Sequel
from reknit.core.job.workers import Assignment, WorkerRanks
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
    failure,
    joined,
    limit,
    lost,
    node,
    playing,
    read,
    start,
    stopped,
    up,
)

PAIR = Terms(2, 2)
ME, N1 = node("n0"), node("n1")
ANY = Placeholder
ELSEWHERE = Assignment(0, 1, 2, 8, "default", 8, "elsewhere", 1, (WorkerRanks(0, 6, 6), WorkerRanks(1, 7, 7)))
DONE = (Append(Left(ME)),)


def finishing(playbook: Playbook) -> Result:
    """The result with which the playbook's last event ends the agent."""
    finish = ANY(Finish)
    assert playbook << finish
    result = finish().result
    assert isinstance(result, Result)
    return result


def succeeded(**fields: object) -> Playbook:
    """n0 has succeeded, and waits for n1."""
    playbook = playing("n0", PAIR, joined("n1"), **fields) >> exits(
        *range(Spec(ME.id, "n0", **fields).local_world_size)
    )
    assert playbook << ANY(StopWorkers) << Append(Succeeded(ME, 0)) >> stopped() >> echo()
    return playbook


# ---- results ---------------------------------------------------------------------------------------------------------


def test_success_is_told_by_global_rank() -> None:
    """torchelastic's `RunResult`: this node's ranks, all or nothing."""
    playbook = succeeded(local_world_size=2) >> read(Succeeded(N1, 0)) << Append(Left(ME)) >> echo()
    result = finishing(playbook)
    assert (result.state, result.why) == (WorkerState.SUCCEEDED, AllSucceeded())
    assert set(result.return_values) == {1, 2}
    assert not result.failures


def test_success_is_told_by_the_ranks_that_the_workers_really_got() -> None:
    """Another rendezvous may have decided the ranks: the agents of the other nodes know them, and the journal does
    not."""
    playbook = playing("n0", Terms(), local_world_size=2) >> up(assignment=ELSEWHERE) >> exits(0, 1)
    assert playbook << ANY(StopWorkers) << Append(Succeeded(ME, 0)) >> stopped() >> echo() << Append(Left(ME))
    assert set(finishing(playbook >> echo()).return_values) == {6, 7}


def test_failure_is_told_with_all_failures_of_the_last_round_on_every_node() -> None:
    """S5: the same root cause wherever the user looks, also where no worker failed."""
    theirs = failure(0, 3, rank=0)
    playbook = playing("n0", PAIR, joined("n1")) >> read(Failed(N1, 0, (theirs,)), joined("n1", 1))
    assert playbook << ANY(StopWorkers) >> stopped() << ANY(Append) >> echo() << Append(Left(ME))
    result = finishing(playbook >> echo())
    assert result.why == BudgetSpent(0, WorkerFailed(N1, theirs))
    assert (result.state, result.failures, result.return_values) == (WorkerState.FAILED, {0: theirs}, {})


def test_an_aborted_job_is_stopped_not_failed() -> None:
    """Nothing went wrong: an operator has ended it."""
    playbook = (
        playing("n0", PAIR, joined("n1")) >> read(Aborted("x")) << ANY(StopWorkers) >> stopped() << DONE[0] >> echo()
    )
    assert finishing(playbook) == Result(WorkerState.STOPPED, AbortedByOperator("x"))


def test_a_node_that_leaves_is_stopped() -> None:
    """Preemption is neither success nor failure."""
    playbook = (
        playing("n0", PAIR, joined("n1")) >> ask_to_leave() << ANY(StopWorkers) << Append(Leaving(ME)) >> stopped()
    )
    assert finishing(playbook << Append(Left(ME)) >> echo()) == Result(WorkerState.STOPPED, SignalReceived(15))


def test_a_node_told_to_leave_after_the_end_tells_the_jobs_outcome() -> None:
    """The scheduler cleans up while we say goodbye: the training is done all the same."""
    playbook = succeeded() >> read(Succeeded(N1, 0)) << Append(Left(ME)) >> ask_to_leave()
    assert finishing(playbook).state is WorkerState.SUCCEEDED


def test_a_node_whose_workers_were_stopped_for_leaving_does_not_share_in_the_success() -> None:
    """Its workers did not finish, whatever the others made of it."""
    playbook = playing("n0", PAIR, joined("n1")) >> ask_to_leave() << ANY(StopWorkers) << Append(Leaving(ME))
    assert finishing(playbook >> echo(Aborted("x")) >> stopped() << DONE[0]).why == SignalReceived(15)


# ---- when ------------------------------------------------------------------------------------------------------------


def test_nobody_finishes_over_living_workers() -> None:
    """S7."""
    playbook = (
        playing("n0", PAIR, joined("n1")) >> read(Aborted("x")) << ANY(StopWorkers) >> after(1) >> ack() >> after(1)
    )
    assert playbook >> read(lost("n0", by="n1")) >> cut_off()
    assert playbook.agent.result is None


def test_a_succeeded_node_stays_until_the_job_closes() -> None:
    """Rule 10: a later failure reopens the round for it too."""
    playbook = succeeded() >> after(1) >> ack(n1=1) >> after(1) >> ack(n1=2)
    assert playbook
    assert playbook.agent.result is None


def test_a_succeeded_node_that_was_counted_out_shares_in_the_success() -> None:
    """Rule 10: it joins again as a standby, and its work still counts."""
    playbook = (
        succeeded()
        >> read(lost("n0", by="n1"))
        >> ack()
        << ANY(Append, entry=ANY(Joined, node=node("n0", 1)))
        >> echo()
    )
    result = finishing(playbook >> read(Succeeded(N1, 0)) << Append(Left(node("n0", 1))) >> echo())
    assert (result.state, set(result.return_values)) == (WorkerState.SUCCEEDED, {1})


def test_an_agent_lingers_until_its_goodbye_is_seen() -> None:
    """Rule 12: else the others would wait out its silence."""
    playbook = succeeded() >> read(Succeeded(N1, 0)) << Append(Left(ME)) >> read() >> after(2) << Append(Left(ME))
    assert finishing(playbook >> echo()).state is WorkerState.SUCCEEDED


def test_after_the_close_losing_the_journal_changes_nothing() -> None:
    """Rule 12: the store's host may be gone first, and the outcome is known."""
    assert (
        finishing(succeeded() >> read(Succeeded(N1, 0)) << Append(Left(ME)) >> cut_off()).state is WorkerState.SUCCEEDED
    )
    playbook = (
        succeeded()
        >> cut_off()
        >> read(Succeeded(N1, 0))
        << Append(Left(ME))
        >> cut_off("gone", refusal=Refusal.FORMAT)
    )
    assert finishing(playbook).state is WorkerState.SUCCEEDED


def test_before_the_close_a_journal_of_another_kind_is_the_end() -> None:
    """Two folds that differ are two jobs."""
    assert finishing(succeeded() >> cut_off("unknown kind", refusal=Refusal.FORMAT)).why == JournalRefused(
        Refusal.FORMAT, "unknown kind"
    )


def test_the_journals_host_waits_for_its_guests() -> None:
    """They could not read the end of a journal that has gone."""
    playbook = succeeded(hosts_journal=True) >> read(Succeeded(N1, 0)) >> after(1) >> ack(n1=1)
    assert playbook >> read(Left(N1)) << Append(Left(ME))
    assert finishing(playbook >> echo()).state is WorkerState.SUCCEEDED


def test_the_journals_host_does_not_wait_for_a_guest_that_died() -> None:
    """It watches them still."""
    playbook = succeeded(hosts_journal=True) >> read(Succeeded(N1, 0))
    for _ in range(3):
        assert playbook >> after(1) >> ack()
    assert playbook >> after(1) >> ack() << ANY(Append) >> echo() << Append(Left(ME))


def test_the_journals_host_may_be_told_to_leave_while_it_waits() -> None:
    """The job is over: SIGTERM during the wait for the others works at once."""
    playbook = succeeded(hosts_journal=True) >> read(Succeeded(N1, 0)) >> after(1) >> ask_to_leave() << Append(Left(ME))
    assert finishing(playbook).state is WorkerState.SUCCEEDED


def test_a_request_in_the_moment_in_which_the_host_begins_to_wait_does_not_end_the_store() -> None:
    """Nobody can have known yet that the host waits for the others. The next request means it."""
    playbook = succeeded(hosts_journal=True) >> read(Succeeded(N1, 0)) >> ask_to_leave()
    assert playbook >> after(0.5)
    assert finishing(playbook >> ask_to_leave() << Append(Left(ME))).state is WorkerState.SUCCEEDED


def test_the_root_of_a_result_is_the_failure_that_the_job_blames() -> None:
    """This node's report may not hold it. Without blame it is the first that is no echo."""
    other, own = failure(0, message="broken pipe"), failure(1)
    assert Result(WorkerState.FAILED, BudgetSpent(1, WorkerFailed(N1, own)), failures={0: other}).root == own
    assert Result(WorkerState.FAILED, TooFewNodes(1, 2), failures={0: other, 1: own}).root == own
    assert Result(WorkerState.STOPPED, AbortedByOperator("x")).root is None


def test_nothing_follows_the_end() -> None:
    """Rule of `Finish`: the loop feeds nothing any more."""
    playbook = playing("n0", Terms(restarts=RestartPolicy())) >> exits(0) << ANY(StopWorkers) << ANY(Append) >> echo()
    assert playbook >> stopped() << Append(Left(ME)) >> echo() << ANY(Finish)
    before = playbook.agent
    assert playbook >> ask_to_leave() >> read(Aborted("x")) >> stopped() >> after(1000) >> cut_off()
    assert playbook.agent is before


def test_the_journals_host_waits_for_its_guests_even_when_it_was_counted_out() -> None:
    """Rule 12: nobody's journal may end before they have read how the job did."""
    playbook = playing("n0", Terms(1, 3), joined("n1"), joined("n2"), hosts_journal=True)
    assert playbook >> read(lost("n0", by="n1"), Aborted("enough")) << ANY(StopWorkers) >> stopped()
    assert playbook >> read(Left(N1))
    assert finishing(playbook >> read(Left(node("n2")))).state is WorkerState.STOPPED


def test_how_the_job_ended_counts_more_than_why_this_agent_must() -> None:
    """S5: it has lost patience with the journal, and then reads there that the job was closed."""
    playbook = playing("n0", PAIR, joined("n1"), store_timeout_s=5.0) >> cut_off()
    playbook = awake(playbook, 5) << ANY(StopWorkers)
    assert finishing(playbook >> read(Aborted("enough")) >> stopped()).why == AbortedByOperator("enough")


def test_a_latecomer_of_a_finished_job_has_succeeded() -> None:
    """Rule 16: its scheduler must not start it again."""
    job = (Opened(Terms(), "j"), joined("n1"), Succeeded(N1, 0))
    assert finishing(Playbook(an_agent()) >> start() >> read(*job)).state is WorkerState.SUCCEEDED


# ---- the host of the journal -----------------------------------------------------------------------------------------


def told_host(signal: int = 15) -> Playbook:
    """n0 hosts the journal, was told to leave, and has said goodbye: n1 and n2 go on without it."""
    playbook = playing("n0", Terms(1, 3), joined("n1"), joined("n2"), hosts_journal=True) >> ask_to_leave(signal)
    playbook = playbook << ANY(StopWorkers) << Append(Leaving(ME)) >> stopped() << Append(Left(ME))
    assert playbook >> echo(joined("n1", 1), joined("n2", 1))
    return playbook


def test_a_host_that_is_told_to_leave_serves_the_others_until_they_end() -> None:
    """They regroup at once, and need its journal for that; else preempting one node would end the job of all."""
    playbook = told_host() >> after(1) >> ack(n1=1, n2=1) >> after(400) >> ack(n1=2, n2=2) >> read()
    assert playbook >> ack(n1=3, n2=3) >> read(Aborted("x")) >> read(Left(N1))
    assert finishing(playbook >> read(Left(node("n2")))).why == SignalReceived(15)


@pytest.mark.parametrize("signal", [1, 2, 15])
def test_a_host_that_is_told_by_any_signal_but_sigkill_serves_the_others(signal: int) -> None:
    """Ctrl-C and a lost terminal have smaller numbers than SIGKILL. The others need the journal all the same."""
    playbook = told_host(signal) >> after(1) >> ack(n1=1, n2=1)
    assert playbook
    assert playbook.agent.result is None


def test_a_host_that_is_told_twice_ends_at_once() -> None:
    """The second signal is the operator's last word."""
    assert finishing(told_host() >> after(1) >> ask_to_leave()).why == SignalReceived(15)


def test_a_host_whose_workers_are_hurried_serves_on() -> None:
    """Whoever is impatient with the workers of this node does not mean the other nodes."""
    playbook = playing("n0", Terms(1, 3), joined("n1"), hosts_journal=True) >> ask_to_leave() << ANY(StopWorkers)
    assert playbook << Append(Leaving(ME)) >> after(0.6) >> ask_to_leave() << ANY(StopWorkers) >> after(0.6)
    assert playbook >> ask_to_leave() << ANY(StopWorkers) >> stopped() << Append(Left(ME)) >> echo(joined("n1", 1))
    assert playbook >> after(1) >> ack(n1=1)
    assert playbook.agent.result is None
    assert finishing(playbook >> after(1) >> ask_to_leave()).why == SignalReceived(15)


def test_a_host_whose_last_guests_fell_silent_ends() -> None:
    """Nobody is left who could call the last one lost: without this it would serve the dead for ever."""
    playbook = told_host()
    for _ in range(12):
        assert playbook.agent.result is None
        assert playbook >> after(1) >> ack(n1=1, n2=1)
    assert finishing(playbook >> after(1) >> ack(n1=1, n2=1)).why == SignalReceived(15)


def test_a_host_that_has_not_joined_hears_that_its_guests_are_dead() -> None:
    """It waits to begin the next epoch, and is told to leave. Those of the last epoch have died without a goodbye."""
    over = fold_all(Job(), (Opened(PAIR, "x"), joined("n1"), joined("n2"), Aborted("y")))
    playbook = Playbook(an_agent(terms=PAIR, hosts_journal=True)) >> start() >> after(1)
    playbook = playbook >> (lambda p: EntriesRead(p.at, (), over)) >> ask_to_leave() >> ack(n1=1, n2=1)
    for _ in range(11):
        assert playbook.agent.result is None
        assert playbook >> after(1) >> ack(n1=1, n2=1)
    assert finishing(playbook >> after(1) >> ack(n1=1, n2=1)).why == SignalReceived(15)


def test_a_host_that_serves_does_not_speak_for_another_agent_of_its_name() -> None:
    """n0 is lost, told to leave, and serves. A second agent with its id comes as n0.1 and must be let alone."""
    twin = joined("n0", 1, 1, nonce="twin")
    playbook = playing("n0", Terms(1, 3), joined("n1"), hosts_journal=True) >> read(lost("n0", by="n1"))
    playbook = playbook << ANY(StopWorkers) >> stopped() >> ask_to_leave() >> read(joined("n1", 1), twin)
    assert playbook >> after(1) >> ack(n1=1) >> after(2) >> ack(n1=2)
    assert playbook.agent.result is None


def test_a_host_with_other_terms_serves_those_who_agree() -> None:
    """It takes no part, and must not take the store away from a job that it merely does not fit into."""
    playbook = Playbook(an_agent(terms=Terms(1, 5), hosts_journal=True)) >> start()
    playbook = playbook >> read(Opened(PAIR, "x"), joined("n1"), joined("n2")) >> after(1) >> ack(n1=1, n2=1)
    assert playbook
    assert playbook.agent.result is None
    assert playbook >> read(Aborted("x"), Left(N1))
    assert isinstance(finishing(playbook >> read(Left(node("n2")))).why, TermsDiffer)


def test_a_host_with_other_terms_keeps_its_reason_whatever_comes() -> None:
    """The job that it does not fit into succeeds, or the next epoch has its terms. It stays for the others, and its
    result is none of theirs."""
    terms = Terms(1, 5)
    others = Opened(PAIR, "x"), joined("n1"), joined("n2"), LastCall(0)
    playbook = Playbook(an_agent(terms=terms, hosts_journal=True)) >> start() >> read(*others)
    assert playbook >> read(Succeeded(N1, 0), Succeeded(node("n2"), 0))
    assert playbook.agent.is_serving
    assert isinstance(finishing(playbook >> read(Left(N1), Left(node("n2")))).why, TermsDiffer)
    playbook = Playbook(an_agent(terms=terms, hosts_journal=True)) >> start() >> read(*others)
    assert playbook >> read(Aborted("x"), Opened(terms, "n1", epoch=1), joined("n1", incarnation=1, seen=0))
    assert playbook.agent.is_serving
    assert isinstance(finishing(playbook >> read(Left(node("n1", 1)))).why, TermsDiffer)


def test_a_host_with_other_terms_serves_nobody_who_cannot_be_heard() -> None:
    """Its own store hangs: no call fails, and no silence grows."""
    playbook = Playbook(an_agent(terms=Terms(1, 5), hosts_journal=True, store_timeout_s=30.0)) >> start()
    playbook = playbook >> read(Opened(PAIR, "x"), joined("n1"), joined("n2")) >> after(1) >> ack(n1=1, n2=1)
    assert playbook >> after(20)
    assert playbook.agent.is_serving
    assert isinstance(finishing(awake(playbook, 30)).why, TermsDiffer)


def served_for(playbook: Playbook, guest: Node) -> int:
    """For how many seconds the host serves on, while its guest beats and never leaves."""
    assert playbook
    for second in range(100):
        if playbook.agent.result is not None:
            return second
        playbook.feed(after(1))
        own = playbook.agent.me, playbook.agent.contact.sent
        playbook.feed(Counters(playbook.at, dict([own, (guest, second + 10)])))
        playbook.feed(read())
    raise AssertionError("it serves for ever")


def test_a_host_that_leaves_learns_the_end_in_another_journal_too() -> None:
    """Its store was lost, and another journal was founded. The job ends there, and a guest never goes."""
    playbook = playing("n0", Terms(1, 3), joined("n1"), hosts_journal=True, store_timeout_s=30.0) >> ask_to_leave()
    playbook = playbook << ANY(StopWorkers) << Append(Leaving(ME)) >> stopped() << Append(Left(ME)) >> echo()
    anew = read(Opened(Terms(1, 3), "n1"), joined("n1", incarnation=1), life=Life("n1"), is_anew=True)
    assert playbook >> anew >> read(Aborted("x"), life=Life("n1"))
    assert playbook.agent.is_serving
    assert served_for(playbook, node("n1", 1)) == 30


def test_a_host_that_was_replaced_serves_the_end_of_the_job_no_longer_than_any() -> None:
    """A guest that hangs must not keep the host for ever."""
    playbook = playing("n0", Terms(1, 3), joined("n1"), hosts_journal=True, store_timeout_s=30.0)
    playbook = playbook >> read(joined("n0", 1, 1, nonce="twin")) << ANY(StopWorkers) >> stopped()
    assert playbook >> read(Aborted("x"))
    assert playbook.agent.is_serving
    assert served_for(playbook, N1) == 30


def test_a_host_that_was_replaced_serves_on_until_it_is_told() -> None:
    """A second agent with its id on another host, a typo: the others have done nothing wrong."""
    playbook = playing("n0", Terms(1, 3), joined("n1"), hosts_journal=True) >> read(joined("n0", 1, 1, nonce="twin"))
    assert playbook << ANY(StopWorkers) >> stopped() >> after(1) >> ack(n1=1)
    assert playbook.agent.result is None
    assert finishing(playbook >> ask_to_leave()).state is WorkerState.STOPPED


def test_a_host_that_is_interrupted_says_goodbye() -> None:
    """SIGINT has a smaller number than SIGKILL, and asks for an end in order."""
    playbook = playing("n0", PAIR, joined("n1"), hosts_journal=True) >> ask_to_leave(2) << ANY(StopWorkers)
    assert playbook << Append(Leaving(ME)) >> stopped() << Append(Left(ME))


def test_a_host_that_must_be_gone_at_once_says_nothing() -> None:
    """Its warden was killed. The others would stop good workers for a goodbye, and could not regroup without it."""
    playbook = playing("n0", PAIR, joined("n1"), hosts_journal=True) >> ask_to_leave(9) << ANY(StopWorkers)
    assert finishing(playbook >> stopped()).why == SignalReceived(9)


# ---- what follows a stop ---------------------------------------------------------------------------------------------


def test_a_stop_by_a_request_is_the_end() -> None:
    """The agent has its result, and only waits until the workers are gone."""
    playbook = playing("n0", PAIR, joined("n1"))
    assert sequel(playbook.agent) is Sequel.UNKNOWN
    assert playbook >> ask_to_leave() << ANY(StopWorkers) << Append(Leaving(ME))
    assert sequel(playbook.agent) is Sequel.END


def test_what_follows_is_unknown_to_an_agent_that_had_no_workers_yet() -> None:
    """Its round is none of the job's. The others may succeed without it."""
    terms = Terms(1, 2, RestartPolicy(max_restarts=3))
    journal = (Opened(terms, "x"), joined("n1"), LastCall(0), Failed(N1, 0, (failure(),)), joined("n1", 1))
    playbook = Playbook(an_agent(terms=terms)) >> start() >> read(*journal)
    assert playbook << ANY(Append)
    assert playbook.agent.job.phase == Running(1)
    assert sequel(playbook.agent) is Sequel.UNKNOWN


def test_a_failure_that_spends_a_restart_is_followed_by_a_round() -> None:
    """If the last restart is spent, it is not known: the other node may be dead, which excuses the failure."""
    for max_restarts, answer in ((1, Sequel.ROUND), (0, Sequel.UNKNOWN)):
        playbook = playing("n0", Terms(2, 2, RestartPolicy(max_restarts)), joined("n1"))
        assert playbook >> exits(failure()) << ANY(StopWorkers) << ANY(Append)
        assert sequel(playbook.agent) is answer


def test_a_closed_job_is_the_end() -> None:
    """For its workers that are being stopped as well."""
    playbook = playing("n0", PAIR, joined("n1")) >> read(Aborted("enough"))
    assert playbook << ANY(StopWorkers)
    assert sequel(playbook.agent) is Sequel.END


# ---- a node that bears fewer failures than the job -------------------------------------------------------------------


def test_a_node_that_bears_no_failure_leaves_after_the_first() -> None:
    """The job has restarts left, and goes on without it. The result is that of a failed run, with its own failures."""
    terms, own = Terms(1, 2, RestartPolicy(max_restarts=3)), failure()
    playbook = playing("n0", terms, joined("n1")) >> limit(0)
    assert (playbook and playbook.agent.restarts_left) == 0
    assert playbook >> exits(own) << ANY(StopWorkers, why=WorkerFailed(ME, own)) << ANY(Append) << Append(Leaving(ME))
    assert sequel(playbook.agent) is Sequel.END
    assert playbook >> stopped() >> echo() << Append(Left(ME))
    result = finishing(playbook >> echo())
    assert (result.state, result.why) == (WorkerState.FAILED, BudgetSpent(0, WorkerFailed(ME, own)))
    assert (result.failures, result.root) == ({0: own}, own)


def test_a_limit_above_that_of_the_job_changes_nothing() -> None:
    """The job decides what follows: another node that went would excuse the failure."""
    playbook = playing("n0", PAIR, joined("n1")) >> limit(5) >> exits(failure())
    assert playbook << ANY(StopWorkers) << Append(ANY(Failed))
    assert playbook.agent.causes.why_leaving is None


def test_a_limit_counts_from_the_round_in_which_it_was_set() -> None:
    """A node that bears one failure of two joins again after the first, and leaves after the second."""
    playbook = playing("n0", Terms(restarts=RestartPolicy(max_restarts=2))) >> limit(1) >> exits(failure())
    assert (
        playbook
        << ANY(StopWorkers)
        << ANY(Append, entry=ANY(Failed))
        >> stopped()
        >> echo()
        << ANY(Append, entry=ANY(Joined))
        >> echo()
        << ANY(StartWorkers)
        >> up()
    )
    assert (playbook.agent.job.spent, playbook.agent.restarts_left) == (1, 0)
    assert playbook >> exits(failure()) << ANY(StopWorkers) << ANY(Append) << Append(Leaving(ME))


def test_a_limit_is_added_to_what_was_spent() -> None:
    """A node that bears one more failure after the first bears two in all."""
    playbook = playing("n0", Terms(restarts=RestartPolicy(max_restarts=9))) >> exits(failure()) << ANY(StopWorkers)
    assert playbook << ANY(Append) >> stopped() >> echo() << ANY(Append) >> echo() << ANY(StartWorkers) >> up()
    assert playbook >> limit(1)
    assert playbook.agent.restarts_left == 1


def test_a_limit_that_is_the_jobs_own_makes_nobody_leave() -> None:
    """The failure may be the echo of another node's death, and then nothing is spent."""
    terms = Terms(1, 2, RestartPolicy(max_restarts=0))
    playbook = playing("n0", terms, joined("n1")) >> limit(0) >> exits(failure())
    assert playbook << ANY(StopWorkers) << ANY(Append, entry=ANY(Failed))
    assert playbook.agent.causes.why_leaving is None


def test_the_failure_of_another_node_makes_nobody_leave() -> None:
    """The limit is about this node's workers."""
    terms = Terms(1, 2, RestartPolicy(max_restarts=3))
    playbook = playing("n0", terms, joined("n1")) >> limit(0) >> read(Failed(N1, 0, (failure(),)))
    assert playbook << ANY(StopWorkers)
    assert playbook.agent.causes.why_leaving is None


@pytest.mark.parametrize("wakes", [0, 1])
def test_a_failure_that_was_held_counts_when_the_workers_are_stopped(wakes: int) -> None:
    """It looks like an echo, and the failure of another node shows its cause. Whether the agent is woken before its
    workers are gone makes no difference."""
    terms = Terms(1, 2, RestartPolicy(max_restarts=3))
    echoed = failure(message="RuntimeError: Connection reset by peer")
    playbook = playing("n0", terms, joined("n1"), local_world_size=2) >> limit(0) >> exits(echoed)
    playbook = playbook >> read(Failed(N1, 0, (failure(),))) << ANY(StopWorkers)
    playbook = playbook << ANY(Append, entry=ANY(Failed)) << Append(Leaving(ME))
    for _ in range(wakes):
        playbook = playbook >> after(0.01)
    assert playbook >> stopped() >> echo() << Append(Left(ME))
    assert playbook.agent.causes.budget == BudgetSpent(0, WorkerFailed(ME, echoed))


def test_a_signal_after_the_last_failure_does_not_change_the_result() -> None:
    """The failure came first."""
    playbook = playing("n0", Terms(restarts=RestartPolicy(max_restarts=3))) >> limit(0) >> exits(failure())
    assert playbook << ANY(StopWorkers) << ANY(Append) << Append(Leaving(ME)) >> after(0.1)
    assert playbook >> ask_to_leave() << ANY(StopWorkers, grace_s=5.0) >> stopped() >> echo() << Append(Left(ME))
    assert finishing(playbook >> echo()).state is WorkerState.FAILED
