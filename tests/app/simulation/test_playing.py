"""Jobs that are played: what the accounts say, and that they add up."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from reknit.app.simulation import playing
from reknit.app.simulation.cluster import BadCluster, SimulatedCluster, with_values
from reknit.app.simulation.playing import (
    Drawn,
    Sweep,
    answers,
    difference,
    expected,
    interval,
    lognormal,
    name_of,
    play,
    simulate,
    title,
)
from tests.support.waiting import PATIENCE_S, is_alive, until

SMALL = with_values(SimulatedCluster(), {"nodes": 8, "spares": 1, "days": 3, "failures": 300}, "here")


def test_the_same_seed_is_the_same_run() -> None:
    """To the last digit. Another seed is another run."""
    assert play(SMALL, 3) == play(SMALL, 3)
    assert play(SMALL, 3) != play(SMALL, 4)


def test_every_second_has_a_cause() -> None:
    """The causes add up to the time that was simulated."""
    for seed in range(4):
        run = play(SMALL, seed)
        assert sum(run.causes.values()) == pytest.approx(run.lasted_s)
        assert min(run.causes.values()) >= 0.0
        assert run.rounds > len(run.recoveries) > 0


def test_nothing_fails() -> None:
    """Then all that is lost are the start and the checkpoints."""
    run = play(with_values(SMALL, {"failures": 0}, "here"), 0)
    lost = {cause for cause, time in run.causes.items() if time}
    assert lost <= {"training", "checkpoints", "starting", "meeting", "waiting for nodes"}
    assert run.rounds == 1
    assert run.effective == pytest.approx(expected(0.0, 0.0, 1800.0, 5.0), abs=0.002)


@pytest.mark.slow
def test_what_is_known_exactly() -> None:
    """Failures of a Poisson process, each of which costs the same: the formula is in the interval of the runs."""
    asked = {"nodes": 30, "days": 10, "worker": 1, "node": 0, "hang": 0, "leave": 0, "failures": 100}
    same = {"start_s": 130, "start_p99_s": 130, "stop_s": 4.9, "stop_p99_s": 4.9}
    found = simulate(runs=12, processes=1, **asked, **same)
    mean, half = found.effective
    assert abs(mean - expected(30 * 0.1 / 86400, 135.0, 1800.0, 5.0)) < 1.5 * half
    assert found.recovery_s(0.5) == pytest.approx(135.0, abs=0.5)


def test_a_budget_that_is_spent_ends_the_job() -> None:
    """The rest of the time is over, and the reason is told."""
    run = play(with_values(SMALL, {"max_restarts": 1, "worker": 1, "node": 0, "hang": 0, "leave": 0}, "here"), 0)
    assert run.causes["over"] > 0
    assert "restart" in run.outcome


def test_a_trace_takes_the_place_of_the_rates(tmp_path: Path) -> None:
    """A node goes and comes back: two rounds more, and the wait between them."""
    (tmp_path / "t.csv").write_text("20000,remove,3\n30000,add,3\n")
    run = play(with_values(SMALL, {"spares": 0, "trace": str(tmp_path / "t.csv")}, "here"), 0)
    assert run.rounds == 2
    assert run.causes["waiting for nodes"] == pytest.approx(10_000, abs=120)
    assert run.most_out == 1


@pytest.mark.slow
def test_two_clusters_are_compared_on_the_same_failures() -> None:
    """A cluster does not differ from itself. One that starts faster trains more, and this can be told."""
    slow, same, fast = answers([SMALL, SMALL, with_values(SMALL, {"start_s": 1, "start_p99_s": 2}, "x")], range(6), 1)
    assert difference(slow, same) == (0.0, 0.0)
    mean, half = difference(slow, fast)
    assert mean > half > 0


@pytest.mark.slow
def test_the_best_interval_between_checkpoints_is_youngs() -> None:
    """The square root of twice the cost of a checkpoint times the mean time between failures. The simulation finds it:
    no other value is really better, and values that are far from it are really worse."""
    failures_per_day, cost_s = 3.0, 20.0
    asked = {"nodes": 2, "days": 10, "failures": 1000 * failures_per_day / 2, "checkpoint_cost_s": cost_s}
    same = {"worker": 1, "node": 0, "hang": 0, "leave": 0, "start_s": 30, "start_p99_s": 30}
    young_s = sqrt(2 * cost_s * 86400 / failures_per_day)
    values = tuple(young_s * factor for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8))
    clusters = [with_values(SimulatedCluster(), {**asked, **same, "checkpoint_s": value}, "here") for value in values]
    sweep = Sweep("checkpoint_s", values, tuple(answers(clusters, range(4), 1)))
    assert sweep.mark(3) != "worse"
    assert sweep.mark(0) == sweep.mark(6) == "worse"
    assert sweep.than_best(sweep.best) == (0.0, 0.0)


def test_a_node_that_has_been_up_is_warm() -> None:
    """A node that has just come up starts its workers cold, also if others are warm. A spare has got warm while it
    waited. Without a time for warm nodes, all start cold."""
    cluster = with_values(SMALL, {"start_s": 30, "start_p99_s": 30, "warm_start_s": 4}, "here")
    now = [29.0]
    drawn = Drawn(cluster, 0, lambda: now[0])
    first, second = name_of(1), name_of(2)
    assert drawn.starts(0, [first, second]) == {30.0: [first, second]}
    now[0] = 100.0
    drawn.up_since[second] = 80.0
    assert drawn.starts(1, [first, second]) == {4.0: [first], 30.0: [second]}
    assert min(Drawn(SMALL, 0, lambda: 100.0).starts(0, [first])) > 4.0


def test_warm_nodes_start_faster_after_a_failure() -> None:
    """If a worker fails, all nodes are warm. If a node is gone and comes back, the round waits for its cold start."""
    same = {"start_s": 60, "start_p99_s": 60, "warm_start_s": 5, "spares": 0, "repair_s": 300, "repair_p99_s": 300}
    same |= {"stop_s": 1, "stop_p99_s": 1}
    for kind, least, most in (("worker", 5, 10), ("node", 300 + 60, 300 + 60 + 30)):
        mix = {**dict.fromkeys(("worker", "node", "hang", "leave"), 0), kind: 1}
        found = simulate(runs=1, processes=1, nodes=3, days=5, failures=300, **same, **mix)
        recovery_s = found.recovery_s(0.5)
        assert recovery_s is not None
        assert least < recovery_s < most, kind


def test_the_title_of_several_clusters() -> None:
    """It is true of each of them."""
    found = answers([with_values(SMALL, {"nodes": nodes, "days": 0.5}, "x") for nodes in (2, 9, 4)], [0], 1)
    assert title(found) == "0.5 days of 2 to 9 nodes, played once"
    assert title(found[:1]) == "0.5 days of 2 nodes, played once"


def test_a_hang_counts_from_the_last_step() -> None:
    """A worker tells of its progress at the end of each step. So half of a step has passed when it begins to hang."""
    same = {"failures": 500.0, "worker": 0, "node": 0, "hang": 1, "leave": 0, "hang_after_s": 600}
    long, none = (play(with_values(SMALL, {**same, "step_s": step_s}, "here"), 0) for step_s in (500, 0))
    waited_s = [run.causes["detecting"] / len(run.recoveries) for run in (long, none)]
    assert waited_s[1] == pytest.approx(600.0, abs=1.0)
    assert waited_s[0] == pytest.approx(350.0, abs=75.0)


def test_processes_change_nothing() -> None:
    """Runs that are played at once are those that are played one after another."""
    assert answers([SMALL], [0, 1], 2)[0].runs == answers([SMALL], [0, 1], 1)[0].runs


def test_what_cannot_be_asked() -> None:
    """A scenario that does not exist, and a key that does not."""
    with pytest.raises(BadCluster, match=r"there is no scenario llama4; there are llama3"):
        simulate("llama4")
    with pytest.raises(ValueError, match="there is no key nodez"):
        simulate(nodez=3)


def test_intervals_and_quantiles() -> None:
    """Student's t of few values, and a distribution that is given by two of its quantiles."""
    assert interval([1.0, 3.0]) == (2.0, pytest.approx(12.71))
    assert interval([2.0])[1] == float("inf")
    assert lognormal(10.0, 40.0, 0.5) == pytest.approx(10.0)
    assert lognormal(10.0, 40.0, 0.99) == pytest.approx(40.0)
    assert lognormal(10.0, 10.0, 0.7) == 10.0


