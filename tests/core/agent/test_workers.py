"""What this node's workers should do."""

from __future__ import annotations

import pytest

from reknit.core.agent.commands import Append, Finish, StopWorkers
from reknit.core.agent.lifecycle import HURRY_S
from reknit.core.agent.reasons import CannotStop, CutOff, DeclaredLost, JournalRefused, SignalReceived, StopReason
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import MOST_AWAITED, ReservePort, StartWorkers
from reknit.core.agent.workers import AWAIT_EXITS_S
from reknit.core.job.entries import Aborted, Admit, Entry, Failed, Joined, RestartPolicy, Succeeded, Terms
from reknit.core.job.reasons import (
    AbortedByOperator,
    AllSucceeded,
    Departure,
    NodeGone,
    NodesAdmitted,
    Refusal,
    WorkerFailed,
)
from reknit.core.job.workers import Assignment, WorkerRanks
from tests.support.playbook import (
    Builder,
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
    start,
    stopped,
    up,
)

ALONE = Terms(restarts=RestartPolicy(max_restarts=1))
PAIR = Terms(2, 2, RestartPolicy(max_restarts=1))
TRIO = Terms(1, 3, RestartPolicy(max_restarts=1))
ME, N1 = node("n0"), node("n1")


def joining(round: int = 1) -> Placeholder:
    return Placeholder(Append, entry=Placeholder(Joined, round=round))


def stopping(
    why: StopReason, signal: int = 15, grace_s: float = 30.0, round: int = 0, await_exits_s: float = 0.0
) -> StopWorkers:
    return StopWorkers(round, signal, grace_s, why, await_exits_s=await_exits_s)


def state(playbook: Playbook) -> WorkerState:
    return playbook.agent.workers.state


# ---- starting --------------------------------------------------------------------------------------------------------


def test_a_member_starts_when_its_round_is_sealed_and_its_beat_was_heard() -> None:
    """S3; and a node that the others cannot hear may be declared lost already."""
    playbook = Playbook(an_agent(terms=PAIR)) >> start() >> read() << Placeholder(Append)
    assert playbook >> echo(joined("n1")) << joining(0) >> echo()
    started = Placeholder(StartWorkers, round=0)
    assert playbook >> ack() << started
    assert started().assignment.group_rank == 1


def test_a_standby_starts_nothing() -> None:
    """The round is sealed without it."""
    playbook = Playbook(an_agent("n2", PAIR)) >> start() >> read() << Placeholder(Append)
    assert playbook >> echo(joined("n0"), joined("n1")) << joining(1) >> echo() >> ack()


def test_a_round_that_is_over_when_it_is_read_is_never_started() -> None:
    """A batch is folded whole: a late reader must not start workers only to stop them."""
    playbook = Playbook(an_agent(terms=PAIR)) >> start() >> read() << Placeholder(Append) >> echo() << joining(0)
    assert playbook >> echo(joined("n1"), failed("n1")) << ReservePort() >> reserved() << joining(1) >> ack()


def test_a_node_that_leaves_starts_nothing_any_more() -> None:
    """The others may have sealed the round before they read that it goes."""
    playbook = Playbook(an_agent(terms=PAIR)) >> start() >> read() << Placeholder(Append) >> echo() << joining(0)
    assert playbook >> echo() >> ack() >> ask_to_leave() << Placeholder(Append) << Placeholder(Append)
    assert playbook >> read(joined("n1"))


def test_a_round_is_started_once() -> None:
    """A second start would put two workers on one rank."""
    playbook = playing("n0", PAIR, joined("n1"))
    assert playbook >> up() >> echo() >> ack() >> after(1) >> read()


def test_the_next_round_starts_only_after_the_last_ones_processes_are_gone() -> None:
    """S2: two rounds on one GPU end in an out-of-memory error that blames the wrong worker."""
    playbook = playing("n0", TRIO, joined("n1"), joined("n2")) >> read(lost("n1", by="n2"))
    assert playbook << stopping(NodeGone(N1, Departure.LOST, node("n2")))
    assert playbook >> read(joined("n2", 1)) >> ack() >> stopped() << joining(1)
    assert playbook >> echo() << Placeholder(StartWorkers, round=1)


