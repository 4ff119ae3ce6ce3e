"""`LocalElasticAgent`: workers on this host, of one agent or of several, as somebody's program runs them."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from reknit.adapters.elastic.hooked_workers import HookedWorkers
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.keeper.client import start
from reknit.adapters.keeper.protocol.stream import Stream
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.agent.worker_words import WorkersExited
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from reknit.elastic.agent.server import local_elastic_agent
from reknit.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.multiprocessing import DefaultLogsSpecs, RunProcsResult, SignalException, Std
from reknit.elastic.multiprocessing.errors import ProcessFailure
from reknit.elastic.rendezvous import RendezvousParameters
from reknit.elastic.rendezvous.handler import ReknitRendezvousHandler
from tests.support.interrupts import interrupted_after
from tests.support.journals import everything
from tests.support.leaks import children, nothing_left
from tests.support.stores import free_port
from tests.support.waiting import is_alive, read_pids, until

WAITS = "import os, signal, sys; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); signal.pause()"


def python(script: str, *args: object, **more: Any) -> WorkerSpec:
    """A spec whose workers run this script."""
    given: dict[str, Any] = {"role": "trainer", "local_world_size": 2, "max_restarts": 0, **more}
    return WorkerSpec(entrypoint=sys.executable, args=("-c", textwrap.dedent(script), *map(str, args)), **given)


@cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    LocalElasticAgent(python("pass")).run()


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Any:
    """Threads, descriptors, children, handlers, the environment, and the folder for temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        patch.setattr("tempfile.tempdir", None)
        first()
        with nothing_left(scratch):
            yield
            gc.collect()  # an exception that a test has caught holds on to its agent


# ---- one agent ----


def test_a_program_that_succeeds() -> None:
    """As the documentation has it: the result is no failure, and there are no return values."""
    agent = LocalElasticAgent(WorkerSpec("trainer", 3, entrypoint="true"), "spawn")
    result = agent.run()
    assert not result.is_failed()
    assert result == RunResult(WorkerState.SUCCEEDED, {0: None, 1: None, 2: None})
    assert agent._pcontext is not None
    assert {worker.id for worker in agent.get_worker_group().workers} == set(agent._pcontext.pids().values())


def test_what_a_worker_is_told(tmp_path: Path) -> None:
    """docs/torchelastic.md#environment, and the macro in the arguments."""
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    spec = python(script, tmp_path / "told.${local_rank}", max_restarts=2, local_addr="127.0.0.2")
    LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs"))).run()
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    assert {name: value for name, value in told[1].items() if told[0].get(name) != value}.keys() == {
        "RANK",
        "LOCAL_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_ERROR_FILE",
        "REKNIT_PROGRESS",
    }
    wanted = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "ROLE_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert {name: told[1].get(name) for name in wanted} == wanted
    assert told[1]["TORCHELASTIC_RUN_ID"]
    assert told[1]["PATH"] == os.environ["PATH"]


def test_only_workers_that_failed_by_themselves_are_failures() -> None:
    """The agent has ended the other one. `PContext`, a level below, reports it with -15."""
    script = "import os, signal; exit(7) if os.environ['RANK'] == '0' else signal.pause()"
    result = LocalElasticAgent(python(script)).run()
    assert result.is_failed()
    assert [(rank, failure.exitcode) for rank, failure in result.failures.items()] == [(0, 7)]


def test_a_worker_that_does_not_end_gets_the_time_that_was_asked_for(tmp_path: Path) -> None:
    """Also if it must end because another one has failed. torch gives it 30 seconds then."""
    script = """
        import os, signal, sys
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(sys.argv[1], "w").write("1\\n")
            while True:
                signal.pause()
        while not os.path.exists(sys.argv[1]):
            pass
        exit(3)
    """
    agent = LocalElasticAgent(python(script, tmp_path / "up"), shutdown_timeout=0)
    result = agent.run()
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: 3}
    assert agent._pcontext is not None
    assert not any(is_alive(pid) for pid in agent._pcontext.pids().values())


