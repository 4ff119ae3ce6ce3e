"""Plain torchrun with `--rdzv-backend=reknit`: real torchrun processes on the loopback interface.

The entry point `torchrun.handlers` must be installed for this.
"""

from __future__ import annotations

import signal
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from tests.elastic.torchruns import BAD, GOOD, NodeRun, torchrun
from tests.support.stores import free_port
from tests.support.waiting import until

pytestmark = [
    pytest.mark.beside_torch,
    pytest.mark.skipif(
        not entry_points(group="torchrun.handlers", name="reknit"),
        reason="this installation is older than the entry point",
    ),
]
GLOO = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.barrier()
    os.write(1, f"sum {int(ones)}\\n".encode())
    os._exit(0)  # gloo aborts now and then when it is torn down
"""


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


def kill_all(node: NodeRun) -> None:
    """The host loses power."""
    doomed = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    for process in doomed:
        process.kill()


def test_two_nodes_train_and_a_failure_restarts_both(tmp_path: Path, endpoint: str) -> None:
    """The ordinary life of a job. The other node is told, and need not wait for its own worker to hang."""
    with (
        torchrun(tmp_path, "a", "reknit", endpoint, "2", "--max-restarts=1") as a,
        torchrun(tmp_path, "b", "reknit", endpoint, "2", "--max-restarts=1") as b,
    ):
        first = a.up(1), b.up(1)
        assert sorted((u.rank, u.world) for u in first) == [(0, 2), (1, 2)]
        assert first[0].master == first[1].master
        b.tell(BAD)
        second = a.up(2), b.up(2)
        assert [(u.rank, u.world) for u in second] == [(u.rank, u.world) for u in first]
        assert second[0].master == second[1].master != first[0].master
        assert (second[0].restart, second[1].restart) == (0, 1)  # the budget is torchrun's, per node
        a.tell(GOOD)
        b.tell(GOOD)
        assert (a.ends(), b.ends()) == (0, 0)


def test_gloo_meets_in_the_store_of_the_round(tmp_path: Path, endpoint: str) -> None:
    """torch's workers are clients of the store that torchrun's process of group rank 0 serves."""
    with (
        torchrun(tmp_path, "a", "reknit", endpoint, "2", script=GLOO) as a,
        torchrun(tmp_path, "b", "reknit", endpoint, "2", script=GLOO) as b,
    ):
        assert (a.ends(), b.ends()) == (0, 0), a.err_path.read_text() + b.err_path.read_text()
        assert a.out_path.read_text() == b.out_path.read_text() == "sum 2\n"


def test_a_node_joins_and_a_node_is_killed(tmp_path: Path, endpoint: str) -> None:
    """The running round is extended, and shortened again, without a failure on the nodes that stay: torchrun with its
    own rendezvous does not notice the second."""
    with torchrun(tmp_path, "a", "reknit", endpoint, "1:2") as a:
        assert a.up(1)[:3] == (0, 1, 0)
        with torchrun(tmp_path, "b", "reknit", endpoint, "1:2") as b:
            assert b.up(1)[:2] == (1, 2)
            assert a.up(2)[:3] == (0, 2, 0)
            kill_all(b)
            assert a.up(3)[:3] == (0, 1, 0)
        a.tell(GOOD)
        assert a.ends() == 0


def test_the_node_that_serves_the_rounds_store_is_killed(tmp_path: Path) -> None:
    """Group rank 0 is another node then, and serves the store of the next round."""
    journal = str(tmp_path / "journal")
    with torchrun(tmp_path, "a", "reknit", journal, "1:2") as a, torchrun(tmp_path, "b", "reknit", journal, "1:2") as b:
        until(lambda: a.ups() and b.ups() and a.ups()[-1].world == b.ups()[-1].world == 2)
        first, second = sorted((a, b), key=lambda node: node.ups()[-1].rank)
        count = len(second.ups())
        kill_all(first)
        assert second.up(count + 1)[:2] == (0, 1)
        second.tell(GOOD)
        assert second.ends() == 0


def test_a_node_that_stood_still_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """A paused host, or a network that was cut: the others go on, and take the node in again at its old rank."""
    journal = str(tmp_path / "journal")
    with torchrun(tmp_path, "a", "reknit", journal, "1:2") as a, torchrun(tmp_path, "b", "reknit", journal, "1:2") as b:
        until(lambda: a.ups() and b.ups() and a.ups()[-1].world == b.ups()[-1].world == 2)
        count, before = len(a.ups()), b.ups()[-1]
        b.signal(signal.SIGSTOP)
        assert a.up(count + 1)[:2] == (0, 1)
        b.signal(signal.SIGCONT)
        until(lambda: a.ups()[-1].world == b.ups()[-1].world == 2 and b.ups()[-1] != before)
        assert b.ups()[-1].rank == before.rank
        until(lambda: not psutil.pid_exists(before.pid))
        a.tell(GOOD)
        b.tell(GOOD)
        assert (a.ends(), b.ends()) == (0, 0)


def test_a_node_that_is_started_again_takes_its_old_place(tmp_path: Path) -> None:
    """What a scheduler does with a node that has died. The ranks of the others must not change for it."""
    journal = str(tmp_path / "journal")
    with torchrun(tmp_path, "a", "reknit", journal, "2") as a:
        with torchrun(tmp_path, "b", "reknit", journal, "2") as b:
            first = a.up(1), b.up(1)
            kill_all(b)
        with torchrun(tmp_path, "b", "reknit", journal, "2") as again:
            second = a.up(2), again.up(1)
            assert [(u.rank, u.world) for u in second] == [(u.rank, u.world) for u in first]
            assert second[0].restart == 0
            a.tell(GOOD)
            again.tell(GOOD)
            assert (a.ends(), again.ends()) == (0, 0)


def test_a_node_that_is_told_to_end_says_goodbye(tmp_path: Path, endpoint: str) -> None:
    """torchrun does not call `shutdown` after a signal. The process says goodbye when it ends."""
    with torchrun(tmp_path, "a", "reknit", endpoint, "1:2") as a:
        a.up(1)
        with torchrun(tmp_path, "b", "reknit", endpoint, "1:2") as b:
            assert (a.up(2).world, b.up(1).world) == (2, 2)  # otherwise a's worker may be ended before it has said so
            b.signal(signal.SIGTERM)
            assert b.ends() == 1
            assert a.up(3)[:2] == (0, 1)
        a.tell(GOOD)
        assert a.ends() == 0


def test_a_node_whose_budget_is_spent_ends_the_job(tmp_path: Path, endpoint: str) -> None:
    """The others are told at once, and end as with torch: with its error for a closed rendezvous."""
    with torchrun(tmp_path, "a", "reknit", endpoint, "2") as a, torchrun(tmp_path, "b", "reknit", endpoint, "2") as b:
        a.up(1)
        b.up(1)
        b.tell(BAD)
        assert b.ends() == 1
        assert a.ends() == 1
        assert "RendezvousClosedError" in a.err_path.read_text()
        assert len(a.ups()) == 1
