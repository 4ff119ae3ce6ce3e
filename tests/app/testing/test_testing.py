"""`reknit.testing`, as people use it who change a policy."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

import reknit.testing
from reknit.app.testing.as_text import read
from reknit.core.agent.events import Woken
from reknit.core.job import restart
from reknit.core.job.job import Gathering, Job
from reknit.core.job.restart import Cost, cost
from reknit.testing import (
    CHECKS,
    NODE_MOVES,
    ClusterMachine,
    Script,
    Setup,
    Violation,
    parse,
    play,
    replaced,
    scripts,
    setups,
    tell,
)

PAGE = (Path(__file__).parents[3] / "docs" / "testing.md").read_text()
SHORT = settings(
    max_examples=20, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def free(job: Job, phase: Gathering) -> Cost:
    """A wrong policy: no failure costs anything."""
    return Cost.UNSPENT


def test_a_wrong_policy_is_caught() -> None:
    """The example of the page, word for word. Its history is the page's as well."""
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.partition("def ")[2].splitlines() if line.strip()]) < 10
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(Violation, match=r"^S4: "):
        seed(0)(names["test_lenient"])()
    shown = PAGE.partition("```\nsetup\n")[2].partition("```")[0].splitlines()
    with (
        replaced(cost, names["lenient"]),
        pytest.raises(Violation, match="and spent nothing") as caught,
    ):
        play(parse("\n".join(["setup", *shown])))
    story = caught.value.__notes__[0].splitlines()
    assert {line.strip() for line in shown} <= {line.strip() for line in story}


def test_a_violation_is_a_history_that_can_be_played_again() -> None:
    """Its note is the script, an empty line, and the story."""
    with replaced(cost, free), pytest.raises(Violation) as caught:
        play(parse("setup seed=3\nwait 1\nfail b\nwait 5"))
    note = caught.value.__notes__[0]
    with replaced(cost, free), pytest.raises(Violation, match=re.escape(str(caught.value))):
        play(parse(note))
    assert "fail b" in note.partition("\n\n")[2]


def test_a_check_may_be_left_out() -> None:
    """The policy breaks it on purpose."""
    with replaced(cost, free):
        assert play(parse("setup\nfail a\nwait 5"), checks=CHECKS.keys() - {"S4"}).jobs[-1].spent == 0


def test_an_error_in_a_policy_is_a_violation_with_its_story() -> None:
    """S8. Somebody who has left it out gets the error itself."""

    def broken(job: Job, phase: Gathering) -> Cost:
        raise KeyError("mine")

    script = parse("setup\nfail a\nwait 5")
    with replaced(cost, broken), pytest.raises(Violation, match=r"S8: raised at .* KeyError"):
        play(script)
    with replaced(cost, broken), pytest.raises(KeyError, match="mine"):
        play(script, checks=["S1"])


def test_a_function_is_replaced_for_the_block_alone() -> None:
    """In every module that has imported it, and not in the checks."""
    with replaced(cost, free):
        assert restart.cost is free
    assert restart.cost is cost
    with pytest.raises(ValueError, match="is no function of reknit"), replaced(len, free):
        pass


def test_the_innermost_block_counts() -> None:
    """A policy of one's own, and for a comparison the original within."""
    with replaced(cost, free):
        with replaced(cost, cost):
            assert play(parse("setup\nfail a\nwait 5")).jobs[-1].spent == 1
        assert restart.cost is free
    assert restart.cost is cost


def test_a_module_that_is_imported_within_the_block_is_as_before_afterwards() -> None:
    """`reknit.simulate` imports the fleet when it is asked for."""
    done = subprocess.run([sys.executable, "-c", IMPORTS_WITHIN], check=False, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["True", "True"]


IMPORTS_WITHIN = """
from reknit.core.agent.timers import next_wake
from reknit.testing import replaced

def mine(agent):
    return next_wake(agent)

with replaced(next_wake, mine):
    from reknit.adapters.simulated import crew
    print(crew.next_wake is mine)
print(crew.next_wake is next_wake)
"""


@pytest.mark.parametrize(("original", "mine"), [("cost", free), (partial(cost), free), (len, free), (cost, 3)])
def test_what_cannot_be_replaced(original: Any, mine: Any) -> None:
    """A `ValueError` says so."""
    with pytest.raises(ValueError, match=r"is no function of reknit|cannot be called"), replaced(original, mine):
        pass


@pytest.mark.slow
def test_the_machine_of_the_page() -> None:
    """With a rule of its own."""
    names: dict[str, Any] = {}
    exec(
        PAGE.partition("from hypothesis.stateful")[2].partition("```")[0].join(("from hypothesis.stateful", "")), names
    )
    run_state_machine_as_test(names["Maintenance"], settings=settings(SHORT, max_examples=5))


class TestFree(ClusterMachine.TestCase):
    """A machine finds nothing in the policy that stands."""

    settings = settings(SHORT, max_examples=8)


class FailsOnly(ClusterMachine):
    """With a rule of its own."""

    @rule()
    def first_worker_fails(self) -> None:
        """Of the first host."""
        self.make(parse("setup\nfail a").moves[0])


def test_a_machine_finds_a_wrong_policy() -> None:
    """With the history in the notes."""
    with replaced(cost, free), pytest.raises(Violation, match="S4") as caught:
        run_state_machine_as_test(
            FailsOnly, settings=settings(SHORT, max_examples=200, phases=[Phase.generate], stateful_step_count=20)
        )
    assert caught.value.__notes__[0].startswith("setup")


@SHORT
@given(scripts(st.just(Setup(nodes=2, formed=2, max=2)), moves=("crash", "start")))
def test_a_strategy_draws_from_what_it_was_given(script: Script) -> None:
    """A cluster of one's own, and few faults."""
    assert script.setup.nodes == 2
    assert {move.name for move in script.moves} <= {"crash", "start", "wait", "settle"}


@SHORT
@given(setups())
def test_every_cluster_can_be_written_and_read(setup: Setup) -> None:
    """As the first line of a history."""
    assert parse(str(Script(setup))).setup == setup


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("setup\nexplode a", "no move is named 'explode'"),
        ("setup size=3", "nothing of a setup is named 'size'"),
        ("setup\nfail z", "no host is named 'z'"),
    ],
)
def test_a_history_with_a_mistake(text: str, why: str) -> None:
    """Somebody has written it by hand."""
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_the_story_leaves_out_what_changed_nothing() -> None:
    """Beats and looks at the journal."""
    story = tell(play(parse("setup\nwait 25")))
    assert "Joined(a" in story
    assert "Beat" not in story


def test_what_agents_read_is_the_text_of_it() -> None:
    """A history with `text=yes` plays like the one without."""
    assert read(Woken(1.5)) == Woken(1.5)
    plain, as_text = (play(parse(f"setup{more}\nfail a\nwait 7")) for more in ("", " text=yes"))
    assert plain.jobs == as_text.jobs


def test_all_names_are_there() -> None:
    """And the page names each."""
    for name in reknit.testing.__all__:
        assert hasattr(reknit.testing, name)
    assert {name for name in reknit.testing.__all__ if f"`{name}" not in PAGE} == set()
    assert "crash" in NODE_MOVES
