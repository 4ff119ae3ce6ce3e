"""The story of a job in sentences: whole texts, as people read them."""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from reknit.core.job.entries import Node, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job, Outcome, Verdict
from reknit.core.job.reasons import (
    AllSucceeded,
    BudgetSpent,
    Departure,
    NodeGone,
    NodesAdmitted,
    TooFewNodes,
    WorkerFailed,
)
from reknit.core.job.workers import NoProgress, WorkerFailure
from reknit.core.text.doing import Doing, Situation
from reknit.core.text.story import NodeStory, Remark, RoundStory, Span, Story
from reknit.core.text.telling import round_lines, told, verdict_text

TERMS = Terms(2, 3, RestartPolicy(max_restarts=2), silence_s=4.0)
N0, N1 = Node(NodeId("n0")), Node(NodeId("n1"))


def when(at: float) -> str:
    return f"{at:.1f}"


def failed(rank: int = 1, message: str = "ValueError: no such file") -> WorkerFailed:
    return WorkerFailed(N1, WorkerFailure(0, rank, 1, 77, message))


def first(**fields: object) -> RoundStory:
    told = {"joined": {"n0": 1.0, "n1": 3.0}, "sealed_at": 3.0, "members": ("n0", "n1"), "workers": 4, "master": "a:1"}
    return RoundStory((0, 0), **{**told, **fields})  # type: ignore[arg-type]  # fields of a test


def node(name: str, *spans: Span, remarks: tuple[Remark, ...] = (), last: Doing = Doing.ENDED) -> NodeStory:
    return NodeStory(name, spans[0].began, spans[-1].ended, spans, remarks, {}, Job(), Situation(last, 0))


def lines(story: Story, live: Collection[str] = (), *, shows_all: bool = False) -> list[str]:
    return list(told(story, "digits", when, live=live, shows_all=shows_all))


def test_a_small_story() -> None:
    """Who took part, who failed first and why, what was decided by which rule, and where the time went."""
    spans = (
        Span(Doing.GATHERING, (0, 0), 1.0, 3.0),
        Span(Doing.RUNNING, (0, 0), 3.0, 20.0),
        Span(Doing.STOPPING, (0, 0), 20.0, 22.0),
    )
    rest = Span(Doing.RUNNING, (0, 1), 22.0, 40.0)
    blamed = failed()
    echo = WorkerFailure(0, 0, 1, 78, "RuntimeError: Connection closed by peer")
    rounds = (
        first(ended_at=20.0, failed_at=20.0, why=blamed, spent=1, failures=(("n0", echo), ("n1", blamed.failure))),
        RoundStory(
            (0, 1), {"n0": 22.0, "n1": 22.0}, 22.0, ("n0", "n1"), 4, "a:2", 40.0, 40.0, restarts=1, spent=1,
            outcome=Outcome(Verdict.SUCCEEDED, AllSucceeded()),
        ),
    )  # fmt: skip
    story = Story((node("n0", *spans, rest), node("n1", *spans, rest)), rounds, TERMS)
    assert lines(story) == [
        'job "digits": succeeded after 1 restart',
        "from 1.0 to 40.0 (39 s), as seen by 2 nodes (n0, n1)",
        "",
        "round 0  3.0  2 nodes (n0, n1), 4 workers, master a:1",
        "  node n1 came last, 2.0 s after the first, which waited for it",
        "  20.0  ended after 17.0 s: rank 1 on node n1 failed: exit code 1, ValueError: no such file",
        "    rank 0 failed, probably as a consequence: exit code 1, RuntimeError: Connection closed by peer",
        "    so all workers were stopped and started again: restart 1 of 2 (rule 2)",
        "    stopping the workers took 2.0 s on node n1",
        "",
        "round 1  22.0  2 nodes (n0, n1), 4 workers, master a:2",
        "  2.0 s passed since the round before had ended",
        "  40.0  ended after 18.0 s: all workers succeeded",
        "",
        "where the time went (of 2 agents together)",
        "  training       1 min 10 s   89.7 %",
        "  stopping            4.0 s    5.1 %   most on node n0: 2.0 s",
        "  meeting             4.0 s    5.1 %   most on node n0: 2.0 s",
        "the rules are those of docs/protocol.md",
    ]


def test_why_a_round_ended() -> None:
    """Each reason with its rule, and with how late it was noticed."""
    hung = WorkerFailed(N1, WorkerFailure(0, 1, -6, 77, "", "load (data.py:41)", cause=NoProgress(30.0, 7)))
    lost = NodeGone(N1, Departure.LOST, N0)
    ends = {
        "a hang": [*round_lines(first(ended_at=60.0, failed_at=30.0, why=hung, spent=1), None, TERMS, when)],
        "a loss": [*round_lines(first(ended_at=60.0, failed_at=56.0, why=lost), None, TERMS, when)],
        "a growth": [*round_lines(first(ended_at=60.0, failed_at=60.0, why=NodesAdmitted((N1,))), None, TERMS, when)],
    }
    assert ends["a hang"][2:] == [
        "  60.0  ended after 57.0 s: rank 1 on node n1 hung: no progress for 30 s after step 7 (killed by SIGABRT)",
        "    what it was doing, innermost call first:",
        "      load (data.py:41)",
        "    so all workers were stopped and started again: restart 1 of 2 (rule 2)",
        "    it was noticed 30.0 s after it had happened",
    ]
    rest = "go on without it. This costs no restart (rule 2)."
    assert ends["a loss"][2:] == [
        "  60.0  ended after 57.0 s: node n1 fell silent, noticed by node n0",
        f"    A node that does not beat for 4 s counts as lost (rule 6), and the others {rest}",
        "    it was noticed 4.0 s after it had happened",
    ]
    assert ends["a growth"][-1] == (
        "    so a new round began with them 1 s after the first of them came (--admission=soon, rule 11)"
    )


