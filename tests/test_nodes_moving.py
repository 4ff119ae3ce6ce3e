"""A job with two endpoints whose first host stays away, through the real command."""

from __future__ import annotations

from pathlib import Path

from tests.netns import Network
from tests.nodes import GOOD, Nodes, all_alive, ended
from tests.stores import free_port

CONF = "--rdzv-conf=heartbeat=3,last_call_timeout=9,settle=0.2"


def at_two() -> tuple[str, ...]:
    places = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={places}", "--rdzv-id=j", CONF)


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


def test_the_host_of_the_store_is_cut_off(tmp_path: Path) -> None:
    """One node would be enough for a round. The host forms none alone, because the others may go on elsewhere, as they
    do. Mended, all meet there."""
    with Network(3) as network:
        first, second, _ = network.addresses
        places = f"--rdzv-endpoint={first}:29400,{second}:29400"
        argv = ("--nnodes=1:3", "--max-restarts=0", "--rdzv-backend=c10d", places, "--rdzv-id=j", CONF)
        with Nodes(tmp_path, *argv) as nodes:
            runs = {i: nodes.start(f"n{i}", preexec_fn=network.enter(i))[0] for i in (1, 2, 0)}
            a, b, c = runs[0], runs[1], runs[2]
            before = nodes.formed(a, b, c)
            network.cut(0)
            a.says("less than half of the nodes of the round reach this store, so it has ended")
            for run in (b, c):
                run.says("the journal can be reached again")
            assert all_alive(before)
            two = nodes.formed(b, c, after=before)
            assert len(a.ups) == 1, "the host has formed a round alone"
            network.mend(0)
            again = nodes.formed(a, b, c, after=two)
            assert {up.restart for up in again} == {0}
            for run in (a, b, c):
                run.tell(GOOD)
            assert ended(a, b, c) == [0] * 3
