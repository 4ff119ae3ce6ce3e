"""One run of an agent: its loop in a thread of its own, and the commands that come from there.

All judgement is the core's. An `AgentRun` hands its commands to the thread that called `run()`, and what that thread
reports to the core.

1. One thread at a time uses an `AgentRun`: the one that called `run()`, except that it is made and closed in a thread
   of its own, where no handler of a signal can break that off (`sheltered`).
2. The thread waits for a command, for the end of the loop, and, while it looks at workers, for news of them.
3. An `AgentRun` is closed after the workers have ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.adapters.elastic.foreign_rendezvous import ForeignRendezvous
from reknit.adapters.elastic.hooked_workers import HookedWorkers
from reknit.adapters.runtime.clock import SystemClock
from reknit.app.input.readers import HEALTH_CHECK_PORT
from reknit.app.python.session import Session
from reknit.app.settings import Settings
from reknit.app.wiring.surroundings import Wired
from reknit.core.agent.commands import Result, StopWorkers
from reknit.core.agent.lifecycle import sequel
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.job.restart import Sequel
from reknit.core.job.workers import Assignment, WorkerFailure
from reknit.elastic.events.agents import rendezvous_observers
from reknit.elastic.multiprocessing.signals import holding_back
from reknit.elastic.rendezvous.meeting_handler import MeetingHandler
from reknit.elastic.utils.logging import get_logger

from .group import RunResult, WorkerGroup, WorkerSpec
from .ranks import Place, assignment_of, place_at, place_of
from .results import is_graceful_exit

if TYPE_CHECKING:
    from reknit.adapters.observe.http import Page
    from reknit.adapters.observe.metrics import Processes
    from reknit.adapters.observe.pages import RoundTrips

_FAREWELL_S = 15.0
"""Time for the agent to say goodbye to the others. The store may not answer. Seconds."""
_REPORT_S = 1.0
"""How long a node that leaves waits until the loop has taken what was reported before. Seconds."""
_HURRY_S = 5.0
"""Time for an agent that hosts the store to wait for the others, after the exit barrier. Seconds."""

_logger = get_logger(__name__)


def _none() -> tuple[int, Mapping[int, int]]:
    """No workers are known."""
    return 0, {}


class Ended(BaseException):
    """No round follows on this node. It is raised through methods that people override, so it is no `Exception`."""


def settings_of(spec: WorkerSpec, grace_s: float) -> Settings:
    """What the core needs of a spec. `grace_s`: the time that workers get to end. Raises `ValueError` for nonsense.

    An agent with a handler of torch is alone in a private journal: see `foreign_rendezvous.py`."""
    handler = spec.rdzv_handler
    common: dict[str, Any] = {
        "command": (spec.get_entrypoint_name() or "worker",),
        "local_world_size": spec.local_world_size,
        "role": spec.role,
        "address": spec.local_addr or "",
        "grace_s": float(grace_s),
    }
    if handler is None:
        return Settings(terms=Terms(restarts=RestartPolicy(max_restarts=spec.max_restarts)), **common)
    if not isinstance(handler, MeetingHandler):
        return Settings(run_id=str(handler.get_run_id()) or os.urandom(8).hex(), **common)
    meeting, run_id = handler.meeting(), handler.get_run_id()
    return Settings(
        terms=handler.terms(spec.max_restarts),
        meeting=meeting,
        run_id=run_id or os.urandom(8).hex(),
        node_id=handler.node_id,
        rank_hint=handler.rank_hint,
        store_timeout_s=handler.store_timeout_s,
        **{**common, "address": common["address"] or handler.address},
    )


def _master_port(spec: WorkerSpec, settings: Settings) -> int:
    """The bootstrap port of every round. 0: another free port for each round.

    With `static`, a launcher gives the port at which the nodes meet. Here the agents' store listens there, and each
    round has a store of its own."""
    taken = () if settings.meeting is None else [port for _, port in settings.meeting.endpoints]
    return 0 if spec.master_port in taken else spec.master_port or 0


def _foreign(spec: WorkerSpec) -> ForeignRendezvous | None:
    """What calls a handler of torch. None: the handler is reknit's own, or there is none."""
    handler = spec.rdzv_handler
    if handler is None or isinstance(handler, MeetingHandler):
        return None
    return ForeignRendezvous(handler, spec.max_restarts, poll_s=spec.monitor_interval)


