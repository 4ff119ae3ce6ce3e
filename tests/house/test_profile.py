"""Hypothesis searches this folder's tests as this folder says, whatever else is collected in the same run."""

from __future__ import annotations

from hypothesis import settings

AT_IMPORT = settings()
"""What a decorator in this module begins with."""


def test_modules_and_tests_have_the_profile_of_their_folder() -> None:
    """A thousand examples in the wrong folder cost minutes, and a hundred too few find nothing."""
    mine = settings.get_profile("tests")
    assert mine.max_examples == 100
    assert AT_IMPORT.show_changed() == mine.show_changed()
    assert settings().show_changed() == mine.show_changed()