def test_nothing_is_said_of_a_restart_that_was_not_seen() -> None:
    """The job ends with this round, or its traces do."""
    only = first(ended_at=60.0, failed_at=60.0, why=failed())
    assert [*round_lines(only, None, TERMS, when, goes_on=False)][-1] == "    so all workers were stopped (rule 2)"


def test_a_node_that_ran_alone_has_left_nobody() -> None:
    """Nothing is said of others."""
    left = NodeGone(N0, Departure.LEAVING)
    only = first(members=("n0",), ended_at=60.0, failed_at=60.0, why=left)
    assert "others" not in " ".join(round_lines(only, None, TERMS, when, goes_on=False))
    assert "rule 11" in " ".join(round_lines(only, None, TERMS, when)), "a standby went on"


def test_a_job_that_failed() -> None:
    """The verdict first, and the budget with its option."""
    outcome = Outcome(Verdict.FAILED, BudgetSpent(2, failed()))
    round = first(ended_at=20.0, failed_at=20.0, spent=2, outcome=outcome)
    story = Story((node("n0", Span(Doing.RUNNING, (0, 0), 3.0, 20.0)),), (round,), TERMS)
    assert verdict_text(story) == "failed: rank 1 failed, and all 2 restarts are spent"
    assert "    so the job failed: a failed worker costs a restart (rule 2), and --max-restarts=2" in lines(story)


def test_a_job_for_which_too_few_nodes_came() -> None:
    """Who was there, how many it takes, and which limit ended the wait."""
    round = RoundStory((0, 0), {"n0": 1.0}, ended_at=31.0, outcome=Outcome(Verdict.FAILED, TooFewNodes(1, 2)))
    story = Story((node("n0", Span(Doing.GATHERING, (0, 0), 1.0, 31.0)),), (round,), TERMS)
    few = "1 node joined in time, but the job needs at least 2"
    assert lines(story) == [
        f'job "digits": failed: {few}',
        "from 1.0 to 31.0 (30 s), as seen by node n0",
        "",
        "round 0  not formed: node n0 had joined, and the job needs at least 2",
        f"  31.0  ended: {few}",
        "    so the job failed: a round waits for enough nodes for 600 s (--rdzv-conf=join_timeout) (rule 9)",
        "",
        "where the time went",
        "  meeting            30.0 s  100.0 %",
        "the rules are those of docs/protocol.md",
    ]


def test_the_workers_are_named_by_their_command_line() -> None:
    """Once, if it is the same on all nodes."""

    def told(*commands: str) -> list[str]:
        span = Span(Doing.RUNNING, (0, 0), 3.0, 20.0)
        nodes = (evolve(node(f"n{i}", span), command=each) for i, each in enumerate(commands))
        return [line for line in lines(Story(tuple(nodes), (first(),), TERMS)) if line.startswith("workers")]

    assert told("python3 train.py", "python3 train.py") == ["workers: python3 train.py"]
    assert told("python3 train.py", "./run", "./run") == [
        "workers of node n0: python3 train.py",
        "workers of 2 nodes (n1, n2): ./run",
    ]
    assert told("", "") == []


def test_an_agent_that_was_started_again_is_told_apart() -> None:
    """Both have the name of the node."""
    gone = node("n0", Span(Doing.RUNNING, (0, 0), 3.0, 20.0), last=Doing.RUNNING)
    lives = node("n0", Span(Doing.RUNNING, (0, 0), 30.0, 40.0), last=Doing.RUNNING)
    told_lines = lines(Story((gone, lives), (first(),), TERMS), live={"n0"})
    assert any(line.startswith("an earlier agent of node n0 ended without a word") for line in told_lines)
    assert "the agent of node n0 runs: now running, round 0" in told_lines


def test_many_rounds_are_counted() -> None:
    """The first and the last are told. All are, if that is wanted."""
    rounds = tuple(
        RoundStory((0, n), {}, float(n), ("n0",), 1, "a:1", n + 0.5, n + 0.5, why=failed(n % 2), spent=n + 1)
        for n in range(100)
    )
    story = Story((node("n0", Span(Doing.RUNNING, (0, 0), 0.0, 100.0)),), rounds, TERMS)
    told_lines = lines(story)
    assert "rounds 3 to 89 are not told one by one (--all does). They ended because:" in told_lines
    assert "      44 ×  rank 1 on node n1 failed: exit code 1, ValueError: no such file" in told_lines
    assert sum(line.startswith("round ") for line in told_lines) == 13
    assert sum(line.startswith("round ") for line in lines(story, shows_all=True)) == 100


def test_what_several_nodes_have_seen_is_told_once() -> None:
    """An outage of the store concerns all."""
    remark = (Remark(5.0, "the store could not be used: refused"),)
    span = Span(Doing.RUNNING, (0, 0), 3.0, 20.0)
    nodes = tuple(node(f"n{i}", span, remarks=remark, last=Doing.RUNNING) for i in range(2))
    story = Story(nodes, (first(),), TERMS, {"n1": -40.0})
    assert lines(story, live={"n0"})[0:5] == [
        'job "digits": runs',
        "from 3.0 to 20.0 (17 s), as seen by 2 nodes (n0, n1)",
        "the clock of node n1 is 40.0 s behind the others; its times are corrected here",
        "the agent of node n0 runs: now running, round 0",
        "the agent of node n1 ended without a word some time after 20.0: it was killed, or its host died",
    ]
    assert "  5.0  2 nodes (n0, n1): the store could not be used: refused" in lines(story)
