"""Sentences for people: each reason has one, and the lines of a whole run tell an operator what happens."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from attrs import evolve

from reknit.core.agent import reasons as own
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Append, Beat, Command, Finish, Result, StopWorkers
from reknit.core.agent.events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    RestartsLimited,
    Started,
    StopRequested,
    Woken,
)
from reknit.core.agent.states import WorkerState
from reknit.core.agent.step import step
from reknit.core.agent.worker_words import (
    PortReserved,
    ReservePort,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job import reasons
from reknit.core.job.entries import Filler, Leaving, Left, Lost, NodeId, Opened, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.job.restart import blaming, root_cause_of
from reknit.core.job.workers import (
    UNSEEN,
    Activity,
    Assignment,
    Collective,
    NoProgress,
    Stance,
    TimerExpired,
    WorkerFailure,
    WorkerRanks,
)
from reknit.core.text.describe import (
    cause_text,
    decisions,
    exit_text,
    failure_text,
    failure_told,
    hang_lines,
    killed_text,
    reason_text,
    sealed_text,
    signal_name,
    spent_text,
    time_text,
)
from reknit.core.text.doing import command_text, entry_text, event_text
from tests.support.playbook import (
    Builder,
    Playbook,
    ack,
    after,
    ask_to_leave,
    cut_off,
    echo,
    exits,
    failed,
    failure,
    joined,
    limit,
    lost,
    node,
    read,
    running,
    start,
    stopped,
    up,
)

# ---- the lines of a run ----


def agent(least: int = 1, most: int = 1, restarts: int = 0) -> Agent:
    terms = Terms(min_nodes=least, max_nodes=most, restarts=RestartPolicy(max_restarts=restarts))
    return Agent(Spec(NodeId("n0"), "n0", terms, shares_journal=most > 1))


def told(agent: Agent, *builders: Builder) -> list[str]:
    """What an operator reads while these things happen."""
    play, lines = Playbook(agent), list[str]()
    last: reasons.WorkerFailed | None = None
    for build in builders:
        event = build(play)
        play.at = max(play.at, event.at)
        result = step(play.agent, event)
        last = failure_told(play.agent, result.agent, result.commands) or last
        lines += decisions(play.agent, result.agent, result.commands, last)
        play.agent = result.agent
        play.appended += [c.entry for c in result.commands if isinstance(c, Append)]
    return lines


ALONE = (start(), read(), echo(), echo(), up())
WITH_N1 = (start(), read(), echo(), ack(), echo(), ack(), echo(joined("n1")), ack(), up())
FIRST_ALONE = "round 0: 1 node, 1 worker, master n0:29500"
FIRST_WITH_N1 = "round 0: 2 nodes, 2 workers, master n0:29500"
WAITING = "waiting for nodes: 1 joined, 2 wanted, for at most 600 s"
STOPPING = "stopping this node's workers (SIGTERM, SIGKILL after 30 s)"


def test_a_run_in_which_nothing_happens() -> None:
    """One line, and the rest is the workers'. The end is the caller's to tell, once."""
    assert told(agent(), *ALONE, exits(0), stopped(), echo(), echo()) == [FIRST_ALONE]


def test_a_run_whose_ranks_another_rendezvous_decides() -> None:
    """The ranks of the journal are told first, and these are not what the workers see."""
    made = Assignment(0, 1, 2, 8, "default", 8, "elsewhere", 7, (WorkerRanks(0, 6, 6), WorkerRanks(1, 7, 7)))
    assert told(agent(), *ALONE[:-1], up(assignment=made)) == [
        FIRST_ALONE,
        "round 0, by another rendezvous: 2 nodes, 8 workers, ranks 6 to 7 here, master elsewhere:7",
    ]
    alone = evolve(made, workers=made.workers[:1])
    assert told(agent(), *ALONE[:-1], up(assignment=alone))[1].split(", ")[3] == "rank 6 here"


def test_a_run_that_is_knit_together_again() -> None:
    """Why it stopped, what it does, how many restarts are left."""
    again = (after(2), exits(failure(0, 7)), echo(), stopped(), echo(), up(), exits(0), stopped(), echo(), echo())
    assert told(agent(restarts=2), *ALONE, *again) == [
        FIRST_ALONE,
        "rank 0 on node n0 failed: exit code 7",
        "round 1 (restart 1 of 2): 1 node, 1 worker, master n0:29501",
    ]


def test_a_run_whose_budget_is_spent() -> None:
    """The last failure is told like the others; that it was the last is the report's business."""
    once = (after(2), exits(failure(0, 7)), echo(), stopped(), echo(), up())
    last = (exits(failure(0, -9, message="x\ny")), echo(), stopped(), echo(), echo(), echo())
    assert told(agent(restarts=1), *ALONE, *once, *last)[2:] == [
        "round 1 (restart 1 of 1): 1 node, 1 worker, master n0:29501",
        "rank 0 on node n0 failed: killed by SIGKILL, x",
    ]


