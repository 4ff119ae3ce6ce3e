"""Nodes that vanish with all their processes, hang for a while, lose their agent, or host the store and vanish."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from reknit.core.job.entries import Joined, Lost
from tests.support.command import STORY
from tests.support.etcd import Etcd
from tests.support.nodes import BOTH, CONF, GLOO, GOOD, WAITS, Nodes, all_alive, at_c10d, at_etcd, at_file, ended
from tests.support.waiting import is_alive, until


def place(tmp_path: Path, backend: str) -> tuple[str, ...]:
    return at_c10d() if backend == "c10d" else at_file(tmp_path)


@pytest.mark.parametrize("backend", BOTH)
def test_the_survivors_regroup(tmp_path: Path, backend: str) -> None:
    """No last call, no restart spent, the old order. Where they meet in c10d, they have real groups, whose collectives
    the dead node tears."""
    script = GLOO if backend == "c10d" else WAITS
    with Nodes(tmp_path, "--nnodes=2:3", "--max-restarts=0", *place(tmp_path, backend), script=script) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        b, c = nodes.start("b", "c")
        three = nodes.formed(a, b, c)
        b.vanish()
        two = nodes.formed(a, c, after=three)
        assert [up.restart for up in two] == [0, 0]
        order = sorted((a, c), key=lambda run: run.ups[0].rank)
        assert [run.ups[-1].rank for run in order] == [0, 1]
        for run in (a, c):
            run.says("node b fell silent")
            run.tell(GOOD)
        assert ended(a, c) == [0, 0]


@pytest.mark.parametrize("backend", BOTH)
def test_a_replacement_is_waited_for(tmp_path: Path, backend: str) -> None:
    """Below the minimum nobody can go on, and nobody gives up before the join timeout."""
    with Nodes(tmp_path, "--nnodes=2", *place(tmp_path, backend)) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        (b,) = nodes.start("b")
        two = nodes.formed(a, b)
        b.vanish()
        nodes.said(Joined, "a", round=1)
        assert not is_alive(a.ups[0].pid)
        (c,) = nodes.start("c")
        again = nodes.formed(a, c, after=two)
        assert [up.restart for up in again] == [0, 0]
        for run in (a, c):
            run.tell(GOOD)
        assert ended(a, c) == [0, 0]


def test_too_few_for_too_long(tmp_path: Path) -> None:
    """Never a hang: who waits for nodes in vain says so, after the time that it was given."""
    with Nodes(tmp_path, "--nnodes=2", *at_file(tmp_path), f"{CONF},join_timeout=2") as nodes:
        a, b = nodes.start("a", "b")
        nodes.formed(a, b)
        b.vanish()
        assert a.end() == 75
        assert a.said[-3:] == [
            "the job failed: 1 node joined in time, but the job needs at least 2",
            STORY,
            "exit status 75: too few nodes joined in time",
        ]


def test_the_host_of_the_store_vanishes(tmp_path: Path) -> None:
    """Healthy workers are kept through it, while somebody may yet bring the store back; then there is one clear end."""
    argv = ("--nnodes=3", *at_c10d(), "--store-timeout=3")
    with Nodes(tmp_path, *argv) as nodes:
        (a,) = nodes.start("a")
        a.says("this node hosts the job's store")
        b, c = nodes.start("b", "c")
        nodes.formed(a, b, c)
        a.vanish()
        for run in (b, c):
            run.says("the store cannot be reached, workers keep running")
            assert all_alive(run.ups)
        assert ended(b, c) == [74, 74]
        for run in (b, c):
            assert len(run.ups) == 1
            assert run.said[-3].startswith("this node has given up: the store cannot be reached: 127.0.0.1:PORT: ")


def test_any_node_vanishes_at_etcd(tmp_path: Path) -> None:
    """No node is special there: the survivors regroup, whichever it was."""
    with Etcd(tmp_path) as server, Nodes(tmp_path, "--nnodes=1:2", *at_etcd(server)) as nodes:
        a, b = nodes.start("a", "b")
        two = nodes.formed(a, b)
        first, second = (a, b) if a.ups[0].rank == 0 else (b, a)
        first.vanish()
        nodes.formed(second, after=two)
        second.tell(GOOD)
        assert second.end() == 0


def incarnation(nodes: Nodes, node_id: str) -> int:
    """As which the node has joined last."""
    return [e.node.incarnation for e in nodes.entries() if isinstance(e, Joined) and e.node.id == node_id][-1]


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("what", ["the machine", "the agent"])
def test_a_suspended_node(tmp_path: Path, backend: str, what: str) -> None:
    """Stopped for longer than anybody waits, and awake again: it reads that it was declared lost, stops its workers,
    comes back, and calls nobody lost."""
    with Nodes(tmp_path, "--nnodes=1:2", *place(tmp_path, backend)) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        (b,) = nodes.start("b")
        two = nodes.formed(a, b)
        before = incarnation(nodes, "b")
        if what == "the machine":
            b.freeze()
        else:
            for pid in (b.keeper, b.pid):
                os.kill(pid, signal.SIGSTOP)
        one = nodes.formed(a, after=two)
        b.thaw()
        b.says("the other nodes have declared this node lost; stopping this node's workers")
        again = nodes.formed(a, b, after=one)
        assert [up.restart for up in again] == [0, 0]
        assert {(e.node.id, e.by.id) for e in nodes.entries() if isinstance(e, Lost)} == {("b", "a")}
        assert incarnation(nodes, "b") == before + 1
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]


@pytest.mark.parametrize("what", ["agent", "agent and keeper"])
def test_a_suspended_node_with_a_fence(tmp_path: Path, what: str) -> None:
    """An agent that cannot run keeps its fence all the same: when the other node begins the next round, the old worker
    is dead. A keeper that is suspended as well kills as soon as it runs again, although its agent does not."""
    with Nodes(tmp_path, "--nnodes=1:2", "--fence-after=1", *at_file(tmp_path)) as nodes:
        a, b = nodes.start("a", "b")
        two = nodes.formed(a, b)
        (own,) = b.workers()
        keeper = b.keeper
        for pid in [b.pid] if what == "agent" else [b.pid, keeper]:
            os.kill(pid, signal.SIGSTOP)
        alone = nodes.formed(a, after=two)
        if what == "agent":
            assert not is_alive(own.pid)
        else:
            os.kill(keeper, signal.SIGCONT)
            until(lambda: not is_alive(own.pid), "the end of the old worker")
        b.says("its keeper kills this node's workers")
        os.kill(b.pid, signal.SIGCONT)
        nodes.formed(a, b, after=alone)
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]


def test_an_agent_is_killed(tmp_path: Path) -> None:
    """Its keeper takes the workers away, and the other nodes regroup."""
    with Nodes(tmp_path, "--nnodes=1:2", *at_file(tmp_path)) as nodes:
        a, b = nodes.start("a", "b")
        two = nodes.formed(a, b)
        os.kill(b.pid, signal.SIGKILL)
        until(lambda: not b.left_over(), "the end of all of b")
        one = nodes.formed(a, after=two)
        (c,) = nodes.start("b")  # its name is free again, with its old rank
        nodes.formed(a, c, after=one)
        assert c.ups[0].rank == b.ups[0].rank
        for run in (a, c):
            run.tell(GOOD)
        assert ended(a, c) == [0, 0]


def test_a_keeper_is_killed(tmp_path: Path) -> None:
    """A failure like another: its agent ends what it held, starts a new one, and the whole group restarts."""
    with Nodes(tmp_path, "--nnodes=2", "--max-restarts=1", *at_file(tmp_path)) as nodes:
        a, b = nodes.start("a", "b")
        two = nodes.formed(a, b)
        os.kill(b.keeper, signal.SIGKILL)
        b.says("the keeper of this node's workers is lost: killed by SIGKILL")
        again = nodes.formed(a, b, after=two)
        assert [up.restart for up in again] == [1, 1]
        for run in (a, b):
            run.tell(GOOD)
        assert ended(a, b) == [0, 0]


@pytest.mark.slow
def test_again_and_again(tmp_path: Path) -> None:
    """Five times a node vanishes and comes back; the budget is untouched, and nothing hangs."""
    argv = ("--nnodes=2:3", "--max-restarts=0", *at_c10d(), "--rdzv-conf=heartbeat=1,last_call_timeout=9,settle=0.1")
    with Nodes(tmp_path, *argv) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        b, c = nodes.start("b", "c")
        ups = nodes.formed(a, b, c)
        for i in range(5):
            victim, other = (b, c) if i % 2 else (c, b)
            victim.vanish()
            ups = nodes.formed(a, other, after=ups)
            (victim,) = nodes.start(victim.name)
            b, c = (victim, other) if i % 2 else (other, victim)
            ups = nodes.formed(a, b, c, after=ups)
            assert {up.restart for up in ups} == {0}
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]
