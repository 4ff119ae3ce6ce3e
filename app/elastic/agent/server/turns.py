"""What the thread that called `run()` does meanwhile: it carries out the core's commands with the methods of the agent,
and tells the core what they have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from reknit.adapters.observe.torchelastic_events import hang_events
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.workers import StartWorkers
from reknit.core.job.restart import Sequel
from reknit.core.job.workers import WorkerFailure
from reknit.elastic.events import EventSource
from reknit.elastic.events.agents import record
from reknit.elastic.utils.logging import get_logger

from .course import Course
from .group import WorkerGroup, WorkerState
from .hooks import Hooks, called, monitored
from .results import BAD, failed_result, failures_of

_logger = get_logger(__name__)


class Turns:
    """One run of an agent, turn by turn."""

    def __init__(self, agent: Hooks, course: Course) -> None:
        self._agent = agent
        self._course = course
        self._group = agent._worker_group
        self._looks_at = course.now()
        """When the workers are looked at again, on the clock of the course."""

    def run(self) -> NoReturn:
        """Run the agent until no round follows. Raises `Ended` then, and whatever a method of the agent raises."""
        self._form(self._agent._initialize_workers)
        while True:
            self._turn()

    def _form(self, form: Callable[[WorkerGroup], None]) -> None:
        self._course.form()
        form(self._group)
        self._course.be_started(self._group)
        self._plan_look()

    def _plan_look(self) -> None:
        interval_s = max(self._group.spec.monitor_interval, self._agent._least_interval_s)
        self._looks_at = self._course.now() + interval_s

    def _turn(self) -> None:
        # Workers that have ended or were stopped are not looked at: what follows is for the other nodes to say, too.
        is_idle = self._course.last is not None or not self._course.has_round
        command = self._course.wait(None if is_idle else self._looks_at)
        if isinstance(command, StartWorkers):
            self._course.give_back(command)
            self._form(self._agent._initialize_workers)
        elif isinstance(command, StopWorkers):
            self._obey()
        elif not is_idle:
            self._plan_look()
            self._look()

    def _obey(self) -> None:
        agent = self._agent
        if self._course.sequel() is Sequel.ROUND:
            self._form(agent._restart_workers)
            return
        called(agent._stop_workers, self._group)
        self._group.state = WorkerState.FAILED if self._group.state in BAD else WorkerState.STOPPED
        self._course.be_stopped()

    def _look(self) -> None:
        agent, group, course = self._agent, self._group, self._course
        with course.looking():
            result = monitored(agent, group)
        state = WorkerState(result.state)  # a subclass may still have torch's class, or a text
        group.state = state
        agent._record_state(state)
        if state is WorkerState.SUCCEEDED:
            course.succeeded(result)
            agent._exit_barrier()
            course.retire()
        elif state in BAD:
            _logger.info("[%s] the workers are %s", group.spec.role, state.name)
            failures = failures_of(result, group)
            self._record_hangs(failures)
            course.failed(failed_result(result, failures), failures)
        elif state is not WorkerState.HEALTHY:
            raise RuntimeError(f"[{group.spec.role}] the workers are {state.name}: the agent cannot go on")

    def _record_hangs(self, failures: Sequence[WorkerFailure]) -> None:
        """Record the events about workers that were ended because they were hung."""
        for failure in failures:
            if failure.cause is None:
                continue
            for name, inner in hang_events(failure.cause, failure.pid, failure.exitcode):
                event = self._agent._construct_event("RUNNING", EventSource.AGENT)
                event.name, event.metadata["metadata"] = name, inner
                record(event, self._group.spec.event_log_handler)