def test_a_run_whose_workers_die_at_once() -> None:
    """Ten instant failures would else spend the whole budget in a tenth of a second. The line says why nothing runs."""
    once = (exits(failure(0, 7)), echo(), stopped(), after(0.2), echo(), up())
    again = (exits(failure(0, 7)), echo(), stopped())
    assert told(agent(restarts=3), *ALONE, *once, *again) == [
        FIRST_ALONE,
        "rank 0 on node n0 failed: exit code 7",
        "the workers failed within 1 s of their start, and start again in 0.2 s",
        "round 1 (restart 1 of 3): 1 node, 1 worker, master n0:29501",
        "rank 0 on node n0 failed: exit code 7",
        "the workers failed within 1 s of their start, and start again in 0.4 s",
    ]


def test_a_run_that_is_stopped() -> None:
    """Each signal has its effect on a line of its own; and who leaves waits for nobody."""
    asked = (ask_to_leave(), echo(), after(1), ask_to_leave(), after(1), ask_to_leave(), stopped(), echo())
    assert told(agent(), *ALONE, *asked) == [
        FIRST_ALONE,
        f"SIGTERM received; {STOPPING}",
        "asked again to stop: the workers get SIGKILL within 5 s",
        "asked again to stop: the workers get SIGKILL now",
    ]


def test_a_run_that_loses_a_node() -> None:
    """Which node, how, who says so."""
    gone = (echo(Lost(node("n1"), node("n0"))), stopped(), echo(), ack(), after(31), echo(), ack(), up())
    assert told(agent(1, 2), *WITH_N1, *gone) == [
        "waiting for nodes: 1 joined, 1 to 2 wanted, for 30 s more",
        FIRST_WITH_N1,
        f"node n1 fell silent, noticed by node n0; {STOPPING}",
        "round 1 (node n1 fell silent, noticed by node n0): 1 node, 1 worker, master n0:29501",
    ]


def test_a_run_that_waits_for_a_node() -> None:
    """Why nothing happens now."""
    gone = (echo(Leaving(node("n1"))), stopped(), echo(Left(node("n1"))), ack())
    assert told(agent(2, 2), *WITH_N1, *gone) == [
        WAITING,
        FIRST_WITH_N1,
        f"node n1 is leaving; {STOPPING}",
        "waiting for nodes: 1 joined, 2 wanted, for at most 600 s",
    ]


def test_a_run_that_gathers() -> None:
    """Each node that comes is counted, and the time that is left."""
    come = (after(1), echo(joined("n1")), after(2), echo(joined("n2")), echo())
    assert told(agent(4, 4), start(), read(), echo(), echo(), ack(), *come) == [
        "waiting for nodes: 1 joined, 4 wanted, for at most 600 s",
        "waiting for nodes: 2 joined, 4 wanted, for at most 599 s",
        "waiting for nodes: 3 joined, 4 wanted, for at most 597 s",
    ]


def test_a_long_wait_is_told_in_seconds() -> None:
    """Not as 1.8e+03."""
    long = agent(3, 3)
    long = evolve(long, spec=evolve(long.spec, terms=evolve(long.spec.terms, join_timeout_s=1800.0)))
    lines = told(long, start(), read(), echo(), echo(), ack(), after(1), echo(joined("n1")))
    assert [line.rpartition(" for ")[2] for line in lines] == ["at most 1800 s", "at most 1799 s"]


def test_a_run_whose_peer_fails() -> None:
    """The rank that failed and its node, not ours, which was only stopped."""
    fails = (echo(failed("n1", 0, failure(0, 3, rank=1))), stopped(), echo(), echo(joined("n1", 1)), ack(), up())
    assert told(agent(2, 2, 2), *WITH_N1, *fails) == [
        WAITING,
        FIRST_WITH_N1,
        f"rank 1 on node n1 failed: exit code 3; {STOPPING}",
        "round 1 (restart 1 of 2): 2 nodes, 2 workers, master n0:29501",
    ]


