"""The counterpart of `torch.distributed.elastic.agent.server.api`: the agent that others extend.

    run → _invoke_run → _initialize_workers → _rendezvous → _assign_worker_ranks
                                            → _start_workers
          _monitor_workers, again and again
          _restart_workers → _stop_workers → _initialize_workers     another round follows
          _stop_workers                                              no round follows
          _exit_barrier                                              the workers have succeeded
        → _record_metrics, _record_worker_events; _shutdown

1. These methods may be overridden, and are called by the thread that called `run()`. They may take minutes: the agent's
   loop runs in a thread of its own, and goes on talking to the other nodes.
2. They decide nothing. The core decides when workers are started and stopped, and with which ranks. It learns from
   `_monitor_workers` how the workers are.
3. `_restart_workers` is called if the terms allow another round (`Sequel.ROUND`), and `_stop_workers` otherwise. If no
   round comes after a restart has begun, `_rendezvous` raises `Ended`. If a round comes after `_stop_workers`,
   `_initialize_workers` is called.
4. An overridden `_invoke_run` takes the place of the core. `run` then only adds metrics, events and `_shutdown`.
5. Outside of `run` each method works alone. `_rendezvous` then asks the spec's handler.
"""

from __future__ import annotations

import abc
import json
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from reknit.adapters.host.address import full_host_name as _get_fq_hostname  # torch's name, which programs patch
from reknit.adapters.observe.torchelastic_events import worker_event_name
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.threads import sheltered
from reknit.elastic.events import Event, EventSource, agents
from reknit.elastic.events.agents import record
from reknit.elastic.metrics import prof, put_metric
from reknit.elastic.multiprocessing.signals import SignalException, holding_back
from reknit.elastic.utils.logging import get_logger

from .agent_driver import AgentDriver
from .agent_run import AgentRun, Ended
from .group import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState, _RoleInstanceInfo
from .hooks import called, started
from .ranks import alone, wait_for_all, workers_alike, workers_of, workers_over_store
from .results import is_graceful_exit, leave_error_file, raw_error, run_result

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "_RoleInstanceInfo",
]

DEFAULT_ROLE = "default"
_HURRY_S = 5
"""Time that a second signal leaves to workers that are being stopped. Seconds."""
logger = get_logger(__name__)