def test_the_ranks_that_workers_really_got_are_kept() -> None:
    """Also if all workers have ended before they were reported as started, and never for another round."""
    made = Assignment(0, 1, 2, 8, "default", 8, "elsewhere", 1, (WorkerRanks(0, 6, 6),))
    early = playing("n0", ALONE) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert early >> up(assignment=made)
    assert early.agent.workers.assignment == made
    assert (state(early), early.agent.workers.exits.keys()) == (WorkerState.FAILED, {0})
    asked = playing("n0", ALONE)
    assert asked >> up(1, made)
    assert asked.agent.workers.assignment != made
    assert asked >> up(assignment=made) >> up()
    assert asked.agent.workers.assignment == made


def test_the_assignment_counts_restarts_spent() -> None:
    """Workers see TORCHELASTIC_RESTART_COUNT, and must not count rounds that cost nothing."""
    start_1 = Placeholder(StartWorkers, round=1)
    playbook = playing("n0", ALONE) >> exits(failure()) << Placeholder(StopWorkers) << Append(failed("n0"))
    assert playbook >> echo() >> stopped() << joining(1) >> echo() << start_1
    assert (start_1().assignment.restart_count, start_1().assignment.max_restarts) == (1, 1)


# ---- exits -----------------------------------------------------------------------------------------------------------


def test_success_is_that_of_all_workers() -> None:
    """A worker that ends early with 0 is waited for by nobody, and ends nothing."""
    playbook = playing("n0", ALONE, local_world_size=2) >> exits(1)
    assert playbook
    assert state(playbook) is WorkerState.HEALTHY
    assert playbook >> exits(0) << stopping(AllSucceeded()) << Append(Succeeded(ME, 0))
    assert state(playbook) is WorkerState.SUCCEEDED


def test_a_failure_stops_the_others_and_is_told_at_once() -> None:
    """The peers hang in a collective until they hear of it."""
    first, second = failure(0, 3, message="broken pipe"), failure(1, 1, message="ValueError: x")
    playbook = playing("n0", ALONE, local_world_size=3) >> exits(first, second)
    assert playbook << stopping(WorkerFailed(ME, second)) << Append(Failed(ME, 0, (first, second)))
    assert state(playbook) is WorkerState.FAILED


def test_a_failure_after_a_success_is_a_failure() -> None:
    """One of eight that exits with 0 does not excuse the rest."""
    bad = failure(0)
    playbook = playing("n0", ALONE, local_world_size=2) >> exits(1)
    assert playbook >> exits(bad) << stopping(WorkerFailed(ME, bad)) << Append(Failed(ME, 0, (bad,)))


def test_a_worker_that_fails_while_the_others_are_stopped_is_reported_still() -> None:
    """It died by itself, says the adapter, and may be the very cause of what ended the round."""
    playbook = playing("n0", TRIO, joined("n1")) >> read(lost("n1", by="n0")) << Placeholder(StopWorkers)
    assert playbook >> exits(failure()) << Append(failed("n0")) >> stopped() >> echo() << joining(1)
    assert state(playbook) is WorkerState.FAILED


# ---- echoes ----------------------------------------------------------------------------------------------------------

ECHO = failure(0, message="RuntimeError: Connection reset by peer")


def test_a_worker_that_is_said_to_have_ended_twice() -> None:
    """No adapter says so. Whoever does must not make the agent forget that a worker has failed, nor why."""
    playbook = playing("n0", PAIR, joined("n1"), local_world_size=2) >> exits(0) >> exits(ECHO) >> exits(0)
    assert playbook >> exits(failure(0, 9, message=ECHO.message))
    assert playbook.agent.workers.exits[0].failure == ECHO


CAUSE = failure(1, message="ValueError: boom")


def test_an_echo_waits_for_its_cause() -> None:
    """DDP: rank 1 raises and leaves through destroy_process_group, rank 0 sees the reset and is dead first."""
    playbook = playing("n0", ALONE, local_world_size=2) >> exits(ECHO)
    assert (
        playbook
        >> after(0.03)
        >> exits(CAUSE)
        << stopping(WorkerFailed(ME, CAUSE))
        << Append(failed("n0", 0, ECHO, CAUSE))
    )


def test_an_echo_does_not_wait_for_ever() -> None:
    """The cause may be on another node, or hang."""
    playbook = playing("n0", ALONE, local_world_size=2) >> exits(ECHO) >> after(0.9)
    assert playbook >> after(0.1) << stopping(WorkerFailed(ME, ECHO)) << Append(failed("n0", 0, ECHO))


