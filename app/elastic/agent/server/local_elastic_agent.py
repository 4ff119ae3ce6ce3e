"""The counterpart of `torch.distributed.elastic.agent.server.local_elastic_agent`.

1. `run` takes signals while it runs, if it is called in the main thread, and puts back the handlers that were there.
   See `reknit.elastic.multiprocessing.signals`.
2. The workers are held by a keeper (docs/design.md#keeper). It is started once per `run`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from string import Template
from typing import Any

from reknit.adapters.host.children import stat_of
from reknit.adapters.keeper.client.calling import METHODS
from reknit.adapters.keeper.common.environment import device, environment
from reknit.adapters.runtime.clock import SystemClock
from reknit.app.cli.options import LEAST_HANG_S, LONGEST_S
from reknit.app.input.readers import ENABLE_FILE_TIMER, HEALTH_CHECK_PORT, optional, seconds_from, timer_file
from reknit.elastic.events import EventSource
from reknit.elastic.events.agents import record
from reknit.elastic.metrics import prof
from reknit.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, PContext, ProcessFailure, start_processes
from reknit.elastic.multiprocessing.api import take_signals
from reknit.elastic.multiprocessing.shared import SharedKeeper
from reknit.elastic.multiprocessing.signals import VARIABLE, holding_back, put_back
from reknit.elastic.timer.file_based_local_timer import FileTimerRequest
from reknit.elastic.utils import macros
from reknit.elastic.utils.logging import get_logger

from .api import DEFAULT_ROLE, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from .health_check_server import HealthCheckServer, create_healthcheck_server
from .ranks import assignment_of

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "LocalElasticAgent",
]

TORCHELASTIC_ENABLE_FILE_TIMER = ENABLE_FILE_TIMER
TORCHELASTIC_HEALTH_CHECK_PORT = HEALTH_CHECK_PORT
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_HANDED_DOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_IDLE_LOOK_S = 2.0  # the shortest time between two looks at workers whose end wakes the agent
_ALIVE_S = 60  # the timeout that the health check server gets

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
        `health_check_server`: stopped at the end of a run. Whoever brings a server starts it, as with torch. None: one
        is made and started if TORCHELASTIC_HEALTH_CHECK_PORT is set.
        `uninterruptible_state_timeout`: a worker that the kernel has not let run for so many seconds (state D) makes
        the group UNHEALTHY, and no restart follows on this node. None: what TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT
        says. 0 or less: no worker is looked at.

        Raises `ValueError` if `logs_specs` is a text that names no start method.
        """
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        if isinstance(logs_specs, str):  # torch's documentation writes LocalElasticAgent(spec, start_method)
            if logs_specs not in METHODS:
                wanted = "what DefaultLogsSpecs(folder) makes, or the name of a start method"
                raise ValueError(f"logs_specs must be {wanted}, not {logs_specs!r:.100}")
            start_method = logs_specs
        no_specs = logs_specs is None or isinstance(logs_specs, str)
        self._logs_specs: Any = DefaultLogsSpecs() if no_specs else logs_specs
        self._start_method = start_method
        self._rdzv_handler = spec.rdzv_handler
        self._log_line_prefix_template = log_line_prefix_template
        self._health_check_server = health_check_server
        self._refused_port = ""
        """The value of TORCHELASTIC_HEALTH_CHECK_PORT that could not be read. The log has said so once."""
        self._uninterruptible_state_timeout = _seconds(uninterruptible_state_timeout)
        self._uninterruptible_state_first_seen: dict[int, float] = {}  # by pid: since when the worker is in state D
        self._worker_watchdog: Any = None
        """Watches the workers' timers. It has the methods `get_last_progress_time` and `stop`. None: nobody does."""
        self._pcontext: PContext | None = None
        self._shared: SharedKeeper | None = None
        """The keeper of the workers, while a run is under way."""
        self._signals_to_handle: str | None = None
        """Names of signals, with commas. None: those that TORCHELASTIC_SIGNALS_TO_HANDLE names."""
        self._worker_env: dict[str, str] = {}
        """Variables for the workers besides those of this process."""

    # ---- a run ----

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """See `SimpleElasticAgent.run`."""
        if not isinstance(self._worker_group.spec.entrypoint, str):
            from reknit.adapters.keeper.client.function_workers import (
                end_import,  # slow to import, and not needed for programs
            )

            end_import(self._start_method)
        signals: list[signal.Signals] = []
        try:
            with holding_back():  # a signal that comes in between must not keep this list from being put back
                signals += take_signals(self._signals_to_handle)
            return super().run(role)
        finally:
            put_back(signals)

    def _prepare(self, mark: str) -> SystemClock | None:
        is_woken = (
            getattr(self._monitor_workers, "__func__", None) is _OWN_LOOK and not self._uninterruptible_state_timeout
        )
        self._least_interval_s = _IDLE_LOOK_S if is_woken else 0.0
        # Under "fork" the keeper is a fork of this process, which has no thread of this run yet.
        self._shared = SharedKeeper(
            mark=mark,
            grace_s=self._shutdown_timeout,
            hang_after_s=_seconds_of("PET_HANG_AFTER"),
            start_timeout_s=_seconds_of("PET_START_TIMEOUT"),
        )
        self._shared.timer_file = timer_file(os.environ)  # a guess, so that the keeper need not be started twice
        self._shared.keeper(None if isinstance(self._worker_group.spec.entrypoint, str) else self._start_method)
        return self._shared.clock

    def _close_agent_run(self) -> None:
        shared, self._shared = self._shared, None
        try:
            if shared is not None:
                shared.close()  # first: with its goodbye this node promises that none of its workers runs
        finally:
            super()._close_agent_run()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._setup_healthcheck()  # a supervisor also asks while the nodes are waited for
        super()._rendezvous(worker_group)

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
        if self._shared is not None:
            self._shared.timer_file = None  # an override of the next method may bring a watchdog of its own
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
        spec, agent_run = worker_group.spec, self._agent_run
        assignment = assignment_of(
            worker_group,
            round_=agent_run.assignment.round if agent_run is not None else 0,
            restart_count=(
                agent_run.assignment.restart_count
                if agent_run is not None
                else spec.max_restarts - self._remaining_restarts
            ),
        )
        base = {name: os.environ[name] for name in _HANDED_DOWN if name in os.environ} | self._worker_env
        if self._signals_to_handle is not None:
            base[VARIABLE] = self._signals_to_handle
        if worker_group.store is not None and spec.rdzv_handler.use_agent_store:
            base["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        envs = {}
        for worker in assignment.workers:
            told = environment(base, assignment, worker, run_id=self._run_id(), error_file="")
            self._set_local_rank_env(told, worker.local_rank, spec)
            envs[worker.local_rank] = {**told, **{name: base[name] for name in base if "AGENT_STORE" in name}}
        return envs

    def _set_local_rank_env(self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec) -> None:
        """Set LOCAL_RANK, and CUDA_VISIBLE_DEVICES if the worker shall see one GPU only, in the variables of a worker.
        Raises `ValueError` if CUDA_VISIBLE_DEVICES names too few devices."""
        worker_env.update(device(worker_env, local_rank, virtual=spec.virtual_local_rank))

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        server = self._health_check_server
        if self._is_in_run:
            # The server outlives the round. Otherwise a supervisor would find nobody during the next rendezvous, and
            # end this agent.
            self._health_check_server = None
        try:
            self._shutdown(timeout=self._shutdown_timeout)
        finally:
            if self._is_in_run:
                self._health_check_server = server

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30, is_restart: bool = False
    ) -> None:
        if self._health_check_server is not None:
            self._health_check_server.stop()
            self._health_check_server = None
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
            if isinstance(self._worker_watchdog, _Watchdog):
                self._log_watchdog_event("watchdog stopped", None)
            self._worker_watchdog = None
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
            # A mock in the place of the context would have every attribute.
            ended = getattr(context, "ended_ranks", ()) if issubclass(type(context), PContext) else ()
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
        """Have the timers of the workers watched, if TORCHELASTIC_ENABLE_FILE_TIMER is 1. The keeper does that, and
        adds TORCHELASTIC_TIMER_FILE to the variables of the workers.

        `envs`: these variables, by local rank. An override with a watchdog of its own writes its path there, and may
        keep an object with a method `stop` in `_worker_watchdog`."""
        path = timer_file(os.environ)
        if path is not None and self._shared is not None:
            self._shared.timer_file = path
            self._worker_watchdog = _Watchdog(self._shared)
            self._log_watchdog_event("watchdog started", None)

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """Record an event about the watchdog. `request`: the timer that it is about. None: it is about none."""
        inner = {"watchdog_event": name}
        if request is not None:
            inner |= {"worker_pid": str(request.worker_pid), "scope_id": request.scope_id}
            inner |= {"expiration_time": str(request.expiration_time), "signal": str(request.signal)}
        event = self._construct_event("RUNNING", EventSource.AGENT)
        event.name, event.metadata["metadata"] = name, json.dumps(inner)
        record(event, self._worker_group.spec.event_log_handler)

    def _setup_healthcheck(self) -> None:
        """Start a health check server if TORCHELASTIC_HEALTH_CHECK_PORT is set, and there is none yet."""
        text = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
        if not text or self._health_check_server is not None or text == self._refused_port:
            return
        from reknit.app.wiring.health import health_check

        try:
            wanted = health_check(text)
        except ValueError as error:
            self._refused_port = text
            why = str(error)  # a log record must not hold on to the agent
            logger.warning("%s=%s: %s; there is no health check server", TORCHELASTIC_HEALTH_CHECK_PORT, text, why)
            return
        agent_run = self._agent_run
        alive: Callable[[], int] = LocalElasticAgent._get_current_time_secs
        if agent_run is not None and agent_run.round_trips is not None:
            alive = agent_run.round_trips.alive_at
        server = create_healthcheck_server(alive_callback=alive, port=wanted.port, timeout=_ALIVE_S)
        self._health_check_server = server
        if isinstance(server, HealthCheckServer):
            server.host = wanted.host
            if agent_run is not None and agent_run.round_trips is not None:
                agent_run.processes = self._processes
                server.pages = agent_run.pages
        server.start()

    def _processes(self) -> tuple[int, dict[int, int]]:
        """The pid of the keeper, and the pids of the workers by local rank."""
        pids = {worker.local_rank: worker.id for worker in self._worker_group.workers if type(worker.id) is int}
        return (0, {}) if self._shared is None else (self._shared.keeper_pid, pids)

    @staticmethod
    def _get_current_time_secs() -> int:
        return int(time.time())