def test_a_run_whose_worker_fails_because_a_node_is_lost() -> None:
    """The worker dies first, and then the silence of its peer is noticed. Too few nodes are left for another round."""
    fails = (after(2), exits(failure(0, 1)), echo(), stopped(), echo(Lost(node("n1"), node("n0"))), echo(), ack())
    assert told(agent(2, 2, 2), *WITH_N1, *fails) == [
        WAITING,
        FIRST_WITH_N1,
        "rank 0 on node n0 failed: exit code 1",
        "node n1 fell silent, noticed by node n0",
        WAITING,
    ]


def test_the_failure_to_blame_is_told_once() -> None:
    """Two workers fail at the same time. The line about the stop has named the first one."""
    alone = agent(restarts=2)
    two = Agent(evolve(alone.spec, local_world_size=2))
    again = (after(2), exits(failure(0, 7), failure(1, 7)), echo(), stopped(), echo(), up())
    assert [line for line in told(two, *ALONE, *again) if "failed" in line] == ["rank 0 on node n0 failed: exit code 7"]


def test_a_failure_that_the_job_blames_is_told_if_this_node_has_told_its_own() -> None:
    """Both nodes fail at the same time, and each tells its own failure. The one in the journal first is blamed."""
    own_first = (after(2), ack(n1=1), exits(failure(0, 6)))
    later = (stopped(), echo(joined("n1", 1)), ack(n1=2), up())
    theirs = failed("n1", 0, failure(0, 5, rank=1))
    lines = told(agent(2, 2, 2), *WITH_N1, *own_first, read(theirs), echo(), *later)
    assert [line for line in lines if "failed" in line] == [
        "rank 0 on node n0 failed: exit code 6",
        "to blame: rank 1 on node n1 failed: exit code 5",
    ]
    reset = failed("n1", 0, failure(0, 1, rank=1, message="RuntimeError: Connection reset by peer"))
    lines = told(agent(2, 2, 2), *WITH_N1, *own_first, read(reset), echo(), *later)
    assert [line for line in lines if "failed" in line] == ["rank 0 on node n0 failed: exit code 6"]


def test_a_node_that_leaves_because_of_a_failure_names_it() -> None:
    """The failure is in the line about the stop. If the workers were being stopped already, there is no such line."""
    spec = evolve(agent(2, 2, 3).spec, local_world_size=2)
    fails = (after(2), ack(n1=1), exits(failure(0, 7)))
    lines = told(Agent(spec), *WITH_N1, limit(0), *fails)
    assert lines[-2:] == [
        f"rank 0 on node n0 failed: exit code 7; {STOPPING}",
        "no restarts are allowed here; this node takes part in no further round",
    ]
    lines = told(Agent(spec), *WITH_N1, limit(0), echo(failed("n1")), *fails)
    assert lines[-1] == (
        "rank 0 on node n0 failed: exit code 7, and no restarts are allowed; this node takes part in no further round"
    )


def test_only_who_was_asked_twice_was_asked_again() -> None:
    """The second line about a stop says why the time is shorter."""
    alone = agent()
    two = Agent(evolve(alone.spec, local_world_size=2))
    lines = told(two, *ALONE, exits(failure(0, 7)), ask_to_leave(2), after(1), ask_to_leave(2))
    assert lines[1:] == [
        "rank 0 on node n0 failed: exit code 7; " + STOPPING.replace("workers ", "workers once no other fails "),
        "SIGINT received: the workers get SIGKILL within 30 s",
        "asked again to stop: the workers get SIGKILL within 5 s",
    ]


def test_another_failure_than_the_first_is_to_blame() -> None:
    """A worker of this node has lost its peer. The failure of the peer is read while the workers of this node are being
    stopped, and is told as well."""
    reset = failure(0, 1, message="RuntimeError: Connection closed by peer")
    fails = (after(2), ack(n1=1), exits(reset), after(1), ack(n1=2), echo(failed("n1", 0, failure(0, 3, rank=1))))
    lines = told(agent(2, 2, 2), *WITH_N1, *fails, stopped(), echo(joined("n1", 1)), ack(n1=3), up())
    assert [line for line in lines if "failed" in line] == [
        f"rank 0 on node n0 failed: exit code 1, {reset.message} (probably a consequence of another worker's end)",
        "to blame: rank 1 on node n1 failed: exit code 3",
    ]


