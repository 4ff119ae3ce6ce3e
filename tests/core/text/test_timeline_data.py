"""The story of a job as data for pictures."""

from __future__ import annotations

import json

from attrs import evolve

from reknit.core.job.entries import Node, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.job.reasons import WorkerFailed
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.doing import Doing, Situation
from reknit.core.text.story import NodeStory, Remark, RoundStory, Span, Story
from reknit.core.text.timeline_data import page_data, perfetto

OWN = WorkerFailure(0, 1, 1, 5, "ValueError: x")
ECHO = WorkerFailure(0, 0, 1, 5, "RuntimeError: Connection reset by peer")
SPANS = (
    Span(Doing.GATHERING, (0, 0), 100.0, 101.0),
    Span(Doing.RUNNING, (0, 0), 101.0, 105.0),
    Span(Doing.GATHERING, (0, 1), 105.0, 105.0),
    Span(Doing.RUNNING, (0, 1), 105.0, 107.25),
)


def story() -> Story:
    """Rank 1 on n1 fails after 4 s, and rank 0 because of it. Round 1 still runs on both nodes."""
    why = WorkerFailed(Node(NodeId("n1")), OWN)
    nodes = [
        NodeStory(name, 100.0, 107.25, SPANS, remarks, {}, Job(), Situation(Doing.RUNNING, 1))
        for name, remarks in (("n0", (Remark(102.0, "asked to stop"),)), ("n1", ()))
    ]
    round = RoundStory((0, 0), {}, 101.0, ("n0", "n1"), 2, "a:1", 105.0, 105.0, why, (("n0", ECHO), ("n1", OWN)), 1, 1)
    later = RoundStory((0, 1), {}, 105.0, ("n0", "n1"), 2, "a:2")
    return Story(tuple(nodes), (round, later), Terms(2, 2, RestartPolicy(max_restarts=3)))


def test_perfetto_can_read_it() -> None:
    """A row for the job and one for each node, in this order. Times are in microseconds from 0."""
    made = perfetto(story(), "digits", str)
    assert json.loads(json.dumps(made)) == made
    events = made["traceEvents"]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert list(rows) == ["job digits", "node n0", "node n1"]
    assert list(rows.values()) == sorted(rows.values())
    spans = {row: [] for row in rows.values()}  # type: dict[int, list[tuple[str, int, int]]]
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"]].append((event["name"], event["ts"], event["dur"]))
    assert spans[rows["job digits"]] == [("round 0", 1_000_000, 4_000_000), ("round 1", 5_000_000, 2_250_000)]
    assert spans[rows["node n1"]] == [
        ("gathering, round 0", 0, 1_000_000),
        ("running, round 0", 1_000_000, 4_000_000),
        ("gathering, round 1", 5_000_000, 1),
        ("running, round 1", 5_000_000, 2_250_000),
    ]
    marks = [(event["pid"], event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert marks == [(rows["node n0"], "asked to stop", 2_000_000), (rows["node n1"], "rank 1 failed", 5_000_000)], (
        "what failed as a consequence has no mark"
    )
    (told,) = [event["args"]["story"] for event in events if event["name"] == "round 0"]
    assert "rank 1 on node n1 failed: exit code 1, ValueError: x" in told


def test_the_page_has_rows_rounds_and_marks() -> None:
    """With the sentences that a click shows."""
    made = page_data(story(), "digits", str, ["head"])
    assert json.loads(json.dumps(made)) == made
    assert (made["job"], made["head"], made["began"], made["length"]) == ("digits", ["head"], 100.0, 7250.0)
    assert [node["name"] for node in made["nodes"]] == ["n0", "n1"]
    spans = [(made["kinds"][kind], round, begin, end) for kind, round, begin, end in made["nodes"][0]["spans"]]
    assert spans == [
        ("gathering", 0, 0.0, 1000.0),
        ("running", 0, 1000.0, 5000.0),
        ("gathering", 1, 5000.0, 5000.0),
        ("running", 1, 5000.0, 7250.0),
    ]
    assert [number for number, _ in made["rounds"]] == ["0", "1"]
    assert "    so all workers were stopped and started again: restart 1 of 3 (rule 2)" in made["rounds"][0][1]
    assert made["marks"] == [
        ["n0", 2000.0, "asked to stop", False],
        ["n1", 5000.0, "rank 1 failed in round 0", True],
    ]


def test_agents_of_one_node_share_its_row() -> None:
    """A node whose agent was started again is still one machine."""
    first, second = story().nodes
    again = evolve(second, node="n0", began=108.0, spans=(Span(Doing.RUNNING, (0, 2), 108.0, 109.0),), ended=109.0)
    told = evolve(story(), nodes=(first, again))
    assert [len(node["spans"]) for node in page_data(told, "j", str, [])["nodes"]] == [5]
    rows = [event for event in perfetto(told, "j", str)["traceEvents"] if event["ph"] == "M"]
    assert [event["args"]["name"] for event in rows] == ["job j", "node n0"]


def test_an_agent_that_ended_at_once_can_be_drawn() -> None:
    """A picture without a length would be divided by zero."""
    node = story().nodes[0]
    short = evolve(node, spans=(Span(Doing.ENDED, (0, 0), 100.0, 100.0),), ended=100.0, remarks=())
    told = evolve(story(), nodes=(short,), rounds=())
    made = page_data(told, "j", str, [])
    assert (made["length"], made["nodes"], made["marks"]) == (1.0, [{"name": "n0", "spans": []}], [])
    assert {event["ph"] for event in perfetto(told, "j", str)["traceEvents"]} == {"M"}
