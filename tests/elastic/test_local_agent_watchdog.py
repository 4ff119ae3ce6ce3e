"""`LocalElasticAgent` with the watchdog for timers, and with a watchdog that a subclass brings."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reknit.elastic.agent.server import local_elastic_agent
from reknit.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.multiprocessing.shared import SharedKeeper


def python(script: str, *args: object) -> WorkerSpec:
    """A spec with two workers, which run this script."""
    return WorkerSpec("trainer", 2, entrypoint=sys.executable, args=("-c", textwrap.dedent(script), *map(str, args)))


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's folder for temporary files, in which no pipe is left. The watchdog is switched on."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    assert [path for path in scratch.rglob("*") if path.is_fifo()] == []


SHOWS = """
    import os, sys
    with open(sys.argv[1], "a") as file:
        file.write(os.environ.get("TORCHELASTIC_TIMER_FILE", "none") + "\\n")
"""


def test_an_expired_timer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result names the timer. In torch the agent's process would be killed as well."""
    agent = LocalElasticAgent(
        python(
            """
            import os, time
            from reknit.elastic import timer
            timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
            with timer.expires(after=0.2 if os.environ["RANK"] == "1" else 60, scope="step 1"):
                time.sleep(1000)
            """
        )
    )
    seen: list[object] = []
    monkeypatch.setattr(agent, "_monitor_workers", _noting(agent, seen))
    result = agent.run()
    assert result.state is WorkerState.FAILED
    assert set(result.failures) == {1}
    assert result.failures[1].exitcode == -signal.SIGKILL
    assert "the timer 'step 1' ran out" in str(result.failures[1].message)
    now = int(time.time())
    assert seen
    assert all(isinstance(at, int) and now - 600 < at <= now for at in seen)
    assert agent._worker_watchdog is None, "the watchdog ends with the workers"


def _noting(agent: LocalElasticAgent, seen: list[object]) -> Callable[[WorkerGroup], RunResult]:
    """`_monitor_workers`, and before it a question to the watchdog."""
    monitor = agent._monitor_workers

    def ask(group: WorkerGroup) -> RunResult:
        seen.append(agent._worker_watchdog.get_last_progress_time())
        return monitor(group)

    return ask


def test_an_override_may_bring_a_watchdog_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is what the workers get, and it is stopped with them. An override that does nothing switches the
    watchdog off."""
    stopped = []

    class Own(LocalElasticAgent):
        def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
            for env in envs.values():
                env["TORCHELASTIC_TIMER_FILE"] = "/own"
            self._worker_watchdog = self

        def stop(self) -> None:
            stopped.append(self)

    class Off(LocalElasticAgent):
        def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None: ...

    path = tmp_path / "shown"
    assert not Own(python(SHOWS, path)).run().is_failed()
    assert len(stopped) == 1
    assert not Off(python(SHOWS, path)).run().is_failed()
    assert path.read_text().splitlines() == ["/own"] * 2 + ["none"] * 2


def test_a_watchdog_that_is_stopped_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for its last progress wants to find out just that."""
    monkeypatch.setattr(local_elastic_agent, "_state", lambda pid: "T")

    class Clock:
        now = 100.0

    monkeypatch.setattr(local_elastic_agent.time, "time", lambda: Clock.now)
    watchdog = local_elastic_agent._Watchdog(SharedKeeper())
    Clock.now = 200.0
    assert watchdog.get_last_progress_time() == 100
    monkeypatch.setattr(local_elastic_agent, "_state", lambda pid: "S")
    assert watchdog.get_last_progress_time() == 200
