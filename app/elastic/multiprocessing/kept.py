"""One start of processes on a keeper, driven by the thread that calls.

1. Only `look` listens to the keeper. So nothing happens between two calls, and no thread is needed.
2. Signals are held back while the keeper is talked to. If another exception comes in between, for example
   KeyboardInterrupt, a message may be lost. Then the keeper is not trusted any more: the stop ends it, and with it the
   processes, at once.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reknit.adapters.keeper.protocol.wire import Process, StartProcesses
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.worker_words import WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.workers import WorkerFailure

from .logger import logger
from .shared import SharedKeeper
from .signals import holding_back

if TYPE_CHECKING:
    from reknit.adapters.keeper.client.function_workers import Function
    from reknit.adapters.keeper.client.keeper_client import KeeperClient

_START_S = 180.0
"""Time for the keeper to start all processes. A fork server, which the keeper waits for, may take 120 s. Seconds."""
_ANSWER_S = 30.0
"""Time between the end of a grace and the keeper's answer, at most. Seconds."""
_HURRIED_S = 5.0
"""The grace that is left when a signal comes during a stop. A second signal leaves none. Seconds."""
_FLUSH_S = 5.0
"""Time for the last output to reach the console. Seconds."""
_KILLED = -signal.SIGKILL


class KeptProcesses:
    """`processes` on one keeper. Started once."""

    def __init__(self, shared: SharedKeeper, start_method: str | None = None, *, owns: bool) -> None:
        """`start_method`: how functions are started. None: the processes are programs.
        `owns`: `let_go` closes the keeper."""
        self._shared = shared
        self._start_method = start_method
        self.owns = owns
        self.grace_s = shared.grace_s
        """Time that processes get to end when another one has failed. Seconds."""
        self._keeper: KeeperClient | None = None
        self._round = -1
        self._ranks: frozenset[int] = frozenset()
        self._is_started = False
        self._is_stopped = False
        self._is_torn = False
        """A call to the keeper's client was not finished."""
        self.pids: dict[int, int] = {}
        """By local rank."""
        self.exited: dict[int, int] = {}
        """By local rank: the exit codes of processes that ended by themselves, in the order in which they were seen."""
        self.failures: dict[int, WorkerFailure] = {}
        """By local rank: what the keeper tells of those that failed by themselves."""
        self.ended: dict[int, int] = {}
        """By local rank, after a stop: the exit codes of processes that the stop has ended."""

    @property
    def was_started(self) -> bool:
        return self._round >= 0

    @property
    def is_running(self) -> bool:
        return self._keeper is not None and not self._is_stopped

    def start(self, processes: Sequence[Process], functions: Mapping[int, Function] | None = None) -> None:
        """Start all, and wait until they run. Raises `OSError` for a program that cannot be started, and `CannotStart`
        if no keeper can be started."""
        if self.was_started:
            raise ValueError("these processes were started already")
        self._ranks = frozenset(process.local_rank for process in processes)
        if self._shared.user is not None and self._shared.user.is_running:
            raise RuntimeError("other processes run on this keeper already")
        self._shared.user = self
        with holding_back():
            keeper = self._shared.keeper(self._start_method)
            number = self._shared.next_round()
            try:
                keeper.start(StartProcesses(number, tuple(processes)), functions or {})
            except ValueError:
                raise  # a function that cannot be a worker: nothing was said to the keeper
            except BaseException:
                self._shared.end()
                raise
            self._keeper, self._round = keeper, number
        give_up = self._shared.clock.now() + _START_S
        # A process that could not be started has no pid, and its failure comes a moment later.
        while not (self.failures or (self._is_started and self.pids.keys() >= self._ranks)):
            self.look(give_up - self._shared.clock.now())
            self.pids = dict(keeper.pids(self._round))
            if self._shared.clock.now() >= give_up:
                raise TimeoutError(f"the keeper has not started the processes within {_START_S:g} s")
        for rank, failure in self.failures.items():
            if rank not in self.pids and failure.exitcode > 0:  # a function may have ended already
                raise _not_started(failure)

    def look(self, wait_s: float) -> None:
        """Take what the keeper has to say. If it has nothing to say, wait for it, for so many seconds at most."""
        keeper = self._keeper
        if keeper is None or self._is_stopped:
            return
        self._shared.check_owner()
        clock = self._shared.clock
        with holding_back(clock.wake):
            until = clock.now() + max(0.0, wait_s)
            clock.wait(until if keeper.wakes_at is None else min(until, keeper.wakes_at))
            self._is_torn = True
            for event in keeper.events(clock.now()):
                self._take(event)
            self._is_torn = False

    def _take(self, event: Event) -> None:
        match event:
            case WorkersStarted(round=number) if number == self._round:
                self._is_started = True
            case WorkersExited(round=number, exits=exits) if number == self._round:
                for exit_ in exits:
                    self.exited[exit_.local_rank] = exit_.failure.exitcode if exit_.failure else 0
                    if exit_.failure:
                        self.failures[exit_.local_rank] = exit_.failure
            case WorkersStopped(round=number, stuck=stuck) if number == self._round:
                self._be_stopped()
                if stuck:
                    logger().error("these processes survive SIGKILL: %s", ", ".join(map(str, stuck)))

    def _be_stopped(self) -> None:
        self._is_stopped = True
        told = self._keeper.told.exitcodes(self._round) if self._keeper is not None else {}
        for rank in sorted(self._ranks - self.exited.keys()):
            self.ended[rank] = told.get(rank, _KILLED)

    @property
    def values(self) -> dict[int, Any]:
        """What the functions returned, by local rank, when all have succeeded."""
        return {} if self._keeper is None else dict(self._keeper.values(self._round))

    def stop(self, signum: int, grace_s: float) -> None:
        """End all processes: `signum`, then SIGKILL after `grace_s` seconds. Returns when none is left. May be
        repeated.

        The first signal that comes meanwhile shortens the grace to five seconds, the second one to none.
        """
        if not self.is_running:
            return
        clock = self._shared.clock
        with holding_back(clock.wake) as signals:
            seen = signals()
            give_up = self._tell(signum, grace_s)
            while not (self._is_stopped or self._is_torn or clock.now() >= give_up):
                self.look(give_up - clock.now())
                if signals() > seen:
                    give_up = min(give_up, self._tell(signum, _HURRIED_S if signals() == 1 else 0.0))
                    seen = signals()
            if not self._is_stopped:
                self._shared.end()  # the keeper does not answer, or cannot be trusted
                self._be_stopped()
            elif not self.owns and self._keeper is not None:
                self._keeper.flush(_FLUSH_S)

    def _tell(self, signum: int, grace_s: float) -> float:
        """Give the order. Returns when the answer must have come."""
        if self._keeper is not None and not self._is_torn:
            self._keeper.stop(StopWorkers(self._round, signum, grace_s, SignalReceived(signum)))
        return self._shared.clock.now() + grace_s + _ANSWER_S

    def let_go(self) -> None:
        """End what still runs, at once. May be repeated."""
        if self.owns:
            self._shared.close()
        elif self.is_running:
            self.stop(signal.SIGKILL, 0.0)


def _not_started(failure: WorkerFailure) -> OSError:
    number = {127: errno.ENOENT, 126: errno.EACCES}.get(failure.exitcode)
    return OSError(failure.message) if number is None else OSError(number, failure.message)
