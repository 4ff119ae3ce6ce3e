"""The health check server of `LocalElasticAgent`, with torch's classes and with a program's own."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.agent.server import local_elastic_agent
from reknit.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from reknit.elastic.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.launcher.api import LaunchConfig, elastic_launch
from tests.support.asking import get, listening, metrics, served, state
from tests.support.leaks import nothing_left
from tests.support.stores import free_port
from tests.support.waiting import PATIENCE_S, read_pids, until

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
WAITS = """
import os, signal, sys, time
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""
"""Writes its pid, and waits for a file."""


def spec(script: str, *args: object, **more: Any) -> WorkerSpec:
    given: dict[str, Any] = {"role": "trainer", "local_world_size": 1, "max_restarts": 0, **more}
    return WorkerSpec(entrypoint=sys.executable, args=("-c", script, *map(str, args)), **given)


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        LocalElasticAgent(spec("pass")).run()


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, descriptors, children and handlers."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    first()
    with nothing_left(scratch, may_stay=lambda what: what.startswith(f"environment {VARIABLE}")):
        yield
        gc.collect()


class Running:
    """An agent whose `run` is called in a thread."""

    def __init__(self, agent: LocalElasticAgent) -> None:
        self.result: RunResult | None = None
        self._agent = agent
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.result = self._agent.run()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_the_variable_starts_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows what the server of `reknit run` shows, and one server serves all rounds."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv(VARIABLE, str(port))
    pids, end = tmp_path / "pids", tmp_path / "end"
    agent = LocalElasticAgent(spec(WAITS, pids, end, max_restarts=1, monitor_interval=0.01))
    with Running(agent) as running:
        try:
            (first,) = read_pids(pids, 1)
            server = agent._health_check_server
            assert isinstance(server, HealthCheckServer)
            assert served(url) == server.url
            until(lambda: state(url)["agent"]["doing"] == "running")
            assert state(url)["workers"]["pids"] == {"0": first}
            assert get(f"{url}/healthz?timeout=50") == (200, "ok\n")
            os.kill(first, signal.SIGKILL)
            second = read_pids(pids, 2)[1]
            until(lambda: state(url)["workers"]["pids"] == {"0": second})
            assert agent._health_check_server is server
            until(lambda: state(url)["agent"]["doing"] == "running")
            assert metrics(url)['reknit_restarts_total{cause="worker_failed"}'] == 1
            assert metrics(url)['reknit_worker_resident_memory_bytes{local_rank="0"}'] > 1_000_000
            assert not listening(os.getpid()) & listening(second)
        finally:
            end.touch()
    assert running.result is not None
    assert running.result.state is WorkerState.SUCCEEDED
    with pytest.raises(OSError, match="refused"):
        get(url)


def test_a_supervisor_has_an_answer_during_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would end an agent that waits for its peers."""
    seen = []

    class Agent(LocalElasticAgent):
        def _assign_worker_ranks(self, *args: Any) -> Any:
            server = self._health_check_server
            assert server is not None
            seen.append((get(f"{server.url}/healthz"), state(server.url)["agent"]["doing"]))
            return super()._assign_worker_ranks(*args)

    monkeypatch.setenv(VARIABLE, "0")
    assert Agent(spec("pass")).run().state is WorkerState.SUCCEEDED
    assert seen == [((200, "ok\n"), "launching")]


def test_a_look_that_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent hangs, although its loop turns: nobody would notice that a worker has failed. A server of the program's
    own learns it as well."""
    looks, hangs = threading.Event(), threading.Event()

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            looks.set()
            assert hangs.wait(PATIENCE_S)
            return super()._monitor_workers(worker_group)

    monkeypatch.setenv(VARIABLE, "0")
    end = tmp_path / "end"
    agent = Agent(spec(WAITS, tmp_path / "pids", end, monitor_interval=0.01))
    with Running(agent):
        try:
            assert looks.wait(PATIENCE_S)
            server = agent._health_check_server
            assert server is not None
            status, text = get(f"{server.url}/healthz?timeout=0.1")
            assert (status, text) == (503, "the agent has not answered within 0.1 s\n")
            began = server.alive_callback()
            until(lambda: time.time() >= began + 2)
            assert server.alive_callback() == began
            hangs.set()
            assert get(f"{server.url}/healthz") == (200, "ok\n")
            until(lambda: server.alive_callback() > began)
        finally:
            hangs.set()
            end.touch()


