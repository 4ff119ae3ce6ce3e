"""Which incarnation an agent speaks as."""

from __future__ import annotations

from attrs import evolve

from reknit.core.agent.commands import SIGKILL, Append, Beat, Finish, StopWorkers
from reknit.core.agent.contact import is_entry_late
from reknit.core.agent.events import JournalFailed
from reknit.core.agent.reasons import AlreadyFinished, CutOff, DeclaredLost, JournalRefused, Replaced, TermsDiffer
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import ReservePort, StartWorkers
from reknit.core.job.entries import (
    Aborted,
    Admission,
    Entry,
    GaveUp,
    Joined,
    LastCall,
    Opened,
    RestartPolicy,
    Succeeded,
    Terms,
)
from reknit.core.job.fold import fold
from reknit.core.job.founding import Life, moved
from reknit.core.job.job import Job, Running
from reknit.core.job.reasons import AbortedByOperator, Refusal
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
    up,
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
    """`--admission` takes `never`. `Admission.NEVER` cannot be typed there."""
    ours = an_agent("n0", evolve(PAIR, admission=Admission.NEVER))
    playbook = Playbook(ours) >> start() >> read(Opened(PAIR, "x"))
    finish = Placeholder(Finish)
    assert playbook << finish
    assert finish().result.why == TermsDiffer((("admission", "soon", "never"),))


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


def test_a_term_is_told_as_its_option_is_written() -> None:
    """Whoever reads the line must find what to change."""
    theirs = evolve(PAIR, admission=Admission.NEVER, restarts=RestartPolicy(max_restarts=1, renews=True))
    finish = Placeholder(Finish)
    assert Playbook(an_agent("n0", PAIR)) >> start() >> read(Opened(theirs, "x")) << finish
    assert finish().result.why == TermsDiffer((("admission", "never", "soon"), ("renews", "yes", "no")))


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


# ---- another life of the journal, and another journal (rule 16) ------------------------------------------------------

YOUNG, OLD = Life("young"), Life("old")
AGAIN, AND_AGAIN = Life("old", "again"), Life("old", "and again")
"""Later lives of the journal `old`."""


def in_life(life: Life, *entries: Entry, terms: Terms = PAIR) -> Playbook:
    """An agent that has joined round 0, together with what else it has read of this life of the journal."""
    playbook = Playbook(an_agent("n0", terms)) >> start("mine") >> read(Opened(terms, "x"), life=life)
    playbook = playbook << joining(0, 0) >> echo(*entries)
    assert playbook
    return playbook


def at_work(life: Life) -> Playbook:
    """An agent whose workers run in round 0."""
    playbook = in_life(life, joined("n1")) >> ack() << Placeholder(StartWorkers) >> up()
    assert playbook
    return playbook


def test_the_first_read_shows_in_which_life_the_journal_is() -> None:
    """Nothing was offered before, so nothing is offered again: the port is that of the start."""
    playbook = Playbook(an_agent("n0", PAIR)) >> start("mine", 7) >> read(life=AGAIN, base=running(2, PAIR))
    assert playbook << Placeholder(Append, entry=Placeholder(Joined, node=node("n0", 1), nonce="mine", port=7))
    assert playbook.agent.life == AGAIN


def test_workers_run_on_in_another_life_of_the_journal() -> None:
    """The store was lost. That is no failure of any worker."""
    playbook = at_work(OLD)
    assert playbook >> read(life=AGAIN, base=moved(playbook.agent.job))
    assert playbook.agent.workers.alive
    assert playbook.agent.life == AGAIN
    assert playbook.agent.speaker == "mine", "it is the member that has started them"


def test_who_goes_on_in_another_life_offers_another_port() -> None:
    """As the same process and as the same incarnation. Its `Joined` may have been sealed in the life before, and
    workers of other nodes may dial the port."""
    playbook = Playbook(an_agent("n0", PAIR)) >> start("mine") >> read(Opened(PAIR, "x"), life=OLD) << joining(0, 0)
    job = folded(PAIR, joined("n1"))
    assert playbook >> read(base=job), "a published fold of the same life changes nothing"
    playbook = playbook >> read(life=AGAIN, base=moved(job)) << ReservePort()
    assert playbook >> reserved(2) << Placeholder(Append, entry=Placeholder(Joined, node=ME, nonce="mine", port=2))


def test_a_port_is_offered_once_more_only_in_the_life_in_which_it_was_offered() -> None:
    """The store was lost twice. The port of the first life was never given up by those who dial it."""
    playbook = in_life(OLD)
    for number, life in enumerate((AGAIN, AND_AGAIN), 2):
        playbook = playbook >> read(life=life, base=moved(folded(PAIR))) << ReservePort()
        again = Placeholder(Append, entry=Placeholder(Joined, node=ME, port=number))
        assert playbook >> reserved(number) << again
        assert playbook >> after(2) << again, "its `Joined` may be lost on its way"


def test_what_was_said_in_the_life_before_is_said_again_at_once() -> None:
    """The failure is lost with the store. Without this the agent would wait until it counts as lost on its way, and the
    round would not end until then."""
    playbook = at_work(OLD)
    job = playbook.agent.job
    playbook = playbook >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> read(life=AGAIN, base=moved(job)) << Append(failed("n0"))


