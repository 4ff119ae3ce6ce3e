"""The counterpart of `torch.distributed.elastic.agent.server.local_elastic_agent`.

1. `run` takes signals while it runs, if it is called in the main thread, and puts back the handlers that were there.
   See `reknit.elastic.multiprocessing.signals`.
2. The workers are held by a keeper (docs/design.md#keeper). It is started once per `run`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from string import Template
from typing import Any

from reknit.adapters.clock import Clock
from reknit.adapters.keeper.environment import environment

from ...metrics import prof
from ...multiprocessing import DefaultLogsSpecs, LogsSpecs, PContext, ProcessFailure, start_processes
from ...multiprocessing.shared import SharedKeeper
from ...multiprocessing.signals import VARIABLE, holding_back, put_back, take
from ...utils import macros
from ...utils.logging import get_logger
from .api import DEFAULT_ROLE, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from .health_check_server import HealthCheckServer, create_healthcheck_server
from .ranks import assignment_of

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "LocalElasticAgent",
]

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_HANDED_DOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_ALIVE_S = 60
"""The timeout that the health check server gets. Seconds."""

logger = get_logger(__name__)


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of a spec as processes on this host."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | str | None = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        """
        `logs_specs`: where the output of the workers goes. None: to the console. A text stands for `start_method`.
        `start_method`: "spawn", "fork" or "forkserver", for functions only.
        `exit_barrier_timeout`, `shutdown_timeout`: see `SimpleElasticAgent`.
        `log_line_prefix_template`: the prefix of teed lines, with the macros `${role_name}`, `${local_rank}` and
        `${rank}`. None: `[<role><local rank>]:`.
        `health_check_server`: stopped at the end. None: one is made if TORCHELASTIC_HEALTH_CHECK_PORT is set.
        `uninterruptible_state_timeout`: a worker that the kernel has not let run for so many seconds (state D) makes
        the group UNHEALTHY, and no restart follows on this node. None: what TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT
        says. 0 or less: no worker is looked at.
        """
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        if isinstance(logs_specs, str):  # torch's documentation writes LocalElasticAgent(spec, start_method)
            start_method = logs_specs
        no_specs = logs_specs is None or isinstance(logs_specs, str)
        self._logs_specs: Any = DefaultLogsSpecs() if no_specs else logs_specs
        self._start_method = start_method
        self._rdzv_handler = spec.rdzv_handler
        self._log_line_prefix_template = log_line_prefix_template
        self._health_check_server = health_check_server
        self._uninterruptible_state_timeout = _seconds(uninterruptible_state_timeout)
        self._uninterruptible_state_first_seen: dict[int, float] = {}
        """By pid: since when the worker is in state D, on the monotonic clock."""
        self._pcontext: PContext | None = None
        self._shared: SharedKeeper | None = None
        """The keeper of the workers, while a run is under way."""
        self._signals_to_handle: str | None = None
        """Names of signals, with commas. None: those that TORCHELASTIC_SIGNALS_TO_HANDLE names."""
        self._worker_env: dict[str, str] = {}
        """Variables for the workers besides those of this process."""

    # ---- a run ----

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """See `SimpleElasticAgent.run`."""
        signals: list[signal.Signals] = []
        try:
            with holding_back():  # a signal that comes in between must not keep this list from being put back
                signals += take(signal.signal, self._signals_to_handle)
            return super().run(role)
        finally:
            put_back(signals)

    def _prepare(self, mark: str) -> Clock | None:
        # Under "fork" the keeper is a fork of this process, which has no thread of this run yet.
        self._shared = SharedKeeper(mark, grace_s=self._shutdown_timeout)
        self._shared.keeper(None if isinstance(self._worker_group.spec.entrypoint, str) else self._start_method)
        return self._shared.clock

    def _close_course(self) -> None:
        shared, self._shared = self._shared, None
        try:
            if shared is not None:
                shared.close()  # first: with its goodbye this node promises that none of its workers runs
        finally:
            super()._close_course()

    # ---- the workers ----

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        if spec.entrypoint is None:
            raise AssertionError("a spec without an entrypoint cannot be made")
        envs = self._environments(worker_group)
        args = {rank: tuple(macros.substitute(spec.args, str(rank))) for rank in envs}
        prefixes = None
        if self._log_line_prefix_template:
            template = Template(self._log_line_prefix_template)
            prefixes = {
                worker.local_rank: template.safe_substitute(
                    role_name=spec.role, rank=worker.global_rank, local_rank=worker.local_rank
                )
                for worker in worker_group.workers
            }
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        self._uninterruptible_state_first_seen.clear()
        shared = {} if self._shared is None else {"_shared": self._shared}
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            **shared,
        )
        return dict(self._pcontext.pids())

    def _environments(self, worker_group: WorkerGroup) -> dict[int, dict[str, str]]:
        """What each worker is told, by local rank, besides the environment of this process."""
        spec, course = worker_group.spec, self._course
        assignment = assignment_of(
            worker_group,
            round_=course.assignment.round if course is not None else 0,
            restart_count=(
                course.assignment.restart_count if course is not None else spec.max_restarts - self._remaining_restarts
            ),
        )
        base = {name: os.environ[name] for name in _HANDED_DOWN if name in os.environ} | self._worker_env
        if self._signals_to_handle is not None:
            base[VARIABLE] = self._signals_to_handle
        if worker_group.store is not None and spec.rdzv_handler.use_agent_store:
            base["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        envs = {}
        for worker in assignment.workers:
            told = environment(
                base,
                assignment,
                worker,
                run_id=self._run_id(),
                error_file="",
                virtual_local_rank=spec.virtual_local_rank,
            )
            envs[worker.local_rank] = {**told, **{name: base[name] for name in base if "AGENT_STORE" in name}}
        return envs

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._shutdown(timeout=self._shutdown_timeout)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30, is_restart: bool = False
    ) -> None:
        if self._health_check_server is not None:
            self._health_check_server.stop()
            self._health_check_server = None
        if self._pcontext is not None:
            # A subclass for torch 2.4 passes `is_restart` in the place of `timeout`.
            self._pcontext.close(death_sig, self._shutdown_timeout if isinstance(timeout, bool) else timeout)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        if context is None:
            raise AssertionError("the workers were not started")
        known, running = {worker.id for worker in worker_group.workers}, set(context.pids().values())
        if known != running:
            logger.error("[%s] the workers are %s, and not %s", worker_group.spec.role, running, known)
            return RunResult(WorkerState.UNKNOWN)
        result = context.wait(0)
        if result is None:
            stuck = self._stuck(worker_group)
            return RunResult(WorkerState.UNHEALTHY, failures=stuck) if stuck else RunResult(WorkerState.HEALTHY)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if result.is_failed():
            # A program that the context has ended is among its failures. Here it is not.
            ended = getattr(context, "ended_ranks", ())
            failures = {ranks[rank]: failure for rank, failure in result.failures.items() if rank not in ended}
            return RunResult(WorkerState.FAILED, failures=failures)
        return RunResult(WorkerState.SUCCEEDED, {ranks[rank]: value for rank, value in result.return_values.items()})

    # ---- workers that the kernel does not let run ----

    def _stuck(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """By global rank: the workers that are in state D for too long. No restart follows then on this node: such a
        worker holds a device, which a new worker would need."""
        timeout = self._uninterruptible_state_timeout
        if timeout <= 0:
            return {}
        since, now = self._uninterruptible_state_first_seen, time.monotonic()
        stuck = {}
        for worker in worker_group.workers:
            if not _is_uninterruptible(worker.id):
                since.pop(worker.id, None)
            elif now - since.setdefault(worker.id, now) >= timeout:
                failure = ProcessFailure(worker.local_rank, worker.id, 1, "")
                failure.message = f"process {worker.id} was in an uninterruptible sleep for {timeout:g} s"
                stuck[worker.global_rank] = failure
        if stuck:
            self._remaining_restarts = 0
        return stuck

    # ---- what looks after the agent and its workers ----

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Says that reknit has no watchdog yet, if one was asked for. `envs`: the variables of the workers."""
        if os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) == "1":
            logger.warning("%s=1: reknit has no watchdog yet", TORCHELASTIC_ENABLE_FILE_TIMER)

    def _setup_healthcheck(self) -> None:
        """Start a health check server if TORCHELASTIC_HEALTH_CHECK_PORT is set."""
        port = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
        if port is None or self._health_check_server is not None:
            return
        if not port.strip().isdigit():
            logger.warning("%s=%s is no port: there is no health check", TORCHELASTIC_HEALTH_CHECK_PORT, port)
            return
        alive: Callable[[], int] = LocalElasticAgent._get_current_time_secs
        self._health_check_server = create_healthcheck_server(alive_callback=alive, port=int(port), timeout=_ALIVE_S)
        self._health_check_server.start()

    @staticmethod
    def _get_current_time_secs() -> int:
        return int(time.time())


def _seconds(given: float | None) -> float:
    """The limit for state D. 0: there is none."""
    text = os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "") if given is None else given
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        logger.warning("%s=%s is no number of seconds", TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, text)
        return 0.0


def _is_uninterruptible(pid: int) -> bool:
    """The process is in state D. False if that cannot be found out, as on other systems than Linux."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"D"]
    except OSError:
        return False
