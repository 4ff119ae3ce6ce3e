"""The text of one option: its value, or a clause that says what was expected. `test_parsing` has them by name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.app.input import readers

READERS: list[Callable[[str], Any]] = [
    readers.whole(0, 10),
    readers.restarts,
    readers.age,
    readers.optional(readers.whole(0)),
    readers.workers(10),
    readers.nodes,
    readers.seconds,
    readers.seconds_from(1.0, 9.0),
    readers.port,
    readers.one_of("a", "b"),
    readers.truth,
    readers.masks,
    readers.ranks,
    readers.signals,
]


@given(st.sampled_from(READERS), st.text(max_size=12) | st.floats().map(str) | st.integers().map(str))
def test_any_text_is_read_or_refused(read: Callable[[str], Any], text: str) -> None:
    """A reader fails in one way only, so that the option can be named in one place."""
    with suppress(ValueError):
        read(text)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (readers.whole(0), "3", 3),
        (readers.restarts, "3", {"max_restarts": 3}),
        (readers.restarts, "3/steady", {"max_restarts": 3, "renews": True}),
        (readers.restarts, "3/600", {"max_restarts": 3, "renews": True, "steady_s": 600.0}),
        (readers.restarts, "3/10m", {"max_restarts": 3, "renews": True, "steady_s": 600.0}),
        (readers.age, "12h", 43200.0),
        (readers.age, "0", 0.0),
        (readers.age, "0s", 0.0),
        (readers.optional(readers.whole(0)), "", None),
        (readers.workers(10), "auto", "auto"),
        (readers.workers(10), "2", 2),
        (readers.nodes, "3", (3, 3)),
        (readers.nodes, "2:4", (2, 4)),
        (readers.seconds, "0.5", 0.5),
        (readers.port, "0", 0),
        (readers.truth, "Yes", True),
        (readers.truth, "F", False),
        (readers.masks, "3", 3),
        (readers.masks, "0:1,10:3", {0: 1, 10: 3}),
        (readers.ranks, "", frozenset()),
        (readers.ranks, "0,2", {0, 2}),
        (readers.signals, " SIGUSR1, SIGTERM", (signal.SIGUSR1, signal.SIGTERM)),
    ],
)
def test_what_a_text_means(read: Callable[[str], Any], text: str, value: object) -> None:
    """Values are numbers and tuples: nobody behind the parser reads a text again."""
    assert read(text) == value
