"""What the thread that called `run()` does meanwhile: it carries out the core's commands with the methods of the agent,
and tells the core what they have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from reknit.adapters.observe.torchelastic_events import hang_events
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.restart import Sequel
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.describe import stacks_lines
from reknit.elastic.events import EventSource
from reknit.elastic.events.agents import record
from reknit.elastic.utils.logging import get_logger

from .agent_run import AgentRun
from .group import WorkerGroup, WorkerState
from .hooks import Hooks, called, monitored
from .results import BAD, failed_result, failures_of

_logger = get_logger(__name__)


class AgentDriver:
    """One run of an agent, turn by turn."""

    def __init__(self, agent: Hooks, agent_run: AgentRun) -> None:
        self._agent = agent
        self._agent_run = agent_run
        self._group = agent._worker_group
        self._looks_at = agent_run.now()
        """When the workers are looked at again, on the clock of the run."""

    def run(self) -> NoReturn:
        """Run the agent until no round follows. Raises `Ended` then, and whatever a method of the agent raises."""
        self._form(self._agent._initialize_workers)
        while True:
            self._turn()

    def _form(self, form: Callable[[WorkerGroup], None]) -> None:
        self._agent_run.form()
        form(self._group)
        self._agent_run.be_started(self._group)
        self._plan_look()

    def _plan_look(self) -> None:
        interval_s = max(self._group.spec.monitor_interval, self._agent._least_interval_s)
        self._looks_at = self._agent_run.now() + interval_s

    def _turn(self) -> None:
        # Workers that have ended or were stopped are not looked at: what follows is for the other nodes to say, too.
        is_idle = self._agent_run.last is not None or not self._agent_run.has_round
        command = self._agent_run.wait(None if is_idle else self._looks_at)
        if isinstance(command, StartWorkers):
            self._agent_run.give_back(command)
            self._form(self._agent._initialize_workers)
        elif isinstance(command, StopWorkers):
            self._obey()
        elif not is_idle:
            self._plan_look()
            self._look()

    def _obey(self) -> None:
        agent = self._agent
        if self._agent_run.sequel() is Sequel.ROUND:
            self._form(agent._restart_workers)
            return
        called(agent._stop_workers, self._group)
        self._group.state = WorkerState.FAILED if self._group.state in BAD else WorkerState.STOPPED
        self._agent_run.be_stopped()

    def _look(self) -> None:
        agent, group, agent_run = self._agent, self._group, self._agent_run
        with agent_run.looking():
            result = monitored(agent, group)
        state = WorkerState(result.state)  # a subclass may still have torch's class, or a text
        group.state = state
        agent._record_state(state)
        if state is WorkerState.SUCCEEDED:
            agent_run.succeeded(result)
            agent._exit_barrier()
            agent_run.retire()
        elif state in BAD:
            _logger.info("[%s] the workers are %s", group.spec.role, state.name)
            failures = failures_of(result, group)
            self._record_hangs(failures)
            agent_run.failed(failed_result(result, failures), failures)
        elif state is not WorkerState.HEALTHY:
            raise RuntimeError(f"[{group.spec.role}] the workers are {state.name}: the agent cannot go on")

    def _record_hangs(self, failures: Sequence[WorkerFailure]) -> None:
        """Record the events about workers that were ended because they were hung."""
        for failure in failures:
            if failure.cause is None:
                continue
            for line in stacks_lines(failure):
                _logger.error(line)
            for name, inner in hang_events(failure.cause, failure.pid, failure.exitcode):
                event = self._agent._construct_event("RUNNING", EventSource.AGENT)
                event.name, event.metadata["metadata"] = name, inner
                record(event, self._group.spec.event_log_handler)