def test_a_run_that_a_node_comes_late_to() -> None:
    """A node that the job has no room for says so as soon as it sees the round, before it has joined."""
    terms = Terms(min_nodes=2, max_nodes=2)
    full = read(Opened(terms, "j"), joined("n1"), joined("n2"))
    assert told(agent(2, 2), start(), full, echo(), ack()) == [
        "round 0: 2 nodes, 2 workers, master n1:29500; this node stands by"
    ]


def test_a_wait_that_is_no_whole_number_of_seconds() -> None:
    """It is told as it was asked for, and not rounded."""
    terms = Terms(min_nodes=1, max_nodes=2, last_call_s=7.5)
    waits = Agent(Spec(NodeId("n0"), "n0", terms))
    lines = told(waits, start(), read(), echo(), echo())
    assert lines == ["waiting for nodes: 1 joined, 1 to 2 wanted, for 7.5 s more"]


def test_a_round_that_ends_and_begins_in_one_read() -> None:
    """An agent that was slow reads both at once. It stood by, and its operator learns of the new round all the same."""
    full = read(Opened(Terms(min_nodes=2, max_nodes=2, restarts=RestartPolicy(1)), "j"), joined("n1"), joined("n2"))
    again = read(failed("n1"), joined("n1", round=1), joined("n2", round=1))
    assert told(agent(2, 2, 1), start(), full, echo(), ack(), again)[-1] == (
        "round 1 (restart 1 of 1): 2 nodes, 2 workers, master n1:29500; this node stands by"
    )


def test_a_run_that_goes_on_without_this_node() -> None:
    """Who has left does not stand by."""
    left = (ask_to_leave(), echo(), stopped(), echo(joined("n1", 1)), echo(joined("n2", 1)), echo())
    assert not [line for line in told(agent(1, 2), *WITH_N1, *left) if "stands by" in line]


def test_a_run_through_an_outage() -> None:
    """That the workers go on is what an operator wants to know first."""
    assert told(agent(2, 2), *WITH_N1, cut_off("refused"), after(1), cut_off("refused"), echo(), ack()) == [
        WAITING,
        FIRST_WITH_N1,
        "the store cannot be reached, workers keep running; reknit tries again for 300 s: refused",
        "the store can be reached again",
    ]
    assert told(agent(2, 2), *WITH_N1, cut_off("refused"), after(301), after(13))[3:] == [
        f"the store cannot be reached: refused; {STOPPING}"
    ]


def test_an_outage_in_which_the_store_comes_back_without_the_others() -> None:
    """The operator must learn that the network is not to blame any more."""
    answered = (cut_off("1 of 3", answers=True), cut_off("1 of 3", answers=True), cut_off("refused"), read())
    lines = told(agent(), *ALONE, cut_off(), cut_off("timeout"), after(7), *answered)
    answers, more = "the store answers, but the job cannot use it yet", "reknit tries again for 293 s more: 1 of 3"
    assert lines[1:] == [
        "the store cannot be reached, workers keep running; reknit tries again for 300 s: refused",
        f"{answers}, workers keep running; {more}",
        "the store can be reached again",
    ]
    assert reason_text(own.StoreLost("1 of 3", True)) == f"{answers}: 1 of 3"


def test_an_agent_that_is_told_to_leave_in_an_outage_does_not_wait() -> None:
    """It leaves as soon as its workers are gone."""
    lines = told(agent(), *ALONE, cut_off(), ask_to_leave(), stopped())
    assert not any("waits until the store" in line for line in lines)


def test_a_run_that_is_taken_over_while_it_waits() -> None:
    """Otherwise the last line of the new agent is the one about its name, for ten minutes."""
    lines = told(agent(2, 2), start(), read(Opened(agent(2, 2).spec.terms, "j"), joined("n0")), echo())
    assert lines == ["node n0 is in the job already: this agent takes its place as n0.1", WAITING]


def test_a_node_that_comes_back_says_its_name() -> None:
    """The lines of the other nodes speak of n0.1."""
    lines = told(agent(1, 2), *WITH_N1, read(lost("n0", by="n1")), stopped(), ack(), read())
    assert "this node is n0.1 for the others from now on" in lines


def test_an_outage_with_a_fence() -> None:
    """Nobody is promised that workers run on if the fence is about to kill them."""
    terms = Terms(min_nodes=2, max_nodes=2, fence_s=2.5, silence_s=6)
    fenced = Agent(Spec(NodeId("n0"), "n0", terms))
    said = told(fenced, *WITH_N1, cut_off("refused"))
    assert said[-1] == (
        "the store cannot be reached, workers keep running for at most 2.5 s (--fence-after); "
        "reknit tries again for 300 s: refused"
    )