def test_an_entry_that_was_late_in_the_life_before_is_not_late_in_the_next() -> None:
    """This node beats no further while an entry of it is late. In the new life it would be declared lost, although it
    has just said the entry there for the first time."""
    playbook = at_work(OLD)
    job = playbook.agent.job
    playbook.hide = (Append, Beat)
    assert playbook >> exits(failure()) << Placeholder(StopWorkers) >> stopped()
    while not is_entry_late(playbook.agent):
        assert playbook >> after(1) >> ack(n1=int(playbook.at)) >> read()
    assert playbook >> read(life=AGAIN, base=moved(job))
    beats = playbook.agent.contact.sent
    assert playbook >> after(1) >> ack() >> after(1) >> ack()
    assert playbook.agent.contact.sent > beats


def test_silence_in_the_life_before_is_no_silence_in_the_next() -> None:
    """n1 has joined and has not beaten yet: no counter of it is in the store. The same holds in the new life, which has
    just begun. Otherwise it would be declared lost before its first beat can come."""
    playbook = in_life(OLD, joined("n1"), terms=TRIO)
    job = playbook.agent.job
    for _ in range(3):
        assert playbook >> after(1) >> ack()
    playbook = playbook >> read(life=AGAIN, base=moved(job)) << ReservePort() >> reserved(2) << joining(0, 0) >> echo()
    for _ in range(3):
        assert playbook >> after(1) >> ack()
    assert playbook.agent.job.is_live(node("n1"))


def test_an_agent_whose_young_journal_makes_way_is_no_twin_in_the_old_one() -> None:
    """The node's earlier agent is live there. What this agent has said in the young journal does not count, so it need
    not end."""
    playbook = in_life(YOUNG) >> ack() >> read(life=OLD, base=running(2, PAIR)) << ReservePort()
    assert playbook >> reserved() << Placeholder(Append, entry=Placeholder(Joined, node=node("n0", 1), round=1))
    assert playbook.agent.epoch == 0
    assert playbook >> echo() >> ack()
    assert playbook.agent.job.is_live(node("n0", 1))


def test_each_journal_is_joined_under_another_nonce() -> None:
    """(1) This agent joins in `old`, and does not read that round 0 is sealed. (2) The store is lost. The agent takes
    part in `young`, and gives its port away. (3) `young` makes way, and the agent is back in `old`. If it took the
    member n0 for itself, it would start workers at a port that it does not hold any more."""
    playbook = in_life(OLD) >> read(life=YOUNG, base=Job()) << Append(Opened(PAIR, "mine.1")) >> echo()
    playbook = playbook << ReservePort() >> reserved(2)
    playbook = (
        playbook << Placeholder(Append, entry=Placeholder(Joined, node=node("n0", 1), nonce="mine.1", port=2)) >> echo()
    )
    sealed = folded(PAIR, joined("n0", nonce="mine"), joined("n1"))
    assert isinstance(sealed.phase, Running)
    playbook = playbook >> ack() >> read(life=OLD, base=sealed) << ReservePort() >> reserved(3)
    back = Placeholder(Joined, node=node("n0", 2), nonce="mine.2", round=1, port=3)
    assert playbook << Placeholder(Append, entry=back)


def test_what_the_workers_did_in_another_journal_is_not_reported() -> None:
    """In both journals n0.0 is a member of round 0. The failure would end another round, and spend a restart."""
    playbook = at_work(YOUNG) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    playbook = playbook >> stopped(port=3) >> read(life=OLD, base=folded(PAIR, joined("n1"))) << joining(1, 0)
    assert playbook >> echo() >> ack() << Placeholder(StartWorkers)


def test_a_node_with_workers_takes_part_in_no_other_journal() -> None:
    """They belong to a round of which the other journal knows nothing. Two groups would train the same model. Nobody
    waits for the end of these workers, so they get no grace."""
    playbook = at_work(YOUNG) >> read(life=OLD, base=folded(PAIR))
    playbook = playbook << Placeholder(StopWorkers, signal=SIGKILL, grace_s=0.0)
    finish = Placeholder(Finish)
    assert playbook >> stopped() << finish
    why = finish().result.why
    assert isinstance(why, JournalRefused)
    assert why.refusal is Refusal.LEFT_BEHIND


def test_a_node_with_workers_goes_on_in_another_life_of_its_journal() -> None:
    """The journal was founded again from what this node had read, or from more. Its id comes from another text now."""
    playbook = at_work(OLD)
    assert playbook >> read(life=Life("".join([*OLD.journal]), "next"), base=playbook.agent.job)
    assert playbook.agent.workers.stopping is None


