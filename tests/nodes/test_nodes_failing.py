"""Workers that fail on one of several nodes, that have succeeded on one, or that cannot be stopped."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from reknit.core.job.entries import Lost, Succeeded
from tests.support.etcd import Etcd
from tests.support.nodes import BAD, BOTH, GOOD, UP, Nodes, at_c10d, at_etcd, at_file, ended
from tests.support.stores import free_port, needs_torch


def place(tmp_path: Path, backend: str) -> tuple[str, ...]:
    return at_c10d() if backend == "c10d" else at_file(tmp_path)


@pytest.mark.parametrize(
    "backend", ["c10d", *(pytest.param(name, marks=pytest.mark.slow) for name in ("file", "static"))]
)
def test_all_restart_together(tmp_path: Path, backend: str) -> None:
    """One failure costs one restart of the job's budget, on all nodes; then all end with the same verdict."""
    if backend == "static":
        needs_torch()
    with Nodes(tmp_path, "--nnodes=2", "--max-restarts=1") as nodes:
        each: list[tuple[str, ...]] = [(), ()]
        if backend == "static":
            nodes.argv += (f"--master-port={free_port()}", "--rdzv-id=j")
            each = [("--node-rank=0",), ("--node-rank=1",)]
        else:
            nodes.argv += place(tmp_path, backend)
        a, b = (nodes.start(name, argv=argv)[0] for name, argv in zip("ab", each, strict=True))
        first = nodes.formed(a, b)
        os.kill(first[1].pid, BAD)
        second = nodes.formed(a, b, after=first)
        assert [up.restart for up in second] == [1, 1]
        os.kill(second[1].pid, BAD)
        assert ended(a, b) == [1, 1]
        place_of_1 = next(run.name for run in (a, b) if run.ups[-1].rank == 1)
        for run in (a, b):
            assert f"rank 1 on node {place_of_1} failed: exit code 1" in run.err
            assert "the job failed: rank 1 failed, and the only restart is spent; it had run for T s" in run.said
            assert f"rank 1 failed first (node {place_of_1}, local rank 0, pid {second[1].pid})" in run.err


def test_killed_by_a_signal(tmp_path: Path) -> None:
    """A worker that the kernel kills (no memory) ends all nodes with its code, and is named on all."""
    with Nodes(tmp_path, "--nnodes=3", *at_file(tmp_path)) as nodes:
        runs = nodes.start("a", "b", "c")
        ups = nodes.formed(*runs)
        os.kill(ups[2].pid, signal.SIGKILL)
        assert ended(*runs) == [128 + signal.SIGKILL] * 3
        name = next(run.name for run in runs if run.ups[-1].rank == 2)
        for run in runs:
            assert f"  rank 2 failed first (node {name}, local rank 0, pid {ups[2].pid}): killed by SIGKILL" in run.err


def test_the_finished_take_part_again(tmp_path: Path) -> None:
    """A node whose workers are done is needed again when another fails: ranks 0 to 1 must all be there."""
    with Nodes(tmp_path, "--nnodes=2", "--max-restarts=1", *at_file(tmp_path)) as nodes:
        a, b = nodes.start("a", "b")
        first = nodes.formed(a, b)
        a.tell(GOOD)
        nodes.said(Succeeded, "a")
        b.tell(BAD)
        second = nodes.formed(a, b, after=first)
        assert [up.restart for up in second] == [1, 1]
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]


@pytest.mark.parametrize("backend", BOTH)
def test_nodes_end_at_different_times(tmp_path: Path, backend: str) -> None:
    """Who is done waits without workers; a signal ends that wait at once; the dead do not prolong it."""
    with Nodes(tmp_path, "--nnodes=4", *place(tmp_path, backend)) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        b, c, d = nodes.start("b", "c", "d")
        nodes.formed(a, b, c, d)
        for run in (a, b, c):
            run.tell(GOOD)
            nodes.said(Succeeded, run.name)
        b.signal(signal.SIGTERM)
        assert b.end() == 128 + signal.SIGTERM
        assert d.process.poll() is None
        d.tell(GOOD)
        assert ended(a, c, d) == [0, 0, 0]


def test_the_dead_hold_nobody(tmp_path: Path) -> None:
    """A node that was done and died has done its part: the job ends when the last one does, successfully."""
    with Nodes(tmp_path, "--nnodes=3", *at_file(tmp_path)) as nodes:
        a, b, c = nodes.start("a", "b", "c")
        nodes.formed(a, b, c)
        for run in (a, b):
            run.tell(GOOD)
            nodes.said(Succeeded, run.name)
        b.vanish()
        nodes.said(Lost, "b")
        c.tell(GOOD)
        assert ended(a, c) == [0, 0]


@pytest.mark.parametrize("backend", [pytest.param("etcd", marks=pytest.mark.slow), "file"])
def test_the_same_job_again(tmp_path: Path, backend: str) -> None:
    """A job that failed is begun anew under its name; one that succeeded is finished, for whoever comes late."""
    with ExitStack() as stack:
        where = at_etcd(stack.enter_context(Etcd(tmp_path))) if backend == "etcd" else at_file(tmp_path)
        nodes = stack.enter_context(Nodes(tmp_path, "--nnodes=2", *where))
        for signum, status in ((BAD, 1), (GOOD, 0)):
            runs = nodes.start("a", "b")
            ups = nodes.formed(*runs)
            assert [up.restart for up in ups] == [0, 0]
            runs[0].tell(signum)
            if signum == GOOD:
                runs[1].tell(GOOD)
            assert ended(*runs) == [status, status]
        runs = nodes.start("a", "c")
        assert ended(*runs) == [0, 0]
        assert all(run.said[-1].startswith("the job ") and "succeeded" in run.said[-1] for run in runs)
        assert all(run.ups == [] for run in runs)


def test_nobody_starts_before_the_last_has_stopped(tmp_path: Path) -> None:
    """Two rounds at once would write the same checkpoint. So a stubborn worker is waited for until it is killed."""
    script = (
        UP
        + """
    for line in open("olds"):
        try:
            state = open(f"/proc/{int(line)}/stat").read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state not in "ZX":
            os.write(2, f"an old one lives: {line}".encode())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    up()
    end()
"""
    )
    (tmp_path / "olds").write_text("")
    argv = ("--nnodes=1:3", *at_file(tmp_path), "--shutdown-timeout=1.5")
    with Nodes(tmp_path, *argv, script=script) as nodes:
        a, b = nodes.start("a", "b", argv=("--nproc-per-node=2",))
        four = nodes.formed(a, b)
        (tmp_path / "olds").write_text("".join(f"{up.pid}\n" for up in four))
        (c,) = nodes.start("c")
        nodes.formed(a, b, c, after=four)
        assert "an old one lives" not in nodes.story()
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]