def test_an_echo_that_leaves_nobody_alive_waits_for_nobody() -> None:
    """There is no cause to come."""
    assert playing("n0", ALONE) >> exits(ECHO) << stopping(WorkerFailed(ME, ECHO)) << Append(failed("n0", 0, ECHO))


def test_an_echo_waits_for_a_cause_on_another_node() -> None:
    """gloo, two nodes: the peer's failure is journalled first, and the node that raised would be stopped unheard."""
    playbook = playing("n0", PAIR, joined("n1")) >> exits(ECHO) >> after(0.5)
    assert playbook >> read(failed("n1")) << Placeholder(StopWorkers) << Append(failed("n0", 0, ECHO))


def test_an_echo_ends_the_wait_when_the_round_has_ended_elsewhere() -> None:
    """The cause is in the journal."""
    playbook = playing("n0", PAIR, joined("n1"), local_world_size=2) >> exits(ECHO)
    assert playbook >> read(failed("n1")) << Placeholder(StopWorkers) << Append(failed("n0", 0, ECHO))


@pytest.mark.parametrize("event", [exits(failure(), round=7), exits(0, round=-1), up(7), stopped(7)])
def test_what_is_told_of_another_round_is_stale(event: Builder) -> None:
    """Threads of an adapter may answer late."""
    playbook = playing("n0", ALONE)
    before = playbook.agent.workers
    assert playbook >> event
    assert playbook.agent.workers == before


def test_a_worker_may_end_before_it_was_said_to_run() -> None:
    """`true` as a worker is faster than the report of its start, which must not revive it."""
    playbook = Playbook(an_agent()) >> start() >> read() << Placeholder(Append) >> echo() << Placeholder(Append)
    assert playbook >> echo() << Placeholder(StartWorkers)
    assert playbook >> exits(0) << Placeholder(StopWorkers, why=AllSucceeded()) << Append(Succeeded(ME, 0)) >> up()
    assert state(playbook) is WorkerState.SUCCEEDED


# ---- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (failed("n1"), WorkerFailed(N1, failure())),
        (lost("n1", by="n0"), NodeGone(N1, Departure.LOST, ME)),
        (joined("n1", 1, incarnation=1), NodeGone(N1, Departure.REPLACED)),
        (lost("n0", by="n1"), DeclaredLost()),
        (Aborted("wrong data"), AbortedByOperator("wrong data")),
    ],
)
def test_workers_stop_when_their_round_ends_and_the_reason_is_told(entry: Entry, why: StopReason) -> None:
    """A user whose worker got a SIGTERM asks why, on that node."""
    playbook = playing("n0", TRIO, joined("n1"), joined("n2"))
    assert playbook >> read(entry) << stopping(why)
    assert state(playbook) is WorkerState.HEALTHY


LAST = Terms(1, 3, RestartPolicy(max_restarts=0))
"""No restart is left."""


@pytest.mark.parametrize(
    ("terms", "await_exits_s"), [(LAST, AWAIT_EXITS_S), (TRIO, 0.0)], ids=["the last round", "a restart follows"]
)
def test_who_fails_at_the_same_time_is_waited_for_if_that_delays_no_restart(terms: Terms, await_exits_s: float) -> None:
    """All ranks raise the same error. The report names them all, on the node that failed first and on the others."""
    playbook = playing("n0", terms, joined("n1"), local_world_size=2) >> exits(CAUSE)
    assert playbook << stopping(WorkerFailed(ME, CAUSE), await_exits_s=await_exits_s) << Append(failed("n0", 0, CAUSE))
    other = playing("n0", terms, joined("n1"), local_world_size=2) >> read(failed("n1"))
    assert other << stopping(WorkerFailed(N1, failure()), await_exits_s=await_exits_s)


def test_a_node_that_bears_no_further_failure_waits_for_exits_if_it_is_alone() -> None:
    """Nobody else restarts, so its report is the last one. Otherwise the others would wait for its goodbye."""
    asks = failure(0, message="EOFError: EOF when reading a line")
    alone = playing("n0", ALONE, local_world_size=2) >> exits(asks)
    stop = stopping(WorkerFailed(ME, asks), await_exits_s=AWAIT_EXITS_S)
    assert alone << stop << Placeholder(Append) << Placeholder(Append)
    with_others = playing("n0", TRIO, joined("n1"), local_world_size=2) >> exits(asks)
    assert with_others << stopping(WorkerFailed(ME, asks)) << Placeholder(Append) << Placeholder(Append)


