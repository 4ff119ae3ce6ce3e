"""What an agent does, in one word and one sentence, through the life of a job."""

from __future__ import annotations

from attrs import evolve

from reknit.core.agent.agent import Agent
from reknit.core.job.entries import LastCall, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.text.doing import Doing, Situation, doing, doing_text, situation, takes_part
from tests.support.playbook import (
    Playbook,
    ack,
    after,
    an_agent,
    ask_to_leave,
    cut_off,
    echo,
    exits,
    failure,
    joined,
    playing,
    read,
    running,
    start,
    stopped,
    up,
)

PAIR = Terms(2, 2, RestartPolicy(max_restarts=1))


def feed(playbook: Playbook, *events: object) -> Agent:
    """The commands do not matter here."""
    for event in events:
        playbook.feed(event)  # type: ignore[arg-type]  # an event or what builds one
    return playbook.agent


def told(agent: Agent) -> tuple[Doing, bool, str]:
    return doing(agent), takes_part(agent), doing_text(agent)


def test_the_ranks_of_a_node_with_several_workers() -> None:
    """The first and the last of them."""
    playbook = Playbook(an_agent("n0", PAIR, local_world_size=3))
    agent = feed(playbook, start(), read(), echo(), echo(joined("n1")), ack(), up())
    assert doing_text(agent) == "runs the workers of round 0, ranks 0 to 2 of 4"


def test_from_the_start_to_a_restart() -> None:
    """The readiness does not change while a round is ended and another one is gathered."""
    playbook = Playbook(an_agent("n0", PAIR))
    assert told(playbook.agent) == (Doing.STARTING, False, "waits for its keeper")
    assert told(feed(playbook, start())) == (Doing.STARTING, False, "reads the journal")
    feed(playbook, read(), echo())
    assert told(feed(playbook, echo())) == (
        Doing.GATHERING,
        True,
        "waits for round 0: 1 of at least 2 nodes are there",
    )
    agent = feed(playbook, read(joined("n1")), ack())
    assert told(agent) == (Doing.LAUNCHING, True, "starts the workers of round 0")
    agent = feed(playbook, up())
    assert told(agent) == (Doing.RUNNING, True, "runs the workers of round 0, rank 0 of 2")
    playbook.agent = evolve(agent, workers=evolve(agent.workers, up_at=float("-inf")))
    agent = feed(playbook, exits(failure()))
    assert doing(agent) is Doing.STOPPING
    assert takes_part(agent)
    assert doing_text(agent) == "stops the workers of round 0: rank 0 on node n0 failed: exit code 1"
    agent = feed(playbook, stopped(), echo())
    assert (doing(agent), takes_part(agent)) == (Doing.GATHERING, True)
    assert "waits for round 1" in doing_text(agent)


def test_an_outage_is_told_and_does_not_end_the_part_of_a_node() -> None:
    """Its workers run on, so that nobody should take its address away."""
    agent = feed(playing("n0", PAIR, joined("n1")), cut_off("no route"))
    assert (doing(agent), takes_part(agent)) == (Doing.RUNNING, True)
    assert doing_text(agent).endswith("; the store cannot be reached: no route")


def test_a_standby() -> None:
    """A round runs without this node."""
    job: Job = running(2, Terms(1, 2))
    agent = evolve(an_agent("n2"), epoch=0, job=job)
    assert told(agent) == (Doing.STANDBY, False, "stands by while round 0 runs")


def test_the_end_after_a_success() -> None:
    """It waits for the other node, and then it has ended."""
    playbook = playing("n0", PAIR, joined("n1"))
    agent = feed(playbook, exits(0), stopped(), echo())
    assert (doing(agent), takes_part(agent)) == (Doing.FINISHING, True)


def test_a_node_that_leaves() -> None:
    """Nobody should count on it from the request on."""
    playbook = playing("n0", Terms())
    agent = feed(playbook, ask_to_leave())
    assert told(agent) == (Doing.STOPPING, False, "stops the workers of round 0: SIGTERM received")
    agent = feed(playbook, stopped(), echo(), after(0))
    assert told(agent) == (Doing.ENDED, False, "has ended: SIGTERM received")


def test_a_last_call_is_waited_for() -> None:
    """The number of nodes shows what is missing."""
    playbook = Playbook(an_agent("n0", Terms(1, 2)))
    agent = feed(playbook, start(), read(), echo(), echo())
    assert doing_text(agent) == "waits for round 0: 1 of at least 1 nodes are there"
    assert doing(feed(playbook, read(LastCall(0)), ack())) is Doing.LAUNCHING


def test_a_situation_names_the_round_of_the_workers() -> None:
    """While the workers of a round are stopped, the job may gather the next one. The time of both is told apart."""
    playbook = Playbook(an_agent("n0", PAIR))
    assert situation(playbook.agent) == Situation(Doing.STARTING, 0)
    agent = feed(playbook, start(), read(), echo(), echo(joined("n1")), ack(), up())
    assert situation(agent) == Situation(Doing.RUNNING, 0)
    playbook.agent = evolve(agent, workers=evolve(agent.workers, up_at=float("-inf")))
    agent = feed(playbook, exits(failure()), echo())
    assert agent.job.round == 1
    assert situation(agent) == Situation(Doing.STOPPING, 0)
    assert situation(feed(playbook, stopped(), echo())) == Situation(Doing.GATHERING, 1)


def test_a_situation_says_why_nothing_goes_on() -> None:
    """An outage and what keeps an agent out of the job are told with their moments."""
    agent = feed(playing("n0", PAIR, joined("n1")), cut_off("no route"))
    assert situation(agent) == Situation(Doing.RUNNING, 0, outage="no route")
    agent = feed(playing("n0", PAIR, joined("n1")), read(joined("n0", incarnation=1)))
    assert situation(agent).unable.startswith("another agent has joined with this node's id")
