"""One run of an agent: its loop in a thread of its own, and the commands that come from there.

All judgement is the core's. A course hands its commands to the thread that called `run()`, and what that thread reports
to the core.

1. Only the thread that made a course uses it.
2. The thread waits in the clock `news`, which is woken by a command, by the end of the loop, and by whatever else the
   agent watches with it.
3. A course is closed after the workers have ended.
"""

from __future__ import annotations

import os
import signal
from typing import Any, Protocol, runtime_checkable

from reknit.adapters.clock import Clock
from reknit.app.launch import Running
from reknit.app.settings import Meeting, Settings
from reknit.core.agent.commands import Result, StartWorkers, StopWorkers
from reknit.core.agent.states import WorkerState as CoreState
from reknit.core.job.entries import RestartPolicy, Terms, WorkerFailure
from reknit.core.job.ranks import Assignment
from reknit.core.job.reasons import AllSucceeded, WorkerFailed

from ...utils.logging import get_logger
from .group import RunResult, WorkerSpec
from .hooked import HookedWorkers
from .ranks import Place, place_of

_FAREWELL_S = 15.0
"""Time for the agent to say goodbye to the others. The store may not answer. Seconds."""
_HURRY_S = 5.0
"""Time for an agent that hosts the store to wait for the others, after the exit barrier. Seconds."""

_logger = get_logger(__name__)


class Ended(BaseException):
    """No round follows on this node. It is raised through methods that people override, so it is no `Exception`."""


@runtime_checkable
class MeetingHandler(Protocol):
    """A rendezvous handler of reknit's own: it knows where the nodes meet, and on which terms."""

    @property
    def node_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def rank_hint(self) -> int | None: ...
    @property
    def store_timeout_s(self) -> float: ...
    def meeting(self) -> Meeting | None: ...
    def terms(self, max_restarts: int = 0) -> Terms: ...
    def get_run_id(self) -> str: ...


def settings_of(spec: WorkerSpec, grace_s: float) -> Settings:
    """What the core needs of a spec. `grace_s`: the time that workers get to end. Raises `TypeError` for a handler that
    is none of reknit's own, and `ValueError` for nonsense."""
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
        raise TypeError(
            f"WorkerSpec.rdzv_handler must come from reknit.elastic.rendezvous, or be None, not {handler!r:.100}"
        )
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


class Course:
    """One run of an agent. The agent's loop runs from the start."""

    def __init__(self, settings: Settings, news: Clock | None, *, master_port: int = 0) -> None:
        """`news`: the clock in which the calling thread waits. None: the course makes one, and closes it.
        `master_port`: the bootstrap port of every round. 0: another free port for each round. May wait some seconds for
        the store. Raises `Prevented`, `CannotStart`."""
        self._owner = os.getpid()
        self._news = news if news is not None else Clock()
        self._own_clock = self._news if news is None else None
        self._master_port = master_port
        self._has_ended = False
        self._hooked: HookedWorkers
        self._round: StartWorkers | None = None
        """The round that is formed or runs. None: it was stopped, or there was none."""
        self._is_up = False
        """Its workers were started."""
        self._settings = settings
        self.run_id = settings.run_id
        self.last: RunResult | None = None
        """The end of this node's workers in the present round. None: they run."""
        try:
            self._running = Running(settings, say=_logger.info, workers=self._open, on_end=self._end)
            self._running.start()
        except BaseException:
            self._close_clock()
            raise

    def _open(self, clock: Clock, nonce: str, mark: str) -> HookedWorkers:
        self._hooked = HookedWorkers(clock, nonce, mark, news=self._news.wake, master_port=self._master_port)
        return self._hooked

    def _end(self) -> None:
        self._has_ended = True
        self._news.wake()

    @property
    def mark(self) -> str:
        """The text that every worker carries in its environment (`orphans.MARK`)."""
        return self._hooked.mark

    @property
    def assignment(self) -> Assignment:
        """The ranks of this node in the present round."""
        if self._round is None:
            raise AssertionError("there is no round")
        return self._round.assignment

    # ---- commands ----

    def wait(self, until: float | None) -> StartWorkers | StopWorkers | None:
        """The next command. None: there is news of another kind, or the time `until` has come. Raises `Ended`."""
        command = self._taken()
        if command is None and (until is None or self._news.now() < until):
            self._news.wait(until)
            command = self._taken()
        return command

    def _taken(self) -> StartWorkers | StopWorkers | None:
        command = self._hooked.taken()
        if command is None and self._has_ended:
            raise Ended
        return command

    def now(self) -> float:
        return self._news.now()

    def next_place(self) -> Place:
        """The place of this node in the next round. See `next_round`."""
        return place_of(self.next_round())

    def next_round(self) -> Assignment:
        """Report that the workers of the last round have ended, and wait for the next one. Raises `Ended`."""
        self.be_stopped()
        while True:
            command = self.wait(None)
            if isinstance(command, StartWorkers):
                self._round, self._is_up, self.last = command, False, None
                if not self._is_stopped_already():
                    return command.assignment
                self.be_stopped()

    def _is_stopped_already(self) -> bool:
        """The round that was to be started is over."""
        command = self._hooked.taken()
        if command is not None:
            self._hooked.put_back(command)
        return isinstance(command, StopWorkers)

    def give_back(self, command: StartWorkers) -> None:
        """Let `next_round` find this command."""
        self._hooked.put_back(command)

    def will_restart(self, command: StopWorkers) -> bool:
        """Whether a round is likely to follow the one that is stopped. A wrong guess does no harm: see
        `SimpleElasticAgent`."""
        agent = self._running.loop.agent
        if agent.leaving is not None or agent.end is not None or agent.outcome is not None:
            return False
        has_budget = agent.job.spent < agent.job.terms.restarts.max_restarts
        return has_budget or not isinstance(command.why, WorkerFailed)

    # ---- reports ----

    def be_started(self) -> None:
        """The workers of the round run."""
        if self._round is None:
            self.next_round()
        if self._round is not None and not self._is_up:
            self._is_up = True
            self._hooked.report_started(self._round.round)

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

    # ---- the end ----

    def stay(self, timeout_s: float) -> bool:
        """Wait until the job has ended, or another round begins. False: neither is so after `timeout_s` seconds."""
        until = self._news.now() + timeout_s
        while not (self._has_ended or self._hooked.has_start()):
            if self._news.now() >= until:
                return False
            self._news.wait(until)
        return True

    def leave(self, signum: int = signal.SIGTERM) -> None:
        """Tell the others that this node leaves. The workers may still run."""
        self._running.leave(signum)

    def retire(self) -> None:
        """Leave after the workers of this node have succeeded, whether or not the others have. Raises `Ended` if that
        was done."""
        if self._hooked.has_start():
            return
        self._hooked.dismiss()
        self.leave()
        if self._running.join(_HURRY_S) is None:
            self.leave(signal.SIGKILL)  # this node hosts the store, and others use it
            self._running.join(_FAREWELL_S)
        raise Ended

    def result(self) -> Result:
        """How the agent has ended. Raises what the loop has raised."""
        result = self._running.join(_FAREWELL_S)
        return result if result is not None else Result(CoreState.STOPPED, AllSucceeded())

    def close(self) -> None:
        """Say goodbye if the job goes on without this node, and let go of everything. No worker may run. Bounded in
        time. May be repeated, and does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        try:
            if not self._has_ended:
                self._hooked.dismiss()
                self.be_stopped()
                self.leave()
                self._running.join(_FAREWELL_S)
        finally:
            self._running.close()
            self._close_clock()

    def _close_clock(self) -> None:
        if self._own_clock is not None:
            self._own_clock.close()