def test_a_number_that_was_offered_is_not_offered_again() -> None:
    """The `Joined` of it may be on its way, and this node has been silent since. So a `Lost` of it may be, too."""
    playbook = playing("n0", TRIO, joined("n1")) >> read(lost("n0", by="n1")) << Placeholder(StopWorkers)
    assert playbook >> stopped() >> after(1) >> ack() << joining(1, 1)
    assert playbook >> after(1) >> after(1) << joining(1, 1) >> after(1) >> after(1)
    assert playbook.agent.contact.gap
    assert playbook >> ack() >> read()
    assert playbook.agent.me == node("n0", 2)


def test_who_is_left_behind_gives_its_workers_no_grace() -> None:
    """Nobody waits for them. A stop that is under way gets no grace any more either."""
    refused = JournalFailed(0.0, "left behind", Refusal.LEFT_BEHIND)
    killed = Placeholder(StopWorkers, signal=SIGKILL, grace_s=0.0)
    assert at_work(OLD) >> (lambda p: refused) << killed
    playbook = at_work(OLD) >> exits(failure()) << Placeholder(StopWorkers, grace_s=30.0) << Append(failed("n0"))
    assert playbook >> (lambda p: refused) << Placeholder(StopWorkers, signal=SIGKILL, grace_s=0.0)


def test_who_is_left_behind_after_the_end_kills_its_workers_too() -> None:
    """The others may not have read the end, and start the next round. The node's result is that of the job."""
    playbook = at_work(OLD) >> read(Aborted("enough")) << Placeholder(StopWorkers, grace_s=30.0)
    playbook = playbook >> (lambda p: JournalFailed(0.0, "left behind", Refusal.LEFT_BEHIND))
    assert playbook << Placeholder(StopWorkers, signal=SIGKILL, grace_s=0.0)
    finish = Placeholder(Finish)
    assert playbook >> stopped() << finish
    assert isinstance(finish().result.why, AbortedByOperator)


def test_an_agent_without_workers_that_is_left_behind_begins_anew() -> None:
    """Its old incarnation is live in the next life, and is replaced."""
    playbook = in_life(OLD)
    playbook = playbook >> read(life=AGAIN, base=moved(playbook.agent.job), is_anew=True) << ReservePort()
    playbook = playbook >> reserved(3)
    assert playbook << Placeholder(Append, entry=Placeholder(Joined, node=node("n0", 1), nonce="mine.1", round=0))


def test_a_standby_whose_port_was_given_up_joins_again() -> None:
    """(1) n0 wants to join round 1. (2) Round 1 is sealed without n0, which reserves another port for round 2. (3) The
    first `Joined` lands. As a member n0 would start its workers at a port that it does not hold."""
    terms = Terms(1, 3, RestartPolicy(max_restarts=3))
    playbook = newcomer(terms, joined("n1"), LastCall(0)) << joining(0, 1)
    playbook = playbook >> read(failed("n1"), joined("n1", 1)) << ReservePort() >> reserved(2) << joining(0, 2)
    playbook = playbook >> read(joined("n0", 1, nonce="mine")) >> ack() << ReservePort() >> reserved(3)
    assert playbook << joining(1, 2)


def test_a_member_that_has_given_up_its_port_joins_again() -> None:
    """(1) n1 has read the seal of round 0, and its workers dial the port of n0. (2) The store is lost. n0 has not read
    the seal, and offers another port in the next life. (3) The store is lost again. n1 comes first, and founds the
    journal from what it has read, which holds all that n0 has read."""
    playbook = in_life(OLD)
    gathered = playbook.agent.job
    playbook = playbook >> ack() >> read(life=AGAIN, base=moved(gathered)) << ReservePort() >> reserved(2)
    playbook = playbook << joining(0, 0) >> ack()
    sealed = fold(gathered, joined("n1"))
    playbook = playbook >> read(life=Life("old", "third"), base=moved(sealed)) >> ack() << ReservePort()
    playbook = playbook >> reserved(3)
    assert playbook << Placeholder(Append, entry=Placeholder(Joined, node=node("n0", 1), round=1, port=3))


def test_what_was_waited_for_in_another_journal_is_waited_for_anew() -> None:
    """Round 0 was gathered for long in the young journal. In the old one, round 0 has just begun: it must not be given
    up at once."""
    terms = Terms(2, 2, join_timeout_s=9.5)
    playbook = in_life(YOUNG, terms=terms)
    for _ in range(9):
        assert playbook >> after(1.0) >> ack()
    playbook = playbook >> read(life=OLD, base=folded(terms)) << ReservePort() >> reserved(2) << joining(1, 0) >> echo()
    for _ in range(9):
        assert playbook >> after(1.0) >> ack()
    assert playbook >> after(1.0) << Append(GaveUp(0))


def test_an_epoch_that_has_ended_in_a_journal_is_not_opened_again_on_the_way_back() -> None:
    """An agent of an epoch that has ended ends with it. Only an agent that comes later opens the next one."""
    playbook = in_life(OLD) >> read(Opened(PAIR, "young"), life=YOUNG, base=Job()) << ReservePort()
    base = folded(PAIR, joined("n1"), Aborted("y"))
    playbook = playbook >> read(life=AGAIN, base=base) << Placeholder(Finish)
    assert playbook
    assert playbook.agent.result is not None
    assert playbook.agent.result.why == AbortedByOperator("y")
