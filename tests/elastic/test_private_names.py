"""Names of torch with an underscore that programs patch or override. A patch has the effect here that it has in torch.

docs/differences.md lists those that do not exist here.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reknit.elastic.agent.server import api as agent_api
from reknit.elastic.agent.server.api import WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.multiprocessing import DefaultLogsSpecs, api
from reknit.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from reknit.elastic.rendezvous import RendezvousHandlerRegistry, RendezvousParameters, registry
from tests.elastic.shells import SH, leaving_nothing, result_of, shell


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with leaving_nothing(tmp_path, monkeypatch):
        yield


def shells(kind: type[SubprocessContext], *scripts: str) -> SubprocessContext:
    """One shell for each script, in a context of this class."""
    args: dict[int, tuple[Any, ...]] = {rank: ("-c", script) for rank, script in enumerate(scripts)}
    context = kind("trainer", SH, args, {rank: {} for rank in args}, DefaultLogsSpecs())
    context.start()
    return context


# ---- multiprocessing.api ----


def test_a_patched_logger_gets_the_messages_of_contexts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests of programs look there for a warning."""
    monkeypatch.setattr(api, "logger", logger := Mock())
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGNONSENSE")
        result_of(shell("exit 3", logs_specs=DefaultLogsSpecs(str(tmp_path))))
    assert "SIGNONSENSE" in str(logger.warning.call_args_list)
    assert "exitcode" in str(logger.error.call_args_list)
    assert str(tmp_path) in str(logger.info.call_args_list)


@pytest.mark.alone
@pytest.mark.slow
def test_a_patched_handler_is_called_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a context, and by an agent. Afterwards the handler of before is back."""
    seen: list[int] = []
    monkeypatch.setattr(api, "_terminate_process_handler", lambda number, frame: seen.append(number))
    context = shell("sleep 1000")
    try:
        signal.raise_signal(signal.SIGHUP)
    finally:
        context.close()
    assert seen == [signal.SIGHUP]

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            signal.raise_signal(signal.SIGHUP)
            return super()._start_workers(worker_group)

    Agent(WorkerSpec("trainer", 1, entrypoint="true")).run()
    assert seen == [signal.SIGHUP] * 2


def test_the_handler_can_be_called() -> None:
    """torch's own tests do so."""
    with pytest.raises(api.SignalException) as caught:
        api._terminate_process_handler(signal.SIGTERM, None)
    assert caught.value.sigval is signal.SIGTERM


# ---- contexts ----


def test_a_program_context_may_say_which_exit_code_is_no_failure() -> None:
    """For example of a program that ends with 3 when it has nothing to do."""
    asked: list[set[int]] = []

    class Lenient(SubprocessContext):
        def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
            super()._capture_process_failures(done_local_ranks)
            self._failures = {rank: found for rank, found in self._failures.items() if found.exitcode != 3}
            asked.append(done_local_ranks)

    result = result_of(shells(Lenient, "exit 3", "true"))
    assert (result.return_values, result.failures) == ({0: None, 1: None}, {})
    assert asked[-1] == {0, 1}
    assert result_of(shells(Lenient, "exit 4", "exit 3")).failures[0].exitcode == 4


def test_a_function_context_may_say_when_it_is_done() -> None:
    """False until all functions have ended. torch's own tests patch it."""
    context = MultiprocessContext("trainer", abs, {0: (-1,), 1: (-2,)}, {0: {}, 1: {}}, "spawn", DefaultLogsSpecs())
    assert not context._is_done()
    context.start()
    assert result_of(context).return_values == {0: 1, 1: 2}
    assert context._is_done()

    class Never(MultiprocessContext):
        def _is_done(self) -> bool:
            return False

    never = Never("trainer", abs, {0: (-1,)}, {0: {}}, "spawn", DefaultLogsSpecs())
    try:
        never.start()
        while not never._kept.exited:
            assert never.wait(0) is None
            never._pause(1)
        assert never.wait(0) is None
    finally:
        never.close()


# ---- the agent ----


def test_an_agent_may_say_which_device_a_worker_uses(tmp_path: Path) -> None:
    """For example for devices that torch does not know."""

    class Agent(LocalElasticAgent):
        def _set_local_rank_env(self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec) -> None:
            super()._set_local_rank_env(worker_env, local_rank, spec)
            worker_env["DEVICE"] = f"{worker_env['LOCAL_RANK']}@{spec.role}"

    told = str(tmp_path / "told${local_rank}")
    assert (
        not Agent(WorkerSpec("trainer", 2, entrypoint=SH, args=("-c", 'echo "$DEVICE" > "$0"', told))).run().is_failed()
    )
    assert [(tmp_path / f"told{rank}").read_text() for rank in (0, 1)] == ["0@trainer\n", "1@trainer\n"]


# ---- rendezvous.registry ----


def test_a_fresh_registry_is_filled_with_what_the_module_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of programs put a creator of their own in the place of one of torch's."""
    handler = Mock(get_backend=lambda: "c10d")
    monkeypatch.setattr(registry, "handler_registry", RendezvousHandlerRegistry())
    monkeypatch.setattr(registry, "_create_c10d_handler", lambda params: handler)
    registry._register_default_handlers()
    assert registry.get_rendezvous_handler(RendezvousParameters("c10d", "h:1", "j", 1, 2)) is handler
    for backend, create in (("static", registry._create_static_handler), ("etcd", registry._create_etcd_handler)):
        params = RendezvousParameters(backend, "h:1", "j", 1, 1)
        assert type(registry.get_rendezvous_handler(params)) is type(create(params))


# ---- agent.server.api ----


def test_a_patched_host_name_stands_in_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of a cluster often have a name that nobody knows outside."""
    monkeypatch.setattr(agent_api, "_get_fq_hostname", lambda: "known.example")
    agent = LocalElasticAgent(WorkerSpec("trainer", 1, entrypoint="true"))
    assert agent.get_event_succeeded().metadata["hostname"] == "known.example"
