"""A node has left, and the other two cannot reach each other before the next round (rule 17)."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.nodes import UP, Nodes, all_alive
from tests.test_nodes_moving import at_two
from tests.waiting import until

SLOW = (
    UP.replace(
        "signal.pthread_sigmask(",
        "os.environ.get('QUICK') or signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    signal.pthread_sigmask(",
    )
    + """
    up()
    end()
"""
)


def test_two_nodes_do_not_both_go_on_after_a_goodbye(tmp_path: Path) -> None:
    """Each has its own word and the goodbye of the third: both would be a majority, and train one job for ever."""
    with Nodes(tmp_path, "--nnodes=1:3", "--shutdown-timeout=12", *at_two(), script=SLOW) as nodes:
        (a,) = nodes.start("a")
        a.says("this node hosts the job's store")
        (b,) = nodes.start("b")
        b.says("this node hosts the second store")
        (c,) = nodes.start("c", env={"QUICK": "1"})
        first = nodes.formed(a, b, c)
        c.signal(signal.SIGTERM)
        until(lambda: c.process.poll() is not None, "c to leave")
        b.says("node c is leaving")
        a.freeze()
        b.says("the store can be reached again")
        alone = nodes.formed(b, after=first)
        a.thaw()
        others = nodes.formed(a, after=first)
        assert not (all_alive(alone) and all_alive(others)), "both run round 1"
