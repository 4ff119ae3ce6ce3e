"""A job with two endpoints whose first host stays away, through the real command."""

from __future__ import annotations

from pathlib import Path

from tests.nodes import GOOD, Nodes, all_alive, ended
from tests.stores import free_port


def at_two() -> tuple[str, ...]:
    places = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={places}", "--rdzv-id=j", "--rdzv-conf=heartbeat=3,settle=0.2")


def test_the_host_of_the_store_hangs_and_goes_on(tmp_path: Path) -> None:
    """The others go to the second endpoint, and their workers run meanwhile. One of them hosts the store there. The job
    goes on without the host, and a new agent finds it. When the first host goes on, its store must not serve a second
    life of the journal: the host takes part in the one of the others."""
    with Nodes(tmp_path, "--nnodes=2:3", "--max-restarts=0", *at_two()) as nodes:
        (a,) = nodes.start("a")
        a.says("this node hosts the job's store")
        b, c = nodes.start("b", "c")
        first = nodes.formed(a, b, c)
        a.freeze()
        for run in (b, c):
            run.says("the journal can be reached again")
        assert all_alive(b.ups + c.ups)
        second = nodes.formed(b, c, after=first)
        (d,) = nodes.start("d")
        third = nodes.formed(b, c, d, after=second)
        a.thaw()
        a.says("this node stands by")
        assert {up.restart for up in third} == {0}
        for run in (b, c, d):
            run.tell(GOOD)
        assert ended(a, b, c, d) == [0] * 4
