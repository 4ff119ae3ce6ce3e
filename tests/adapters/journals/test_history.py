"""Whether two readers have read the same records of a journal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.adapters.journals import history
from reknit.adapters.journals.history import Prefix, read_to

RECORDS = st.lists(st.binary(max_size=3), max_size=5)


def after(records: list[bytes], start: int = 0, digest: str = "") -> Prefix:
    """What a reader knows that has read these records from `start` on."""
    prefix = Prefix(start, digest)
    for position, record in enumerate(records, start + 1):
        prefix.extend(record, position)
    return prefix


@given(RECORDS, RECORDS)
def test_digests_are_equal_if_the_records_are(one: list[bytes], other: list[bytes]) -> None:
    """Also if one of them holds the same bytes in fewer records: each record is an entry."""
    assert (after(one).digest == after(other).digest) == (one == other)


@given(RECORDS, RECORDS)
def test_a_reader_goes_on_from_a_digest_as_if_it_had_read_all(before: list[bytes], later: list[bytes]) -> None:
    """A reader that is far behind takes a published fold with its digest, and does not read what was before."""
    whole, part = after(before + later), after(later, len(before), after(before).digest)
    assert (part.position, part.digest) == (whole.position, whole.digest)
    assert part.at(len(before)) == whole.at(len(before))


def test_a_writer_that_has_read_other_records_is_contradicted() -> None:
    """The store has shown two agents different records. A writer that has read less, or more, may have read the
    same."""
    mine, theirs = after([b"a", b"b"]), after([b"a", b"x"])
    assert mine.contradicts(theirs.seen)
    assert not mine.contradicts(after([b"a", b"b"]).seen)
    assert not mine.contradicts(after([b"a"]).seen)
    assert not mine.contradicts(after([b"a", b"x", b"y"]).seen), "this reader has not come so far"


def test_only_the_latest_positions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal grows for months. What is forgotten contradicts nobody."""
    monkeypatch.setattr(history, "REMEMBERED", 3)
    prefix = after([b"a", b"b", b"c", b"d"])
    assert [bool(prefix.at(position)) for position in range(6)] == [False, False, True, True, True, False]
    assert not prefix.contradicts("1 another digest")


@pytest.mark.parametrize("seen", ["", "x", "-1 d", "² d", "1" * 20 + " d", "1.5 d", " d"])
def test_what_names_no_position_contradicts_nobody(seen: str) -> None:
    """Anybody can write to a store."""
    assert read_to(seen)[0] == -1
    assert not after([b"a"]).contradicts(seen)
