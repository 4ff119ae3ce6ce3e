"""Warm workers on several nodes: who waits for a place has its imports done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.nodes import GOOD, UP, Nodes, at_c10d, ended
from tests.support.warming import PACKAGES, install, needs_linux

pytestmark = needs_linux

SCRIPT = (
    UP
    + """
    import counted
    os.write(1, b"imported by itself\\n" if counted.PID == os.getpid() else b"imported before\\n")
    up()
    end()
"""
)


@pytest.mark.slow
def test_a_standby_and_a_newcomer_take_over_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the whole job would wait for the imports of one node."""
    install(tmp_path, counted="import os; PID = os.getpid()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / PACKAGES), os.environ.get("PYTHONPATH", "")]))
    options = ("--nnodes=1:2", "--warm=counted", "--max-restarts=0", *at_c10d())
    with Nodes(tmp_path, *options, script=SCRIPT) as nodes:
        (a,) = nodes.start("a")
        a.says("joins job")
        (b,) = nodes.start("b")
        two = nodes.formed(a, b)
        (c,) = nodes.start("c")  # there is no place for it
        c.says("joins job")
        b.vanish()
        again = nodes.formed(a, c, after=two)
        for run in (a, c):
            run.tell(GOOD)
        assert ended(a, c) == [0, 0]
        assert len(again) == 2
        for run in (a, b, c):
            assert "imported before" in run.texts[0]
            assert "imported by itself" not in run.texts[0]
