"""Nodes that are told to leave: one of several, the host of the store, and one that is told twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from reknit.core.job.entries import Left
from tests.support.nodes import BOTH, GOOD, UP, Nodes, at_c10d, at_file, ended
from tests.support.waiting import is_alive, until

TERM = 128 + signal.SIGTERM


@pytest.mark.parametrize("backend", BOTH)
def test_the_rest_regroup(tmp_path: Path, backend: str) -> None:
    """Preemption is announced: nobody has to notice a silence, and it is no failure. Every node can be told."""
    place = at_c10d() if backend == "c10d" else at_file(tmp_path)
    # A silence would only be noticed after the patience of this test.
    with Nodes(tmp_path, "--nnodes=1:3", *place, "--rdzv-conf=heartbeat=300,last_call_timeout=9") as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        b, c = nodes.start("b", "c")
        three = nodes.formed(a, b, c)
        b.signal(signal.SIGTERM)
        assert b.end() == TERM
        two = nodes.formed(a, c, after=three)
        assert {up.restart for up in two} == {0}
        assert "this node has left: SIGTERM received" in b.said
        for run in (a, c):
            run.says("node b is leaving")
            run.tell(GOOD)
        assert ended(a, c) == [0, 0]


def test_the_host_serves_on(tmp_path: Path) -> None:
    """To preempt the node that happens to host the store must not end the job of all. It ends when they are done."""
    with Nodes(tmp_path, "--nnodes=2:3", *at_c10d()) as nodes:
        (a,) = nodes.start("a")
        a.says("this node hosts the job's store")
        b, c = nodes.start("b", "c")
        three = nodes.formed(a, b, c)
        a.signal(signal.SIGTERM)
        a.says("this node hosts the store, and stays until the other nodes have ended")
        two = nodes.formed(b, c, after=three)
        assert {up.restart for up in two} == {0}
        assert not is_alive(a.ups[0].pid)
        for run in (b, c):
            run.tell(GOOD)
        assert ended(b, c, a) == [0, 0, TERM]
        lines = a.err.splitlines()
        told = [
            i
            for i, line in enumerate(lines)
            if "SIGTERM received; stopping" in line or "stays until the other nodes" in line
        ]
        assert len(told) == 2, a.err
        assert "stays until the other nodes" in lines[told[1]], a.err
        assert not any("this node stands by" in line for line in lines[told[0] :]), a.err


def test_the_host_is_told_again(tmp_path: Path) -> None:
    """Whoever insists is obeyed, and the others know how to bear it."""
    with Nodes(tmp_path, "--nnodes=1:2", *at_c10d(), "--store-timeout=2") as nodes:
        (a,) = nodes.start("a")
        a.says("this node hosts the job's store")
        (b,) = nodes.start("b")
        two = nodes.formed(a, b)
        a.signal(signal.SIGTERM)
        nodes.formed(b, after=two)

        def has_ended_when_told() -> bool:
            a.signal(signal.SIGTERM)  # within half a second it is the same request, so it is repeated until it counts
            return a.process.poll() is not None

        until(has_ended_when_told, "the end of a")
        assert a.end() == TERM
        assert b.end() == 74


def test_who_leaves_takes_its_time(tmp_path: Path) -> None:
    """Its workers may save what they have; the others wait for that, and do not start before."""
    script = (
        UP
        + """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    up()
    while signal.sigwait({signal.SIGTERM, signal.SIGUSR1}) == signal.SIGTERM:
        if os.environ["SLOW"] == "no":
            break
    """
    )
    with Nodes(tmp_path, "--nnodes=1:2", *at_file(tmp_path), script=script) as nodes:
        (a,) = nodes.start("a", env={"SLOW": "no"})
        (b,) = nodes.start("b", env={"SLOW": "yes"})
        two = nodes.formed(a, b)
        b.signal(signal.SIGTERM)
        until(lambda: not is_alive(a.ups[0].pid), "the worker of a to end")
        assert len(a.ups) == 1
        assert not any(isinstance(entry, Left) for entry in nodes.entries())
        b.tell(GOOD)
        assert b.end() == TERM
        nodes.formed(a, after=two)
        a.tell(GOOD)
        assert a.end() == 0