def test_a_restart_that_nothing_may_excuse_waits_for_no_exits() -> None:
    """No member may vanish any more (`max_unspent`), but a restart is left for a failure."""
    terms = Terms(restarts=RestartPolicy(max_restarts=1, max_unspent=0))
    playbook = playing("n0", terms, local_world_size=2) >> exits(CAUSE)
    assert playbook << stopping(WorkerFailed(ME, CAUSE)) << Append(failed("n0", 0, CAUSE))


def test_who_hurries_waits_for_no_exits() -> None:
    """Ctrl-C while the workers are being stopped. The command without the wait ends the wait. Another one shortens the
    grace."""
    playbook = playing("n0", LAST, joined("n1"), local_world_size=2) >> exits(CAUSE)
    assert playbook << Placeholder(StopWorkers, await_exits_s=AWAIT_EXITS_S) << Placeholder(Append)
    playbook = playbook >> after(0.5) >> ask_to_leave(2)
    assert playbook << stopping(WorkerFailed(ME, CAUSE), signal=2) << Placeholder(Append)
    playbook = playbook >> after(1.0) >> ask_to_leave(2)
    assert playbook << stopping(WorkerFailed(ME, CAUSE), signal=2, grace_s=HURRY_S)


@pytest.mark.parametrize("grace_s", [0.25, 3.0])
def test_no_request_makes_a_short_grace_longer(grace_s: float) -> None:
    """The worker waits for input, so this node leaves anyway, and the request counts as the second one. It ends the
    wait for exits."""
    asks = failure(0, message="EOFError: EOF when reading a line")
    playbook = playing("n0", ALONE, local_world_size=2, grace_s=grace_s) >> exits(asks)
    assert playbook << Placeholder(StopWorkers, grace_s=grace_s) << Placeholder(Append) << Placeholder(Append)
    playbook = playbook >> after(0.125) >> ask_to_leave(2)
    assert playbook << stopping(WorkerFailed(ME, asks), signal=2, grace_s=grace_s)


@pytest.mark.parametrize("grace_s", [0.0, 0.5])
def test_a_short_grace_shortens_the_wait_for_exits(grace_s: float) -> None:
    """Whoever gives workers no time to end has no time for them either."""
    playbook = playing("n0", LAST, joined("n1"), local_world_size=2, grace_s=grace_s) >> exits(CAUSE)
    assert playbook << stopping(WorkerFailed(ME, CAUSE), grace_s=grace_s, await_exits_s=grace_s) << Placeholder(Append)


def test_an_agent_knows_how_long_the_wait_for_exits_may_be() -> None:
    """Otherwise a node whose workers end one by one would fall silent (rule 6), and its failure would be excused."""
    playbook = playing("n0", LAST, joined("n1"), local_world_size=2) >> exits(CAUSE)
    assert playbook << Placeholder(StopWorkers) << Placeholder(Append)
    assert playbook.agent.workers.kill_at == playbook.at + MOST_AWAITED * AWAIT_EXITS_S + 30.0


def test_a_stop_without_a_reason_to_report_waits_for_no_exits() -> None:
    """Nobody has failed."""
    playbook = playing("n0", LAST, joined("n1"), joined("n2")) >> read(Aborted("wrong data"))
    assert playbook << stopping(AbortedByOperator("wrong data"))


def test_workers_stop_for_an_admission() -> None:
    """A larger world needs new ranks for all."""
    playbook = playing("n0", TRIO, joined("n1")) >> read(joined("n2", 1), Admit(1))
    assert playbook << stopping(NodesAdmitted((node("n2"),)))


def test_workers_of_a_round_that_was_passed_over_stop_when_the_next_one_runs() -> None:
    """The agent reads the end of their round and the seal of the next one at once."""
    playbook = playing("n0", TRIO, joined("n1"), joined("n2"))
    entries = failed("n1"), joined("n0", 1), joined("n1", 1), joined("n2", 1)
    assert playbook >> read(*entries) << stopping(WorkerFailed(N1, failure()))


def test_a_stop_is_said_once() -> None:
    """A second signal kills many training scripts that handle the first."""
    playbook = playing("n0", TRIO, joined("n1"), joined("n2")) >> read(failed("n1")) << Placeholder(StopWorkers)
    assert playbook >> read(lost("n2", by="n1")) >> after(1) >> read(Aborted("x")) >> after(1)