def test_two_agents_in_one_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Port 0 gives each a port of its own. With one port for both, one has none, and runs all the same."""
    for port in ("0", str(free_port())):
        monkeypatch.setenv(VARIABLE, port)
        meet = threading.Barrier(2)

        class Agent(LocalElasticAgent):
            def _start_workers(self, worker_group: Any) -> Any:
                meet.wait(PATIENCE_S)  # noqa: B023  # it is used within this round of the loop
                return super()._start_workers(worker_group)

        with ThreadPoolExecutor(2) as pool:
            results = [*pool.map(lambda _: Agent(spec("pass")).run(), range(2))]  # likewise
        assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    urls = re.findall(r"health check server: (\S+)", caplog.text)
    assert len(set(urls)) == 3
    assert caplog.text.count("Address already in use; the job goes on without it") == 1


def _sockets(path: str) -> None:
    with open(path, "w") as file:
        file.write(str(len(listening(os.getpid()))))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_that_are_functions_do_not_have_the_socket(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of this process has copies of everything that is open, unless somebody closes them."""
    monkeypatch.setenv(VARIABLE, "0")
    out = str(tmp_path / "out")
    own = WorkerSpec("trainer", 1, entrypoint=_sockets, args=(out,), rdzv_handler=None)
    assert LocalElasticAgent(own, start_method=method).run().state is WorkerState.SUCCEEDED
    # The bootstrap port is bound and does not listen.
    assert Path(out).read_text() == "0"


# ---- servers of the program ----


class Noting(HealthCheckServer):
    """The documentation's interface, extended."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.calls: list[str] = []
        made.append(self)

    def start(self) -> None:
        self.calls.append(f"start {self._port} {self._timeout} {time.time() - self.alive_callback() < 60}")

    def stop(self) -> None:
        self.calls.append("stop")


made: list[Noting] = []


def test_a_class_in_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made where torch makes it, started once, and stopped at the end of the run, not with each round."""
    made.clear()
    monkeypatch.setattr(local_elastic_agent, "create_healthcheck_server", Noting)
    monkeypatch.setenv(VARIABLE, "8123")
    script = "import os, time; time.sleep(1.2); os._exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
    assert LocalElasticAgent(spec(script, max_restarts=1)).run().state is WorkerState.SUCCEEDED
    (server,) = made
    assert server.calls == ["start 8123 60 True", "stop"]


def test_a_server_that_is_passed_is_stopped_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch. Whoever passes a server has started it, for example before the nodes have met."""
    server = Noting(lambda: 0, 0, 0)
    LocalElasticAgent(spec("pass"), health_check_server=server).run()
    assert server.calls == ["stop"]
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d")
    server = Noting(lambda: 0, 0, 0)
    elastic_launch(config, sys.executable, health_check_server=server)("-c", "pass")
    assert server.calls == ["stop"]


def test_a_variable_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line, no server, and the job runs."""
    monkeypatch.setenv(VARIABLE, "none")
    assert LocalElasticAgent(spec("pass")).run().state is WorkerState.SUCCEEDED
    lines = [record.getMessage() for record in caplog.records if VARIABLE in record.getMessage()]
    assert lines == [f"{VARIABLE}=none: a whole number expected; there is no health check server"]


# ---- the class alone ----


def test_a_server_with_a_callback() -> None:
    """The documentation's parameters: the last progress, and the timeout after which the agent is dead."""
    progress = time.time()
    server = create_healthcheck_server(lambda: int(progress), 0, 60)
    assert server.url == ""
    server.start()
    server.start()
    try:
        assert get(f"{server.url}/healthz") == (200, "ok\n")
        assert get(f"{server.url}/nowhere") == (404, "there is no such page; the pages are /healthz\n")
        progress -= 30
        assert get(f"{server.url}/healthz")[0] == 200
        status, text = get(f"{server.url}/healthz?timeout=20")
        assert status == 503
        assert re.fullmatch(r"the agent has made no progress for 3\d s\n", text)
        assert get(f"{server.url}/healthz?timeout=x")[0] == 400
        progress -= 40
        assert get(f"{server.url}/healthz")[0] == 503
    finally:
        server.stop()
        server.stop()


def test_a_callback_that_fails_is_status_500() -> None:
    """The server goes on."""

    def fails() -> int:
        raise ValueError("no watchdog")

    server = HealthCheckServer(fails, 0, 60)
    server.start()
    assert get(f"{server.url}/healthz") == (500, "the page has failed: ValueError: no watchdog\n")
    server.stop()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("x" * 100, 0), ("node0", 0)])
def test_nonsense_is_a_line_in_the_log(host: str, port: int, caplog: pytest.LogCaptureFixture) -> None:
    """A port or address that cannot be."""
    server = HealthCheckServer(lambda: 0, port, 60)
    server.host = host
    server.start()
    assert server.url == ""
    assert f"no health check server at {host}:{port}" in caplog.text


def test_a_port_in_use(caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log, and no exception."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = HealthCheckServer(lambda: 0, taken.getsockname()[1], 60)
        server.start()
        server.stop()
    assert "Address already in use" in caplog.text