def test_the_workers_own_words_come_with_the_failure(tmp_path: Path) -> None:
    """From its stderr, if it has not recorded its error. They are handed on to the program that runs the agent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        result = LocalElasticAgent(python("raise ValueError('bad data')", local_world_size=1)).run()
    assert "ValueError: bad data" in str(result.failures[0].message)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: bad data"
    assert "Traceback" in message["extraInfo"]["py_callstack"]
    assert message["errorCode"] == 1


def test_restarts_use_one_keeper_and_have_files_of_their_own(tmp_path: Path) -> None:
    """The count of restarts names the folder of each attempt, as with torch."""
    script = "import os; n = os.environ['TORCHELASTIC_RESTART_COUNT']; print('attempt', n); exit(n != '2')"
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    keepers = set()

    class Noting(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            ids: dict[int, Any] = super()._start_workers(worker_group)
            assert self._shared is not None
            keepers.add(self._shared.keeper(None).pid)
            return ids

    agent = Noting(python(script, max_restarts=2, local_world_size=1), logs)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert len(keepers) == 1
    files = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [file.parts[-3] for file in files] == ["attempt_0", "attempt_1", "attempt_2"]
    assert [file.read_text() for file in files] == [f"attempt {n}\n" for n in range(3)]


def test_the_prefix_of_teed_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template with macros."""
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.OUT)
    template = "<${role_name}|${local_rank}|${rank}>"
    agent = LocalElasticAgent(python("print('hello')"), logs, log_line_prefix_template=template)
    agent.run()
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "<trainer|0|0>hello", "<trainer|1|1>hello"]


def test_a_folder_is_no_logs_specs() -> None:
    """A text stands for the start method. The error would come later, and name the start method only."""
    with pytest.raises(ValueError, match=r"^logs_specs must be what DefaultLogsSpecs\(folder\) makes, .* not '/tmp/x'"):
        LocalElasticAgent(python("pass"), "/tmp/x")


def test_a_program_that_does_not_exist() -> None:
    """One error that names it, as torch raises it, and no restart."""
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        LocalElasticAgent(WorkerSpec("trainer", 2, entrypoint="/no/such/program", max_restarts=3)).run()


def test_gpus_for_virtual_local_ranks(tmp_path: Path) -> None:
    """Each worker sees its own GPU as device 0. Too few GPUs are a mistake that is named."""
    script = """
        import os, sys
        open(sys.argv[1], "a").write(os.environ["LOCAL_RANK"] + os.environ["CUDA_VISIBLE_DEVICES"])
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4, 5")
        LocalElasticAgent(python(script, tmp_path / "told", virtual_local_rank=True)).run()
        assert sorted((tmp_path / "told").read_text()) == sorted("0405")
        patch.setenv("CUDA_VISIBLE_DEVICES", "4")
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4 has no device"):
            LocalElasticAgent(python(script, tmp_path / "told", virtual_local_rank=True)).run()


def test_workers_that_the_kernel_does_not_let_run(tmp_path: Path) -> None:
    """The run has failed: torch's result is none, so its launcher ends with 0. No restart follows on this node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_elastic_agent, "_is_uninterruptible", lambda pid: pid == read_pids(tmp_path / "pids", 2)[0])
        spec = python(WAITS, tmp_path / "pids", max_restarts=3)
        agent = LocalElasticAgent(spec, uninterruptible_state_timeout=0.05)
        result = agent.run()
    assert result.is_failed()
    (failure,) = result.failures.values()
    assert failure.pid == read_pids(tmp_path / "pids", 2)[0]
    assert "uninterruptible sleep" in str(failure.message)
    assert len(read_pids(tmp_path / "pids", 2)) == 2


@pytest.mark.parametrize(("text", "seconds"), [("", 0.0), ("2.5", 2.5), ("-1", 0.0), ("soon", 0.0)])
def test_the_limit_for_such_workers_comes_from_a_variable(text: str, seconds: float) -> None:
    """What cannot be read turns the check off, as with torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", text)
        assert LocalElasticAgent(python("pass"))._uninterruptible_state_timeout == seconds


@pytest.mark.parametrize(("text", "seconds", "said"), [("6", 6.0, ""), ("", None, ""), ("soon", None, "expected")])
def test_the_limit_for_progress_comes_from_a_variable(
    text: str, seconds: float | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be read turns the watch off, and one warning says so."""
    monkeypatch.setenv("PET_HANG_AFTER", text)
    assert local_elastic_agent._seconds_of("PET_HANG_AFTER") == seconds
    assert said in caplog.text


# ---- several agents ----

REDUCES = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == int(sys.argv[2]):
        os._exit(9)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    open(sys.argv[1], "a").write(f"{total.item()} ")
    dist.destroy_process_group()
