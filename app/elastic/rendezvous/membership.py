"""reknit's rendezvous for plain torchrun: the membership of one node whose workers torchrun holds.

    torchrun's thread                                    the agent's thread
      next_rendezvous()   the last round's workers ended   << WorkersExited (unless they were to stop), WorkersStopped
                          waits                            >> StartWorkers: ranks, and the port of the round's store
      num_nodes_waiting() 1: stop the workers              >> StopWorkers: the round is over
      the exit barrier    the workers have succeeded       << WorkersExited, all with 0
      shutdown()          the job ends for all             Aborted, unless the workers have succeeded

1. torchrun starts, watches and ends the workers, and has a budget for each node. The core decides who is in a round.
2. `next_rendezvous` without an order to stop means that workers have failed. Why is not known here.
3. Each round has a store of its own, in the process of group rank 0, on the port that this node has reserved.
4. torchrun tells a success from a failure by one thing only: it enters its exit barrier, by `add` on the round's store.
5. This node beats only while torchrun calls, waits in a call, or waits in its exit barrier. After a signal torchrun
   calls nothing, and ends its workers within their grace.
6. torch's errors and objects are used here, so torch is loaded. This module is imported only for torchrun.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from signal import SIGKILL, SIGTERM
from typing import Any

from attrs import evolve
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from reknit.adapters.elastic.hooked_workers import HookedWorkers
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.ports import CannotStart
from reknit.app.python.session import Session
from reknit.app.settings import Settings
from reknit.app.wiring.surroundings import Prevented, Wired
from reknit.core.agent import reasons as own
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command, StopWorkers
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job import reasons
from reknit.core.job.job import Gathering
from reknit.core.job.workers import Assignment, WorkerFailure
from reknit.core.text.describe import reason_text
from reknit.elastic.utils.logging import get_logger

from .line import RendezvousLink
from .meeting_handler import MeetingHandler

_MANY = 10**9
"""Restarts of the job. torchrun has a budget for each node, and the job has none."""
_EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""torch's agents use this key in the store of a round, and only when their workers have succeeded."""
_STORE_S = 60.0
"""How long an agent waits for the store of a round, and for a key in it. Seconds."""
_PAUSE_S = 0.05
_ABORT_S = 60.0
"""How long a node that ends the job waits for the others to leave. Their agents may give workers a grace of 30 s."""
_SETTLED_S = 2.0
"""How long a node that has succeeded waits for the journal to show that all others have, too. Seconds."""
_GOODBYE_S = 5.0
"""How long the end of the process may wait for a goodbye. Seconds."""
_MARGIN_S = 10.0
logger = get_logger("torch.distributed.elastic.rendezvous.reknit")
"""A name under torch's, so that the lines appear in torchrun's own log (LOGLEVEL=INFO)."""


