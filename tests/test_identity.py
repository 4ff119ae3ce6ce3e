"""Which incarnation an agent speaks as."""

from __future__ import annotations

from attrs import evolve

from reknit.core.agent.commands import Append, Finish, StopWorkers
from reknit.core.agent.events import EntriesRead
from reknit.core.agent.reasons import AlreadyFinished, CutOff, DeclaredLost, Replaced, TermsDiffer
from reknit.core.agent.states import WorkerState
from reknit.core.agent.workers import ReservePort, StartWorkers
from reknit.core.job.entries import Aborted, Admission, Entry, Joined, LastCall, Opened, RestartPolicy, Succeeded, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.reasons import AbortedByOperator

from .playbook import (
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
    running,
    start,
    stopped,
)

PAIR = Terms(2, 2, RestartPolicy(max_restarts=1))
TRIO = Terms(1, 3)
ME = node("n0")


def joining(incarnation: int, round: int) -> Placeholder:
    return Placeholder(Append, entry=Placeholder(Joined, node=node("n0", incarnation), round=round))


def newcomer(terms: Terms, *journal: Entry) -> Playbook:
    """An agent that has just started; its first read brings this journal."""
    return Playbook(an_agent("n0", terms)) >> start("mine") >> read(Opened(terms, "x"), *journal)


# ---- coming in -------------------------------------------------------------------------------------------------------


def test_the_first_incarnation_is_0() -> None:
    """Names stay short where nothing has happened."""
    assert newcomer(PAIR) << joining(0, 0)


def test_an_agent_that_was_started_again_is_one_more_than_the_highest_ever() -> None:
    """Also than one that is gone: a `Lost` of it may still come."""
    assert newcomer(PAIR, joined("n0")) << joining(1, 0)
    assert newcomer(TRIO, joined("n1"), joined("n0", incarnation=4), lost("n0", by="n1", incarnation=4)) << joining(
        5, 0
    )


def test_it_stays_the_same_while_its_joining_is_on_its_way() -> None:
    """Every read would else make another incarnation, and the job a round for each."""
    assert newcomer(PAIR) << joining(0, 0) >> read() >> read(joined("n1")) >> after(2) << joining(0, 0)


def test_two_agents_that_start_at_once_do_not_become_one() -> None:
    """Both read an empty journal and say n0.0: the journal's order decides, and the nonce tells."""
    other = joined("n0", nonce="theirs")
    assert newcomer(PAIR) << joining(0, 0) >> read(other) >> ack() << ReservePort() >> reserved() << joining(1, 0)


# ---- being declared lost ---------------------------------------------------------------------------------------------


def test_a_node_that_was_declared_lost_stops_and_comes_back_as_another() -> None:
    """Rule 4. Its `Joined` must wait until its workers are gone."""
    playbook = (
        playing("n0", TRIO, joined("n1")) >> read(lost("n0", by="n1")) << Placeholder(StopWorkers, why=DeclaredLost())
    )
    assert playbook >> after(1) >> read() >> stopped() >> ack() << joining(1, 1)
    assert playbook >> echo(joined("n1", 1)) << Placeholder(StartWorkers, round=1)


def test_being_lost_again_while_coming_back_makes_another_one_more() -> None:
    """Each incarnation is gone for ever, so they must not be used twice."""
    playbook = playing("n0", TRIO, joined("n1")) >> read(lost("n0", by="n1")) << Placeholder(StopWorkers)
    assert playbook >> stopped() >> ack() << joining(1, 1)
    assert playbook >> echo(lost("n0", by="n1", incarnation=1)) >> ack() << ReservePort() >> reserved() << joining(2, 1)


def test_who_cannot_be_heard_does_not_come_back() -> None:
    """A node that reads the journal and whose beats are swallowed would be declared lost, and join, for ever."""
    playbook = playing("n0", TRIO, joined("n1")) >> read(lost("n0", by="n1")) << Placeholder(StopWorkers)
    assert playbook >> stopped() >> after(1) >> read() >> after(100) >> read()


def test_a_leaving_node_does_not_come_back() -> None:
    """To be gone is its wish."""
    playbook = playing("n0", TRIO, joined("n1")) >> ask_to_leave() << Placeholder(StopWorkers) << Placeholder(Append)
    assert playbook >> read(lost("n0", by="n1")) >> stopped() << Placeholder(Finish)


def test_a_node_that_leaves_and_was_replaced_stays_who_it_is() -> None:
    """A new number would be one more than its successor's, and the two would be told apart no more."""
    playbook = playing("n0", TRIO, joined("n1")) >> ask_to_leave() << Placeholder(StopWorkers) << Placeholder(Append)
    assert playbook >> read(joined("n0", 1, incarnation=1, nonce="twin"))
    assert playbook.agent.me == ME


def test_an_agent_that_sees_another_in_its_place_ends() -> None:
    """Two agents with one id would throw each other out for ever; the newer has it."""
    newer = joined("n0", 1, incarnation=1)
    playbook = playing("n0", TRIO, joined("n1")) >> read(newer) << Placeholder(StopWorkers, why=Replaced(newer.node))
    finish = Placeholder(Finish)
    assert playbook >> stopped() << finish
    assert (finish().result.state, finish().result.why) == (WorkerState.FAILED, Replaced(newer.node))