def test_a_request_to_leave_hands_its_signal_on() -> None:
    """Handlers in training scripts tell SIGUSR1 from SIGTERM."""
    playbook = playing("n0", ALONE, grace_s=7.0) >> ask_to_leave(10)
    assert playbook << stopping(SignalReceived(10), 10, 7.0) << Placeholder(Append)


def test_a_request_to_leave_shortens_a_stop_that_began_for_another_reason() -> None:
    """The scheduler will kill us; the workers' grace must end before that."""
    playbook = playing("n0", ALONE, grace_s=30.0) >> exits(failure())
    why = WorkerFailed(ME, failure())
    assert playbook << stopping(why) << Append(failed("n0")) >> ask_to_leave() << Placeholder(Append)
    assert playbook >> after(1) >> ask_to_leave() << stopping(why, 15, 5.0)
    assert playbook >> after(0.9) >> ask_to_leave() << stopping(why, 15, 0.0)


def test_an_own_failure_is_the_reason_before_all_that_follows_from_it() -> None:
    """When there are several reasons to stop, the first of the list is given."""
    playbook = playing("n0", PAIR, joined("n1"))
    assert playbook >> exits(failure()) << stopping(WorkerFailed(ME, failure())) << Append(failed("n0"))
    assert playbook >> read(lost("n0", by="n1"), Aborted("x"))


def test_an_agent_that_must_end_stops_its_workers_first() -> None:
    """S7."""
    playbook = playing("n0", PAIR, joined("n1")) >> cut_off("unknown kind", refusal=Refusal.FORMAT)
    assert playbook << stopping(JournalRefused(Refusal.FORMAT, "unknown kind")) >> stopped() << Placeholder(Finish)


def test_a_fenced_node_kills_its_workers_at_once() -> None:
    """Who needs exclusivity cannot wait for a grace: the others may start at the silence limit."""
    playbook = playing("n0", Terms(2, 2, fence_s=3.0), joined("n1")) >> cut_off() >> after(2)
    assert playbook >> after(1) << stopping(CutOff(3.0), signal=9, grace_s=0.0)


def test_without_a_fence_an_outage_stops_nobody() -> None:
    """Rule 15: the store is not the training."""
    playbook = playing("n0", PAIR, joined("n1")) >> cut_off() >> after(60) >> after(200)
    assert playbook
    assert state(playbook) is WorkerState.HEALTHY


def test_processes_that_survive_sigkill_end_the_node() -> None:
    """They hold the GPU: a node in which they live must not take part again, and must not be waited for either."""
    playbook = playing("n0", PAIR, joined("n1")) >> read(failed("n1")) << Placeholder(StopWorkers)
    left = Placeholder(Append)
    assert playbook >> stopped(stuck=(42,)) << left
    assert left().entry.stuck == (42,)
    assert state(playbook) is WorkerState.UNHEALTHY
    finish = Placeholder(Finish)
    assert playbook >> echo() << finish
    assert (finish().result.state, finish().result.why) == (WorkerState.UNHEALTHY, CannotStop((42,)))


def test_the_fence_does_not_wait_for_a_grace_under_way() -> None:
    """The others start this node's successor at the silence limit, whatever its workers were being stopped for."""
    playbook = playing("n0", Terms(2, 2, fence_s=1.5), joined("n1")) >> exits(failure())
    assert playbook << Placeholder(StopWorkers) << Placeholder(Append) >> cut_off() >> after(1)
    why = playbook.agent.workers.stopping
    assert playbook >> after(0.5) << stopping(why, signal=9, grace_s=0.0)


def test_with_a_fence_a_node_that_is_counted_out_has_no_grace() -> None:
    """That it was declared lost means that its fence has run out, even if it only wakes up to read it."""
    playbook = playing("n0", Terms(1, 3, fence_s=2.0), joined("n1"), joined("n2"))
    assert playbook >> read(lost("n0", by="n1")) << stopping(DeclaredLost(), signal=9, grace_s=0.0)


def test_an_echo_is_reported_before_the_node_joins_again() -> None:
    """The wait for its cause ends with the workers: held longer, the failure would never be said."""
    playbook = playing("n0", PAIR, joined("n1"), local_world_size=2) >> read(failed("n1")) << Placeholder(StopWorkers)
    assert playbook >> exits(ECHO) << Append(failed("n0", 0, ECHO)) >> stopped() >> echo() << joining(1)