class AgentRun:
    """One run of an agent. The agent's loop runs from the start."""

    def __init__(
        self, spec: WorkerSpec, grace_s: float, prepare: Callable[[str], SystemClock | None], limit: int | None = None
    ) -> None:
        """`grace_s`: the time that workers get to end. `limit`: number of failures of its workers that this node bears.
        None: it bears what the job bears.

        `prepare`: called once, while this process has no thread of the run yet, with the text that every worker is
        to carry in its environment (`orphans.MARK`). Returns a clock that news of workers wakes, for `wait` to wait in.
        The caller closes that clock, after the run. None: there is no such clock.

        May wait some seconds for the store. Raises `ValueError`, `Prevented` and `CannotStart`, and what `prepare`
        raises."""
        settings = settings_of(spec, grace_s)
        self._owner = os.getpid()
        self._clock = SystemClock()
        self._workers_clock: SystemClock | None = None
        self._master_port = _master_port(spec, settings)
        self._has_ended = False
        self._hooked: HookedWorkers
        self._round: StartWorkers | None = None
        """The round that is formed or runs. None: it was stopped, or there was none."""
        self._is_formed = False
        """`next_round` has returned the round that is being formed, or that runs."""
        self._spec = spec
        self._settings = settings
        self._foreign = _foreign(spec)
        self.run_id = settings.run_id
        self.pages: Mapping[str, Page] = {}
        """What a health check server can show of this run. Empty unless TORCHELASTIC_HEALTH_CHECK_PORT is set."""
        self.round_trips: RoundTrips | None = None
        """Whether the agent's loop lives. None unless that variable is set."""
        self.processes: Processes = _none
        """The workers that a health check server looks at. A subclass of the agent may know them."""
        self.restarts_left = spec.max_restarts
        """Failures that this node still bears, as they were counted when its last round began."""
        self.last: RunResult | None = None
        """The end of this node's workers in the present round. None: they run."""
        try:
            self._running = Session(
                settings,
                say=_logger.info,
                observers=[] if self._foreign else rendezvous_observers(settings.run_id, spec.event_log_handler),
                workers=partial(self._open, prepare, limit),
                rewire=self._rewire,
                on_end=self._end,
            )
            self._running.start()
        except BaseException:
            self._clock.close()
            raise

    def _open(
        self, prepare: Callable[[str], SystemClock | None], limit: int | None, clock: SystemClock, nonce: str, mark: str
    ) -> HookedWorkers:
        self._workers_clock = prepare(mark)
        self._hooked = HookedWorkers(clock, nonce, news=self._wake, master_port=self._master_port)
        if limit is not None:
            self.limit_restarts(limit)
        return self._hooked

    def _rewire(self, wired: Wired) -> None:
        if self._foreign is not None:
            self._foreign.rewire(wired)
        if os.environ.get(HEALTH_CHECK_PORT):
            from reknit.app.wiring.health import TIMEOUT_S, observe

            self.pages, self.round_trips = observe(wired, TIMEOUT_S, self.run_id, self._held)

    def looking(self) -> AbstractContextManager[None]:
        """A context: the workers are looked at. A look that does not return shows a supervisor that the agent hangs."""
        return nullcontext() if self.round_trips is None else self.round_trips.calling()

    def _held(self) -> tuple[int, Mapping[int, int]]:
        return self.processes()

    def _end(self) -> None:
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._clock.wake()
        if self._workers_clock is not None:
            self._workers_clock.wake()

    @property
    def has_round(self) -> bool:
        """A round was begun on this node, and its workers were not stopped yet."""
        return self._round is not None

    @property
    def assignment(self) -> Assignment:
        """The ranks of this node in the present round."""
        if self._round is None:
            raise AssertionError("there is no round")
        return self._round.assignment

    # ---- commands ----

    def wait(self, until: float | None = None) -> StartWorkers | StopWorkers | None:
        """The next command. Raises `Ended`.

        `until`: None waits for a command alone. A time waits for news of workers as well, and returns None then, or
        when that time has come.
        """
        while (command := self._taken()) is None:
            if until is None:
                self._pause(self._clock, None)
            elif self.now() >= until:
                return None
            else:
                self._pause(self._workers_clock or self._clock, until)
                return self._taken()
        return command

    def _pause(self, clock: SystemClock, until: float | None) -> None:
        """Wait for news. A signal ends the wait, and is raised when the clock is left."""
        with holding_back(clock.wake):
            clock.wait(until)

    def _taken(self) -> StartWorkers | StopWorkers | None:
        command = self._hooked.taken()
        if command is None and self._has_ended:
            raise Ended
        return command

    def now(self) -> float:
        return self._clock.now()

    def next_place(self) -> Place:
        """The place of this node in the next round. See `next_round`."""
        assignment = self.next_round()
        return place_of(assignment) if self._foreign is None else place_at(self._foreign.info, self._spec)

    def next_round(self) -> Assignment:
        """Report that the workers of the last round have ended, and wait for the next one. Raises `Ended`."""
        self.be_stopped()
        while True:
            command = self.wait()
            if isinstance(command, StartWorkers):
                self._round, self._is_formed, self.last = command, True, None
                self.restarts_left = self._running.loop.agent.restarts_left
                if not self._is_stopped_already():
                    return command.assignment
                self.be_stopped()

    def _is_stopped_already(self) -> bool:
        """The round that was to be started is over."""
        command = self._hooked.taken()
        if command is not None:
            self._hooked.put_back(command)
        return isinstance(command, StopWorkers)

    def form(self) -> None:
        """Another round is going to be formed."""
        self._is_formed = False

    def be_in_round(self) -> None:
        """Call `next_round` if nobody has since `form`: whoever did the rendezvous did it without the core. Raises
        `Ended`."""
        if not self._is_formed:
            self.next_round()

    def give_back(self, command: StartWorkers) -> None:
        """Let `next_round` find this command."""
        self._hooked.put_back(command)

    def sequel(self) -> Sequel:
        """What follows the stop that was commanded, as far as the core knows."""
        return sequel(self._running.loop.agent)

    # ---- reports ----

    def be_started(self, group: WorkerGroup) -> None:
        """The workers of the round run, with the ranks in `group`. Raises `Ended` as `be_in_round` does."""
        self.be_in_round()
        asked = self.assignment
        made = assignment_of(group, round_=asked.round, restart_count=asked.restart_count) if group.workers else asked
        self._hooked.report_started(asked.round, made if made != asked else None)
        if self._foreign is not None:
            self._foreign.be_started()

    def be_stopped(self) -> None:
        """No worker of the round runs any more."""
        if self._round is not None:
            self._hooked.report_stopped(self._round.round)
            self._round = None

    def succeeded(self, result: RunResult) -> None:
        """All workers of the round have succeeded."""
        self.last = result
        if self._round is not None:
            self._hooked.report_success(self._round.round, self._settings.local_world_size)

    def failed(self, result: RunResult, failures: tuple[WorkerFailure, ...]) -> None:
        """Workers of the round have failed."""
        self.last = result
        if self._round is not None:
            self._hooked.report_failures(self._round.round, failures)

    def limit_restarts(self, left: int) -> None:
        """The program bears only `left` more failures of its workers. 0 or less: the node leaves after the next one."""
        self._hooked.report_limit(left)
        self.restarts_left = left

    # ---- the end ----

    def stay(self, timeout_s: float) -> bool:
        """Wait until the job has ended, or another round begins. False: neither is so after `timeout_s` seconds."""
        until = self.now() + timeout_s
        while not (self._has_ended or self._hooked.has_start()):
            if self.now() >= until:
                return False
            self._pause(self._clock, until)
        return True

    def leave(self, signum: int = signal.SIGTERM) -> None:
        """Tell the others that this node leaves. The workers may still run."""
        # If they have just succeeded, the core must hear that first. Otherwise the node would leave without its
        # `Succeeded`, and the others would start another round.
        if not self._has_ended:
            self._hooked.await_told(_REPORT_S)
        self._running.leave(signum)

    def retire(self) -> None:
        """Leave after the workers of this node have succeeded, whether or not the others have. Raises `Ended` if that
        was done."""
        if self._hooked.has_start():
            return
        self.leave()
        self._hooked.dismiss()
        if self._running.join(_HURRY_S) is None:
            self.leave(signal.SIGKILL)  # this node hosts the store, and others use it
            self._running.join(_FAREWELL_S)
        raise Ended

    def result(self) -> Result | None:
        """How the agent has ended. None: it was told to leave after its workers had succeeded, and does not end in
        time. Raises what the loop has raised, and what a handler of torch has raised."""
        error = None if self._foreign is None else self._foreign.error
        if error is not None and not is_graceful_exit(error):
            try:
                raise error
            finally:
                del error  # its traceback holds this call, which would hold the error, and with it the agent
        return self._running.join(_FAREWELL_S)

    def close(self) -> None:
        """Say goodbye if the job goes on without this node, and let go of everything. No worker may run. Bounded in
        time. May be repeated, and does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        try:
            if not self._has_ended:
                self.leave()  # first: a node whose workers are gone would join the next round
                self._hooked.dismiss()
                self.be_stopped()
                self._running.join(_FAREWELL_S)
        finally:
            self._running.close()
            self._clock.close()
            self.last = None  # failures hold on to the files of the workers
            self.processes = _none  # a program may keep its server, and this would hold on to the agent
