"""An agent of reknit in a rendezvous of torch, whose other member is a real torchrun."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.torchruns import BAD, GOOD, NodeRun, torchrun
from tests.support.stores import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.beside_torch
AGENT = """
    import json, sys
    from reknit.elastic.agent.server import WorkerSpec
    from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from reknit.elastic.rendezvous import RendezvousParameters
    from reknit.elastic.rendezvous.registry import get_rendezvous_handler

    endpoint, most = sys.argv[1], int(sys.argv[2])
    config = {"last_call_timeout": 1, "join_timeout": 50}
    handler = get_rendezvous_handler(RendezvousParameters("torch:c10d", endpoint, "j", 2, most, "127.0.0.2", **config))
    command = {"entrypoint": sys.executable, "args": ("w.py",)}
    spec = WorkerSpec("default", 2, handler, max_restarts=1, **command)
    try:
        result = LocalElasticAgent(spec).run()
        print("result", json.dumps([result.state.value, sorted(result.return_values), sorted(result.failures)]))
    except Exception as error:
        print("error", json.dumps([type(error).__name__]))
    handler.shutdown()
"""


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


def agent(path: Path, endpoint: str, most: int = 2) -> NodeRun:
    (path / "agent.py").write_text("\n".join(line[4:] for line in AGENT.splitlines()))
    return NodeRun(path, "agent", "agent.py", endpoint, str(most))


def said(node: NodeRun, word: str) -> list[object]:
    lines = node.out_path.read_text().splitlines()
    return next((json.loads(line.partition(" ")[2]) for line in lines if line.startswith(f"{word} [")), [])


def ranks(*nodes: NodeRun, count: int) -> tuple[list[tuple[int, int]], str]:
    """Rank and world size of all workers when this many have come up in all, and where they meet."""
    ups = until(lambda: len(found := [u for node in nodes for u in node.ups()]) == count and found)
    latest = [u for u in ups if u.master == ups[-1].master]
    return sorted((u.rank, u.world) for u in latest), ups[-1].master


def test_an_agent_and_torchrun_form_one_group(tmp_path: Path, endpoint: str) -> None:
    """Ranks are exchanged over the store of the rendezvous, with torch's keys. Here the nodes differ in size. A failure
    on one of them restarts both, and success is told by the ranks that the workers really had."""
    with (
        agent(tmp_path, endpoint) as ours,
        torchrun(tmp_path, "b", "c10d", endpoint, "2", "--max-restarts=1", "--local-addr=127.0.0.3") as theirs,
    ):
        assert ranks(ours, theirs, count=3)[0] == [(0, 3), (1, 3), (2, 3)]
        assert len({u.master for u in (*ours.ups(), *theirs.ups())}) == 1
        theirs.tell(BAD)
        until(lambda: len(ours.ups()) == 4 and len(theirs.ups()) == 2)
        for up in (*ours.ups()[2:], *theirs.ups()[1:]):
            os.kill(up.pid, GOOD)
        assert (ours.ends(), theirs.ends()) == (0, 0), ours.err_path.read_text() + theirs.err_path.read_text()
        mine = sorted(u.rank for u in ours.ups()[2:])
        assert said(ours, "result") == ["SUCCEEDED", mine, []]


def test_a_torchrun_that_joins_gets_its_place(tmp_path: Path, endpoint: str) -> None:
    """It waits at the rendezvous, and the agent ends the round for it like any other member.

    The newcomer stands first in torch's order. One that stands later waits in vain in torch 2.13, also among torchruns
    alone: group rank 0 publishes the address of its store only in its first round.
    """
    with (
        agent(tmp_path, endpoint, most=3) as ours,
        torchrun(tmp_path, "b", "c10d", endpoint, "2:3", "--local-addr=127.0.0.3") as theirs,
    ):
        assert ranks(ours, theirs, count=3)[0] == [(0, 3), (1, 3), (2, 3)]
        with torchrun(tmp_path, "c", "c10d", endpoint, "2:3", "--local-addr=127.0.0.1") as newcomer:
            nodes = (newcomer, ours, theirs)
            # On a busy machine, the two nodes may form another round before: torch drops a node whose beats are late.
            ups = until(lambda: len(found := [u for n in nodes for u in n.ups() if u.world == 4]) == 4 and found)
            assert [ups[0].rank, *sorted(u.rank for u in ups[1:3]), ups[3].rank] == [0, 1, 2, 3]
            assert {u.restart for u in ups} == {0}
            for up in ups:
                os.kill(up.pid, GOOD)
            assert (ours.ends(), theirs.ends(), newcomer.ends()) == (0, 0, 0)
            assert said(ours, "result") == ["SUCCEEDED", [1, 2], []]


def test_a_rendezvous_that_another_agent_has_closed_is_torchs_error(tmp_path: Path, endpoint: str) -> None:
    """A torchrun whose budget is spent closes it. As with torch, the agent finds out when it wants another round: its
    workers may be done before."""
    with (
        agent(tmp_path, endpoint) as ours,
        torchrun(tmp_path, "b", "c10d", endpoint, "2", "--local-addr=127.0.0.3") as theirs,
    ):
        ranks(ours, theirs, count=3)
        theirs.tell(BAD)
        until(lambda: theirs.process.poll() is not None or "FAILED" in theirs.err_path.read_text())
        os.kill(ours.ups()[0].pid, BAD)
        assert (theirs.ends(), ours.ends()) == (1, 0)
        assert said(ours, "error") in (["RendezvousClosedError"], ["RendezvousConnectionError"])


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_each_handler_of_torch_can_be_a_specs_handler(backend: str) -> None:
    """The workers of a restart see the store, and the ranks, of their own round."""
    from reknit.elastic.agent.server import WorkerSpec
    from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from reknit.elastic.rendezvous import RendezvousParameters
    from reknit.elastic.rendezvous.registry import get_rendezvous_handler

    endpoint = "localhost:0" if backend == "c10d" else f"127.0.0.1:{free_port()}"
    handler = get_rendezvous_handler(RendezvousParameters(f"torch:{backend}", endpoint, "j", 1, 1, rank=0, timeout=60))
    code = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1')"
    spec = WorkerSpec("default", 2, handler, entrypoint=sys.executable, args=("-c", code), max_restarts=1)
    result = LocalElasticAgent(spec).run()
    handler.shutdown()
    assert (result.state.value, sorted(result.return_values)) == ("SUCCEEDED", [0, 1])


def test_the_core_knows_the_ranks_that_the_rendezvous_has_decided(tmp_path: Path) -> None:
    """Its own journal says that the node is alone. Results and reports must not."""
    from torch.distributed import HashStore

    from reknit.elastic.agent.server import WorkerSpec
    from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from reknit.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from reknit.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    store, go = HashStore(), tmp_path / "go"
    code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    agents = []
    for _ in range(2):
        backend = C10dRendezvousBackend(store, "j")
        handler = DynamicRendezvousHandler.from_backend("j", store, backend, 2, 2, local_addr="127.0.0.1")
        spec = WorkerSpec("default", 2, handler, entrypoint=sys.executable, args=("-c", code))
        agents.append(LocalElasticAgent(spec))
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(agent.run) for agent in agents]
        try:
            made = [until(lambda a=agent: _seen(a, 2)) for agent in agents]  # type: ignore[misc]  # mypy cannot infer the lambda with a default
        finally:
            go.touch()
        assert sorted(worker.rank for each in made for worker in each.workers) == [0, 1, 2, 3]
        assert {each.world_size for each in made} == {4}
        assert [run.result(60).state.value for run in runs] == ["SUCCEEDED", "SUCCEEDED"]
    for agent in agents:
        agent.get_worker_group().spec.rdzv_handler.shutdown()


def _seen(agent: Any, nodes: int) -> Any:
    """The assignment in the agent's core, once it names so many nodes."""
    agent_run = agent._agent_run
    made = agent_run and agent_run._running.loop.agent.workers.assignment
    return made if made and made.group_world_size == nodes else None
