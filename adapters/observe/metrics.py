"""What an agent has done and does, as numbers for Prometheus.

1. `MetricsObserver` keeps frozen values, and replaces them. So another thread may read them at any time.
2. The text for Prometheus is made only when somebody asks. prometheus_client and psutil are imported then.
3. Each agent has a registry of its own. Several agents may live in one process.
4. Counters begin with the agent, at 0. What the job did before is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import EntriesRead, Event
from reknit.core.agent.worker_words import WorkersExited
from reknit.core.job.job import EMPTY, Closed, Gathering, Job, Outcome, Running, Unopened, Verdict
from reknit.core.job.reasons import Departure, NodeGone, NodesAdmitted, RoundEnd, WorkerFailed
from reknit.core.job.workers import NoProgress, TimerExpired
from reknit.core.text.doing import Doing, doing, takes_part
from reknit.core.text.picture import cause_of

from .progress_seen import progress_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily

KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The type of the text that `Metrics.text` makes."""
UNSEEN = "unseen"
"""The cause of a restart that this agent has not seen, because it has read several rounds at once."""
CAUSES = (
    "worker_failed",
    "timer_expired",
    "no_progress",
    *(f"node_{how.value}" for how in Departure),
    "nodes_admitted",
    UNSEEN,
)
_MOST_WORKERS = 1000
"""Limit for the workers in one look at their processes."""
USAGE_S = 1.0
"""Limit for the time of such a look. Seconds."""

Processes = Callable[[], tuple[int, Mapping[int, int]]]
"""The pid of the parent of this node's workers, and the workers' pids by local rank. A process with another parent is
none of them: its pid was used again, or the workers run on another host."""


def no_processes() -> tuple[int, Mapping[int, int]]:
    """The workers are not on this host."""
    return 0, EMPTY


@frozen
class Counts:
    """What has been counted."""

    doing: Doing
    since: float
    """When the agent began to do this, on the clock of the loop."""
    seconds: Mapping[Doing, float] = EMPTY
    """How long it has done each of the other things. What it does now is not in it."""
    sealed: tuple[int, int] | None = None
    """Epoch and number of the last round that has begun. None: the journal has not been read."""
    rounds: int = 0
    restarts: Mapping[str, int] = EMPTY
    failures: Mapping[tuple[int, str], int] = EMPTY
    """Failures of this node's workers, by local rank and cause (`picture.cause_of`)."""


class MetricsObserver:
    """An observer of one loop. It never waits, and never raises."""

    def __init__(self, agent: Agent, now: float) -> None:
        """`agent`: the agent before its first step. `now`: the time on the clock of the loop."""
        self.agent = agent
        """The agent after its latest step."""
        self.counts = Counts(doing(agent), now)

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        counts = self.counts
        if isinstance(event, EntriesRead):
            counts = _with_rounds(counts, after.job)
        if isinstance(event, WorkersExited) and after.workers.exits is not before.workers.exits:
            counts = _with_failures(counts, event)
        if (what := doing(after)) is not counts.doing:
            past = {**counts.seconds, counts.doing: _lasted(counts, after.at)}
            counts = evolve(counts, doing=what, since=after.at, seconds=past)
        self.counts, self.agent = counts, after


def _lasted(counts: Counts, now: float) -> float:
    """How long the agent has done what it does now, in all."""
    return float(counts.seconds.get(counts.doing, 0.0) + max(0.0, now - counts.since))


def _with_rounds(counts: Counts, job: Job) -> Counts:
    """The counts after a read of the journal. A round counts when it begins."""
    begun = _begun(job)
    if counts.sealed is None:
        return evolve(counts, sealed=(job.epoch, begun))
    if counts.sealed >= (job.epoch, begun):
        return counts
    epoch, last = counts.sealed
    new = begun - (last if epoch == job.epoch else -1)
    restarts = dict(counts.restarts)
    # The job tells the cause of its present round. `begun` has another one if the next round is gathered already.
    cause = _cause(job.why) if isinstance(job.phase, Running) else UNSEEN
    for number in range(begun - new + 1, begun + 1):
        if number > 0:
            key = cause if number == begun else UNSEEN
            restarts[key] = restarts.get(key, 0) + 1
    return evolve(counts, sealed=(job.epoch, begun), rounds=counts.rounds + new, restarts=restarts)