"""
"""Adds up all ranks plus 1. In the first round the rank of the second argument fails. Each worker writes the sum."""


@pytest.mark.slow
def test_workers_of_two_agents_meet_and_meet_again_after_a_failure(tmp_path: Path) -> None:
    """Real collectives: the bootstrap address is right in every round, and no key of the first round is in the way.

    Workers of agents that meet in a file are those of test_local_agent_functions.py."""
    place = f"127.0.0.1:{free_port()}"
    agents = []
    for name in ("a", "b"):
        config = {"node_id": name, "last_call_timeout": 1}
        params = RendezvousParameters("reknit", place, "job", 2, 2, local_addr="127.0.0.1", **config)
        more = {"rdzv_handler": ReknitRendezvousHandler(params), "max_restarts": 1, "local_world_size": 1}
        spec = python(REDUCES, tmp_path / "sums", 1, **more)
        agents.append(LocalElasticAgent(spec))
    results: dict[int, RunResult] = {}

    def run(at: int) -> None:
        results[at] = agents[at].run()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[at].state for at in range(2)] == [WorkerState.SUCCEEDED] * 2
    assert sorted(rank for at in range(2) for rank in results[at].return_values) == [0, 1]
    assert (tmp_path / "sums").read_text().split() == ["3"] * 2


# ---- signals ----


@pytest.mark.alone
def test_a_signal_ends_the_workers_and_comes_out_of_run(tmp_path: Path) -> None:
    """In the main thread. The workers get the signal itself, and the handlers that were there are back afterwards."""
    script = """
        import os, signal, sys
        signal.signal(signal.SIGINT, lambda *given: (open(sys.argv[2], "a").write("SIGINT "), exit(0)))
        open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
        while True:
            signal.pause()
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def interrupt() -> None:
        read_pids(tmp_path / "pids", 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as raised:
        LocalElasticAgent(python(script, tmp_path / "pids", tmp_path / "got")).run()
    thread.join()
    assert raised.value.sigval == signal.SIGINT
    assert (tmp_path / "got").read_text() == "SIGINT SIGINT "
    assert not any(is_alive(pid) for pid in read_pids(tmp_path / "pids", 2))
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.alone
def test_further_signals_shorten_the_grace(tmp_path: Path) -> None:
    """The workers ignore every signal. The third one leaves them no time."""
    script = """
        import os, signal, sys
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *given: open(sys.argv[2], "a").write("."))
        open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
        while True:
            signal.pause()
    """
    agent = LocalElasticAgent(
        python(script, tmp_path / "pids", tmp_path / "got", local_world_size=1), shutdown_timeout=600
    )

    def insist() -> None:
        read_pids(tmp_path / "pids", 1)
        os.kill(os.getpid(), signal.SIGTERM)
        until((tmp_path / "got").exists)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)

    thread = threading.Thread(target=insist)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    assert not any(is_alive(pid) for pid in read_pids(tmp_path / "pids", 1))


def interrupted(agent: LocalElasticAgent, when: Callable[[], object]) -> None:
    """Run the agent, and send SIGTERM to this process when the condition holds."""

    def interrupt() -> None:
        until(when)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()


def meets(folder: Path, name: str) -> ReknitRendezvousHandler:
    params = RendezvousParameters("reknit", str(folder / "journal"), "job", 2, 2, node_id=name, last_call_timeout=1)
    return ReknitRendezvousHandler(params)


def job_at(folder: Path) -> Job:
    """The job, as another client of the same journal reads it. It is empty before its journal is there."""
    with closing(FileJournal(str(folder / "journal"), Envelope("job"), reads_only=True)) as journal:
        try:
            return fold_all(Job(), everything(journal))
        except (Unavailable, Refused):
            return Job()


@pytest.mark.alone
def test_a_signal_ends_the_wait_for_a_round(tmp_path: Path) -> None:
    """The second node never comes. torch's agent cannot be ended while a call to its store waits."""
    agent = LocalElasticAgent(python("pass", rdzv_handler=meets(tmp_path, "a")))
    interrupted(agent, lambda: "a" in job_at(tmp_path).live)


@pytest.mark.alone
def test_a_signal_ends_the_wait_at_the_exit_barrier(tmp_path: Path) -> None:
    """At once, and the other node goes on. torch notices the signal when the wait is over."""
    script = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    other = LocalElasticAgent(python(script, tmp_path / "gone", rdzv_handler=meets(tmp_path, "b")))
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(other.run()))
    thread.start()
    agent = LocalElasticAgent(python("pass", rdzv_handler=meets(tmp_path, "a")), exit_barrier_timeout=3000)
    interrupted(agent, lambda: any(node.id == "a" for node in job_at(tmp_path).succeeded))
    (tmp_path / "gone").touch()
    thread.join()
    assert results[0].state is WorkerState.SUCCEEDED


