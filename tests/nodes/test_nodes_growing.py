"""Nodes that come: all at once, into a job with room, and into one that is full."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.etcd import Etcd
from tests.support.nodes import BAD, BOTH, CONF, GLOO, GOOD, WAITS, Nodes, at_c10d, at_etcd, at_file, ended
from tests.support.stores import free_port


@pytest.mark.parametrize("backend", ["c10d", "file", "etcd", pytest.param("static", marks=pytest.mark.slow)])
def test_a_group_of_two_nodes(tmp_path: Path, backend: str) -> None:
    """What it is all for: a process group over two nodes, wherever they meet. It is a real one where the master port is
    given. Where the nodes meet at c10d, `test_several_nodes.py` has a real one."""
    with ExitStack() as stack:
        place = at_c10d()
        if backend == "file":
            place = at_file(tmp_path)
        elif backend == "etcd":
            place = at_etcd(stack.enter_context(Etcd(tmp_path)))
        script = GLOO if backend == "static" else WAITS
        nodes = stack.enter_context(Nodes(tmp_path, "--nnodes=2", *place, script=script))
        each: list[tuple[str, ...]] = [(), ()]
        if backend == "static":
            nodes.argv = ("--nnodes=2", f"--master-port={free_port()}", "--rdzv-id=j")
            each = [("--node-rank=0",), ("--node-rank=1",)]
        a, b = (nodes.start(name, argv=argv)[0] for name, argv in zip("ab", each, strict=True))
        nodes.formed(a, b)
        a.tell(GOOD)
        b.tell(GOOD)
        assert ended(a, b) == [0, 0]
        assert a.said[-1] == b.said[-1] == "the job succeeded"


def test_nodes_of_different_size(tmp_path: Path) -> None:
    """Ranks are dense over nodes with different numbers of workers, contiguous on each, and the same for all."""
    with Nodes(tmp_path, "--nnodes=3", *at_file(tmp_path)) as nodes:
        runs = [nodes.start(f"n{i}", argv=(f"--nproc-per-node={i + 1}", f"--node-rank={i}"))[0] for i in range(3)]
        ups = nodes.formed(*runs)
        assert [up.group_rank for up in ups] == [0, 1, 1, 2, 2, 2]
        assert [[up.rank for up in sorted(run.ups)] for run in runs] == [[0], [1, 2], [3, 4, 5]]
        for run in runs:
            run.tell(GOOD)
        assert ended(*runs) == [0, 0, 0]


@pytest.mark.parametrize("backend", BOTH)
def test_the_last_call(tmp_path: Path, backend: str) -> None:
    """Fewer than the maximum, at least the minimum: nobody waits for ever for those who never come."""
    with Nodes(tmp_path, "--nnodes=2:5", *(at_c10d() if backend == "c10d" else at_file(tmp_path))) as nodes:
        a, b = nodes.start("a", "b")
        nodes.formed(a, b)
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]


def test_a_group_grows(tmp_path: Path) -> None:
    """A newcomer with room regroups everybody, without the job's budget (torchrun 2.13 dies of it)."""
    with Nodes(tmp_path, "--nnodes=1:3", "--max-restarts=0", *at_c10d()) as nodes:
        a, b = nodes.start("a", "b")
        two = nodes.formed(a, b)
        (c,) = nodes.start("c")
        three = nodes.formed(a, b, c, after=two)
        assert {up.restart for up in three} == {0}
        assert [up.rank for up in a.workers() + b.workers()] == [up.rank for up in a.ups[:1] + b.ups[:1]], "old ranks"
        for run in (a, b, c):
            run.says("1 node admitted: c")
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]


@pytest.mark.slow
def test_many_arrive_together(tmp_path: Path) -> None:
    """Those who come within the settling time cost one round, not one each."""
    argv = ("--nnodes=1:4", *at_file(tmp_path), f"{CONF},settle=3")
    with Nodes(tmp_path, *argv) as nodes:
        (a,) = nodes.start("a")
        nodes.formed(a)
        others = nodes.start("b", "c", "d")
        nodes.formed(a, *others)
        assert len(a.ups) == 2
        for run in nodes.runs:
            run.tell(GOOD)
        assert ended(*nodes.runs) == [0, 0, 0, 0]


@pytest.mark.parametrize("backend", BOTH)
def test_standbys(tmp_path: Path, backend: str) -> None:
    """In a full job a node waits, without disturbing it. It takes over from one that vanishes; another is not needed,
    and that is no failure."""
    with Nodes(tmp_path, "--nnodes=2", *(at_c10d() if backend == "c10d" else at_file(tmp_path))) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")  # it is the host of the store, if there is one
        (b,) = nodes.start("b")
        two = nodes.formed(a, b)
        (c,) = nodes.start("c")
        c.says("this node stands by")
        (d,) = nodes.start("d")
        d.says("this node stands by")
        assert (len(a.ups), len(b.ups)) == (1, 1)
        b.vanish()
        again = nodes.formed(a, c, after=two)
        assert {up.restart for up in again} == {0}
        assert d.ups == []
        a.tell(GOOD)
        c.tell(GOOD)
        assert ended(a, c, d) == [0, 0, 0]
        assert d.said[-1] == "the job succeeded"
        a.says("node b fell silent")


def test_admission_at_failure(tmp_path: Path) -> None:
    """A newcomer that waits for the next failure interrupts nobody, and is there when it happens."""
    argv = ("--nnodes=1:2", "--max-restarts=1", "--admission=at-failure", *at_file(tmp_path))
    with Nodes(tmp_path, *argv) as nodes:
        (a,) = nodes.start("a")
        one = nodes.formed(a)
        (b,) = nodes.start("b")
        b.says("this node stands by")
        a.tell(BAD)
        two = nodes.formed(a, b, after=one)
        assert {up.restart for up in two} == {1}
        a.tell(GOOD)
        b.tell(GOOD)
        assert ended(a, b) == [0, 0]
