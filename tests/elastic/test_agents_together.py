"""Agents of one job, each in a thread of this process, with real processes and a journal in a folder."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from reknit.elastic.rendezvous import RendezvousParameters
from reknit.elastic.rendezvous.handler import ReknitRendezvousHandler
from tests.elastic.agents import PlainAgent, spec
from tests.support.leaks import nothing_left
from tests.support.waiting import read_pids

WAITS = """
    import os, signal, sys
    if os.environ["WORLD_SIZE"] == sys.argv[2]:
        raise SystemExit
    open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
    signal.pause()
"""
"""Waits, unless the round has the number of workers that the second argument says."""


class Together:
    """The agents of a job. `run` runs them until all have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.results: dict[str, RunResult | BaseException] = {}
        self._threads: list[threading.Thread] = []

    def agent(self, name: str, script: str, *args: object, nodes: tuple[int, int] = (2, 2), **more: Any) -> PlainAgent:
        low, high = nodes
        config = {"node_id": name, "last_call_timeout": 1, **more.pop("config", {})}
        params = RendezvousParameters("reknit", str(self._folder), "job", low, high, **config)
        kind = more.pop("kind", PlainAgent)
        agent: PlainAgent = kind(spec(script, rdzv_handler=ReknitRendezvousHandler(params), **more))
        agent.get_worker_group().spec.args = args
        agent.name = name
        return agent

    def start(self, agent: PlainAgent) -> None:
        def run() -> None:
            try:
                self.results[agent.name] = agent.run()
            except BaseException as error:
                self.results[agent.name] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def run(self, *agents: PlainAgent) -> None:
        for agent in agents:
            self.start(agent)
        for thread in self._threads:
            thread.join()

    def result(self, name: str) -> RunResult:
        result = self.results[name]
        assert isinstance(result, RunResult), result
        return result


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    PlainAgent(spec("pass")).run()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    first()
    with nothing_left():
        yield Together(tmp_path / "journal")


def test_ranks_of_two_nodes(job: Together) -> None:
    """Each agent's result is by global rank, with its own workers only."""
    agents = [job.agent(name, "pass", local_world_size=size) for name, size in (("a", 1), ("b", 2))]
    job.run(*agents)
    values = [job.result(name).return_values for name in ("a", "b")]
    assert sorted(rank for each in values for rank in each) == [0, 1, 2]
    assert [len(each) for each in values] == [1, 2]
    groups = [agent.get_worker_group() for agent in agents]
    assert sorted((group.group_rank, group.group_world_size) for group in groups) == [(0, 2), (1, 2)]
    assert groups[0].master_port == groups[1].master_port
    assert all(worker.world_size == 3 for group in groups for worker in group.workers)


def test_a_failure_on_one_node_restarts_both(job: Together, tmp_path: Path) -> None:
    """The budget is the job's: both agents count the same restart."""
    up = str(tmp_path / "up")
    waits = f"import os, signal; open({up!r}, 'w'); signal.pause() if os.environ['RESTARTS_LEFT'] == '1' else 0"
    fails = f"""
        import os, time
        while not os.path.exists({up!r}):
            time.sleep(0.01)
        raise SystemExit(int(os.environ["RESTARTS_LEFT"]))
    """
    agents = [job.agent("a", waits, max_restarts=1), job.agent("b", fails, max_restarts=1)]
    job.run(*agents)
    assert {job.result(name).state for name in ("a", "b")} == {WorkerState.SUCCEEDED}
    assert [agent.calls for agent in agents] == [["start", "stop", "start", "shutdown"]] * 2
    assert [agent._remaining_restarts for agent in agents] == [0, 0]


def test_the_root_cause_stands_in_the_result_of_an_agent_without_a_failure(job: Together) -> None:
    """It is never empty when the job has failed."""
    agents = [job.agent("a", "import signal; signal.pause()"), job.agent("b", "raise ValueError('bad data')")]
    job.run(*agents)
    own, other = job.result("b"), job.result("a")
    assert own.is_failed()
    assert other.is_failed()
    ranks = {worker.global_rank for worker in agents[1].get_worker_group().workers}
    assert own.failures.keys() <= ranks
    assert other.failures.keys() <= ranks
    assert [failure.exitcode for failure in other.failures.values()] == [1]


def test_a_node_that_joins_is_taken_in(job: Together, tmp_path: Path) -> None:
    """The workers are started again with the new world size, and no restart is spent."""
    agents = {name: job.agent(name, WAITS, tmp_path / "pids", 4, nodes=(1, 2), max_restarts=3) for name in "ab"}
    job.start(agents["a"])
    read_pids(tmp_path / "pids", 2)
    job.run(agents["b"])
    assert {job.result(name).state for name in "ab"} == {WorkerState.SUCCEEDED}
    assert agents["a"].calls == ["start", "stop", "start", "shutdown"]
    assert [agent._remaining_restarts for agent in agents.values()] == [3, 3]