def test_a_run_with_two_agents_of_one_id() -> None:
    """The older one says why it ends."""
    assert told(agent(2, 2), *WITH_N1, echo(joined("n0", 0, 1)), stopped()) == [
        WAITING,
        FIRST_WITH_N1,
        f"another agent has joined with this node's id, as n0.1: each node needs its own --node-id; {STOPPING}",
    ]


def test_a_run_that_takes_another_agents_place() -> None:
    """Two hosts of one name throw each other out: the newer one must say as well what happens."""
    terms = Terms(2, 2)
    lines = told(agent(2, 2), start(), read(Opened(terms, "j"), joined("n0", nonce="other"), joined("n1")))
    assert lines[0] == "node n0 is in the job already: this agent takes its place as n0.1"
    assert not [line for line in told(agent(2, 2), *WITH_N1) if "already" in line]


def test_a_run_whose_round_ends_when_this_node_is_done() -> None:
    """No worker of this node is stopped, so no other line says why its work begins anew."""
    lines = told(agent(2, 2, 2), *WITH_N1, exits(0), echo(), stopped(), echo(failed("n1", 0, failure(0, 3, rank=1))))
    assert lines[-1] == "round 0 ended: rank 1 on node n1 failed: exit code 3"


def test_a_run_whose_workers_start_in_an_outage() -> None:
    """The beat that was missing is answered, and the journal cannot be read. The workers run."""
    fenced = Agent(Spec(NodeId("n0"), "n0", Terms(2, 2, fence_s=2.5)))
    waits = (
        start(),
        read(),
        echo(),
        ack(),
        echo(),
        ack(),
        after(3),
        echo(joined("n1")),
        cut_off("refused"),
        ack(),
        up(),
    )
    lines = told(fenced, *waits)
    assert lines[-1] == "the store cannot be reached; reknit tries again for 300 s: refused"


def test_a_latecomer_with_other_terms_takes_nobodys_place() -> None:
    """It ends, and the agent that has its id works on."""
    lines = told(agent(2, 2), start(), read(Opened(Terms(2, 3), "j"), joined("n0", nonce="other"), joined("n1")))
    assert not [line for line in lines if "takes its place" in line]


@pytest.mark.parametrize(
    ("asks", "which"), [((ask_to_leave(),), "another"), ((), "a")], ids=["told to leave", "with stuck processes"]
)
def test_a_host_says_which_signal_ends_it(asks: tuple[Builder, ...], which: str) -> None:
    """The first is told how to leave; the second, that it has been told once."""
    host = Agent(Spec(NodeId("n0"), "n0", Terms(1, 2), hosts_journal=True))
    ends = (*asks, echo(failed("n1")), stopped(stuck=() if asks else (7,)), echo(joined("n1", 1)))
    lines = told(host, *WITH_N1, *ends)
    assert f"ended; {which} signal ends it at once" in "\n".join(lines)


def test_a_run_whose_workers_end_in_an_outage() -> None:
    """Nobody must believe that they run on, as the line before said."""
    lines = told(agent(2, 2), *WITH_N1, cut_off("refused"), exits(1), stopped())
    assert lines[-1] == "this node has no workers now; it waits until the store can be reached"


# ---- sentences ----