class Membership:
    """This node in the job. Its methods are torch's, and are for the thread that runs torchrun's agent."""

    def __init__(self, handler: MeetingHandler, notices: Sequence[str]) -> None:
        """Joins the job. May wait some seconds for the store. Raises `RendezvousConnectionError`.

        `notices`: lines that the user should see once."""
        self._owner = os.getpid()
        self._changed = threading.Event()
        self._round: StartWorkers | None = None
        """The round that torchrun was told of. None: there is none."""
        self._is_over = False
        """Its workers are to be stopped."""
        self._had_round = False
        self.has_succeeded = False
        """torchrun's workers have succeeded. It asks for no further round."""
        self._calls = 0
        self._called_at = time.monotonic()
        self._patience_s = _patience_s()
        self._hooked: HookedWorkers
        self._line: RendezvousLink
        self._store: Any = None
        for notice in notices:
            logger.warning("%s", notice)
        try:
            self._running = Session(
                _settings(handler),
                say=_say,
                observers=[self._observe],
                workers=self._open,
                rewire=self._rewire,
                on_end=self._changed.set,
            )
            self._running.start()
        except (Prevented, CannotStart) as error:
            raise RendezvousConnectionError(str(error)) from error
        atexit.register(self._say_goodbye)

    def _open(self, clock: SystemClock, nonce: str, mark: str) -> HookedWorkers:
        self._hooked = HookedWorkers(clock, nonce, news=self._changed.set)
        return self._hooked

    def _rewire(self, wired: Wired) -> None:
        self._line = RendezvousLink(wired.ports.link, self, wired.ports.clock.wake)
        wired.ports = evolve(wired.ports, link=self._line)

    @property
    def _agent(self) -> Agent:
        return self._running.loop.agent

    # ---- torch's RendezvousHandler ----

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Raises torch's errors."""
        with self._call():
            self._end_round()
            while True:
                command = self._next_start()
                store = self._open_store(command.assignment)
                if store is not None:
                    break
                self._end_round()
            self._store = store
            self._hooked.report_started(command.round)
            made = command.assignment
            bootstrap = RendezvousStoreInfo(made.master_addr, made.master_port)
            shown = _RoundStore(f"reknit/{command.round}", store, self._enter_exit_barrier)
            return RendezvousInfo(shown, made.group_rank, made.group_world_size, bootstrap)

    def num_nodes_waiting(self) -> int:
        """1: the workers of the round are to be stopped, for whatever reason. 0: they may run on."""
        with self._call():
            if self.has_succeeded:
                return 0
            self._take_stop()
            return int(self._is_over or self._why_ended() is not None)

    def is_closed(self) -> bool:
        """The job has ended."""
        return self._why_ended() is not None

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self._line.abort(f"node {self._agent.me} has closed the rendezvous")

    def shutdown(self) -> bool:
        """Leave. Unless the workers have succeeded, the job ends for all nodes. False: that could not be said."""
        with self._call():
            if not self.has_succeeded:
                self._line.abort(f"torchrun has ended on node {self._agent.me}")
            self._hooked.dismiss()
            try:
                result = self._running.join(_SETTLED_S if self.has_succeeded else _ABORT_S)
                if result is None and self.has_succeeded:
                    # Other nodes still work. If this node hosts the store, it stays as long as they live.
                    self._running.leave(SIGTERM)
                    result = self._running.join()
            except Exception:
                logger.exception("the agent has failed")
                result = None
            self._close()
        return result is not None

    # ---- rounds ----

    def _next_start(self) -> StartWorkers:
        """Wait for a round. Raises torch's errors."""
        while True:
            self._changed.clear()
            command = self._hooked.taken()
            if isinstance(command, StartWorkers):
                self._round, self._is_over, self._had_round = command, False, True
                return command
            if command is None:
                why = self._why_ended()
                if why is not None:
                    raise self._error(why)
                self._changed.wait()

    def _take_stop(self) -> None:
        """See whether the workers of the round are to be stopped."""
        command = self._hooked.taken() if self._round is not None else None
        if isinstance(command, StopWorkers):
            self._is_over = True
            logger.info("round %s is over: %s", command.round, _told(reason_text(command.why)))

    def _end_round(self) -> None:
        """No worker of the last round runs any more. If they were not to be stopped, they have failed."""
        self._take_stop()
        round_, self._round, self._store = self._round, None, None
        if round_ is None:
            return
        if not self._is_over:
            rank = round_.assignment.group_rank
            what = "workers of torchrun have failed, and its output says how"
            failure = WorkerFailure(0, rank, 1, message=what)
            self._hooked.report_failures(round_.round, (failure,))
        self._hooked.report_stopped(round_.round)

    def _open_store(self, made: Assignment) -> Any:
        """The store of the round. None: the round is over before its store was reached. Raises
        `RendezvousConnectionError`."""
        timeout = timedelta(seconds=_STORE_S)
        if made.group_rank == 0:
            # torch's server binds the reserved port, see `Reservation`.
            return TCPStore("localhost", made.master_port, is_master=True, timeout=timeout, wait_for_workers=False)
        give_up = time.monotonic() + _STORE_S
        while not _is_served(made.master_addr, made.master_port):
            self._take_stop()
            if self._is_over or self._why_ended() is not None:
                return None
            if time.monotonic() > give_up:
                where = f"{made.master_addr}:{made.master_port}"
                raise RendezvousConnectionError(f"the store of round {made.round} at {where} cannot be reached")
            time.sleep(_PAUSE_S)
        return TCPStore(made.master_addr, made.master_port, is_master=False, timeout=timeout, wait_for_workers=False)

    def _enter_exit_barrier(self) -> None:
        if self._round is not None and not self.has_succeeded:
            self.has_succeeded = True
            self._hooked.report_success(self._round.round, 1)

    def _observe(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if self.has_succeeded and isinstance(after.job.phase, Gathering) and after.causes.request is None:
            self._running.leave(SIGTERM)  # another node has failed, and waits for this one
        if (after.causes.outcome, after.causes.unable) != (before.causes.outcome, before.causes.unable):
            self._changed.set()

    # ---- the end ----

    def _why_ended(self) -> own.RunEnd | None:
        """Why no round follows. None: one may. The agent may stay for others, if it hosts the store. Raises what the
        agent's thread has raised."""
        self._running.join(0.0)
        agent = self._agent
        if agent.result is not None:
            return agent.result.why
        causes = agent.causes
        return causes.outcome.why if causes.outcome is not None else causes.unable

    def _error(self, why: own.RunEnd) -> RendezvousError:
        text = _told(reason_text(why))
        match why:
            case reasons.TooFewNodes():
                return RendezvousTimeoutError(text)
            case own.StoreLost() | own.JournalRefused():
                return RendezvousConnectionError(text)
            case own.TermsDiffer() | own.Replaced():
                return RendezvousStateError(text)
            case reasons.AllSucceeded() if not self._had_round:
                return RendezvousGracefulExitError("the job has succeeded without this node")
            case _:
                return RendezvousClosedError(text)

    def _say_goodbye(self) -> None:
        """At the end of the process: torchrun has ended its workers, and has not called `shutdown`, as after a signal.

        A node that hosts the store says nothing. After a goodbye the others would stop good workers to regroup, and
        there is no store left to regroup in."""
        if os.getpid() != self._owner:
            return  # a forked child
        self._hooked.dismiss()
        self._running.leave(SIGKILL if self._agent.spec.hosts_journal else SIGTERM)
        self._running.join(_GOODBYE_S)
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._say_goodbye)
        self._store = None
        self._running.close()

    # ---- whether torchrun lives ----

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._called_at = time.monotonic()

    def is_silent(self) -> bool:
        """torchrun does not call any more: its workers are ending, and nobody will start others."""
        is_busy = self._calls or self.has_succeeded
        return not is_busy and time.monotonic() - self._called_at > self._patience_s


