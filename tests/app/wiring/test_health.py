"""The health check server of real agents: of the command, of the library, of two agents in one process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reknit import HealthCheck, Meeting, RestartPolicy, Settings, Terms
from reknit.adapters.observe.pages import RoundTrips, patience_s
from reknit.app.python.session import opened_async
from reknit.app.version import __version__
from reknit.app.wiring.health import health_check
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.runtime import Session, start
from tests.support.alone import run_alone
from tests.support.asking import documented, get, listening, metrics, served, state
from tests.support.command import Run, run
from tests.support.leaks import nothing_left
from tests.support.stores import free_port
from tests.support.waiting import PATIENCE_S, read_pids, until

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
WAITS = "import os, signal; open('pids', 'a').write(f'{os.getpid()}\\n'); signal.pause()"


def waiting(folder: Path, port: int = 0, **settings: Any) -> Settings:
    """Workers that write their pids and wait."""
    script = f"import os, signal; open({str(folder / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()"
    return Settings(command=(sys.executable, "-c", script), health=HealthCheck(port), **settings)


class Started:
    """An agent of a library with its server."""

    def __init__(self, settings: Settings, **more: Any) -> None:
        self.lines: list[str] = []
        self.running: Session = start(settings, say=self.lines.append, **more)
        (self.line,) = [line for line in self.lines if "health check server" in line]
        found = re.search(r"http://\S+", self.line)
        self.url = found[0] if found else ""

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.running.close()


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    with Started(Settings(command=("true",), health=HealthCheck(0))) as made:
        made.running.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, descriptors, children and files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    first()
    with nothing_left(scratch):
        yield


# ---- the library ----


def test_an_agent_that_runs(tmp_path: Path) -> None:
    """All four pages."""
    with Started(waiting(tmp_path, local_world_size=2, run_id="job42")) as agent:
        pids = read_pids(tmp_path / "pids", 2)
        until(lambda: state(agent.url)["agent"]["doing"] == "running")
        assert get(f"{agent.url}/healthz") == (200, "ok\n")
        assert get(f"{agent.url}/readyz") == (200, "runs the workers of round 0, ranks 0 to 1 of 2\n")
        told = state(agent.url)
        assert told["job"]["run_id"] == "job42"
        assert (told["job"]["phase"], told["job"]["round"], told["job"]["restarts_allowed"]) == ("running", 0, 0)
        assert "fold" not in told["job"]
        assert told["workers"]["count"]["running"] == 2
        assert sorted(told["workers"]["pids"].values()) == sorted(pids)
        values = metrics(agent.url)
        assert values['reknit_workers{state="running"}'] == 2
        assert values["reknit_ready"] == values["reknit_rounds_total"] == 1
        assert values['reknit_worker_resident_memory_bytes{local_rank="1"}'] > 1_000_000
        assert values['reknit_worker_cpu_seconds_total{local_rank="0"}'] >= 0
    with pytest.raises(OSError, match="refused"):
        get(f"{agent.url}/healthz")


def test_a_restart_is_counted(tmp_path: Path) -> None:
    """The workers of the second round are the ones that are looked at."""
    policy = Terms(restarts=RestartPolicy(max_restarts=2))
    with Started(waiting(tmp_path, terms=policy)) as agent:
        os.kill(read_pids(tmp_path / "pids", 1)[0], signal.SIGKILL)
        pid = read_pids(tmp_path / "pids", 2)[1]
        until(lambda: state(agent.url)["agent"]["doing"] == "running")
        values = metrics(agent.url)
        assert values['reknit_restarts_total{cause="worker_failed"}'] == 1
        assert (values["reknit_restarts_spent"], values["reknit_restarts_allowed"]) == (1, 2)
        assert values['reknit_worker_failures_total{cause="signal",local_rank="0"}'] == 1
        told = state(agent.url)
        assert told["workers"]["pids"] == {"0": pid}
        assert (told["job"]["round"], told["job"]["restarts_spent"]) == (1, 1)
        (failure,) = told["job"]["failures"]
        assert (failure["rank"], failure["cause"], failure["exitcode"], failure["blamed"]) == (0, "signal", -9, True)
        assert told["job"]["why"] == failure["text"]


def test_how_far_the_workers_are(tmp_path: Path) -> None:
    """A dashboard sees a straggler before it is a hang. The fields are those of `reknit status --json`."""
    script = f"""
        import os, signal, reknit
        if os.environ["RANK"] == "1":
            reknit.progress(7)
        open({str(tmp_path / "pids")!r}, "a").write(f"{{os.getpid()}}\\n")
        signal.pause()
    """
    before = time.time()
    settings = Settings(
        command=(sys.executable, "-c", textwrap.dedent(script)), local_world_size=2, health=HealthCheck(0)
    )
    with Started(settings) as agent:
        pids = read_pids(tmp_path / "pids", 2)
        told = state(agent.url)
        for part, fields in documented().items():
            assert fields <= (told[part] if part != "ranks" else told["workers"]["ranks"][0]).keys()
        ranks = told["workers"]["ranks"]
        assert [(each["rank"], each["state"], each["step"]) for each in ranks] == [
            (0, "running", None),
            (1, "running", 7),
        ]
        assert {each["pid"] for each in ranks} == set(pids)
        assert ranks[0]["progress_s"] is None
        assert ranks[1]["progress_s"] >= 0
        about = told["agent"]
        assert (about["version"], about["pid"], about["command"]) == (__version__, os.getpid(), [*settings.command])
        assert before - 1 <= about["began"] <= time.time()
        values = metrics(agent.url)
        assert values['reknit_worker_step{local_rank="1"}'] == 7
        assert values['reknit_worker_seconds_since_progress{local_rank="1"}'] >= ranks[1]["progress_s"]
        assert not [name for name in values if "progress" in name and 'local_rank="0"' in name]


class Block:
    """An observer that holds up the loop."""

    def __init__(self) -> None:
        self.blocks = False
        self.is_blocked = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if self.blocks:
            self.is_blocked.set()
            self.go_on.wait(PATIENCE_S)


def test_a_loop_that_hangs(tmp_path: Path) -> None:
    """It is reported with one line after the timeout. The other pages tell what was known. When the loop goes on,
    everybody who still asks has the answer."""
    block, answers = Block(), []
    with Started(waiting(tmp_path), observers=[block]) as agent:
        (pid,) = read_pids(tmp_path / "pids", 1)
        until(lambda: state(agent.url)["agent"]["doing"] == "running")
        block.blocks = True
        os.kill(pid, signal.SIGKILL)
        assert block.is_blocked.wait(PATIENCE_S)
        late = (503, "the agent has not answered within 0.05 s\n")
        assert get(f"{agent.url}/healthz?timeout=0.05") == late
        assert get(f"{agent.url}/healthz?timeout=0.05") == late
        assert get(f"{agent.url}/readyz")[0] == 200
        asking = [threading.Thread(target=lambda: answers.append(get(f"{agent.url}/healthz"))) for _ in range(4)]
        for thread in asking:
            thread.start()
        block.go_on.set()
        for thread in asking:
            thread.join()
        assert answers == [(200, "ok\n")] * 4
        assert get(f"{agent.url}/healthz?timeout=soon") == (400, "timeout=soon: a number of seconds expected\n")


def test_an_event_loop_that_hangs(tmp_path: Path) -> None:
    """The agent lives in the event loop of a program. A coroutine of the program that blocks the loop is noticed."""

    async def main() -> list[tuple[int, str]]:
        lines: list[str] = []
        with ThreadPoolExecutor(1) as pool:
            async with opened_async(waiting(tmp_path), say=lines.append) as running:
                (url,) = re.findall(r"http://\S+", lines[0])
                task = asyncio.create_task(running.run_async())
                await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
                answers = [await asyncio.to_thread(get, f"{url}/healthz")]
                answers.append(pool.submit(get, f"{url}/healthz?timeout=0.05").result())  # blocks the event loop
                answers.append(await asyncio.to_thread(get, f"{url}/healthz"))
                running.leave()
                await task
        return answers

    late = (503, "the agent has not answered within 0.05 s\n")
    assert asyncio.run(main()) == [(200, "ok\n"), late, (200, "ok\n")]


def test_two_agents_in_one_process_of_which_one_stands_by(tmp_path: Path) -> None:
    """Each has a server, a registry and metrics of its own. A standby takes part: it is ready, and says that it
    waits."""
    (tmp_path / "journal").mkdir()
    common: dict[str, Any] = {
        "terms": Terms(min_nodes=1, max_nodes=1),
        "meeting": Meeting("file", folder=str(tmp_path / "journal")),
        "run_id": "job",
        "address": "127.0.0.1",
    }
    with Started(waiting(tmp_path, node_id="a", **common)) as a:
        read_pids(tmp_path / "pids", 1)
        with Started(waiting(tmp_path, node_id="b", **common)) as b:
            until(lambda: get(f"{b.url}/readyz") == (200, "stands by while round 0 runs\n"))
            assert get(f"{b.url}/healthz") == (200, "ok\n")
            assert state(b.url)["agent"]["doing"] == "standby"
            until(lambda: metrics(a.url)['reknit_nodes{standing="standby"}'] == 1)
            assert metrics(b.url)['reknit_workers{state="stopped"}'] == 1
            assert metrics(a.url)['reknit_workers{state="running"}'] == 1
        assert get(f"{a.url}/healthz") == (200, "ok\n")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """The job goes on without a server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Started(Settings(command=("true",), health=HealthCheck(port))) as agent:
            result = agent.running.join(PATIENCE_S)
    assert result is not None
    assert result.state.value == "SUCCEEDED"
    line = f"no health check server at 127.0.0.1:{port}: Address already in use; the job goes on without it"
    assert agent.line == f"reknit: {line}"