class ElasticAgent(abc.ABC):
    """Runs the workers of one node. `SimpleElasticAgent` is the usual class to extend."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they have succeeded, or have failed too often. Raises an exception if the job ends
        for another reason, for example if the nodes cannot meet."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The workers of this node. The group may change at any time."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for workers of one role.

    A subclass implements `_start_workers`, `_stop_workers`, `_monitor_workers` and `_shutdown`, and may override every
    other method. Signatures of older versions of torch are understood as well."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: float = 30) -> None:
        """`exit_barrier_timeout`: how long the agent waits for the other nodes when its own workers have succeeded.
        `shutdown_timeout`: how long workers get to end before they are killed. Both in seconds."""
        self._worker_group = WorkerGroup(spec)
        self._restarts_left = spec.max_restarts
        """What `_remaining_restarts` is while there is no run."""
        self._limit: int | None = None
        """What the program has set `_remaining_restarts` to since the last run. It holds for the next run."""
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        self._agent_run: AgentRun | None = None
        """The run that is under way. None: none is."""
        self._is_in_run = False
        self._least_interval_s = 0.0  # between two looks at the workers, whatever the spec says

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    # ---- what a subclass implements ----

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start `spec.local_world_size` workers. Returns, by local rank, what each worker is known by."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End all workers, whatever state they are in. When this returns, no worker runs."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Say how the workers are: HEALTHY, UNHEALTHY, SUCCEEDED or FAILED. If they have succeeded, none runs."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """End all workers, and let go of everything. `death_sig`: what they get first. `timeout`: SIGKILL follows after
        so many seconds. May be called several times."""

    # ---- a round ----

    @property
    def _remaining_restarts(self) -> int:
        """Failures that this node still survives, as they were counted when its last round began. A subclass may set a
        lower number. After so many more failures of its workers the node leaves the job."""
        return self._restarts_left if self._agent_run is None else self._agent_run.restarts_left

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        self._restarts_left = left
        if self._agent_run is None:
            self._limit = left
        else:
            self._agent_run.limit_restarts(left)

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the next round, and put the ranks of this node into the group."""
        spec, agent_run = worker_group.spec, self._agent_run
        with self.record_duration("RENDEZVOUS"):
            place = agent_run.next_place() if agent_run is not None else alone(spec)
            worker_group.group_rank, worker_group.group_world_size = place.group_rank, place.group_world_size
        self._store = place.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            workers = self._assign_worker_ranks(place.store, place.group_rank, place.group_world_size, spec)
        worker_group.workers = workers
        worker_group.store = place.store
        worker_group.master_addr = spec.master_addr or place.master_addr
        worker_group.master_port = place.master_port
        logger.info("[%s] %s, workers: %s", spec.role, place, workers)

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """The workers of this node with their ranks in the round. `store`: where the agents of the round tell each
        other what they have. None: reknit's agents know it without a store."""
        if store is not None:
            return workers_over_store(store, group_rank, group_world_size, spec)
        if self._agent_run is not None:
            return workers_of(self._agent_run.assignment)
        return workers_alike(group_rank, group_world_size, spec)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Wait for a round, and start its workers. No worker may run."""
        self._rendezvous(worker_group)
        if self._agent_run is not None:
            self._agent_run.be_in_round()
        logger.info("[%s] starting workers", worker_group.spec.role)
        for local_rank, worker_id in started(self, worker_group).items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            record(self._construct_event("START", EventSource.WORKER, worker), worker_group.spec.event_log_handler)
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, wait for the next round, and start its workers."""
        logger.info("[%s] stopping workers", worker_group.spec.role)
        called(self._stop_workers, worker_group, is_restart=True)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    # ---- a run ----

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until the job has ended, on this node or at all.

        Raises `SignalException` when the workers have ended after a signal, and whatever an overridden method raises.
        If the nodes cannot meet, or the store is lost: torch's error for that, or `RendezvousFailed` where torch is not
        loaded. `Prevented` if this agent cannot begin. `UnusableHandler`, which is a `ValueError`, if there is no such
        handler of events as the spec names. `RuntimeError` if this agent runs already.
        """
        if self._is_in_run:
            raise RuntimeError("this agent runs already")
        agents.check(self._worker_group.spec.event_log_handler)
        start = time.monotonic()
        death_sig: int | None = None
        self._is_in_run = True
        try:
            result = self._invoke_run(role)
            self._total_execution_time = int(time.monotonic() - start)
            self._record_metrics(result)
            self._record_worker_events(result)
            leave_error_file(result)
            return result
        except SignalException as e:
            logger.warning("%s: the workers are ended", str(e))  # a log record must not hold on to the agent
            death_sig = e.sigval
            if self._agent_run is not None:
                self._agent_run.leave(death_sig)
            raise
        except Exception as e:
            if not is_graceful_exit(e):
                raise
            logger.info("this node is not needed: %s", str(e))
            return RunResult(WorkerState.STOPPED)
        finally:
            try:
                self._end_workers(death_sig)
                if death_sig is not None:
                    self._total_execution_time = int(time.monotonic() - start)
                    self._record_worker_events(RunResult(WorkerState.STOPPED))
            finally:
                self._is_in_run = False
                self._total_execution_time = int(time.monotonic() - start)
                with holding_back():
                    sheltered(self._close_agent_run)
                agents.flush()

    def _end_workers(self, death_sig: int | None) -> None:
        """End all workers. Each further signal meanwhile shortens the time that they get."""
        if death_sig is None:
            called(self._shutdown, timeout=self._shutdown_timeout)
            return
        for signum, left_s in ((death_sig, self._shutdown_timeout), (death_sig, _HURRY_S), (signal.SIGKILL, 0)):
            try:
                called(self._shutdown, signal.Signals(signum), timeout=left_s)
                return
            except SignalException as e:
                logger.warning("%s again: the workers get less time to end", str(e))

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """`run` without metrics and events, and without the clean-up of workers after an error."""
        spec = self._worker_group.spec
        logger.info("[%s] starting %s", spec.role, spec.get_entrypoint_name())
        agent_run = None
        try:
            limit, self._limit = self._limit, None
            make = partial(AgentRun, spec, self._shutdown_timeout, self._prepare, limit)
            self._agent_run = agent_run = sheltered(make, undo=AgentRun.close)
            AgentDriver(self, agent_run).run()
        except Ended:
            if agent_run is None:
                raise AssertionError("a run cannot end before it has begun") from None
            return run_result(agent_run.result(), agent_run.last)
        finally:
            if not self._is_in_run:
                sheltered(self._close_agent_run)

    def _prepare(self, mark: str) -> SystemClock | None:
        """Called at the beginning of a run, before it has a thread. See `AgentRun`."""
        return None

    def _exit_barrier(self) -> None:
        """Wait until the other nodes have ended as well, at most for `exit_barrier_timeout` seconds. If a node fails
        meanwhile, this returns, and another round follows."""
        timeout = self._exit_barrier_timeout
        logger.info("the workers of this node have ended; waiting for the other nodes, at most %s s", timeout)
        self._in_exit_barrier = True
        try:
            if self._store is not None:
                has_ended = wait_for_all(self._store, self._worker_group.group_world_size or 1, timeout, time.sleep)
            else:
                has_ended = self._agent_run is None or self._agent_run.stay(timeout)
            if not has_ended:
                logger.warning("the other nodes have not ended within %s s", timeout)
        except SignalException as e:
            logger.warning("%s while this agent waits for the other nodes", str(e))
            raise
        except Exception:
            logger.exception("this agent could not wait for the other nodes")
        finally:
            self._in_exit_barrier = False

    def _close_agent_run(self) -> None:
        agent_run, self._agent_run = self._agent_run, None
        if agent_run is not None:
            self._restarts_left = agent_run.restarts_left
            agent_run.close()

    # ---- events and metrics ----

    def get_event_failed(self) -> Event:
        """The event that this agent has failed, with the exception that is being handled."""
        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """The event that this agent has done its work. Its workers may have failed."""
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            if worker.id is None:
                continue  # it was never started: the job was over, or did not need this node
            failure = result.failures.get(worker.global_rank)
            found: dict[str, Any] = {}
            if failure is not None:
                found = {"raw_error": raw_error(failure), "exit_code": failure.exitcode, "worker_pid": failure.pid}
            event = self._construct_event(self._get_worker_state(worker, result), EventSource.WORKER, worker, **found)
            record(event, self._worker_group.spec.event_log_handler)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """The state of one worker at the end. TERMINATED: the agent has ended it."""
        if worker.global_rank in result.failures or result.state == WorkerState.SUCCEEDED:
            return WorkerState(result.state).value
        return "TERMINATED"

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """A context. Afterwards the event `state` of this agent is recorded, with the time that passed."""
        start = time.perf_counter()
        try:
            yield
        finally:
            passed_ms = (time.perf_counter() - start) * 1000
            event = self._construct_event(state, EventSource.AGENT, duration_ms=passed_ms)
            record(event, self._worker_group.spec.event_log_handler)

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group, spec = self._worker_group, self._worker_group.spec
        more: dict[str, Any] = {"group_world_size": group.group_world_size, "entry_point": spec.get_entrypoint_name()}
        if worker is not None:
            more |= {name: getattr(worker, name) for name in ("local_rank", "role_rank", "role_world_size")}
            more |= {"exit_code": exit_code, "worker_pid": worker_pid}
        handler = spec.rdzv_handler
        metadata = {
            "run_id": self._run_id(),
            "global_rank": None if worker is None else worker.global_rank,
            "group_rank": group.group_rank,
            "worker_id": None if worker is None else str(worker.id),
            "role": spec.role,
            "hostname": _get_fq_hostname(),
            "state": state,
            "total_run_time": self._total_execution_time,
            "rdzv_backend": handler.get_backend() if handler is not None else "reknit",
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": spec.max_restarts - self._remaining_restarts,
            "duration_ms": duration_ms,
        }
        return Event(worker_event_name(state), source, int(time.time() * 1000), metadata)

    def _run_id(self) -> str:
        if self._agent_run is not None:
            return self._agent_run.run_id
        handler = self._worker_group.spec.rdzv_handler
        return str(handler.get_run_id()) if handler is not None else ""

    def _record_state(self, state: WorkerState) -> None:
        """Publish what the latest look at the workers has shown."""
        role = self._worker_group.spec.role
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.{state.name.lower()}", 1)

    def _record_metrics(self, group_results: RunResult) -> None:
        is_failed = group_results.is_failed()
        self._record_flakiness_metric(is_failed)
        has_restarted = self._remaining_restarts != self._worker_group.spec.max_restarts
        put_metric(f"workers.{self._worker_group.spec.role}.run_total", 1)
        for how, is_so in (("success", not is_failed), ("failed", is_failed)):
            self._record_metric_with_condition(f"run_{how}_with_retries", is_so and has_restarted)
            self._record_metric_with_condition(f"run_{how}_no_retries", is_so and not has_restarted)

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        put_metric(f"workers.{self._worker_group.spec.role}.{metric_name}", int(condition))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """How much of the budget was spent, in percent. 100: the job has failed."""
        spec = self._worker_group.spec
        left = 0.0 if is_failed else (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        put_metric(f"workers.{spec.role}.flakiness", int(100.0 - 100.0 * left))
