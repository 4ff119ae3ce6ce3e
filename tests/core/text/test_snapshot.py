"""A job as one line: the job that was frozen comes back, and no other text is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.core.job.entries import Entry, Failed, Joined, Leaving, Lost, Node, NodeId, Opened, Succeeded, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.codec import CodecError
from reknit.core.text.snapshot import freeze, thaw

NODES = [Node(NodeId(f"n{i}"), k) for i in range(4) for k in range(2)]
NODE = st.sampled_from(NODES)
ENTRY = st.one_of(
    st.builds(Joined, NODE, st.just("x"), st.integers(0, 2), st.just("a"), st.integers(1, 9)),
    st.builds(Failed, NODE, st.integers(0, 2), st.just((WorkerFailure(0, 0, 1),))),
    st.builds(Succeeded, NODE, st.integers(0, 2)),
    st.builds(Lost, NODE, NODE),
    st.builds(Leaving, NODE),
)


def job_of(*entries: Entry) -> Job:
    return fold_all(Job(), [Opened(Terms(2, 3), "j"), *entries])


@given(st.lists(ENTRY, max_size=30))
def test_a_job_survives(entries: list[Entry]) -> None:
    """A reader that starts from it must come to the same rounds as one that has folded everything."""
    job = job_of(*entries)
    text = freeze(job)
    back = thaw(json.loads(text))
    assert back == job
    assert list(back.live) == list(job.live), "the order of the journal decides who is sealed"
    assert list(back.gone) == list(job.gone), "the first of them is forgotten first"
    assert "\n" not in text
    assert freeze(back) == text


SMALL: dict[str, Any] = json.loads(freeze(job_of(*(Joined(n, "x", 0, "a", 1) for n in NODES[::2]))))


@pytest.mark.parametrize("part", SMALL)
@pytest.mark.parametrize("wrong", [None, 7, "x", [], [[1], ["x"]], {"kind": "Job"}, [10**6], [True]])
def test_nothing_else_is_a_job(part: str, wrong: Any) -> None:
    """It was written by another machine: what is wrong is an error, and never a crash or a wrong job."""
    try:
        job = thaw({**SMALL, part: wrong})
    except CodecError:
        return
    assert thaw(json.loads(freeze(job))) == job


@pytest.mark.parametrize("wrong", [[1, 2, 3, 4], ["n0", None, "n2", "n3"], "n0"])
def test_names_are_a_list_of_texts(wrong: Any) -> None:
    """A number in the place of a name would be a node that nobody has."""
    with pytest.raises(CodecError, match="is no column of str"):
        thaw({**SMALL, "ids": wrong})


def test_a_missing_part_is_an_error() -> None:
    """So a half-written record is none."""
    for part in SMALL:
        with pytest.raises(CodecError):
            thaw({name: value for name, value in SMALL.items() if name != part})


def test_what_a_thousand_nodes_share_is_said_once() -> None:
    """A reader that is far behind takes the fold, so its text must not grow with what all nodes have in common."""
    few, many = (freeze(job_of(*(_equal(i) for i in range(10_000, 10_000 + size)))) for size in (2, 1002))
    assert (len(many) - len(few)) / 1000 < 3 * len("10000, ")


def _equal(i: int) -> Joined:
    return Joined(Node(NodeId(str(i))), "x", 0, "an address that all of them have", 29500, "a role that all have")
