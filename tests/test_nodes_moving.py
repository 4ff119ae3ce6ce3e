"""A job with two endpoints whose first host stays away, through the real command (rule 17)."""

from __future__ import annotations

from pathlib import Path

from reknit.core.job.entries import Joined
from tests.nodes import BAD, CONF, GOOD, NodeRun, Nodes, all_alive, ended
from tests.stores import free_port


def at_two() -> tuple[str, ...]:
    places = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={places}", "--rdzv-id=j", CONF)


def three(nodes: Nodes) -> tuple[NodeRun, NodeRun, NodeRun]:
    """Nodes of which a hosts the first store and b the second. On one host, whoever comes first hosts it."""
    (a,) = nodes.start("a")
    a.says("this node hosts the first store")
    (b,) = nodes.start("b")
    b.says("this node hosts the second store")
    (c,) = nodes.start("c")
    return a, b, c


def test_the_job_goes_on_at_the_second_endpoint(tmp_path: Path) -> None:
    """The machine of the first host is lost. Its peers' workers run on until they know that, and a new agent finds the
    job. A later failure is a failure like any other."""
    with Nodes(tmp_path, "--nnodes=2:4", "--max-restarts=1", *at_two()) as nodes:
        a, b, c = three(nodes)
        first = nodes.formed(a, b, c)
        a.vanish()
        for run in (b, c):
            run.says("the job's store is at")
            run.says("the store can be reached again")
        assert all_alive(b.ups + c.ups)
        second = nodes.formed(b, c, after=first)
        (d,) = nodes.start("d")
        third = nodes.formed(b, c, d, after=second)
        assert {up.restart for up in third} == {0}
        c.tell(BAD)
        fourth = nodes.formed(b, c, d, after=third)
        assert {up.restart for up in fourth} == {1}
        for run in (b, c, d):
            run.tell(GOOD)
        assert ended(b, c, d) == [0] * 3


def test_the_first_host_hangs_and_goes_on(tmp_path: Path) -> None:
    """When the first host goes on, its store still has the old journal. The host must not go on with it: it takes part
    in the journal of the others."""
    with Nodes(tmp_path, "--nnodes=2:4", "--max-restarts=0", *at_two()) as nodes:
        a, b, c = three(nodes)
        first = nodes.formed(a, b, c)
        a.freeze()
        second = nodes.formed(b, c, after=first)
        a.thaw()
        third = nodes.formed(a, b, c, after=second)
        assert {up.restart for up in third} == {0}
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0] * 3


def test_the_first_host_is_lost_while_the_next_round_is_gathered(tmp_path: Path) -> None:
    """A worker of the host fails, and the host a moment later. b has joined the next round in the store that is lost.
    c has not, so that the round is not sealed yet."""
    patient = f"{CONF},heartbeat=6"  # c must not count as lost
    with Nodes(tmp_path, "--nnodes=2:4", "--max-restarts=1", *at_two(), patient) as nodes:
        a, b, c = three(nodes)
        first = nodes.formed(a, b, c)
        c.freeze()
        a.tell(BAD)
        nodes.said(Joined, "b", round=1)
        a.vanish()
        c.thaw()
        second = nodes.formed(b, c, after=first)
        assert {up.restart for up in second} == {1}
        for run in (b, c):
            run.tell(GOOD)
        assert ended(b, c) == [0] * 2


def test_the_job_goes_back_to_the_first_endpoint(tmp_path: Path) -> None:
    """The first host comes back and hosts an empty store. Then the second one is lost. It costs no restart."""
    with Nodes(tmp_path, "--nnodes=2:4", "--max-restarts=0", *at_two()) as nodes:
        a, b, c = three(nodes)
        first = nodes.formed(a, b, c)
        a.vanish()
        second = nodes.formed(b, c, after=first)
        (again,) = nodes.start("a")
        third = nodes.formed(again, b, c, after=second)
        b.vanish()
        fourth = nodes.formed(again, c, after=third)
        assert {up.restart for up in fourth} == {0}
        for run in (again, c):
            run.tell(GOOD)
        assert ended(again, c) == [0] * 2
