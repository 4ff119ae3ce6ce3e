"""The language of scenarios itself: if it accepted anything, every test that uses it would be worthless."""

from __future__ import annotations

import pytest

from reknit.core.agent.commands import Append, Beat
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import Joined, Opened, Terms
from tests.support.playbook import Placeholder, Playbook, an_agent, echo, playing, read, start


def test_a_missing_command_fails_with_an_ndiff_of_arrows() -> None:
    """The reader of a red test must see which arrow is wrong without running it again."""
    with pytest.raises(AssertionError) as caught:
        bool(Playbook(an_agent()) >> start() >> read())
    assert "+ << Append(entry=Opened(" in str(caught.value)
    assert "  >> Started(" in str(caught.value)


def test_a_command_that_never_came_fails() -> None:
    """An expectation at the end of the script must not be dropped."""
    with pytest.raises(AssertionError, match=r"- << Append\(entry=Opened\("):
        bool(Playbook(an_agent()) >> start() << Append(Opened(Terms(), "nonce")))


def test_commands_of_one_step_keep_their_order() -> None:
    """The loop carries them out in the order given, so the order is behaviour."""
    playbook = (
        Playbook(an_agent(terms=Terms(max_nodes=2)), hide=()) >> start() >> read() << Placeholder(Append) >> echo()
    )
    assert playbook << Placeholder(Append, entry=Placeholder(Joined)) << Placeholder(Beat)


def test_a_placeholder_is_one_object_once_it_has_met_it() -> None:
    """Else a scenario could not say that the same object came twice."""
    placeholder = Placeholder(int)
    assert (placeholder == "no", placeholder == 1, placeholder == 2, placeholder == 1) == (False, True, False, True)
    assert placeholder() == 1


def test_a_placeholder_looks_at_attributes() -> None:
    """A scenario names what it is about, and leaves the rest open."""
    playbook = Playbook(an_agent()) >> start() >> read() << Placeholder(Append, entry=Placeholder(Opened, epoch=0))
    assert playbook
    with pytest.raises(AssertionError):
        bool(playbook >> echo() << Placeholder(Append, entry=Placeholder(Joined, round=7)))


def test_a_placeholder_that_met_nothing_is_not_to_be_asked() -> None:
    """A scenario that reads it would go on with nothing."""
    with pytest.raises(AssertionError, match="was not met"):
        Placeholder(StartWorkers)()


def test_a_forgotten_assert_raises_when_the_playbook_is_collected() -> None:
    """`Playbook(agent) >> event << command` without `assert` checks nothing, and looks like a test."""
    playbook = Playbook(an_agent()) >> start()
    with pytest.raises(RuntimeError, match="never asserted: 1 arrows"):
        playbook.__del__()
    assert playbook


def test_an_agent_that_plays_has_nothing_left_to_assert() -> None:
    """`playing` is the set-up of most scenarios: they start where their story does."""
    playbook = playing("n0", Terms(max_nodes=1))
    assert playbook
    assert playbook.agent.workers.round == 0