def test_an_address_that_is_not_here(tmp_path: Path) -> None:
    """Likewise."""
    health = HealthCheck(0, host="192.0.2.1")
    with Started(Settings(command=("true",), health=health)) as agent:
        assert agent.running.join(PATIENCE_S) is not None
    assert "no health check server at 192.0.2.1:0" in agent.line


def test_a_thread_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise, and the socket is closed."""

    def refuse(thread: threading.Thread) -> None:
        if "health" in thread.name:
            raise RuntimeError("can't start new thread")
        real(thread)

    real: Callable[[threading.Thread], None] = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Started(Settings(command=("true",), health=HealthCheck(0))) as agent:
        assert agent.running.join(PATIENCE_S) is not None
    assert "can't start new thread" in agent.line


def test_a_host_program_that_forks(tmp_path: Path) -> None:
    """Its child has none of the sockets. When the parent is dead, the port is free, though the child lives."""
    out = run_alone(
        """
        import os, signal, sys
        from tests.support.asking import get, listening
        from tests.app.wiring.test_health import Started, waiting
        from tests.support.waiting import read_pids, until
        from pathlib import Path

        folder = Path(sys.argv[1])
        with Started(waiting(folder)) as agent:
            read_pids(folder / "pids", 1)
            assert len(listening(os.getpid())) == 1
            pid = os.fork()
            if pid == 0:
                os._exit(len(listening(os.getpid())))
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), get(agent.url + "/healthz"))
        """,
        str(tmp_path),
    )
    assert out == "0 (200, 'ok\\n')\n"


# ---- the command ----


def test_the_command(tmp_path: Path) -> None:
    """A variable starts the server, and neither keeper nor workers have its socket."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Run(tmp_path, "--nproc-per-node=2", "w.py", script=WAITS, env={VARIABLE: str(port)}) as job:
        pids = read_pids(tmp_path / "pids", 2)
        assert get(f"{served(url)}/healthz") == (200, "ok\n")
        until(lambda: get(f"{url}/readyz") == (200, "runs the workers of round 0, ranks 0 to 1 of 2\n"))
        assert len(listening(job.pid)) == 1
        assert not any(listening(job.pid) & listening(pid) for pid in (job.keeper, *pids))
        os.kill(job.keeper, signal.SIGKILL)  # the next keeper is started while the server listens
        job.end()
    assert f"health check server: {url} (/healthz, /readyz, /state, /metrics)" in job.err


