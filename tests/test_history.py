"""Up to which position two lives of a journal hold the same records."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.adapters.journals.history import Life, common, lives


def _followed(life: Life, name: str, records: int) -> Life:
    """The life that goes on from this one after so many of its records."""
    return Life(name, life.position + records, number=life.number + 1, before=life.line)


@st.composite
def _trees(draw: st.DrawFn) -> list[Life]:
    """Lives of one journal. Each goes on from one of those before it."""
    found = [Life()]
    for number in range(draw(st.integers(1, 6))):
        found.append(_followed(draw(st.sampled_from(found)), f"life {number}", draw(st.integers(0, 3))))
    return found


def _writers(life: Life, up_to: int) -> list[str]:
    """For each position, the name of the life in which its record was written."""
    return [[name for name, begins in life.line if begins <= position][-1] for position in range(up_to)]


def _expected(one: Life, other: Life) -> float:
    """The first position at which the two lives have records of different lives."""
    up_to = max(one.position, other.position) + 1
    pairs = zip(_writers(one, up_to), _writers(other, up_to), strict=True)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), inf)


@given(_trees(), st.data())
def test_two_lives_have_in_common_what_was_written_before_they_parted(tree: list[Life], data: st.DataObject) -> None:
    """Whichever way they parted: one goes on from the other, or both from a third."""
    one, other = data.draw(st.sampled_from(tree)), data.draw(st.sampled_from(tree))
    assert common(one, other) == common(other, one) == _expected(one, other)


def test_a_life_that_this_agent_has_not_met_may_lie_between() -> None:
    """The agent has read a life that begins at 10. The other life goes on from one that the agent does not know."""
    first = Life()
    mine = _followed(first, "mine", 10)
    unknown = _followed(first, "unknown", 12)
    assert common(mine, _followed(unknown, "theirs", 2)) == 10


def test_only_the_latest_lives_are_named() -> None:
    """The header stays small. An agent that has missed all that are named does not know what it has in common."""
    life = first = Life()
    early = _followed(first, "early", 1)
    for number in range(70):
        life = _followed(life, f"life {number}", 1)
    assert len(life.line) == 64
    assert common(first, life) == common(life, early) == -1
    assert common(life, _followed(life, "next", 5)) == life.position + 5


@pytest.mark.parametrize("data", [None, "life", 3, {}, [["life"]], [["life", 1, 2]], ["ab", 3]])
def test_what_is_no_list_of_lives_is_none(data: object) -> None:
    """Anybody can write to a store."""
    assert lives(data) == ()


def test_a_life_without_a_number_is_left_out() -> None:
    """A bool is an integer in Python, and no position."""
    assert lives([["a", 0], ["b", "3"], ["c", True], ["d", 7]]) == (("a", 0), ("d", 7))
