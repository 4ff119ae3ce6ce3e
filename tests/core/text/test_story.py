"""What has become of a job, from the traces of its agents."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from reknit.adapters.observe.trace_reader import Resumed, skim
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.world import World
from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.job.job import Verdict
from reknit.core.job.reasons import Departure, NodeGone, TooFewNodes, WorkerFailed
from reknit.core.text.story import NodeStory, Told, lasting, merged, node_story, time_spent
from tests.support.traces import Watching, simulated

TERMS = Terms(2, 3, RestartPolicy(max_restarts=3), last_call_s=5.0)


def told(watching: Watching, shift_s: float = 0.0, shifted: str = "") -> list[NodeStory]:
    """The stories of all agents. The clock of one node may be ahead. Steps are seconds apart, as the simulated clock
    has it."""
    found = []
    for path in sorted(watching.folder.rglob("*.jsonl")):
        each = [
            one.agent if isinstance(one, Resumed) else one for one in skim(path.read_text().splitlines(keepends=True))
        ]
        by_s = shift_s if path.parent.name.startswith(shifted) and shifted else 0.0
        moved = [evolve(one, time=one.time + by_s) if isinstance(one, Told) else one for one in each]
        story = node_story(moved)
        assert story is not None
        found.append(story)
    return found


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


def test_the_time_of_a_node_is_spent_on_something(eventful: Watching) -> None:
    """The table adds up."""
    story = merged(told(eventful))
    for node in story.nodes:
        assert sum(time_spent(node, story.rounds).values()) == pytest.approx(node.ended - node.began, abs=0.01)


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


def test_an_agent_without_a_step_has_no_story() -> None:
    """Its trace is empty."""
    assert node_story([]) is None