class _Watchdog:
    """The keeper as what watches the timers. It has the methods of torch's server that an agent calls."""

    def __init__(self, shared: SharedKeeper) -> None:
        self._shared = shared
        self._seen_at = int(time.time())

    def get_last_progress_time(self) -> int:
        """When the keeper was last seen running, in seconds since 1970. Only a call looks."""
        if _state(self._shared.keeper_pid) in ("R", "S", "D"):
            self._seen_at = int(time.time())
        return self._seen_at

    def stop(self) -> None:
        """Does nothing: the keeper forgets the timers of a round when it ends."""


def _seconds(given: float | None) -> float:
    """The limit for state D. 0: there is none."""
    text = os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "") if given is None else given
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        logger.warning("%s=%s is no number of seconds", TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, text)
        return 0.0


def _seconds_of(variable: str) -> float | None:
    """What PET_HANG_AFTER or PET_START_TIMEOUT says: see `Settings`. None: there is no limit."""
    text = os.environ.get(variable, "")
    try:
        return optional(seconds_from(LEAST_HANG_S, LONGEST_S))(text)
    except ValueError as error:
        logger.warning("%s=%s: %s. The progress of workers is not watched", variable, text, error)
        return None


def _is_uninterruptible(pid: int) -> bool:
    """The process is in state D. False if that cannot be found out, as on other systems than Linux."""
    return _state(pid) == "D"


def _state(pid: int) -> str:
    """The state of a process as a letter, see proc_pid_stat(5). Empty: it cannot be found out."""
    try:
        return stat_of(str(pid))[0].decode()
    except OSError:
        return ""


# A program that has another function in this place is asked as often as its spec says.
_OWN_LOOK = LocalElasticAgent._monitor_workers
