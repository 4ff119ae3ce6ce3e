"""`reknit.elastic.agent.server.api`: an agent that somebody has extended, with real processes, alone on its node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from reknit.elastic.agent.server import api
from reknit.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from reknit.elastic.multiprocessing.signals import SignalException
from tests.elastic.agents import PlainAgent, spec
from tests.support.leaks import nothing_left
from tests.support.waiting import read_pids, until

FAILS_UNTIL_RESTARTED = "import os; raise SystemExit(int(os.environ['RESTARTS_LEFT']))"
WAITS = "import os, signal, sys; open(sys.argv[1] + '/pids', 'a').write(f'{os.getpid()}\\n'); signal.pause()"


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    PlainAgent(spec("pass")).run()


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads, descriptors, children, handlers, the environment, and the folder for temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    first()
    with nothing_left(scratch):
        yield


# ---- how a run goes ----


def test_success() -> None:
    """All workers end with 0: the result is the very object that the subclass has returned last."""
    agent = PlainAgent(spec("pass", local_world_size=3))
    result = agent.run()
    assert result.state is WorkerState.SUCCEEDED
    assert not result.is_failed()
    assert result.return_values == {0: "of 0", 1: "of 1", 2: "of 2"}
    assert agent.calls == ["start", "shutdown"]
    group = agent.get_worker_group()
    assert [(w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in group.workers] == [
        (rank, rank, 3, 3) for rank in range(3)
    ]
    assert (group.group_rank, group.group_world_size, group.state) == (0, 1, WorkerState.SUCCEEDED)


def test_a_failure_is_restarted() -> None:
    """The count of restarts that are left goes down from round to round, as the workers see it."""
    agent = PlainAgent(spec(FAILS_UNTIL_RESTARTED, max_restarts=2))
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.calls == ["start", "stop", "start", "stop", "start", "shutdown"]
    assert agent._remaining_restarts == 0


def test_the_budget_is_spent() -> None:
    """The worker that the agent has ended is in neither mapping."""
    agent = PlainAgent(spec("import os, signal; exit(4) if os.environ['RANK'] == '1' else signal.pause()"))
    result = agent.run()
    assert result.is_failed()
    assert result.return_values == {}
    assert list(result.failures) == [1]
    assert result.failures[1].exitcode == 4
    assert agent.calls == ["start", "stop", "shutdown"]
    assert agent.get_worker_group().state is WorkerState.FAILED


def test_each_round_has_a_port_of_its_own_and_a_given_port_is_kept(tmp_path: Path) -> None:
    """A worker of an earlier round must not find the store of a later one. Who gives a port gets it in each round."""
    script = FAILS_UNTIL_RESTARTED.replace(
        "raise",
        "open(__import__('sys').argv[1] + '/ports', 'a').write("
        "os.environ['MASTER_ADDR'] + ':' + os.environ['MASTER_PORT'] + ' '); raise",
    )
    PlainAgent(spec(script, tmp_path, max_restarts=2, local_world_size=1)).run()
    assert len(set((tmp_path / "ports").read_text().split())) == 3
    (tmp_path / "ports").unlink()
    PlainAgent(spec(script, tmp_path, max_restarts=1, local_world_size=1, master_port=34567, master_addr="there")).run()
    assert (tmp_path / "ports").read_text().split() == ["there:34567"] * 2


def test_the_root_cause_goes_into_the_agents_own_error_file(tmp_path: Path) -> None:
    """A scheduler that has started this program reads there why its job failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        PlainAgent(spec("exit(4)", local_world_size=1)).run()
    assert json.loads((tmp_path / "error.json").read_text())["message"]["errorCode"] == 4


# ---- what a subclass says ----


class SaysOnce(PlainAgent):
    """Says `said` at its first look."""

    said: Any = RunResult(WorkerState.HEALTHY)

    def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
        said, self.said = self.said, None
        return said or super()._monitor_workers(worker_group)


def test_unhealthy_workers_are_a_failure() -> None:
    """They spend a restart, and without one the run has failed. torch returns a result that is no failure."""
    agent = SaysOnce(spec("pass", max_restarts=1))
    agent.said = RunResult(WorkerState.UNHEALTHY)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.calls == ["start", "stop", "start", "shutdown"]
    agent = SaysOnce(spec("import signal; signal.pause()"))
    agent.said = RunResult(WorkerState.UNHEALTHY)
    result = agent.run()
    assert result.is_failed()
    assert "UNHEALTHY" in str(result.failures[0].message)
    assert agent.get_worker_group().state is WorkerState.FAILED