FAILURE = WorkerFailure(1, 5, 3, message="ValueError: no\nmore")
FAILED = reasons.WorkerFailed(node("n1", 2), FAILURE)
_FAILED = "rank 5 on node n1.2 failed: exit code 3, ValueError: no"
SENTENCES = {
    FAILED: _FAILED,
    reasons.NodeGone(node("n1"), reasons.Departure.LOST, node("n2")): "node n1 fell silent, noticed by node n2",
    reasons.NodeGone(node("n1"), reasons.Departure.LEFT): "node n1 left",
    reasons.NodeGone(node("n1"), reasons.Departure.LEAVING): "node n1 is leaving",
    reasons.NodeGone(node("n1"), reasons.Departure.REPLACED): "node n1 was started again",
    reasons.NodesAdmitted((node("n1"),)): "1 node admitted: n1",
    reasons.NodesAdmitted((node("n1"), node("n2", 1))): "2 nodes admitted: n1, n2.1",
    reasons.BudgetSpent(0, FAILED): f"{_FAILED}, and no restarts are allowed",
    reasons.BudgetSpent(2, FAILED): f"{_FAILED}, and all 2 restarts are spent",
    reasons.Unstable(3): "more than 3 rounds ended without a failure",
    reasons.LongOver(3): "run 3 of the job has ended long ago, and nothing more is known of it",
    reasons.TooFewNodes(1, 2): "1 node joined in time, but the job needs at least 2",
    reasons.AbortedByOperator("enough"): "aborted: enough",
    reasons.AllSucceeded(): "all workers succeeded",
    own.SignalReceived(2): "SIGINT received",
    own.Replaced(node("n1", 3)): (
        "another agent has joined with this node's id, as n1.3: each node needs its own --node-id"
    ),
    own.DeclaredLost(): "the other nodes have declared this node lost",
    own.CutOff(1.5): "the store has acknowledged no beat of this node for 1.5 s (--fence-after)",
    own.StoreLost("refused"): "the store cannot be reached: refused",
    own.JournalRefused(reasons.Refusal.SECRET, "signed with another secret"): "signed with another secret",
    own.TermsDiffer((("max_nodes", "2", "3"),), node("n1")): (
        "the job runs on other terms: max_nodes: 2 there, 3 here (node n1 began the job)"
    ),
    own.AlreadyFinished(): "the job has already finished",
    own.CannotStop((7, 8)): "processes of this node survive SIGKILL: 7, 8",
}


@pytest.mark.parametrize("why", SENTENCES, ids=lambda why: type(why).__name__)
def test_every_reason_has_a_sentence(why: own.Reason) -> None:
    """One line each, made in one place."""
    assert reason_text(why) == SENTENCES[why]
    assert "\n" not in reason_text(why)


def test_no_reason_is_forgotten() -> None:
    """A new kind needs a sentence here."""
    assert {type(why) for why in SENTENCES} == set(get_args(own.Reason))


def test_ends_by_name() -> None:
    """Nobody knows signal numbers by heart; not all have names."""
    assert exit_text(-11) == "killed by SIGSEGV"
    assert exit_text(-1) == "killed by SIGHUP"
    assert exit_text(-40) == "killed by signal 40"
    assert exit_text(255) == "exit code 255"
    assert signal_name(999) == "signal 999"
    assert failure_text(WorkerFailure(0, 0, 1)) == "rank 0 failed: exit code 1"


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (NoProgress(30), "no progress for 30 s"),
        (NoProgress(30, since_start=True), "no progress for 30 s, and none since its start"),
        (NoProgress(0.5, step=12), "no progress for 0.5 s after step 12"),
        (TimerExpired("forward"), "the timer 'forward' ran out"),
        (TimerExpired(), "a timer ran out"),
    ],
)
def test_a_hung_worker_has_a_cause(cause: NoProgress | TimerExpired, told: str) -> None:
    """That reknit has killed the worker is not why the worker failed."""
    verb = "hung" if isinstance(cause, NoProgress) else "failed"
    assert cause_text(cause) == told
    assert failure_text(WorkerFailure(0, 3, -6, cause=cause)) == f"rank 3 {verb}: {told} (killed by SIGABRT)"
    hung = WorkerFailure(0, 3, -9, cause=cause, message="it survives\nSIGKILL")
    assert failure_text(hung) == f"rank 3 {verb}: {told} (killed by SIGKILL, it survives)"


def test_workers_that_did_not_obey() -> None:
    """The seconds are those that they had, which a second signal may have shortened."""
    assert killed_text(WorkersStopped(1.0, 0, 0, (), (1, 3), 30.0)) == (
        "ranks 1,3 did not end within 30 s: killed by SIGKILL"
    )
    assert killed_text(WorkersStopped(1.0, 0, 0, (), (2,), 6.2371)) == (
        "rank 2 did not end within 6.24 s: killed by SIGKILL"
    )


def test_why_a_job_has_failed() -> None:
    """The failure comes first, because it is the cause. The limit of restarts is none."""
    assert spent_text(reasons.BudgetSpent(0, FAILED)) == "rank 5 failed, and --max-restarts=0 allows no restart"
    assert spent_text(reasons.BudgetSpent(0, FAILED), "max_restarts").endswith("and max_restarts=0 allows no restart")
    assert spent_text(reasons.BudgetSpent(1, FAILED)) == "rank 5 failed, and the only restart is spent"