def _with_failures(counts: Counts, event: WorkersExited) -> Counts:
    failures = dict(counts.failures)
    for exit_ in event.exits:
        if exit_.failure is not None:
            key = exit_.local_rank, cause_of(exit_.failure)
            failures[key] = failures.get(key, 0) + 1
    return evolve(counts, failures=failures)


def _begun(job: Job) -> int:
    """The number of the last round that has begun. -1: none has."""
    match job.phase:
        case Unopened():
            return -1
        case Running(number) | Closed(number, Outcome(Verdict.SUCCEEDED)):
            return number
        case Gathering(number) | Closed(number):
            # A job that fails does so while the next round is gathered. An abort may come while a round runs. Then that
            # round was counted when it began.
            return number - 1


def _cause(why: RoundEnd | None) -> str:
    """One of `CAUSES`."""
    match why:
        case WorkerFailed(_, failure, _):
            match failure.cause:
                case TimerExpired():
                    return "timer_expired"
                case NoProgress():
                    return "no_progress"
                case None:
                    return "worker_failed"
        case NodeGone(_, how):
            return f"node_{how.value}"
        case NodesAdmitted():
            return "nodes_admitted"
        case None:
            return UNSEEN


class Metrics:
    """Makes the text for Prometheus of what a `MetricsObserver` has counted."""

    def __init__(self, watch: MetricsObserver, now: Callable[[], float], run_id: str, processes: Processes) -> None:
        """`now`: the clock of the loop. `run_id`: the name of the job."""
        self._watch = watch
        self._now = now
        self._run_id = run_id
        self._processes = processes
        self._registry: CollectorRegistry | None = None

    def text(self) -> str:
        """All metrics in Prometheus' text format, version 0.0.4."""
        from prometheus_client import CollectorRegistry, generate_latest

        if self._registry is None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(self)
            self._registry = registry
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Family]:
        """Called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        agent, counts = self._watch.agent, self._watch.counts
        job = agent.job
        terms = agent.spec.terms if isinstance(job.phase, Unopened) else job.terms
        about = Gauge("reknit_agent_info", "Always 1. The labels name job and node.", labels=("run_id", "node"))
        about.add_metric((_text(self._run_id), _text(agent.me.id or agent.spec.node_id)), 1)
        yield about
        yield Gauge("reknit_round", "The round that runs or is gathered, from 0.", job.round)
        yield Counter("reknit_rounds", "Rounds that have begun since this agent was started.", counts.rounds)
        restarts = Counter("reknit_restarts", "Rounds after the first, and why the last ended.", labels=["cause"])
        for cause in CAUSES:
            restarts.add_metric([cause], counts.restarts.get(cause, 0))
        yield restarts
        yield Gauge(
            "reknit_restarts_spent",
            "Restarts that failures have cost the job, without those that were given back.",
            job.spent,
        )
        yield Gauge("reknit_restarts_allowed", "Restarts that failures may cost the job.", terms.restarts.max_restarts)
        yield _gauge("reknit_nodes", "Nodes of the job, by standing.", "standing", standings(job))
        yield _gauge("reknit_workers", "Workers of this node, by state.", "state", workers(agent))
        reached = "1 while the agent reaches the job's journal, 0 during an outage."
        yield Gauge("reknit_journal_reachable", reached, float(agent.contact.outage is None))
        yield Gauge("reknit_ready", "1 while this node takes part in the job, as in /readyz.", float(takes_part(agent)))
        phases = Counter("reknit_phase_seconds", "Time that this agent has spent in each phase.", labels=["phase"])
        for what in Doing:
            spent = counts.seconds.get(what, 0.0) if what is not counts.doing else _lasted(counts, self._now())
            phases.add_metric([what.value], spent)
        yield phases
        failures = Counter(
            "reknit_worker_failures", "Failures of a worker of this node.", labels=["local_rank", "cause"]
        )
        for (local_rank, why), count in sorted(counts.failures.items()):
            failures.add_metric([str(local_rank), why], count)
        yield failures
        yield from self._progress()
        yield from self._usage()

    def _progress(self) -> Iterator[Family]:
        """How far the workers are that report progress (`reknit.progress`)."""
        from prometheus_client.core import GaugeMetricFamily as Gauge

        label = ["local_rank"]
        step = Gauge("reknit_worker_step", "The step that a worker has reported last.", labels=label)
        ago = Gauge("reknit_worker_seconds_since_progress", "Time since a worker has reported progress.", labels=label)
        for local_rank, one in sorted(progress_of(self._processes()[0]).items()):
            if one.step is not None:
                step.add_metric([str(local_rank)], one.step)
            if one.ago_s is not None:
                ago.add_metric([str(local_rank)], one.ago_s)
        yield step
        yield ago

    def _usage(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        label = ["local_rank"]
        cpu_help = "Processor time of a worker's process and of the children that it has waited for."
        cpu = Counter("reknit_worker_cpu_seconds", cpu_help, labels=label)
        memory_help = "Memory of a worker's process that is in RAM (RSS), shared memory included."
        memory = Gauge("reknit_worker_resident_memory_bytes", memory_help, labels=label)
        for local_rank, cpu_s, resident in usage(*self._processes()):
            cpu.add_metric([str(local_rank)], cpu_s)
            memory.add_metric([str(local_rank)], resident)
        yield cpu
        yield memory


def _gauge(name: str, text: str, label: str, values: Mapping[str, int]) -> Family:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _text(name: str) -> str:
    """A name that may hold bytes that are no UTF-8 (lone surrogates), as text that can be sent."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def standings(job: Job) -> dict[str, int]:
    """Number of nodes by standing. While no round runs, all live nodes are `gathering`."""
    runs = isinstance(job.phase, Running)
    members = sum(j.node in job.member_nodes for j in [*job.live.values()]) if runs else 0
    return {
        "member": members,
        "standby": len(job.live) - members if runs else 0,
        "gathering": 0 if runs else len(job.live),
        "gone": len(job.gone),
    }


