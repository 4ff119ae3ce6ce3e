"""What /state and `reknit status` tell of an agent and its job, as plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from reknit.core.agent.agent import Agent
from reknit.core.job.entries import Aborted, Joined, Left, RestartPolicy, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Job
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure
from reknit.core.text.picture import agent_picture, awaited, cause_of, job_picture, workers_picture
from tests.support.playbook import (
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
    running,
    stopped,
    succeeded,
)

ONE_RESTART = Terms(2, 3, RestartPolicy(max_restarts=1))


def picked(job: Job, *names: str) -> dict[str, Any]:
    """Some parts of the picture. All of it can be written as JSON."""
    told = job_picture(job)
    assert json.loads(json.dumps(told)) == told
    return {name: told[name] for name in names}


def after(job: Job, *entries: Any) -> Job:
    for entry in entries:
        job = fold(job, entry)
    return job


def test_a_job_before_it_begins() -> None:
    """An agent that has read nothing yet says so, and invents no round."""
    told = picked(Job(), "phase", "members", "joined", "awaited", "standby", "why", "failures", "ended")
    assert told.pop("phase") == "unopened"
    assert not any(told.values())


def test_a_round_that_is_gathered() -> None:
    """Who is there already, and how many it takes: the first question when a job does not begin."""
    job = folded(ONE_RESTART, joined("n1"))
    assert picked(job, "phase", "round", "joined", "awaited", "min_nodes", "max_nodes", "members") == {
        "phase": "gathering",
        "round": 0,
        "joined": ["n1"],
        "awaited": [],
        "min_nodes": 2,
        "max_nodes": 3,
        "members": [],
    }


def test_a_round_that_runs() -> None:
    """Which ranks are where: logs and metrics of workers are named by rank."""
    wide: Joined = joined("n1", local_world_size=4)
    job = after(folded(Terms(2, 2), joined("n0"), wide), joined("n2"), succeeded("n0"))
    told = picked(job, "phase", "members", "standby", "joined", "succeeded")
    members = told.pop("members")
    assert [(m["node"], m["group_rank"], m["first_rank"], m["workers"], m["address"]) for m in members] == [
        ("n0", 0, 0, 1, "n0"),
        ("n1", 1, 1, 4, "n1"),
    ]
    assert told == {"phase": "running", "standby": ["n2"], "joined": [], "succeeded": ["n0"]}


def test_after_a_failure() -> None:
    """All failures of the round are told, and which one is blamed: often one worker fails because of another. The next
    round waits for the nodes of the last one."""
    own, other = (evolve(failure(0, code), pid=5) for code in (3, -11))
    own = evolve(own, rank=1, message="ValueError: x")
    job = after(running(2, ONE_RESTART), failed("n1", 0, own), failed("n0", 0, other))
    told = picked(job, "phase", "round", "awaited", "why", "failures")
    assert (told["phase"], told["round"]) == ("gathering", 1)
    assert told["awaited"] == sorted(map(str, awaited(job))) == ["n0", "n1"]
    assert told["why"] == "rank 1 on node n1 failed: exit code 3, ValueError: x"
    assert [(each["node"], each["rank"], each["cause"], each["blamed"]) for each in told["failures"]] == [
        ("n1", 1, "exit", True),
        ("n0", 0, "signal", False),
    ]
    assert told["failures"][0]["text"] == told["why"]

    back = after(job, joined("n0", 1))
    assert picked(back, "joined", "awaited") == {"joined": ["n0"], "awaited": ["n1"]}
    runs = after(back, joined("n1", 1))
    told = picked(runs, "phase", "restarts_spent", "restarts_allowed", "failures")
    assert [(each["rank"], each["blamed"]) for each in told.pop("failures")] == [(1, True)], "the others are forgotten"
    assert told == {"phase": "running", "restarts_spent": 1, "restarts_allowed": 1}


def test_after_a_loss() -> None:
    """No worker is blamed for a host that is gone, and it costs no restart."""
    job = after(running(3, ONE_RESTART), lost("n1", by="n0"))
    told = picked(job, "restarts_spent", "failures", "awaited", "why")
    assert told.pop("why").startswith("node n1 ")
    assert told == {"restarts_spent": 0, "failures": [], "awaited": ["n0", "n2"]}


def test_how_a_job_has_ended() -> None:
    """The verdict, and the failure behind it."""
    job = after(running(2, Terms(2, 2)), failed("n1", 0, failure(0, 3, rank=1)), joined("n0", 1), joined("n1", 1))
    told = picked(job, "phase", "ended", "failures")
    assert told["phase"] == "closed"
    assert told["ended"]["verdict"] == "failed"
    assert "rank 1 on node n1 failed: exit code 3" in told["ended"]["why"]
    assert [(each["rank"], each["blamed"]) for each in told["failures"]] == [(1, True)]

    told = picked(after(running(2), succeeded("n0"), succeeded("n1")), "ended", "failures", "why")
    assert (told["ended"]["verdict"], told["failures"], told["why"]) == ("succeeded", [], None)

    told = picked(after(running(2), Aborted("told to end")), "ended", "failures")
    assert (told["ended"]["verdict"], told["failures"]) == ("aborted", [])


def test_a_node_that_leaves() -> None:
    """Its place will be free. The job says so before its workers have ended."""
    job = after(running(3, ONE_RESTART), Left(node("n2")))
    assert picked(job, "awaited")["awaited"] == ["n0", "n1"]
    playbook = playing("n0", Terms(1, 1))
    playbook.feed(ask_to_leave())
    assert agent_picture(playbook.agent)["leaving"]


# ---- the agent ----


def test_an_agent_and_its_workers() -> None:
    """What it does, and how each worker is or was."""
    playbook = playing("n0", Terms(1, 1, RestartPolicy(max_restarts=1)), local_world_size=3)
    told = agent_picture(playbook.agent)
    assert (told["node"], told["doing"], told["ready"], told["outage"], told["leaving"]) == (
        "n0",
        "running",
        True,
        None,
        False,
    )
    assert told["text"] == "runs the workers of round 0, ranks 0 to 2 of 3"
    assert workers(playbook.agent) == [(0, "running", None), (1, "running", None), (2, "running", None)]
    playbook.feed(exits(2))
    playbook.feed(exits(failure(1, 7)))
    found = workers(playbook.agent)
    assert found[0][2] is None
    assert found[1:] == [(1, "failed", "rank 1 failed: exit code 7"), (2, "succeeded", None)]
    playbook.feed(cut_off("connection refused"))
    assert agent_picture(playbook.agent)["outage"] == "connection refused"
    assert json.dumps([agent_picture(playbook.agent), workers_picture(playbook.agent)])


def workers(agent: Agent) -> list[tuple[int, str, str | None]]:
    return [(each["rank"], each["state"], each["failure"]) for each in workers_picture(agent)]


def test_workers_that_were_ended_do_not_look_alive() -> None:
    """The round is over, and nobody should look for their processes."""
    playbook = playing("n0", Terms(1, 1, RestartPolicy(max_restarts=1)), local_world_size=2)
    for event in (exits(failure(1, 7)), stopped(), echo()):
        playbook.feed(event)
    assert [state for _, state, _ in workers(playbook.agent)] == ["stopped", "failed"]
    assert workers(an_agent()) == []


def test_an_agent_that_has_read_nothing() -> None:
    """It has a name all the same."""
    assert agent_picture(an_agent("n7"))["node"] == "n7"
    assert not agent_picture(an_agent("n7"))["ready"]


def test_a_node_that_is_back_is_told_apart() -> None:
    """An agent that was started again is another one. Its workers are not those of the first."""
    job = after(running(2, ONE_RESTART), joined("n1", 1, incarnation=1))
    assert picked(job, "joined", "awaited") == {"joined": ["n1.1"], "awaited": ["n0"]}


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (WorkerFailure(0, 0, 1, 5), "exit"),
        (WorkerFailure(0, 0, -9, 5), "signal"),
        (WorkerFailure(0, 0, 127), "not_started"),
        (WorkerFailure(0, 0, -6, 5, cause=NoProgress(30.0)), "no_progress"),
        (WorkerFailure(0, 0, -6, 5, cause=TimerExpired("step")), "timer_expired"),
    ],
)
def test_how_a_worker_failed_in_a_word(bad: WorkerFailure, word: str) -> None:
    """It is the label of a metric, and alerts depend on it."""
    assert cause_of(bad) == word