def test_later_keepers_and_workers_do_not_have_the_socket(tmp_path: Path) -> None:
    """The second keeper is started by exec."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Run(tmp_path, "--max-restarts=1", "w.py", script=WAITS, env={VARIABLE: str(port)}) as job:
        read_pids(tmp_path / "pids", 1)
        first = job.keeper
        os.kill(first, signal.SIGKILL)
        pid = read_pids(tmp_path / "pids", 2)[1]
        until(lambda: job.keeper != first)
        assert len(listening(job.pid)) == 1
        assert not listening(job.pid) & listening(job.keeper)
        assert not listening(job.pid) & listening(pid)
        assert get(f"{url}/healthz") == (200, "ok\n")
        assert state(url)["workers"]["pids"] == {"0": pid}
        job.signal(signal.SIGTERM)
        job.end()


def test_an_agent_that_is_stopped(tmp_path: Path) -> None:
    """Nobody answers, which a probe counts as a failure. When the agent goes on, it is well again."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Run(tmp_path, "w.py", script=WAITS, env={VARIABLE: str(port)}) as job:
        served(url)
        job.signal(signal.SIGSTOP)
        with pytest.raises(OSError, match="timed out"):
            get(f"{url}/healthz", timeout_s=0.2)
        job.signal(signal.SIGCONT)
        assert get(f"{url}/healthz") == (200, "ok\n")
        job.signal(signal.SIGTERM)
        job.end()