def workers(agent: Agent) -> dict[str, int]:
    """Number of this node's workers by state. Their sum is the number of workers that this node has in a round."""
    own = agent.workers
    failed = sum(exit_.failure is not None for exit_ in own.exits.values())
    rest = max(0, agent.spec.local_world_size - len(own.exits))
    there = doing(agent) if own.alive else None
    return {
        "starting": rest * (there is Doing.LAUNCHING),
        "running": rest * (there is Doing.RUNNING),
        "stopping": rest * (there is Doing.STOPPING),
        "stopped": rest * (there is None),
        "succeeded": len(own.exits) - failed,
        "failed": failed,
    }


def usage(parent: int, pids: Mapping[int, int]) -> Iterator[tuple[int, float, int]]:
    """Local rank, processor time in seconds and resident memory in bytes of each worker that runs on this host."""
    if not parent or not pids:
        return
    import psutil

    give_up = time.monotonic() + USAGE_S
    for local_rank, pid in sorted(pids.items())[:_MOST_WORKERS]:
        if time.monotonic() > give_up:
            return
        try:
            process: Any = psutil.Process(pid)
            with process.oneshot():
                if process.ppid() == parent and process.status() != psutil.STATUS_ZOMBIE:
                    times = process.cpu_times()
                    cpu_s = times.user + times.system + times.children_user + times.children_system
                    yield local_rank, cpu_s, process.memory_info().rss
        except psutil.Error:
            pass  # the worker has just ended