def test_workers_that_never_called_progress() -> None:
    """The limit may not fit the script. In the last round the report says so (`app.report`)."""
    hung = evolve(failure(0, -6), cause=NoProgress(30, since_start=True))
    asked = "does the script call it? A slow start needs --start-timeout"
    lines = told(agent(restarts=1), *ALONE, exits(hung))
    assert lines[1] == f"no worker of this node has called reknit.progress() since its start: {asked}"
    assert asked not in " ".join(told(agent(restarts=1), *ALONE, exits(evolve(hung, cause=NoProgress(30, step=3)))))
    assert asked not in " ".join(told(agent(), *ALONE, exits(hung)))


def test_a_worker_that_ended_too_early_is_named() -> None:
    """With exit code 0. Its peers fail of it, and blame the network."""
    two = Agent(Spec(NodeId("n0"), "n0", Terms(), local_world_size=2, shares_journal=False))
    lost = failure(0, 1, message="RuntimeError: Connection closed by peer [127.0.0.1]:1")
    early = "rank 1 had ended before that with exit code 0: the others may have needed it"
    assert told(two, *ALONE, exits(1), exits(lost))[-1] == early
    own = failure(0, 1, message="ValueError: its own")
    assert early not in told(two, *ALONE, exits(1), exits(own))


def test_where_a_hung_worker_stood() -> None:
    """In the line about its failure. That a signal had stopped it is told even if nobody knows where it stood."""
    stood = {
        Activity(Stance.OWN, "load", "data.py:41"): ", in load (data.py:41), not in a collective",
        Activity(Stance.STOPPED, "load", "data.py:41"): ", in load (data.py:41), stopped by a signal",
        Activity(Stance.STOPPED): ", stopped by a signal",
        UNSEEN: "",
    }
    for activity, told in stood.items():
        failure = WorkerFailure(0, 3, -9, cause=NoProgress(30, activity=activity))
        assert failure_text(failure) == f"rank 3 hung: no progress for 30 s{told} (killed by SIGKILL)"


def test_rounds() -> None:
    """Who is in it, and where the master is."""
    job = running(2)
    assert sealed_text(job) == "round 0: 2 nodes, 2 workers, master n0:29500"


COMMANDS: dict[Any, str] = {
    Append(Left(node("n1"))): "say Left node=n1",
    StartWorkers(
        2, Assignment(2, 0, 1, 4, "r", 4, "a", 1, (WorkerRanks(0, 2, 2), WorkerRanks(1, 3, 3)))
    ): "start workers of round 2, ranks 2..3 of 4",
    StopWorkers(1, 15, 3.0, own.SignalReceived(15)): "stop workers of round 1: SIGTERM, 3 s, SIGTERM received",
    Beat(node("n0"), 7, (node("n1"), node("n2"))): "beat, watch n1, n2",
    Beat(node("n0"), 7, ()): "beat, watch nobody",
    ReservePort(): "reserve another port",
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_every_command_has_its_words(command: Command) -> None:
    """For `-v` and transcripts."""
    assert command_text(command) == COMMANDS[command]
    finish = Finish(Result(WorkerState.FAILED, reasons.Unstable(1)))
    assert command_text(finish) == "finish: FAILED, more than 1 rounds ended without a failure"
    assert {type(c) for c in COMMANDS} | {Finish} == set(get_args(Command))


EVENTS: tuple[tuple[Event, str], ...] = (
    (Started(1.0, "x", 41231), "the keeper is ready (agent x, port 41231)"),
    (EntriesRead(1.0), "read nothing new"),
    (EntriesRead(1.0, (joined("n1"), Filler())), "read Joined node=n1 round=0; Filler"),
    (EntriesRead(1.0, (), Job()), "read the job as it is now"),
    (EntriesRead(1.0, (), is_anew=True), "read the journal from its beginning"),
    (Counters(1.0, {node("n1"): 7, node("n2"): 0}), "counters n1 7, n2 0"),
    (JournalFailed(1.0, "refused"), "the store is not reached: refused"),
    (StopRequested(1.0, 15), "asked to stop: SIGTERM"),
    (RestartsLimited(1.0, 2), "this node bears 2 further restarts"),
    (Woken(1.0), "woken"),
    (WorkersStarted(1.0, 3), "the workers of round 3 run"),
    (
        WorkersExited(1.0, 3, (WorkerExit(0), WorkerExit(1, FAILURE))),
        "workers of round 3 ended: local rank 0: exit code 0, local rank 1: exit code 3, ValueError: no",
    ),
    (WorkersStopped(1.0, 3, 0, (7, 8)), "no process of round 3 is left, except for 7, 8 (port none)"),
    (PortReserved(1.0, 41231), "port 41231 is reserved"),
)


@pytest.mark.parametrize(("event", "text"), EVENTS)
def test_every_event_has_a_text(event: Event, text: str) -> None:
    """`-v` shows what has come, without a time of its own: the line has one."""
    assert event_text(event) == text
    assert {type(each) for each, _ in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.24, "0.2 s"),
        (1, "1 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (3600 * 3 + 59 * 60 + 59, "3 h 59 min"),
        (86400 * 54 + 7200, "54 d 2 h"),
    ],
)
def test_a_time_has_two_units(seconds: float, text: str) -> None:
    """Nobody needs the seconds of a week."""
    assert time_text(seconds) == text


