"""Where the time of a simulated job goes, by hand: a fleet of three nodes, and what breaks when."""

from __future__ import annotations

import pytest

from reknit.adapters.simulated.fleet import Constant, Fleet
from reknit.app.simulation.accounts import Accounts
from reknit.core.job.entries import NodeId, RestartPolicy, Terms

NAMES = [NodeId(f"n{i}") for i in range(3)]


def made(step_s: float = 0.0) -> tuple[Fleet, Accounts]:
    accounts = Accounts(checkpoint_s=100.0, checkpoint_cost_s=10.0, step_s=step_s)
    terms = Terms(3, 3, RestartPolicy(9), join_timeout_s=3600.0, beat_s=5.0, silence_s=15.0)
    fleet = Fleet(terms, delays=Constant(20.0, 3.0), watchers=[accounts])
    fleet.start(NAMES)
    fleet.run_until(1000.0)
    return fleet, accounts


def test_a_failure_costs_what_was_trained_since_the_checkpoint() -> None:
    """20 s to start, nine checkpoints each of 100 s, and the rest of 980 s is trained again."""
    fleet, accounts = made()
    accounts.break_down(fleet.now)
    assert fleet.fail(NAMES[1])
    fleet.run_until(1100.0)
    accounts.close(1100.0, is_over=False)
    causes = accounts.causes
    assert causes["training"] == pytest.approx(800.0 + 77.0, abs=1.0)
    assert causes["checkpoints"] == pytest.approx(80.0)
    assert causes["lost steps"] == pytest.approx(100.0, abs=1.0)
    assert causes["stopping"] == pytest.approx(3.0, abs=0.5)
    assert causes["starting"] == pytest.approx(40.0, abs=0.5)
    assert accounts.recoveries == [pytest.approx(23.0, abs=0.5)]


def test_a_checkpoint_comes_after_a_whole_step() -> None:
    """Steps of 40 s: each checkpoint comes after 120 s. There are seven of them in the 980 s. 70 s are lost, with the
    step that was not done."""
    fleet, accounts = made(40.0)
    accounts.break_down(fleet.now)
    assert fleet.fail(NAMES[1])
    fleet.run_until(1001.0)
    assert accounts.causes["training"] == pytest.approx(7 * 120.0)
    assert accounts.causes["checkpoints"] == pytest.approx(70.0)
    assert accounts.causes["lost steps"] == pytest.approx(70.0, abs=1.0)


@pytest.mark.parametrize(
    ("after_s", "wanted_s"), [(0.0, 0.0), (39.0, 39.0), (41.0, 1.0), (121.0, 1.0), (135.0, 15.0), (171.0, 1.0)]
)
def test_progress_is_the_end_of_a_step(after_s: float, wanted_s: float) -> None:
    """A checkpoint of 10 s comes between the third step and the fourth, and is no progress."""
    _, accounts = made(40.0)
    assert accounts.since_step_s(accounts._since + after_s) == pytest.approx(wanted_s)


@pytest.mark.parametrize(("checkpoint_s", "step_s"), [(2.1, 0.3), (4.2, 0.6), (1800.0, 0.1)])
def test_steps_that_fit_leave_the_checkpoint_where_it_is(checkpoint_s: float, step_s: float) -> None:
    """2.1 / 0.3 is a little more than 7 for a computer."""
    assert Accounts(checkpoint_s, 0.0, step_s).interval_s == pytest.approx(checkpoint_s)


def test_a_node_that_falls_silent_is_noticed_late() -> None:
    """Until then the job does not know that it trains no more. Then it waits for the node."""
    fleet, accounts = made()
    accounts.break_down(fleet.now)
    assert fleet.kill(NAMES[1])
    fleet.start([NAMES[1]], 200.0)
    fleet.run_until(1300.0)
    accounts.close(1300.0, is_over=False)
    assert 9.0 < accounts.causes["detecting"] < 26.0
    assert accounts.causes["waiting for nodes"] == pytest.approx(200.0, abs=30.0)
    assert sum(accounts.causes.values()) == pytest.approx(1300.0)


def test_a_job_that_is_over_trains_no_more() -> None:
    """The time that is left has a cause of its own."""
    fleet, accounts = made()
    accounts.break_down(fleet.now)
    fleet.fail(NAMES[0])
    fleet.run_until(1002.0)
    accounts.close(2000.0, is_over=True)
    assert accounts.causes["over"] == pytest.approx(1000.0, abs=1.0)
