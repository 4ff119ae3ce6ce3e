"""Nodes with addresses of their own, and cables that are cut. Packets are dropped, and no connection is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns import INTERFACE, Network
from tests.support.nodes import GLOO, GOOD, NodeRun, Nodes, all_alive, ended
from tests.support.waiting import is_alive

pytestmark = pytest.mark.slow
CONF = "--rdzv-conf=heartbeat=2,last_call_timeout=9,settle=0.2"


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


def at_node_0(network: Network, *argv: str) -> tuple[str, ...]:
    return (*argv, "--rdzv-backend=c10d", f"--rdzv-endpoint={network.addresses[0]}:29400", "--rdzv-id=j", CONF)


def start(nodes: Nodes, network: Network, i: int) -> NodeRun:
    (run,) = nodes.start(f"n{i}", preexec_fn=network.enter(i), env={"GLOO_SOCKET_IFNAME": INTERFACE})
    return run


def three(nodes: Nodes, network: Network) -> list[NodeRun]:
    """With the store on the first, by its address alone: none is told to be the host."""
    runs = [start(nodes, network, 1), start(nodes, network, 2), start(nodes, network, 0)]
    return [runs[2], *runs[:2]]


def test_a_group_over_the_network(tmp_path: Path, network: Network) -> None:
    """What a node advertises is how the others reach it, and the workers' group goes over that."""
    with Nodes(tmp_path, *at_node_0(network, "--nnodes=3"), script=GLOO) as nodes:
        runs = three(nodes, network)
        ups = nodes.formed(*runs)
        assert ups[0].master.partition(":")[0] in network.addresses
        for run, address in zip(runs, network.addresses, strict=True):
            run.says(f'({address}) joins job "j" at 10.73.0.1:29400')
            run.tell(GOOD)
        runs[0].says("this node hosts the job's store")
        assert ended(*runs) == [0, 0, 0]


def test_a_cable_is_cut_and_mended(tmp_path: Path, network: Network) -> None:
    """The others notice and regroup. The node that is cut off keeps its workers, as an outage is nobody's failure; back
    on the network it reads that it was declared lost, and comes back."""
    with Nodes(tmp_path, *at_node_0(network, "--nnodes=2:3", "--max-restarts=0")) as nodes:
        a, b, c = three(nodes, network)
        all_three = nodes.formed(a, b, c)
        network.cut(2)
        two = nodes.formed(a, b, after=all_three)
        assert {up.restart for up in two} == {0}
        for run in (a, b):
            run.says("node n2 fell silent")
        c.says("the store cannot be reached, workers keep running")
        assert all_alive(c.ups)
        network.mend(2)
        c.says("the other nodes have declared this node lost; stopping this node's workers")
        again = nodes.formed(a, b, c, after=two)
        assert {up.restart for up in again} == {0}
        assert "noticed by node n2" not in nodes.story(), "it accuses nobody"
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]


def test_a_fence(tmp_path: Path, network: Network) -> None:
    """With --fence-after a node that is cut off kills its own workers, before the others go on without it."""
    with Nodes(tmp_path, *at_node_0(network, "--nnodes=2:3", "--fence-after=1.5")) as nodes:
        a, b, c = three(nodes, network)
        all_three = nodes.formed(a, b, c)
        network.cut(2)
        nodes.formed(a, b, after=all_three)
        assert not is_alive(c.ups[0].pid)
        c.says("the store has acknowledged no beat of this node for 1.5 s")
        network.mend(2)
        nodes.formed(a, b, c)
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]


def test_the_host_is_cut_off(tmp_path: Path, network: Network) -> None:
    """To it the others are silent, and to them the store is: they keep their workers, and call nobody lost. Mended, all
    meet again."""
    with Nodes(tmp_path, *at_node_0(network, "--nnodes=2:3", "--max-restarts=0")) as nodes:
        a, b, c = three(nodes, network)
        before = nodes.formed(a, b, c)
        network.cut(0)
        for run in (b, c):
            run.says("the store cannot be reached, workers keep running")
        a.says("fell silent")
        assert all_alive(b.ups + c.ups)
        network.mend(0)
        again = nodes.formed(a, b, c, after=before)
        assert {up.restart for up in again} == {0}
        assert "noticed by node n1" not in nodes.story()
        assert "noticed by node n2" not in nodes.story()
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]