def test_a_job_whose_nodes_are_all_out_for_a_while_goes_on(tmp_path: Path) -> None:
    """Also if that is when somebody looks. Nothing that was trained before is lost from the accounts."""
    trace = tmp_path / "trace"
    trace.write_text("432000,remove,0\n439200,add,0\n")
    run = play(SimulatedCluster(nodes=1, days=10, trace=str(trace)), 0)
    assert run.outcome == ""
    assert run.causes["training"] > 850_000
    assert run.causes["over"] == 0


@pytest.mark.parametrize(
    ("lines", "waits_s"),
    [
        ("3600,add,0\n3600,add,1\n", 3600),
        ("7000,remove,0\n7200,remove,1\n9000,add,0\n9000,add,1\n", 1800),
        ("7000,remove,0\n9000,add,0\n9010,remove,0\n", 2000),  # after that it is over
    ],
)
def test_the_time_without_nodes_is_spent_waiting_for_them(lines: str, waits_s: float, tmp_path: Path) -> None:
    """Also if there is no agent at all, which could say so."""
    trace = tmp_path / "trace"
    trace.write_text(lines)
    nodes = 2 if "1" in {line.split(",")[2] for line in lines.splitlines()} else 1
    run = play(SimulatedCluster(nodes=nodes, min_nodes=1, days=0.5, trace=str(trace)), 0)
    assert run.causes["waiting for nodes"] == pytest.approx(waits_s, abs=5)
    assert sum(run.causes.values()) == pytest.approx(43200)
    assert run.most_out == nodes