def test_a_node_that_waits_for_others_is_ready(tmp_path: Path) -> None:
    """In a StatefulSet the second pod is made when the first one is ready."""
    (tmp_path / "journal").mkdir()
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = ("--nnodes=2", "--rdzv-backend=file", f"--rdzv-endpoint={tmp_path / 'journal'}", "--rdzv-id=job", "w.py")
    with Run(tmp_path, *argv, script=WAITS, env={VARIABLE: str(port)}) as job:
        served(url)
        until(lambda: get(f"{url}/readyz") == (200, "waits for round 0: 1 of at least 2 nodes are there\n"))
        job.signal(signal.SIGTERM)
        job.end()


@pytest.mark.parametrize("value", ["http", "70000", "-1", "node0:80", "1.2.3.4:", "8080:1.2.3.4"])
def test_a_variable_that_cannot_be_read(tmp_path: Path, value: str) -> None:
    """As with torch: one line, no server, and the job runs."""
    status, job = run(tmp_path, "--no-python", "true", env={VARIABLE: value})
    assert status == 0
    (line,) = [line for line in job.said if VARIABLE in line]
    assert line.startswith(f"{VARIABLE}={value}: ")
    assert line.endswith("; there is no health check server")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8080", HealthCheck(8080)),
        (" 0 ", HealthCheck(0)),
        ("localhost:1", HealthCheck(1)),
        ("0.0.0.0:8080", HealthCheck(8080, "0.0.0.0")),
        ("[::]:8080", HealthCheck(8080, "::")),
    ],
)
def test_the_variable(text: str, wanted: HealthCheck) -> None:
    """torch's meaning, and an address before it."""
    assert health_check(text) == wanted


def test_nothing_is_imported_when_it_is_off() -> None:
    """A launch without a server pays nothing."""
    script = """
        import sys
        from reknit import Settings
        from reknit.runtime import run
        run(Settings(command=("true",)))
        wanted = ("prometheus", "observe.metrics", "observe.pages", "observe.http", "email")
        print(sorted(name for name in sys.modules if any(each in name for each in wanted)))
    """
    assert run_alone(textwrap.dedent(script)) == "[]\n"


# ---- parts ----


class Told:
    """A clock and the port of requests, as far as `RoundTrips` uses them."""

    wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def taken(self) -> Sequence[int]:
        return [15]


def test_probes_share_a_round_trip() -> None:
    """A hundred probes while the loop is busy wake it once."""
    world: Any = Told()
    trips = RoundTrips(world, world)
    assert trips.taken() == [15]
    assert not trips.is_back(0.0)
    answers: list[bool] = []
    probes = [threading.Thread(target=lambda: answers.append(trips.is_back(PATIENCE_S))) for _ in range(20)]
    for probe in probes:
        probe.start()
    assert not answers
    assert world.wakes == 1
    assert trips.taken() == [15]
    for probe in probes:
        probe.join()
    assert answers == [True] * 20


def test_nobody_waits_for_a_loop_that_has_ended() -> None:
    """It makes no further turn: a probe would wait for a minute."""
    world: Any = Told()
    trips = RoundTrips(world, world)
    probe = threading.Thread(target=trips.is_back, args=(PATIENCE_S,))
    probe.start()
    trips.release()
    probe.join()
    assert trips.is_back(PATIENCE_S)


def test_the_callback_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loop answers, the time is now. When it does not, the time stands still."""
    world: Any = Told()
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    trips = RoundTrips(world, world)
    assert trips.alive_at() == 1000
    now = 1010.0
    assert trips.alive_at() == 1000
    trips.taken()
    assert trips.alive_at() == 1010
    now = 1020.0
    assert trips.alive_at() == 1010


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({}, 60.0),
        ({"timeout": "5"}, 5.0),
        ({"timeout": "1e9"}, 60.0),
        ({"timeout": "-1"}, None),
        ({"timeout": "x"}, None),
    ],
)
def test_a_probe_may_be_less_patient(query: dict[str, str], wanted: float | None) -> None:
    """Never more patient than the server was set up to be."""
    assert patience_s(query, 60.0) == wanted
