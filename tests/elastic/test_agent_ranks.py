"""The methods of an agent outside of `run`, and ranks that agents exchange in a store: the numbers are torch's."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from reknit.elastic.agent.server import api
from reknit.elastic.agent.server.api import Worker, _RoleInstanceInfo
from reknit.elastic.agent.server.ranks import wait_for_all
from tests.elastic.agents import PlainAgent, spec

ROLES = [("trainer", 2), ("ps", 1), ("trainer", 3), ("ps", 2)]
"""By group rank: the role of each agent, and its number of workers."""


def hash_store() -> Any:
    torch = pytest.importorskip("torch")
    return torch.distributed.HashStore()


def all_ranks(agents: list[Any], specs: list[Any], store: Any) -> list[list[tuple[int, ...]]]:
    found: dict[int, Any] = {}

    def assign(at: int) -> None:
        found[at] = agents[at]._assign_worker_ranks(store, at, len(agents), specs[at])

    threads = [threading.Thread(target=assign, args=(at,)) for at in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [[shown(worker) for worker in found[at]] for at in range(len(agents))]


def shown(w: Any) -> tuple[int, ...]:
    return w.local_rank, w.global_rank, w.role_rank, w.world_size, w.role_world_size


def torchs_agent(its_spec: Any) -> Any:
    from torch.distributed.elastic.agent.server import api as torchs

    class Agent(torchs.SimpleElasticAgent):  # type: ignore[misc]  # torch's modules have no types here
        def nothing(self, *given: object) -> None: ...

        _start_workers = _stop_workers = _monitor_workers = _shutdown = nothing

    return Agent(its_spec)


@pytest.mark.parametrize("identical", [False, True])
def test_ranks_over_a_store_are_torchs(identical: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of reknit and of torch can be in one round, so they must agree on every number."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec as TorchsSpec

    roles = [("trainer", 2)] * 3 if identical else ROLES
    if identical:
        monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    specs = [spec("pass", role=role, local_world_size=size, rdzv_handler=Handler()) for role, size in roles]
    theirs = [TorchsSpec(role, size, None, entrypoint="true") for role, size in roles]
    ours = all_ranks([PlainAgent(each) for each in specs], specs, hash_store())
    assert ours == all_ranks([torchs_agent(each) for each in theirs], theirs, hash_store())
    mixed = [PlainAgent(specs[at]) if at % 2 else torchs_agent(theirs[at]) for at in range(len(roles))]
    assert all_ranks(mixed, [specs[at] if at % 2 else theirs[at] for at in range(len(roles))], hash_store()) == ours


class Handler:
    """A handler of torch, whose rendezvous is complete at once."""

    use_agent_store = True

    def __init__(self, store: Any = None) -> None:
        self.store = store

    def next_rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo("here", 123))

    def get_run_id(self) -> str:
        return "run"

    def get_backend(self) -> str:
        return "mine"

    def num_nodes_waiting(self) -> int:
        return 0


def test_the_methods_alone() -> None:
    """Somebody calls them without `run`, as tests of extended agents do."""
    agent = PlainAgent(spec("pass", rdzv_handler=Handler(hash_store())))
    group = agent.get_worker_group()
    agent._rendezvous(group)
    assert (group.master_addr, group.master_port, group.group_rank, group.group_world_size) == ("here", 123, 0, 1)
    assert [shown(worker) for worker in group.workers] == [(0, 0, 0, 2, 2), (1, 1, 1, 2, 2)]
    agent._initialize_workers(group)
    agent._restart_workers(group)
    agent._stop_workers(group)
    agent._exit_barrier()
    assert agent.calls == ["start", "stop", "start", "stop"]
    assert group.state is api.WorkerState.HEALTHY


def test_the_methods_alone_without_a_handler() -> None:
    """This node is the only one."""
    agent = PlainAgent(spec("pass", master_port=77))
    group = agent.get_worker_group()
    agent._rendezvous(group)
    assert (group.master_addr, group.master_port, group.store) == ("127.0.0.1", 77, None)
    assert [shown(worker) for worker in group.workers] == [(0, 0, 0, 2, 2), (1, 1, 1, 2, 2)]
    agent._exit_barrier()


def test_a_run_with_a_handler_of_torch() -> None:
    """The ranks and the bootstrap address come from the handler, and the budget is this agent's."""
    script = "import os; exit(int(os.environ['RESTARTS_LEFT']) or os.environ['MASTER_PORT'] != '123')"
    agent = PlainAgent(spec(script, rdzv_handler=Handler(hash_store()), max_restarts=1))
    assert agent.run().return_values == {0: "of 0", 1: "of 1"}
    assert agent.calls == ["start", "stop", "start", "shutdown"]
    assert agent.get_worker_group().store is agent._store is not None


def test_what_a_handler_raises_comes_out_of_run() -> None:
    """A handler that needs this node no more has not failed. Every other error is the caller's to see."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousGracefulExitError

    class Raises(Handler):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def next_rendezvous(self) -> Any:
            raise self.error

    with pytest.raises(RendezvousClosedError, match="too late"):
        PlainAgent(spec("pass", rdzv_handler=Raises(RendezvousClosedError("too late")))).run()
    result = PlainAgent(spec("pass", rdzv_handler=Raises(RendezvousGracefulExitError("not needed")))).run()
    assert result.state is api.WorkerState.STOPPED


def test_the_exit_barrier_in_a_store() -> None:
    """torch's agents use the same keys."""
    from torch.distributed.elastic.utils.store import barrier

    store = hash_store()
    waits: list[float] = []
    assert not wait_for_all(store, 3, 0.0, waits.append)
    other = threading.Thread(target=barrier, args=(store, 3, "torchelastic/agent/terminal_state", 60))
    other.start()
    assert wait_for_all(store, 3, 60, waits.append)
    other.join()


def test_role_infos() -> None:
    """Names that torch's own tests use."""
    infos = [_RoleInstanceInfo(role, rank, 1) for rank, role in enumerate(("b", "a", "b"))]
    infos.sort(key=lambda info: (info.role, info.rank))
    assert _RoleInstanceInfo.find_role_boundaries(infos, "b") == (1, 2)
    assert _RoleInstanceInfo.find_role_boundaries(infos, "c") == (-1, -1)
    assert _RoleInstanceInfo.compare(infos[0], infos[1]) == -1
    assert _RoleInstanceInfo.compare(infos[2], infos[1]) > 0
    assert _RoleInstanceInfo.deserialize(infos[0].serialize()).rank == 1
    assert str(Worker(0, 1, 2, 3, 4)) == "local_rank=0,global_rank=1,role_rank=2,world_size=3,role_world_size=4"


def test_a_spec_that_cannot_be() -> None:
    """torch raises `AssertionError` without a word. Here the text names the field, and both classes are caught."""
    for given, field in (
        ({"local_world_size": 0}, "local_world_size"),
        ({"monitor_interval": 0}, "monitor_interval"),
        ({"entrypoint": None}, "entrypoint"),
        ({"rdzv_handler": "c10d"}, "rdzv_handler must be a handler, .*, and not the name of a backend: 'c10d'"),
    ):
        fields: dict[str, Any] = {"role": "r", "local_world_size": 1, "entrypoint": "true"} | given
        for kind in (ValueError, AssertionError):
            with pytest.raises(kind, match=field):
                api.WorkerSpec(**fields)
    with pytest.warns(DeprecationWarning, match="entrypoint"):
        assert api.WorkerSpec("r", 1, fn=shown).get_entrypoint_name() == "shown"
    assert api.WorkerSpec("r", 1, entrypoint="/usr/bin/true").get_entrypoint_name() == "true"