def test_a_node_that_a_trace_adds_first_was_not_there_before(tmp_path: Path) -> None:
    """Such traces tell of a cluster that grows. The job waits for its second node."""
    trace = tmp_path / "trace"
    trace.write_text("3600,add,1\n")
    late = play(SimulatedCluster(nodes=2, days=0.25, trace=str(trace)), 0)
    trace.write_text("3600,remove,1\n3600,add,1\n")
    there = play(SimulatedCluster(nodes=2, days=0.25, trace=str(trace)), 0)
    assert late.restarts == 0
    assert late.effective < there.effective < 1


def test_what_was_trained_counts_when_no_agent_is_left() -> None:
    """The store is out for longer than agents wait for it."""
    run = play(SimulatedCluster(nodes=2, days=30, failures=0, store_outages=3, store_outage_s=400), 0)
    assert run.outcome == "no agent was left (the store cannot be reached: it does not answer)"
    assert run.causes["training"] > 86400
    assert sum(run.causes.values()) == pytest.approx(run.lasted_s)
    patient = play(
        SimulatedCluster(nodes=2, days=30, failures=0, store_outages=3, store_outage_s=400, store_timeout_s=900), 0
    )
    assert patient.outcome == ""


def test_a_node_that_is_back_at_once_comes_back() -> None:
    """It was told to leave, and its agent still leaves."""
    only = {"worker": 0.0, "node": 0.0, "hang": 0.0, "leave": 1.0}
    run = play(SimulatedCluster(nodes=4, days=10, failures=100, repair_s=0, repair_p99_s=0, **only), 0)
    assert run.outcome == ""
    assert run.effective > 0.9


def test_a_short_cut_costs_few_steps() -> None:
    """Whoever watches a node that does not beat plays every beat. That ends when the node beats again."""
    only = {"worker": 0.0, "node": 0.0, "hang": 0.0, "leave": 0.0, "network": 1.0}
    run = play(SimulatedCluster(nodes=16, days=10, failures=10, cut_s=1, **only), 0)
    assert run.steps < 2000


@pytest.mark.slow
def test_agents_that_were_lost_at_different_times_are_alike() -> None:
    """They have seen different incarnations of themselves. Every step that one makes for another is audited."""
    with mock.patch.object(playing, "Fleet", partial(playing.Fleet, audits=1.0)):
        cluster = SimulatedCluster(nodes=16, spares=4, days=12, failures=100, store_outages=10, network=0.3)
        assert play(cluster, 0).outcome == ""


def test_no_process_outlives_the_one_that_asks(tmp_path: Path) -> None:
    """It is killed, and the processes that play its runs end."""
    words = [sys.executable, "-m", "reknit", "simulate", "nodes=200", "days=300", "--runs=2", "--processes=2"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children = until(lambda: psutil.Process(process.pid).children(recursive=True))
        process.kill()
    until(lambda: not any(is_alive(child.pid) for child in children), "the end of the processes")


def test_a_process_that_is_killed_is_a_limit_of_the_machine() -> None:
    """The kernel kills processes when memory runs out. That is no bug, and the others are not waited for."""
    words = [sys.executable, "-m", "reknit", "simulate", "nodes=200", "days=3000", "--runs=2", "--processes=2"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        one, other = until(lambda: len(found := psutil.Process(process.pid).children()) == 2 and found)
        one.kill()
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 71
    text = "a process that plays has ended early, perhaps because no memory was left"
    assert said == f"reknit: exit status 71: {text}\n"
    assert not is_alive(other.pid)


@pytest.mark.parametrize("asked", [{"runs": "3"}, {"runs": 0}, {"seed": -1}, {"seed": 0.5}], ids=str)
def test_numbers_of_runs_that_cannot_be(asked: dict[str, Any]) -> None:
    """The same as on the command line."""
    with pytest.raises(ValueError, match="a whole number of at least"):
        simulate(nodes=2, days=1, **asked)
