"""What has become of a job, from the traces of its agents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from reknit.adapters.observe.trace_reader import Resumed, replay, skim
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Spec
from reknit.core.agent.reasons import AlreadyFinished
from reknit.core.agent.worker_words import WorkerExit, WorkersExited
from reknit.core.job.entries import Node, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Verdict
from reknit.core.job.reasons import BudgetSpent, Departure, NodeGone, TooFewNodes, WorkerFailed
from reknit.core.job.workers import NoProgress, WorkerFailure
from reknit.core.text.doing import Doing
from reknit.core.text.story import DETECTING, NodeStory, Told, lasting, merged, node_story, time_spent
from reknit.core.text.telling import round_lines, verdict_text
from reknit.core.text.telling import told as tell
from reknit.core.text.timeline_data import page_data
from tests.support.traces import Watching, simulated

TERMS = Terms(2, 3, RestartPolicy(max_restarts=3), last_call_s=5.0)


def told(watching: Watching, shift_s: float = 0.0, shifted: str = "") -> list[NodeStory]:
    """The stories of all agents, by the clock of the simulated world. The clock of one node may be ahead."""
    found = []
    for path in sorted(watching.folder.rglob("*.jsonl")):
        by_s = shift_s if shifted and path.parent.name.startswith(shifted) else 0.0
        lines = (in_world_time(line, by_s) for line in path.read_text().splitlines())
        story = node_story(one.agent if isinstance(one, Resumed) else one for one in skim(lines))
        assert story is not None
        found.append(story)
    return found


def in_world_time(line: str, by_s: float) -> str:
    """The line of a step says when it was made: in the simulated world as well."""
    data = json.loads(line)
    if "event" in data:
        data["time"] = data["event"]["at"] + by_s
    return json.dumps(data, separators=(",", ":")) + "\n"


def ended(world: World) -> None:
    world.calm = world.finishing = True
    for proc in world.procs:
        if proc.up:
            staff.succeed(world, proc, proc.group)
    assert world.run_for(120.0, until=lambda: not any(proc.up for proc in world.procs))


def failure_and_loss(world: World) -> None:
    world.run_for(60.0)
    staff.fail(world, world.procs[1])
    world.run_for(60.0)
    world.kill(world.procs[2])
    world.run_for(60.0)
    ended(world)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Watching:
    return simulated(tmp_path_factory.mktemp("t") / "t", TERMS, 3, failure_and_loss)


def test_rounds_and_why_they_ended(eventful: Watching) -> None:
    """As the agents have folded it, from all nodes together."""
    story = merged(told(eventful))
    first, second, third = story.rounds
    assert isinstance(first.why, WorkerFailed)
    assert (first.why.node.id, first.spent, len(first.members), first.workers) == ("n1", 1, 3, 6)
    assert isinstance(second.why, NodeGone)
    assert (second.why.node.id, second.why.how, second.spent) == ("n2", Departure.LOST, 1)
    assert third.outcome is not None
    assert third.outcome.verdict is Verdict.SUCCEEDED
    assert set(third.members) == {"n0", "n1"}
    assert story.outcome == third.outcome
    assert not next(node for node in story.nodes if node.node == "n2").has_ended
    assert any("nothing was heard of node n2" in remark.text for node in story.nodes for remark in node.remarks)


def test_the_failures_of_all_nodes_are_in_it(eventful: Watching) -> None:
    """Those that are echoes as well: each with its node."""
    first = merged(told(eventful)).rounds[0]
    assert ("n1", first.why.failure) in first.failures if isinstance(first.why, WorkerFailed) else False


def test_a_clock_that_is_ahead_is_found_and_corrected(eventful: Watching) -> None:
    """By the journal, which all have read. Times of the others stay."""
    right, wrong = merged(told(eventful)), merged(told(eventful, 37.0, "n1"))
    assert wrong.skews.keys() == {"n1"}
    assert wrong.skews["n1"] == pytest.approx(37.0, abs=1.0)
    for one, other in zip(right.rounds, wrong.rounds, strict=True):
        assert one.sealed_at == pytest.approx(other.sealed_at, abs=1.0)


def test_a_node_that_reads_late_has_no_other_clock(tmp_path: Path) -> None:
    """A newcomer reads of a round long after it began. Its clock is right all the same."""

    def play(world: World) -> None:
        world.run_for(60.0)
        spec = Spec(NodeId("n2"), "10.0.0.2", TERMS, local_world_size=2)
        world.begin(Proc("p2", 2, spec, 0.0, 2))
        world.run_for(60.0)

    watching = simulated(tmp_path / "t", TERMS, 2, play)
    stories = told(watching)
    first = [node.rounds[0, 0].sealed_at for node in stories]
    assert max(at for at in first if at is not None) > 50.0 + min(at for at in first if at is not None)
    assert merged(stories).skews == {}


def test_the_rounds_of_a_later_epoch_are_others(tmp_path: Path) -> None:
    """A job that has failed was started again in the same journal. Its rounds have the same numbers. The agents of the
    first epoch have read nothing of the second, and their clocks are right."""

    def play(world: World) -> None:
        world.run_for(30.0)
        staff.fail(world, world.procs[0])
        assert world.run_for(120.0, until=lambda: not any(proc.up for proc in world.procs))
        for i in range(2):
            world.begin(Proc(f"again{i}", i, Spec(NodeId(f"n{i}"), f"10.0.0.{i}", Terms(2, 2)), 0.0, 10 + i))
        world.run_for(60.0)
        ended(world)

    story = merged(told(simulated(tmp_path / "t", Terms(2, 2), 2, play)))
    first, second = story.rounds
    assert (first.key, second.key) == ((0, 0), (1, 0))
    assert story.skews == {}
    for node in story.nodes[2:]:
        spent = time_spent(node, story.rounds)
        assert (spent[DETECTING], spent["training"] > 50.0) == (0.0, True)
    lines = list(tell(story, "j", str, live=(), shows_all=True))
    assert any(line.startswith("round 0 of epoch 1  ") for line in lines)
    assert [name for name, _ in page_data(story, "j", str, [])["rounds"]] == ["0", "1", "0 of epoch 1"]


def test_restarts_that_were_given_back_are_not_spent(tmp_path: Path) -> None:
    """A budget is for a time: two restarts of which one was given back are one of one."""

    def play(world: World) -> None:
        for _ in range(2):
            world.run_for(200.0)
            staff.fail(world, world.procs[0])
        world.run_for(60.0)
        ended(world)

    terms = Terms(1, 1, RestartPolicy(max_restarts=1, renews=True, steady_s=100.0))
    story = merged(told(simulated(tmp_path / "t", terms, 1, play)))
    assert [(round.restarts, round.spent) for round in story.rounds] == [(1, 1), (2, 1), (2, 1)]
    assert "succeeded after 2 restarts" in next(tell(story, "j", str, live=(), shows_all=True))


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_whose_nodes_were_all_stopped(tmp_path: Path, nodes: int) -> None:
    """The operator has ended it. No other node goes on, so the story speaks of none."""

    def play(world: World) -> None:
        world.run_for(30.0)
        for proc in world.procs:
            world.ask_to_leave(proc, 15)
        world.run_for(0.2)
        for proc in world.procs:
            world.ask_to_leave(proc, 15)  # `timeout` signals the agent, and then its group
        assert world.run_for(120.0, until=lambda: not any(proc.up for proc in world.procs))

    stories = told(simulated(tmp_path / "t", Terms(1, 3, last_call_s=5.0), nodes, play))
    story = merged(stories)
    assert (story.outcome, story.stopped_by) == (None, (15,))
    lines = list(tell(story, "j", str, live=(), shows_all=True))
    assert lines[0] == 'job "j": stopped by SIGTERM'
    assert sum("asked to stop: SIGTERM" in line for line in lines) == 1, "a repetition is the same request"
    assert not [line for line in lines if "The others" in line]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_last_agent_says_how_a_job_without_an_outcome_ended(tmp_path: Path, nodes: int) -> None:
    """Some agents were stopped. Others bore no further failure, and have left. A refused one has not taken part."""

    def play(world: World) -> None:
        world.run_for(30.0)
        for proc in world.procs:
            world.ask_to_leave(proc, 15)
            world.run_for(30.0)
        assert not any(proc.up for proc in world.procs)

    stories = told(simulated(tmp_path / "t", Terms(1, 2, last_call_s=5.0), nodes, play))
    spent = BudgetSpent(0, WorkerFailed(Node(NodeId("n0")), WorkerFailure(0, 0, 3)))
    late = evolve(stories[0], node="late", end=AlreadyFinished(), began=stories[-1].ended, ended=stories[-1].ended + 9)
    by_end = sorted(stories, key=lambda node: node.ended)
    failed = merged([*by_end[:-1], evolve(by_end[-1], end=spent), late])
    assert (verdict_text(failed), failed.stopped_by) == (
        "failed: rank 0 failed, and --max-restarts=0 allows no restart",
        (),
    )
    stopped = merged([*(evolve(each, end=spent) for each in by_end[:-1]), by_end[-1], late])
    assert (stopped.outcome, stopped.stopped_by) == (None, (15,))


def test_a_job_that_one_node_has_left_goes_on(tmp_path: Path) -> None:
    """Its story is that of the nodes that are left, and how these end."""

    def play(world: World) -> None:
        world.run_for(30.0)
        world.ask_to_leave(world.procs[2], 2)
        world.run_for(30.0)
        ended(world)

    stories = told(simulated(tmp_path / "t", TERMS, 3, play))
    story = merged(stories)
    assert (story.stopped_by, merged(stories[2:]).stopped_by) == ((), ()), "its own trace knows of the others"
    lines = list(tell(story, "j", str, live=(), shows_all=True))
    assert lines[0] == 'job "j": succeeded'
    assert any("The others go on without a node that leaves (rule 11)." in line for line in lines)


def test_a_standby_is_there_when_the_job_succeeds(tmp_path: Path) -> None:
    """The round for which it was there is none."""

    def play(world: World) -> None:
        world.run_for(60.0)
        ended(world)

    story = merged(told(simulated(tmp_path / "t", evolve(TERMS, max_nodes=2), 3, play)))
    assert len(story.rounds) == 1
    assert story.outcome is not None
    assert story.outcome.verdict is Verdict.SUCCEEDED


@pytest.mark.parametrize("is_needed", [False, True])
def test_nobody_waits_for_a_standby(tmp_path: Path, is_needed: bool) -> None:
    """It has joined long before the round in which it takes part. Nobody waited in that time. While the round before
    runs, the one for which it is there is none."""

    def play(world: World) -> None:
        world.run_for(300.0)
        if is_needed:
            world.ask_to_leave(world.procs[1], 2)
            world.run_for(60.0)
        for proc in world.procs:
            if proc.up:
                world.kill(proc)

    story = merged(told(simulated(tmp_path / "t", evolve(TERMS, max_nodes=2), 3, play)))
    assert [len(round.members) for round in story.rounds] == [2] * (1 + is_needed)
    if is_needed:
        assert "came last" not in " ".join(round_lines(story.rounds[1], story.rounds[0], TERMS, str))


def test_a_trace_without_its_beginning(eventful: Watching) -> None:
    """What was before its first step has no time."""
    (path,) = [path for path in eventful.folder.rglob("*.jsonl") if path.parent.name.startswith("n0")]
    made = [one for one in replay(path.read_text().splitlines(keepends=True)) if one.after.workers.alive]
    story = node_story([made[5].after, *(Told(each.time) for each in made[6:])])
    assert story is not None
    (only,) = story.rounds.values()
    assert (only.sealed_at, only.ended_at, len(only.members)) == (None, None, 3)
    told_lines = list(round_lines(only, None, TERMS, str))
    named = ", ".join(only.members)
    assert told_lines == [f"round 0  (its beginning was not seen)  3 nodes ({named}), master {only.master}"]


def test_the_time_of_a_node_is_spent_on_something(eventful: Watching) -> None:
    """The table adds up."""
    story = merged(told(eventful))
    for node in story.nodes:
        assert sum(time_spent(node, story.rounds).values()) == pytest.approx(node.ended - node.began, abs=0.01)


def test_a_loss_is_noticed_after_the_silence(tmp_path: Path) -> None:
    """The others could not know before. What their workers did meanwhile was for nothing, and counts as detecting."""

    def lose(world: World) -> None:
        world.echo = False  # no worker fails because the others are gone
        world.run_for(60.0)
        world.kill(world.procs[2])
        world.run_for(60.0)
        ended(world)

    story = merged(told(simulated(tmp_path / "t", TERMS, 3, lose)))
    first = story.rounds[0]
    assert isinstance(first.why, NodeGone)
    assert first.ended_at is not None
    assert first.failed_at == first.ended_at - TERMS.silence_s
    for node in story.nodes[:2]:
        assert time_spent(node, story.rounds)[DETECTING] == pytest.approx(TERMS.silence_s, abs=1.0)


def test_a_hang_has_lasted_for_as_long_as_the_failure_says(tmp_path: Path) -> None:
    """It began long before it was noticed."""

    def hang(world: World) -> None:
        world.run_for(120.0)
        staff.freeze(world, world.procs[0])
        world.run_for(30.0)
        ended(world)

    story = merged(told(simulated(tmp_path / "t", TERMS, 2, hang)))
    first = story.rounds[0]
    assert isinstance(first.why, WorkerFailed)
    assert isinstance(first.why.failure.cause, NoProgress)
    assert first.ended_at is not None
    assert first.failed_at == first.ended_at - first.why.failure.cause.for_s
    for node in story.nodes:
        assert time_spent(node, story.rounds)[DETECTING] == pytest.approx(first.why.failure.cause.for_s, abs=1.0)


def test_a_job_whose_restarts_are_spent(tmp_path: Path) -> None:
    """Each round has its failure, and the last one the verdict."""

    def fail(world: World) -> None:
        for _ in range(2):
            world.run_for(60.0)
            staff.fail(world, world.procs[0])
        assert world.run_for(60.0, until=lambda: not any(proc.up for proc in world.procs))

    terms = Terms(2, 2, RestartPolicy(max_restarts=1))
    story = merged(told(simulated(tmp_path / "t", terms, 2, fail)))
    first, second = story.rounds[:2]
    assert isinstance(first.why, WorkerFailed)
    assert (first.spent, first.outcome) == (1, None)
    assert second.outcome is not None
    assert isinstance(second.outcome.why, BudgetSpent)
    assert second.outcome.why.root.node.id == "n0"
    assert all(node.has_ended for node in story.nodes)


def test_what_a_node_did_when(eventful: Watching) -> None:
    """One after the other, without a gap: what the timeline draws."""
    node = next(story for story in told(eventful) if story.node == "n0")
    assert [span.began for span in node.spans[1:]] == [span.ended for span in node.spans[:-1]]
    running = [span.key for span in node.spans if span.doing is Doing.RUNNING]
    assert running == [(0, 0), (0, 1), (0, 2)]
    assert (node.spans[0].doing, node.last.doing) == (Doing.STARTING, Doing.ENDED)


def test_a_node_that_still_runs_lasts_until_now(eventful: Watching) -> None:
    """What it does last takes as long as it does."""
    node = told(eventful)[2]
    later = lasting(node, node.ended + 100.0)
    assert later.ended == later.spans[-1].ended == node.ended + 100.0


def test_a_job_for_which_too_few_nodes_come(tmp_path: Path) -> None:
    """It has a round that was never formed."""
    terms = Terms(2, 2, join_timeout_s=30.0)
    story = merged(told(simulated(tmp_path / "t", terms, 1, lambda world: [world.run_for(60.0)])))
    (only,) = story.rounds
    assert (only.sealed_at, only.members, list(only.joined)) == (None, (), ["n0"])
    assert only.outcome is not None
    assert only.outcome.why == TooFewNodes(1, 2)


def test_the_failure_that_ends_a_job_belongs_to_its_round(tmp_path: Path) -> None:
    """The nodes had begun to gather again. No round was formed, and none is told."""

    def play(world: World) -> None:
        world.run_for(30.0)
        staff.fail(world, world.procs[0])
        world.run_for(60.0)

    story = merged(told(simulated(tmp_path / "t", Terms(2, 2), 2, play)))
    (only,) = story.rounds
    assert only.sealed_at is not None
    assert isinstance(getattr(only.outcome, "why", None), BudgetSpent)


@pytest.mark.parametrize("is_same_node", [True, False])
def test_a_rank_that_ended_before_its_peers_lost_it(tmp_path: Path, is_same_node: bool) -> None:
    """A shard of the data is shorter than the others. Its rank ends with 0, and then others fail in a collective. Of
    another node nobody can tell whether its rank was earlier."""

    def play(world: World) -> None:
        world.run_for(60.0)
        other, short = (proc for proc in world.procs if proc.group is not None)
        staff.succeed(world, short, short.group, 1)
        world.run_for(5.0)
        failing = (short if is_same_node else other).group
        assert failing is not None
        failing.running.discard(1)
        round, lost = failing.command.round, WorkerExit(1, failing.failure(1, 1, staff.ECHO))
        world.tell(short if is_same_node else other, 0.1, lambda at: WorkersExited(at, round, (lost,)))
        world.run_for(60.0)
        ended(world)

    story = merged(told(simulated(tmp_path / "t", Terms(2, 2, RestartPolicy(max_restarts=1)), 2, play)))
    first, second = story.rounds
    rank = 2 * first.members.index("n1")
    assert first.early["n1"] == {rank}
    line = f"    rank {rank} had ended before that with exit code 0: the others may have needed it"
    assert (line in round_lines(first, None, story.terms, str)) == is_same_node
    assert not [line for line in round_lines(second, first, story.terms, str) if "exit code 0" in line], "all have"


def test_an_agent_without_a_step_has_no_story() -> None:
    """Its trace is empty."""
    assert node_story([]) is None