def test_a_node_that_raises_leaves_the_job(job: Together, tmp_path: Path) -> None:
    """The others go on without it."""

    class Raises(PlainAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            read_pids(tmp_path / "pids", 4)
            raise ZeroDivisionError

    a = job.agent("a", WAITS, tmp_path / "pids", 2, nodes=(1, 2))
    b = job.agent("b", WAITS, tmp_path / "pids", 2, nodes=(1, 2), kind=Raises, config={"last_call_timeout": 60})
    a.get_worker_group().spec.rdzv_handler = (
        job.agent("a", "pass", nodes=(1, 2), config={"last_call_timeout": 60}).get_worker_group().spec.rdzv_handler
    )
    job.run(a, b)
    assert isinstance(job.results["b"], ZeroDivisionError)
    assert job.result("a").state is WorkerState.SUCCEEDED


def test_a_failure_that_another_node_excuses_by_its_going(job: Together, tmp_path: Path) -> None:
    """No restart is left, so the core does not know what follows when the workers are stopped. Then a round comes."""

    class Raises(PlainAgent):
        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            raise ZeroDivisionError

    class Restarted(PlainAgent):
        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            raise AssertionError("nobody knows that a round follows")

    up = tmp_path / "up"  # a fails when b has workers to stop
    fails = f"""
import os, time
while os.environ["WORLD_SIZE"] == "4" and not os.path.exists({str(up)!r}):
    time.sleep(0.01)
raise SystemExit(os.environ["WORLD_SIZE"] == "4")
"""
    waits = f"import signal; open({str(up)!r}, 'w').close(); signal.pause()"
    config = {"last_call_timeout": 60}
    a = job.agent("a", fails, nodes=(1, 2), max_restarts=0, kind=Restarted, config=config)
    b = job.agent("b", waits, nodes=(1, 2), max_restarts=0, kind=Raises, config=config)
    job.run(a, b)
    assert isinstance(job.results["b"], ZeroDivisionError)
    assert job.result("a").state is WorkerState.SUCCEEDED
    assert a.calls == ["start", "stop", "start", "shutdown"]


def test_a_node_that_has_succeeded_works_again_if_another_fails(job: Together, tmp_path: Path) -> None:
    """It waits at the exit barrier, and `_initialize_workers` follows."""
    done = tmp_path / "done"
    fails = f"""
        import os, time
        while not os.path.exists({str(done)!r}):
            time.sleep(0.01)
        raise SystemExit(int(os.environ["RESTARTS_LEFT"]))
    """

    class Tells(PlainAgent):
        def _exit_barrier(self) -> None:
            done.touch()
            super()._exit_barrier()

    agents = [job.agent("a", "pass", kind=Tells, max_restarts=1), job.agent("b", fails, max_restarts=1)]
    job.run(*agents)
    assert {job.result(name).state for name in ("a", "b")} == {WorkerState.SUCCEEDED}
    assert agents[0].calls.count("start") == 2


def test_nobody_waits_for_ever_at_the_exit_barrier(job: Together, tmp_path: Path) -> None:
    """When the time is over, the agent leaves with its own success. The other node goes on."""

    class Hasty(PlainAgent):
        def _shutdown(self, *given: Any, **more: Any) -> None:
            super()._shutdown(*given, **more)
            (tmp_path / "gone").touch()

    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'gone')!r}): time.sleep(0.01)"
    a, b = job.agent("a", "pass", kind=Hasty), job.agent("b", waits)
    a._exit_barrier_timeout = 0.1
    job.run(a, b)
    assert {job.result(name).state for name in ("a", "b")} == {WorkerState.SUCCEEDED}


def test_too_few_nodes(job: Together) -> None:
    """An error and no result: no worker has failed. The class is torch's where torch's module is loaded."""
    job.run(job.agent("a", "pass", config={"join_timeout": 1}))
    error = job.results["a"]
    assert type(error).__name__ in ("RendezvousTimeoutError", "RendezvousFailed")
    assert "1 node joined in time" in str(error)


def test_an_agent_that_comes_after_the_end(job: Together) -> None:
    """The job has succeeded: there is nothing to do, and nothing is wrong."""
    job.run(job.agent("a", "pass", nodes=(1, 2)))
    late = job.agent("b", "pass", nodes=(1, 2))
    job.run(late)
    assert job.result("b") == RunResult(WorkerState.SUCCEEDED)
    assert late.calls == ["shutdown"]


def test_events_name_the_job_and_the_backend(job: Together) -> None:
    """Whoever collects events of many jobs tells them apart."""
    agent = job.agent("a", "pass", nodes=(1, 1))
    event = agent.get_event_succeeded()
    assert (event.metadata["run_id"], event.metadata["rdzv_backend"]) == ("job", "reknit")


class Watchful(PlainAgent):
    """Notes whether it was asked how its workers are while it had none."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.processes:
            self.calls.append("looked at nobody")
        return super()._monitor_workers(worker_group)


@pytest.mark.parametrize("attempt", range(3))
def test_workers_that_were_stopped_are_not_looked_at(job: Together, tmp_path: Path, attempt: int) -> None:
    """Between the stop and the end of the job, a look would find workers that this agent itself has ended."""
    script = """
        import os, signal
        if os.environ["RANK"] == "1":
            raise SystemExit(3)
        signal.pause()
    """
    agents = [job.agent(name, script, kind=Watchful, max_restarts=0, monitor_interval=0.001) for name in ("a", "b")]
    job.run(*agents)
    assert all("looked at nobody" not in agent.calls for agent in agents)
    assert [job.result(name).is_failed() for name in ("a", "b")] == [True, True]