# ---- private losses and gaps -----------------------------------------------------------------------------------------


def test_workers_that_are_gone_for_a_private_reason_make_it_another() -> None:
    """Rule 5: the journal shows it as a running member. Nobody would ever hear of it again."""
    playbook = playing("n0", Terms(2, 2, fence_s=3.0), joined("n1")) >> cut_off() >> after(3)
    assert playbook << Placeholder(StopWorkers, why=CutOff(3.0)) >> stopped() >> ack() << joining(1, 1)


def test_workers_that_vanish_without_having_been_stopped_make_it_another() -> None:
    """A warden that was killed takes the workers with it."""
    assert playing("n0", PAIR, joined("n1")) >> stopped() >> ack() << joining(1, 1)


def test_an_agent_without_workers_comes_back_as_another_after_a_gap() -> None:
    """Rule 5: a `Lost` of it may be on its way, and must not meet workers that it has started meanwhile."""
    playbook = newcomer(TRIO) << joining(0, 0) >> echo() >> ack() >> after(5) >> ack()
    assert playbook >> read() >> ack() << ReservePort() >> reserved() << joining(1, 0)


def test_a_gap_does_not_swallow_a_report() -> None:
    """As another it could not report the failure of the one before: the fold would see an innocent node go."""
    playbook = playing("n0", PAIR, joined("n1")) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> stopped() >> after(5) >> ack() >> read() << Append(failed("n0"))
    assert playbook >> echo() << joining(0, 1)


# ---- taking part -----------------------------------------------------------------------------------------------------


def test_other_terms_end_the_agent_before_it_has_said_anything() -> None:
    """A configuration error is told on the node that has it, and does not harm the job."""
    playbook = Playbook(an_agent("n0", evolve(PAIR, max_nodes=5))) >> start() >> read(Opened(PAIR, "x"))
    finish = Placeholder(Finish)
    assert playbook << finish
    assert finish().result.why == TermsDiffer((("max_nodes", "2", "5"),))


def test_the_node_that_set_the_terms_is_named() -> None:
    """Its operator can tell why. The one who has just started this node may know nothing of the job."""
    playbook = Playbook(an_agent("n0", evolve(PAIR, max_nodes=5))) >> start()
    assert playbook >> read(Opened(PAIR, "x"), joined("n1", nonce="x"), joined("n2")) << Placeholder(Finish)
    assert playbook.agent.result is not None
    assert playbook.agent.result.why == TermsDiffer((("max_nodes", "2", "5"),), node("n1"))


def test_terms_that_differ_are_shown_as_the_user_writes_them() -> None:
    """`--admission` takes `never`. `Admission.NEVER` cannot be typed there. Nor can True be typed for two endpoints."""
    ours = an_agent("n0", evolve(PAIR, admission=Admission.NEVER, needs_majority=True))
    playbook = Playbook(ours) >> start() >> read(Opened(PAIR, "x"))
    finish = Placeholder(Finish)
    assert playbook << finish
    assert finish().result.why == TermsDiffer((("admission", "soon", "never"), ("needs_majority", "no", "yes")))


def test_an_agent_knows_its_own_joining_by_the_text_of_its_nonce() -> None:
    """What is read from a journal are other objects than what was said."""
    playbook = Playbook(an_agent("n0", PAIR)) >> start() >> read(Opened(PAIR, "x")) << Placeholder(Append)
    assert playbook
    own = playbook.appended[-1]
    assert isinstance(own, Joined)
    assert playbook >> read(evolve(own, nonce="".join([*own.nonce])))
    assert playbook.agent.was_live


def test_equal_terms_are_no_difference() -> None:
    """The terms in the journal are other objects than the agent's own."""
    theirs = evolve(PAIR, max_nodes=9, join_timeout_s=float("1e3"), last_call_s=float("7.5"))
    ours = evolve(PAIR, max_nodes=8, join_timeout_s=float("1e3"), last_call_s=float("7.5"))
    finish = Placeholder(Finish)
    assert Playbook(an_agent("n0", ours)) >> start() >> read(Opened(theirs, "x")) << finish
    assert finish().result.why == TermsDiffer((("max_nodes", "9", "8"),))


def test_the_second_of_two_that_opened_at_once_compares_too() -> None:
    """It has said its own terms, and must live by the first's."""
    playbook = Playbook(an_agent("n0", TRIO)) >> start() >> read() << Append(Opened(TRIO, "nonce"))
    assert playbook >> read(Opened(PAIR, "x")) << Placeholder(Finish)


def test_a_journal_whose_job_has_succeeded_is_not_joined() -> None:
    """Rule 16."""
    finish = Placeholder(Finish)
    assert newcomer(Terms(), joined("n9"), Succeeded(node("n9"), 0)) << finish
    assert finish().result.why == AlreadyFinished()


