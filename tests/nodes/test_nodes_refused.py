"""Agents that must not take part: each gives one clear line and a status of its own, and does not disturb the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nodes import BOTH, CONF, GOOD, Nodes, at_c10d, at_file, ended

ODD = {
    "terms": (("--max-restarts=7",), 78),
    "range": (("--nnodes=1:9",), 78),
    "secret": (("--rdzv-secret=other",), 77),
    "no secret": ((), 77),
    "job": (("--rdzv-id=other",), 73),
    "name": (("--node-id=a",), 76),
}
LINES = {
    "terms": "this node cannot take part: the job runs on other terms: ",
    "range": "this node cannot take part: the job runs on other terms: ",
    "secret": "the journal of job j is signed with another secret (--rdzv-secret)",
    "no secret": "the journal of job j is signed, and this node has no --rdzv-secret",
    "job": "127.0.0.1:PORT serves job j",
    "name": "another agent of job j runs on this host as a (pid P, since ",
}


@pytest.mark.parametrize("backend", BOTH)
def test_who_does_not_belong_to_it(tmp_path: Path, backend: str) -> None:
    """All of them at one running job, whose workers do not even notice."""
    place = at_c10d() if backend == "c10d" else at_file(tmp_path)
    with Nodes(tmp_path, "--nnodes=1:2", *place, env={"REKNIT_RDZV_SECRET": "s"}) as nodes:
        (a,) = nodes.start("a")
        nodes.formed(a)
        for what, (argv, status) in ODD.items():
            if backend == "file" and what == "job":
                continue  # a folder holds any number of jobs
            env = {"REKNIT_RDZV_SECRET": ""} if what == "no secret" else {}
            (odd,) = nodes.start("odd", argv=argv, env=env)
            assert odd.end() == status, what
            assert LINES[what] in odd.said[-2], what
            assert odd.ups == []
        assert len(a.ups) == 1
        a.tell(GOOD)
        assert a.end() == 0
        assert a.said[-1] == "the job succeeded"
        assert not any("lost" in line or "silent" in line for line in a.said)


@pytest.mark.parametrize("backend", ["file"])
def test_two_jobs_at_one_place(tmp_path: Path, backend: str) -> None:
    """A shared folder serves many jobs, which know nothing of each other."""
    with Nodes(tmp_path, "--nnodes=1:2", *at_file(tmp_path), f"{CONF},last_call_timeout=0") as nodes:
        (a,) = nodes.start("a")
        (b,) = nodes.start("b", argv=("--rdzv-id=other",))
        nodes.formed(a)
        nodes.formed(b)
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]


def test_a_node_that_is_late(tmp_path: Path) -> None:
    """The job has ended well: for whoever was to take part in it, that is no failure."""
    with Nodes(tmp_path, "--nnodes=1:2", *at_file(tmp_path), f"{CONF},last_call_timeout=0") as nodes:
        (a,) = nodes.start("a")
        nodes.formed(a)
        a.tell(GOOD)
        assert a.end() == 0
        (late,) = nodes.start("late")
        assert late.end() == 0
        assert late.ups == []
        assert (
            late.said[-1]
            == "the job had succeeded before this node came: nothing was run; to run it again, give another --rdzv-id"
        )