def test_a_failure_without_a_worker_is_a_failure() -> None:
    """A subclass may know that its workers have failed, and not which."""
    agent = SaysOnce(spec("import signal; signal.pause()"))
    agent.said = RunResult(WorkerState.FAILED)
    result = agent.run()
    assert result.is_failed()
    assert list(result.failures) == [0]


def test_a_result_of_torchs_class() -> None:
    """A subclass may have changed only some of its imports. torch's states are texts, as reknit's are."""
    from torch.distributed.elastic.agent.server import api as torchs

    agent = SaysOnce(spec("import signal; signal.pause()"))
    agent.said = torchs.RunResult(torchs.WorkerState.FAILED)
    assert agent.run().is_failed()
    agent.said = torchs.RunResult(torchs.WorkerState.SUCCEEDED, {0: 1, 1: 2})
    assert agent.run().return_values == {0: 1, 1: 2}


@pytest.mark.parametrize("said", [None, True, WorkerState.HEALTHY, SimpleNamespace(state="HEALTHY"), [], {}])
def test_a_look_that_returns_no_result(said: Any) -> None:
    """The author of a subclass has forgotten a `return`. The error says where."""

    class Forgetful(PlainAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
            return said

    agent = Forgetful(spec("import signal; signal.pause()"))
    with pytest.raises(TypeError, match=r"Forgetful\._monitor_workers has returned .*, and not a RunResult"):
        agent.run()
    assert agent.calls == ["start", "shutdown"]


def test_a_start_that_returns_no_mapping() -> None:
    """The same for the method that starts workers, which has started some by then."""

    class Forgetful(PlainAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> Any:
            super()._start_workers(worker_group)

    agent = Forgetful(spec("import signal; signal.pause()"))
    with pytest.raises(TypeError, match=r"Forgetful\._start_workers has returned None, and not a mapping"):
        agent.run()
    assert agent.calls == ["start", "shutdown"]


def test_workers_that_were_lost_track_of_end_the_run() -> None:
    """Nobody knows whether they run, so there is nothing to restart."""
    agent = SaysOnce(spec("import signal; signal.pause()"))
    agent.said = RunResult(WorkerState.UNKNOWN)
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        agent.run()
    assert agent.calls == ["start", "shutdown"]


def test_a_subclass_may_take_restarts_from_the_budget() -> None:
    """It knows that another start on this host is in vain."""

    class GivesUp(PlainAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                self._remaining_restarts = 0
            return result

    agent = GivesUp(spec("exit(3)", max_restarts=5, local_world_size=1))
    result = agent.run()
    assert result.is_failed()
    assert result.failures[0].exitcode == 3
    assert agent.calls == ["start", "stop", "shutdown"]


def test_restarts_may_be_taken_before_a_run() -> None:
    """A subclass does so when it is made. What it has set holds for one run."""
    agent = PlainAgent(spec("exit(3)", max_restarts=1, local_world_size=1))
    agent._remaining_restarts = 0
    assert agent.run().is_failed()
    assert agent._remaining_restarts == 0
    assert agent.calls == ["start", "stop", "shutdown"]
    agent.calls.clear()
    assert agent.run().is_failed()
    assert agent.calls == ["start", "stop", "start", "stop", "shutdown"]


def test_an_agent_runs_once_at_a_time() -> None:
    """A second run would take the agent's loop from the first one, which could not close it any more."""

    class RunsAgain(PlainAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            return self.run()

    agent = RunsAgain(spec("pass", local_world_size=1))
    with pytest.raises(RuntimeError, match="this agent runs already"):
        agent.run()
    assert agent.calls == ["start", "shutdown"]


def test_a_subclass_may_leave_itself_some_restarts() -> None:
    """The number holds from the round in which it was set. The workers see what is left."""

    class Modest(PlainAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self._remaining_restarts = min(self._remaining_restarts, 1)
            self.left.append(self._remaining_restarts)
            return super()._start_workers(worker_group)

        left: ClassVar[list[int]] = []

    agent = Modest(spec("exit(3)", max_restarts=5, local_world_size=1))
    assert agent.run().is_failed()
    assert agent.left == [1, 0]
    assert agent._remaining_restarts == 0
    assert agent.calls == ["start", "stop", "start", "stop", "shutdown"]


@pytest.mark.parametrize("hook", ["_start_workers", "_monitor_workers", "_rendezvous", "_stop_workers"])
def test_what_a_method_raises_comes_out_of_run(hook: str, tmp_path: Path) -> None:
    """A bug of the subclass ends the run, and the workers with it."""

    def raises(*given: object) -> Any:
        raise ZeroDivisionError(hook)

    agent = PlainAgent(spec("exit(2)", max_restarts=1))
    setattr(agent, hook, raises)
    with pytest.raises(ZeroDivisionError, match=hook):
        agent.run()
    assert agent.calls[-1] == "shutdown"


def test_a_signal_reaches_the_workers_and_comes_out_of_run() -> None:
    """As in torch: `_shutdown` gets the signal, and the exception is raised when the workers have ended."""

    class Signalled(PlainAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            raise SignalException("a signal", signal.SIGINT)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
            self.calls.append(death_sig.name)
            super()._shutdown(death_sig, timeout)

    agent = Signalled(spec("import signal; signal.pause()"))
    with pytest.raises(SignalException) as raised:
        agent.run()
    assert raised.value.sigval == signal.SIGINT
    assert agent.calls == ["start", "SIGINT", "shutdown"]


# ---- each method overridden ----

OVERRIDABLE = (
    "_rendezvous",
    "_assign_worker_ranks",
    "_initialize_workers",
    "_restart_workers",
    "_exit_barrier",
    "_invoke_run",
)


@pytest.mark.parametrize("hook", OVERRIDABLE)
def test_a_method_that_calls_its_base(hook: str) -> None:
    """It is called where torch calls it, and the run goes as it would without it."""
    agent = PlainAgent(spec(FAILS_UNTIL_RESTARTED, max_restarts=1))
    base = getattr(agent, hook)

    def noted(*given: object) -> Any:
        agent.calls.append(hook)
        return base(*given)

    setattr(agent, hook, noted)
    assert agent.run().state is WorkerState.SUCCEEDED
    before_start = hook in ("_rendezvous", "_assign_worker_ranks", "_initialize_workers")
    assert agent.calls == [
        *([hook] if before_start or hook == "_invoke_run" else []),
        "start",
        *([hook] if hook == "_restart_workers" else []),
        "stop",
        *([hook] if before_start else []),
        "start",
        *([hook] if hook == "_exit_barrier" else []),
        "shutdown",
    ]


def test_ranks_that_a_subclass_chooses() -> None:
    """The content of the group is what the workers get, and what the result is keyed by."""

    class Reversed(PlainAgent):
        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
            return [Worker(rank, 1 - rank, 1 - rank, 2, 2) for rank in range(2)]

    agent = Reversed(spec("import os; exit(int(os.environ['RANK']))"))
    result = agent.run()
    assert list(result.failures) == [1]
    assert result.failures[1].local_rank == 0


def test_a_rendezvous_that_a_subclass_does_itself() -> None:
    """It never calls the base. The core still says when a round begins and ends."""

    class Fixed(PlainAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            self.calls.append("rendezvous")
            worker_group.workers = [Worker(0, 7, 7, 8, 8), Worker(1, 6, 6, 8, 8)]
            worker_group.group_rank, worker_group.group_world_size = 3, 4

    agent = Fixed(spec("import os; exit(int(os.environ['RANK']) == 7)", max_restarts=1))
    result = agent.run()
    assert list(result.failures) == [7]
    assert agent.calls == ["rendezvous", "start", "stop", "rendezvous", "start", "stop", "shutdown"]


def test_a_start_that_a_subclass_does_itself() -> None:
    """`_initialize_workers` without its base."""

    class Own(PlainAgent):
        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            worker_group.workers = [Worker(0, 0, 0, 2, 2), Worker(1, 1, 1, 2, 2)]
            self._start_workers(worker_group)
            worker_group.state = WorkerState.HEALTHY

    assert Own(spec("pass")).run().return_values == {0: "of 0", 1: "of 1"}


def test_nobody_waits_at_an_exit_barrier_that_does_nothing() -> None:
    """A subclass does not want to wait for other nodes."""

    class Impatient(PlainAgent):
        def _exit_barrier(self) -> None: ...

    assert Impatient(spec("pass")).run().state is WorkerState.SUCCEEDED


def test_a_run_that_a_subclass_does_itself() -> None:
    """The methods work without the core. `run` adds the clean-up."""

    class Once(PlainAgent):
        def _invoke_run(self, role: str = api.DEFAULT_ROLE) -> RunResult:
            self._initialize_workers(self._worker_group)
            return until(self._result)

        def _result(self) -> RunResult | None:
            result = self._monitor_workers(self._worker_group)
            return None if result.state is WorkerState.HEALTHY else result

    agent = Once(spec("pass"))
    assert agent.run().return_values == {0: "of 0", 1: "of 1"}
    assert agent.calls == ["start", "shutdown"]


def test_signatures_of_older_versions() -> None:
    """torch 2.2 to 2.4 had `_shutdown(death_sig)`, torch 1.9 `_shutdown()`, and torch 2.4 `is_restart`."""

    class Of19(PlainAgent):
        def _shutdown(self) -> None:  # type: ignore[override]  # it is older than the parameters of its base
            self.calls.append("old")
            self._end(signal.SIGTERM)

    class Of24(PlainAgent):
        def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
            self.calls.append(f"is_restart={is_restart}")
            self._shutdown(is_restart=is_restart)

        def _shutdown(  # type: ignore[override]  # it is older than the parameters of its base
            self, death_sig: signal.Signals = signal.SIGTERM, is_restart: bool = False
        ) -> None:
            self._end(death_sig)

    oldest = Of19(spec("pass"))
    oldest.run()
    assert oldest.calls == ["start", "old"]
    older = Of24(spec("exit(1)", max_restarts=1))
    assert older.run().is_failed()
    assert older.calls == ["start", "is_restart=True", "start", "is_restart=False"]


# ---- where it runs ----


def test_in_a_thread_and_in_an_event_loop() -> None:
    """No method needs the main thread."""
    results: list[RunResult] = []
    threads = [threading.Thread(target=lambda: results.append(PlainAgent(spec("pass")).run())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.append(asyncio.run(_run_async()))
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 5


async def _run_async() -> RunResult:
    return await asyncio.to_thread(PlainAgent(spec("pass")).run)


def test_a_run_in_a_method_of_a_run() -> None:
    """Somebody starts a helper job before the workers."""

    class Nested(PlainAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            assert PlainAgent(spec("pass")).run().state is WorkerState.SUCCEEDED
            return super()._start_workers(worker_group)

    assert Nested(spec("pass")).run().state is WorkerState.SUCCEEDED


def test_an_agent_runs_again() -> None:
    """What a run has left in the object does not disturb the next one."""
    agent = PlainAgent(spec(FAILS_UNTIL_RESTARTED, max_restarts=1))
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.run().state is WorkerState.SUCCEEDED


@pytest.mark.alone
@pytest.mark.slow
def test_a_program_that_forks_in_the_middle(tmp_path: Path) -> None:
    """The child unwinds the stack of `run`, and harms neither the workers nor the agent of its parent."""

    class Forks(PlainAgent):
        child = 0

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if not self.child:
                pids = read_pids(tmp_path / "pids", 2)
                self.child = os.fork()
                if not self.child:
                    self.processes.clear()
                    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
                    raise SystemExit
                for pid in pids:
                    os.kill(pid, signal.SIGUSR1)
            return super()._monitor_workers(worker_group)

    script = WAITS.replace("signal.pause()", "signal.signal(signal.SIGUSR1, lambda *a: exit(0)); signal.pause()")
    agent = Forks(spec(script.replace("open(", "signal.signal(signal.SIGUSR1, lambda *a: exit(0)); open("), tmp_path))
    parent = os.getpid()
    try:
        result = agent.run()
    except SystemExit:
        assert os.getpid() != parent
        os._exit(7)
    assert result.state is WorkerState.SUCCEEDED
    assert os.waitstatus_to_exitcode(os.waitpid(agent.child, 0)[1]) == 7


# ---- events and metrics ----


def test_events_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch, in its order. They are looked up where torch does, so a program can put its own in."""
    events: list[Any] = []
    metrics: dict[str, int] = {}
    monkeypatch.setattr(api, "record", lambda event, destination="null": events.append((event, destination)))
    monkeypatch.setattr(api, "put_metric", lambda name, value, group="torchelastic": metrics.update({name: value}))
    agent = PlainAgent(spec(FAILS_UNTIL_RESTARTED, max_restarts=1, event_log_handler="console", local_world_size=1))
    agent.run()
    states = [event.metadata["state"] for event, _ in events]
    assert states == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START"] * 2 + ["SUCCEEDED"]
    assert {destination for _, destination in events} == {"console"}
    last = events[-1][0]
    assert last.name == "torchelastic.worker.status.SUCCEEDED"
    assert json.loads(cast(str, last.metadata["metadata"]))["local_rank"] == 0
    assert (last.metadata["agent_restarts"], last.metadata["global_rank"]) == (1, 0)
    of_runs = {name.removeprefix("workers.trainer."): value for name, value in metrics.items() if "run_" in name}
    assert of_runs == {
        "run_total": 1,
        "run_success_with_retries": 1,
        "run_success_no_retries": 0,
        "run_failed_with_retries": 0,
        "run_failed_no_retries": 0,
    }
    assert metrics["workers.trainer.flakiness"] == 50
    assert metrics["workers.trainer.succeeded"] == 1
    assert agent.get_event_succeeded().metadata["state"] == "SUCCEEDED"
    assert agent.get_event_failed().metadata["raw_error"] == "NoneType: None\n"