class _RoundStore(PrefixStore):  # type: ignore[misc]  # torch's class has no types
    """The store of one round. Tells when torchrun's agent enters its exit barrier."""

    def __init__(self, prefix: str, store: Any, on_exit_barrier: Callable[[], None]) -> None:
        super().__init__(prefix, store)
        self._on_exit_barrier = on_exit_barrier

    def add(self, key: str, amount: int) -> int:
        if key.startswith(_EXIT_BARRIER):
            self._on_exit_barrier()
        return int(super().add(key, amount))


def _say(line: str) -> None:
    logger.info("%s", _told(line))


def _told(line: str) -> str:
    """The line without what is not true here. For the core, a torchrun is one worker, whose rank is the group rank, and
    the job has a budget."""
    line = re.sub(rf" of {_MANY}|, \d+ workers?(?=, master )", "", line)
    return re.sub(r"\brank (\d+) on (node \S+) failed: exit code 1, ", r"\2 (group rank \1): ", line)


def _settings(handler: MeetingHandler) -> Settings:
    terms = handler.terms(_MANY)
    if terms.fence_s is not None:
        raise ValueError("fence_after: torchrun holds the workers, so reknit cannot kill them")
    return Settings(
        command=("torchrun",),
        terms=terms,
        meeting=handler.meeting(),
        run_id=handler.get_run_id() or os.urandom(8).hex(),
        node_id=handler.node_id,
        address=handler.address,
        rank_hint=handler.rank_hint,
        store_timeout_s=handler.store_timeout_s,
        # torchrun sees the end of a round at its next call, and tells at the call after that one that its workers have
        # ended. Earlier the core must not take it for hung. A torchrun that does not call falls silent by itself.
        grace_s=2 * _patience_s(),
    )


def _patience_s() -> float:
    """The longest time between two calls of a torchrun that lives. Seconds."""
    return _grace_s() + _MARGIN_S


def _grace_s() -> float:
    """The longest time in which torchrun calls nothing because it ends its workers. Seconds. Between two rounds it
    always gives them 30 s."""
    try:
        return max(30.0, float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
    except ValueError:
        return 30.0


def _is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