def test_who_leaves_waits_until_the_loop_has_heard_what_came_before() -> None:
    """A node that leaves before the core knows that its workers have succeeded leaves without its `Succeeded`. The
    other nodes would start another round."""
    clock = SystemClock()
    workers = HookedWorkers(clock, "nonce", news=lambda: None)
    workers.events(0.0)
    assert workers.await_told(0.0)
    workers.report_success(0, 1)
    assert not workers.await_told(0.0)
    assert [type(event) for event in workers.events(1.0)] == [WorkersExited]
    assert workers.await_told(0.0)
    workers.close()
    clock.close()


def test_only_the_signals_that_the_launcher_names_are_taken() -> None:
    """And the workers learn which."""
    taken: list[object] = []
    told = "import os; exit(os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'] != 'SIGUSR1,SIGTERM')"

    class Looks(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            taken[:] = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)]
            return super()._monitor_workers(worker_group)

    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)]
    agent = Looks(python(told))
    agent._signals_to_handle = "SIGUSR1,SIGTERM"
    assert agent.run().state is WorkerState.SUCCEEDED
    assert [now != then for now, then in zip(taken, before, strict=True)] == [True, True, False]


def test_a_mock_in_the_place_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own tests of its agent put one there. It has nothing that they did not give it."""
    context = Mock()
    context.pids.return_value = {0: 5}
    context.wait.return_value = RunProcsResult(failures={0: ProcessFailure(0, 5, 3, "")})
    monkeypatch.setattr(local_elastic_agent, "start_processes", lambda **given: context)
    result = LocalElasticAgent(python("pass", local_world_size=1)).run()
    assert result.state is WorkerState.FAILED
    assert result.failures[0].exitcode == 3
    context.close.assert_called()


@pytest.mark.parametrize(("owner", "moment"), [(start, "spawned"), (Stream, "close")])
@pytest.mark.alone
def test_an_interrupt_while_an_agent_is_opened_or_closed_leaves_nothing(owner: Any, moment: str) -> None:
    """A signal that the agent does not take, as with `signals_to_handle="SIGTERM"`."""
    agent = LocalElasticAgent(python("pass"))
    agent._signals_to_handle = "SIGTERM"
    interrupted_after(owner, moment, agent.run)
    assert not children()


def test_in_another_thread_no_signal_is_taken(tmp_path: Path) -> None:
    """Signals are the main thread's."""
    results: list[RunResult] = []
    handlers: list[object] = []

    class Looks(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            handlers.append(signal.getsignal(signal.SIGTERM))
            return super()._monitor_workers(worker_group)

    thread = threading.Thread(target=lambda: results.append(Looks(python("pass")).run()))
    thread.start()
    thread.join()
    assert results[0].state is WorkerState.SUCCEEDED
    assert set(handlers) == {signal.getsignal(signal.SIGTERM)}


def test_a_keeper_that_is_killed_is_a_failure_like_another(tmp_path: Path) -> None:
    """Its workers die with it. The agent starts another one, and spends a restart."""
    script = WAITS.replace("signal.pause()", "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or signal.pause()")
    agent = LocalElasticAgent(python(script, tmp_path / "pids", max_restarts=1))

    def kill() -> None:
        worker = read_pids(tmp_path / "pids", 2)[0]
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert agent.run().state is WorkerState.SUCCEEDED
    thread.join()


def test_a_program_that_is_killed_takes_its_workers_with_it(tmp_path: Path) -> None:
    """torch leaves programs running."""
    script = f"""
        from reknit.elastic.agent.server.api import WorkerSpec
        from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        args = ("-c", {WAITS!r}, {str(tmp_path / "pids")!r})
        LocalElasticAgent(WorkerSpec("trainer", 2, entrypoint={sys.executable!r}, args=args)).run()
    """
    # A program that is killed leaves its temporary folder to the next start.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    pids = read_pids(tmp_path / "pids", 2)
    program.kill()
    program.wait()
    until(lambda: not any(is_alive(pid) for pid in pids), "the workers to end")


@pytest.mark.slow
def test_ten_agents_at_once() -> None:
    """Each has its keeper, its loop and its clock, and closes its own only."""
    results: list[RunResult] = []
    agents = [LocalElasticAgent(python("pass")) for _ in range(10)]
    threads = [threading.Thread(target=lambda agent: results.append(agent.run()), args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 10