def test_a_journal_whose_job_has_failed_is_opened_again() -> None:
    """Rule 16: with the terms of whoever comes next."""
    playbook = Playbook(an_agent("n0", TRIO)) >> start() >> read(Opened(PAIR, "x"), joined("n0"), Aborted("y"))
    assert playbook << Append(Opened(TRIO, "nonce", 1)) >> echo() << joining(1, 0)


def test_an_agent_of_an_old_epoch_takes_no_part_in_the_new() -> None:
    """It ends with its own epoch's outcome, however late it reads it."""
    playbook = playing("n0", PAIR, joined("n1")) >> read(Aborted("y"), Opened(PAIR, "x", 1), joined("n5"))
    finish = Placeholder(Finish)
    assert playbook << Placeholder(StopWorkers) >> stopped() << finish
    assert finish().result.state is WorkerState.STOPPED


def test_nothing_is_started_in_the_round_of_another_epoch() -> None:
    """Rounds are counted from 0 in each: by number alone they would be one."""
    playbook = newcomer(TRIO) << joining(0, 0) >> echo() >> ack()
    again = Opened(TRIO, "x", 1), joined("n0", incarnation=1), LastCall(0)
    assert playbook >> read(Aborted("y"), *again) << Placeholder(Finish)


def test_a_node_that_is_expected_stays_who_it_is_through_an_outage() -> None:
    """As another it would be replaced, its peers excused, and a failure that was everybody's would cost nothing."""
    terms = Terms(2, 2, RestartPolicy(max_restarts=1, backoff_s=30.0))
    playbook = playing("n0", terms, joined("n1")) >> read(failed("n1")) << Placeholder(StopWorkers) >> stopped()
    assert playbook >> after(6) >> ack() >> read()
    assert playbook.agent.me == node("n0")


def test_a_journal_that_takes_the_place_of_a_young_one_is_begun_anew() -> None:
    """Rule 16: the node's earlier agent is live there, and this agent's word for the young journal does not count. It
    is no twin that would have to end."""
    playbook = newcomer(PAIR) << joining(0, 0) >> echo() >> ack()
    base = running(2, PAIR)
    playbook = playbook >> (lambda p: evolve(read()(p), base=base)) << ReservePort()
    assert playbook >> reserved() << joining(1, 1)
    assert playbook.agent.epoch == 0
    assert playbook >> echo() >> ack()
    assert playbook.agent.job.is_live(node("n0", 1))


def in_another_life(playbook: Playbook, *entries: Entry) -> Playbook:
    """The agent is told to begin anew, and then reads the journal that was opened as `x`, with these entries."""
    playbook = playbook >> (lambda p: EntriesRead(p.at, (), Job())) << Placeholder(Append, entry=Placeholder(Opened))
    return playbook >> (lambda p: EntriesRead(p.at, (), fold_all(Job(), (Opened(PAIR, "x"), *entries))))


def test_what_the_workers_did_in_another_life_of_the_journal_is_not_reported() -> None:
    """Rule 17: in both lives n0.0 is a member of round 0. The failure would end another round, and spend a restart."""
    playbook = newcomer(PAIR) << joining(0, 0) >> echo(joined("n1")) >> ack() << Placeholder(StartWorkers)
    playbook = playbook >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    playbook = in_another_life(playbook >> stopped(), joined("n1")) << joining(0, 0)
    assert playbook >> echo() >> ack() << Placeholder(StartWorkers)


def test_a_port_that_was_offered_in_another_life_of_the_journal_is_not_offered_again() -> None:
    """The workers of another round may still dial it, although incarnation and round are the same."""
    playbook = in_another_life(newcomer(PAIR) << joining(0, 0) >> echo()) << ReservePort()
    assert playbook >> reserved(2) << Placeholder(Append, entry=Placeholder(Joined, node=ME, round=0, port=2))


def test_who_goes_on_in_another_life_of_the_journal_offers_another_port() -> None:
    """As the same process. Its `Joined` may have been sealed where it was said first."""
    playbook = newcomer(PAIR) << joining(0, 0)
    other = fold_all(Job(), (Opened(PAIR, "x"), joined("n1")))
    assert playbook >> (lambda p: EntriesRead(p.at, (), other)), "a published fold changes nothing"
    playbook = playbook >> (lambda p: EntriesRead(p.at, (), other, True)) << ReservePort()
    assert playbook >> reserved(2) << Placeholder(Append, entry=Placeholder(Joined, node=ME, nonce="mine", port=2))


def test_an_epoch_that_has_ended_in_another_life_of_the_journal_is_not_opened_again() -> None:
    """Rule 16: an agent of an epoch that has ended ends with it. Only an agent that comes later opens the next one."""
    playbook = newcomer(PAIR) << joining(0, 0) >> echo()
    playbook = playbook >> (lambda p: EntriesRead(p.at, (), Job())) << Placeholder(Append, entry=Placeholder(Opened))
    playbook = playbook >> read(Opened(PAIR, "young")) << ReservePort()
    playbook = in_another_life(playbook, joined("n1"), Aborted("y")) << Placeholder(Finish)
    assert playbook
    assert playbook.agent.result is not None
    assert playbook.agent.result.why == AbortedByOperator("y")
