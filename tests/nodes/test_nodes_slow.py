"""Real nodes whose store is far away. Only in the profile night: each round trip takes seconds.

REKNIT_PROFILE=night pytest -n0 tests/nodes/test_nodes_slow.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.nodes import BAD, GOOD, Nodes, ended
from tests.support.stores import SlowLink, free_port

pytestmark = pytest.mark.skipif(os.environ.get("REKNIT_PROFILE") != "night", reason="takes minutes")


@pytest.mark.parametrize(("delay_s", "heartbeat_s"), [(1.0, 12), (3.0, 36)])
def test_a_store_that_is_far_away(tmp_path: Path, delay_s: float, heartbeat_s: int) -> None:
    """Rounds form, a failure restarts, and the end is the same for all."""
    port = free_port()
    conf = f"--rdzv-conf=heartbeat={heartbeat_s},settle=0.2"
    argv = ("--nnodes=3", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=j", conf)
    with SlowLink(port, delay_s) as link, Nodes(tmp_path, *argv) as nodes:
        (a,) = nodes.start("a", argv=(f"--rdzv-endpoint=127.0.0.1:{port}",))
        a.says("this node hosts the job's store")
        b, c = nodes.start("b", "c", argv=(f"--rdzv-endpoint=127.0.0.1:{link.port}",))
        first = nodes.formed(a, b, c)
        b.tell(BAD)
        second = nodes.formed(a, b, c, after=first)
        assert {up.restart for up in second} == {1}
        for run in (a, b, c):
            run.tell(GOOD)
        assert ended(a, b, c) == [0, 0, 0]
        assert "fell silent" not in nodes.story()