# ---- hangs ----

LOADS = Activity(Stance.OWN, "load", "data.py:41")
WAITS = Activity(Stance.COLLECTIVE, "all_reduce", "train.py:88")


def recorded(activity: Activity, number: int, group: str = "", *, is_over: bool = False) -> Activity:
    """The same, with what torch's flight recorder says."""
    return evolve(activity, collective=Collective("all_reduce", number, group, is_over))


def hang(*activities: Activity) -> reasons.WorkerFailed:
    hung = [WorkerFailure(i, i, -9, cause=NoProgress(30.0, 4, activity=each)) for i, each in enumerate(activities)]
    return blaming(node("n1"), root_cause_of(hung), hung)


UNSURE = "it cannot be told which worker holds up the others"
NAMED = "rank 0 on node n1 is the furthest behind"


@pytest.mark.parametrize(
    ("why", "lines"),
    [
        (
            hang(WAITS, LOADS, WAITS, WAITS),
            (
                "rank 1: load (data.py:41), not in a collective",
                "ranks 0,2-3: all_reduce (train.py:88)",
                "rank 1 on node n1 holds up the others",
            ),
        ),
        (
            hang(WAITS, LOADS, LOADS),
            (
                "ranks 1-2: load (data.py:41), not in a collective",
                "rank 0: all_reduce (train.py:88)",
                "probably ranks 1-2 hold up the others",
            ),
        ),
        (
            hang(WAITS, UNSEEN, WAITS),
            (
                "rank 1: at an unknown place",
                "ranks 0,2: all_reduce (train.py:88)",
                "probably rank 1 on node n1 holds up the others",
            ),
        ),
        (
            hang(recorded(WAITS, 4), recorded(LOADS, 3, is_over=True), recorded(UNSEEN, 4, "tp")),
            (
                "rank 1: load (data.py:41), not in a collective, after collective 3 (all_reduce)",
                "rank 0: all_reduce (train.py:88), in collective 4",
                "rank 2: at an unknown place, in collective 4 (all_reduce) of group 'tp'",
                "rank 1 on node n1 holds up the others",
            ),
        ),
        (hang(WAITS, WAITS), ("ranks 0-1: all_reduce (train.py:88)", f"{UNSURE}; {NAMED}")),
        (
            hang(LOADS, LOADS),
            (
                "ranks 0-1: load (data.py:41), not in a collective",
                f"all of them stand there; {NAMED}",
            ),
        ),
        (hang(LOADS), ()),
        (FAILED, ()),
    ],
)
def test_where_the_workers_stood_that_hung(why: reasons.WorkerFailed, lines: tuple[str, ...]) -> None:
    """By place, and how sure it is that the blamed one holds up the others."""
    assert tuple(line.removeprefix("  ") for line in hang_lines(why)) == lines


def test_every_entry_has_its_words() -> None:
    """Kind first, then what it is about."""
    assert entry_text(Lost(node("n1", 1), node("n2"))) == "Lost node=n1.1 by=n2"
    assert entry_text(Filler()) == "Filler"
    assert entry_text(joined("n1", 3)).startswith("Joined node=n1 round=3")


@pytest.mark.parametrize(
    ("count", "left"), [(1, "the only restart is left again"), (2, "all 2 restarts are left again")]
)
def test_restarts_that_are_given_back(count: int, left: str) -> None:
    """By a round that has lasted."""
    before = agent(restarts=count)
    job = evolve(before.job, terms=before.spec.terms)
    after = evolve(before, job=evolve(job, renewed=1))
    assert list(decisions(evolve(before, job=job), after, ())) == [f"a round has run for 60 s: {left}"]
