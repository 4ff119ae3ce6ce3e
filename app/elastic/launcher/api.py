"""From a `LaunchConfig` to an agent that runs, and to the values that its workers have returned."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reknit.app.python.fielddocs import with_fields
from reknit.elastic import metrics
from reknit.elastic.agent.server.api import WorkerSpec
from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from reknit.elastic.events import agents
from reknit.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException
from reknit.elastic.multiprocessing.errors import ChildFailedError
from reknit.elastic.rendezvous import registry as rdzv_registry
from reknit.elastic.rendezvous.api import RendezvousParameters
from reknit.elastic.utils.logging import get_logger

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

logger = get_logger(__name__)
_RDZV_TIMEOUT_S = 900
_SHUTDOWN_TIMEOUT_S = 30
_EXIT_BARRIER_TIMEOUT_S = 300


@with_fields
@dataclass
class LaunchConfig:
    """What one agent is to do. Times are in seconds."""

    min_nodes: int
    """The job begins when so many nodes have joined."""
    max_nodes: int
    """No more nodes than this take part."""
    nproc_per_node: int
    """Workers on this node."""
    logs_specs: LogsSpecs | None = None
    """Where output goes. None: `DefaultLogsSpecs()`."""
    run_id: str = ""
    """Name of the job, the same on all nodes. Empty: a random one."""
    role: str = "default_role"
    """The role's name. The workers of one role have ranks of their own within it."""
    rdzv_endpoint: str = ""
    """Where the nodes meet, HOST[:PORT]. Empty: this is the only node."""
    rdzv_backend: str = "etcd"
    """c10d, file, etcd or static. `torch:c10d`: torch's own rendezvous of that name."""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    """Settings of the rendezvous, as in `--rdzv-conf`."""
    rdzv_timeout: int = -1
    """An older name of `rdzv_configs["timeout"]`. -1: not given."""
    max_restarts: int = 3
    """Number of failures that the job survives. 0: none."""
    monitor_interval: float = 0.1
    """Longest time between two looks at the workers. Their ends are noticed at once, without a look."""
    start_method: str = "spawn"
    """How function workers are started: spawn, fork or forkserver."""
    log_line_prefix_template: str | None = None
    """Prefix of teed lines: see `LocalElasticAgent`. None: `[<role><local rank>]:`."""
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    """Settings of the metrics, for `reknit.elastic.metrics.initialize_metrics`, which a platform may replace."""
    local_addr: str | None = None
    """Address of this node for the others. None: it is found out."""
    event_log_handler: str = "null"
    """Where events go: see `WorkerSpec.event_log_handler`."""
    numa_options: Any = None
    """Which CPUs the workers may use: torch's `NumaOptions`. None: all."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    """Names of the signals that end the job in order, with commas between them."""
    duplicate_stdout_filters: list[str] | None = None
    """Lines of the workers' stdout that contain one of these texts are copied to a file. None: there is no file."""
    duplicate_stderr_filters: list[str] | None = None
    """The same for stderr."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, as its device 0: LOCAL_RANK is 0, and CUDA_VISIBLE_DEVICES names that GPU alone."""
    shutdown_timeout: int | None = None
    """Time between the signal that stops workers and SIGKILL.
    None: the variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30."""
    exit_barrier_timeout: float | None = None
    """How long an agent waits for the other agents at the end.
    None: the variable TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT, or 300."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables for the workers besides those of this process. torch does not have this field."""

    def __post_init__(self) -> None:
        self.rdzv_configs = dict(self.rdzv_configs)
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", _RDZV_TIMEOUT_S)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(_seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S))
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")
        if self.exit_barrier_timeout is None:
            self.exit_barrier_timeout = _seconds("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", _EXIT_BARRIER_TIMEOUT_S)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{variable}={text}: a number of seconds expected") from None


class elastic_launch:  # noqa: N801  # torch's name
    """Runs an entrypoint as the workers of an elastic job. Call the object with the entrypoint's arguments.

    `entrypoint`: a function, or the name of a program. The call waits until the job has ended. It returns what the
    functions have returned, by global rank, for this node's workers. For a program the values are None. It raises
    `ChildFailedError` if the job failed, and `SignalException` if a signal has ended it.
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, [*args], self._health_check_server)


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """The name in messages: of the function, of the script that this Python runs, or of the program."""
    if entrypoint is None:
        return ""
    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__name__", type(entrypoint).__name__)
    if entrypoint == sys.executable:
        return next((arg for arg in args if isinstance(arg, str) and not arg.startswith("-")), "")
    return entrypoint


def _get_addr_and_port(rdzv_parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT, which a static rendezvous fixes. Otherwise None and None."""
    if rdzv_parameters.backend != "static":
        return None, None
    host, _, port = rdzv_parameters.endpoint.strip().rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"a static rendezvous needs the endpoint HOST:PORT, not {rdzv_parameters.endpoint!r}")
    return host.strip("[]"), int(port)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Make an agent of `config`, run it in this thread, and close it. Returns and raises as `elastic_launch`."""
    agents.check(config.event_log_handler)
    run_id = config.run_id or str(uuid.uuid4().int)
    name = _get_entrypoint_name(entrypoint, args)
    logger.info("job %s: %s with %s", run_id, name, config)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    agent = _agent(config, parameters, entrypoint, args, health_check_server)
    closes = True
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        result = agent.run()
        # The agent has done its work, even if its workers have failed: so torch tells this event.
        agents.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            raise ChildFailedError(name=name, failures=result.failures)
        return result.return_values
    except ChildFailedError:
        raise
    except SignalException:
        # The node leaves, and the others may go on without it.
        closes = False
        agents.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except Exception:
        agents.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        agents.flush()
        if closes:
            agent._worker_group.spec.rdzv_handler.shutdown()


def _agent(
    config: LaunchConfig,
    parameters: RendezvousParameters,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any,
) -> LocalElasticAgent:
    master_addr, master_port = _get_addr_and_port(parameters)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=rdzv_registry.get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        exit_barrier_timeout=config.exit_barrier_timeout or 0,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout or 0,
        health_check_server=health_check_server,
    )
    agent._signals_to_handle = config.signals_to_handle
    agent._worker_env = dict(config.env)
    return agent
