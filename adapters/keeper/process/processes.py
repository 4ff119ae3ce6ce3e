"""The workers of this node as operating-system processes.

1. No call waits, except `end_all` and `flush`. `stop` sends a signal and returns. The rest of a stop happens in
   `events`, which the keeper calls whenever the clock wakes up, and at `wakes_at` at the latest.
2. A stop has four stages. (1) Every group gets the signal. (2) When the grace is over, every group gets SIGKILL. (3)
   When the leaders are dead, the strays are ended. (4) Everything is closed. One `WorkersStopped` answers the stop.
   Before that, a stop waits for hung workers to be looked at and ended (`watchdog.py`), and for workers that are about
   to end (`StopWorkers.await_exits_s`). It waits for nothing if it sends SIGKILL at once.
3. An exit is reported if the worker ended by itself, that is, if it was found dead before the stop's signal was sent.
4. A process that survives SIGKILL for `STUCK_AFTER_S` seconds is reported as stuck. Nothing waits for it any more.
5. `WorkersStopped` names the workers that SIGKILL has ended after a grace. Their exits are not reported.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.host.children import reap
from reknit.adapters.host.memory_kills import count
from reknit.adapters.keeper.common.bootstrap import BootstrapPorts
from reknit.adapters.keeper.common.spawn import Leader
from reknit.adapters.keeper.failures.failing import failure_of, killed, unread
from reknit.adapters.keeper.output.streams import Streams
from reknit.adapters.keeper.protocol.wire import Configure, Happened, StartProcesses, Stop, Warm, workers_of
from reknit.core.agent.worker_words import (
    MOST_AWAITED,
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)

from .launcher import Launcher
from .pauses import Pauses
from .strays import STUCK_AFTER_S, Strays

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Terminal
    from reknit.adapters.keeper.functions.forks import Forks
    from reknit.adapters.keeper.watchdog.watchdog import Hung, Watchdog
    from reknit.adapters.runtime.ports import Clock

_AT_ONCE = 0.0
_MOMENT_S = 0.05
"""Seconds between a fence and the kill. An agent that runs has stopped the workers by then, and knows why."""
_CLOSE_S = 5.0
"""Seconds that `end_all` waits for the end of the processes that it has killed."""


class _Round:
    """The workers of the present round."""

    def __init__(self, command: StartWorkers | StartProcesses, descriptors: Sequence[int]) -> None:
        """`descriptors`: the open files that came with the command. They are closed by `release`."""
        self.number = command.round
        self.command = command
        self.waiting = [*workers_of(command)]
        """The workers that are not started yet."""
        self.descriptors = [*descriptors]
        self.leaders: list[Leader] = []
        self.announced = False
        """`WorkersStarted` was reported."""
        self.exits: list[WorkerExit] = []
        """Exits that were not reported yet."""
        self.late_stop: Stop | None = None
        """A stop that waits, or has waited, for hung workers to be ended, and for workers that are about to end. None:
        there is none."""
        self.late_since = 0.0
        """When the late stop came, on the clock's time."""
        self.last_exit_at = 0.0
        """When a worker was found dead last, on the clock's time. It counts only if that was after `late_since`."""
        self.stopping = False
        self.stopped_at = 0.0
        """When the signal of the stop was sent, on the clock's time. It counts only while `stopping`."""
        self.kill_at = 0.0
        """When SIGKILL is due, on the clock's time. It counts only while `stopping`."""
        self.killed_at: float | None = None
        """When SIGKILL was sent. None: it was not sent."""
        self.overdue: list[Leader] = []
        """The workers that still lived when a grace was over, so that SIGKILL was sent. Empty if they had no grace."""

    @property
    def pids(self) -> set[int]:
        return {leader.pid for leader in self.leaders}

    def signal(self, signum: int) -> None:
        for leader in self.leaders:
            leader.signal(signum)

    def release(self) -> None:
        """No further worker is started. May be repeated."""
        self.waiting.clear()
        while self.descriptors:
            os.close(self.descriptors.pop())


class Processes:
    """The processes of this node's workers, inside the keeper."""

    def __init__(
        self,
        clock: Clock,
        wanted: Configure,
        *,
        env: Mapping[str, str],
        own_children: bool = False,
        given_back: Collection[signal.Signals] = (),
        is_abandoned: Callable[[], bool] = lambda: False,
        console: tuple[int, int] = (1, 2),
        forks: Forks | None = None,
        watchdog: Watchdog | None = None,
        terminal: Terminal | None = None,
    ) -> None:
        """`wanted`: what the workers are. Its `log_dir` must be there. A worker's files are in
        `<log_dir>/round_<round>/<local_rank>/`. Empty: there are no files.
        `env`: the environment with which that of every worker begins.
        `own_children`: True if every child of this process belongs to the job. Then strays are ended as well.
        `given_back`: signals that this process ignores and its workers do not.
        `is_abandoned`: asked between the starts of two workers. If it returns True, no further worker is started.
        `console`: the descriptors of stdout and stderr of the console.
        `forks`: the workers without a program, which are forked from this process. None: there are none.
        `watchdog`: ends hung workers. None: nobody looks for them.
        `terminal`: what the worker `wanted.terminal` has. None: there is no such worker.
        """
        self._clock = clock
        stdout, stderr = console
        self._streams = Streams(wanted.streams, env=env, stdout=stdout, stderr=stderr)
        self._launcher = Launcher(
            clock,
            self._streams,
            wanted,
            env=env,
            given_back=given_back,
            is_abandoned=is_abandoned,
            forks=forks,
            watchdog=watchdog,
            terminal=terminal,
        )
        self._is_abandoned = is_abandoned
        self._watchdog = watchdog
        if watchdog is not None:
            watchdog.say = self.say
        self._spare = os.open(os.devnull, os.O_RDONLY)
        """A descriptor in reserve. When no descriptor is left, it is closed, because the report of that failure needs
        one. -1: the reserve was used."""
        self._strays = Strays(clock, self._spared) if own_children else None
        self._pauses = Pauses(self.say)
        self._round: _Round | None = None
        self.exitcodes: tuple[int, dict[int, int]] = (-1, {})
        """The last round that was stopped, and how its workers have ended, by local rank."""
        self._unknown_stops: list[int] = []
        self._ports = BootstrapPorts(wanted.used_ports, wanted.port, wanted.master_port)
        self._owes_port = False
        self._wakes_at: float | None = None
        self._fenced_at: float | None = None
        self._memory_kills: int | None = None
        """How many processes the kernel had killed for lack of memory when the workers were started. None: this is not
        known."""

    # ---- the port ----

    def reserve_port(self) -> int:
        """The bootstrap port on this host, which stays reserved until the next round has ended. 0: no port is free.
        Raises `OSError` as `BootstrapPorts.present` does."""
        return self._ports.present()

    def renew_port(self) -> None:
        self._owes_port, self._wakes_at = True, _AT_ONCE

    # ---- starting ----

    def start(self, command: StartWorkers | StartProcesses, descriptors: Sequence[int] = ()) -> None:
        """`descriptors`: the open files that came with the command. They are closed when the workers are started."""
        if self._round is not None:
            self.end_all()  # the agent never asks for this. Two rounds at the same time would do more harm
        self._round = _Round(command, descriptors)
        self._wakes_at = _AT_ONCE
        if self._watchdog is not None:
            self._watchdog.begin()
        self._launcher.begin(command)
        self._memory_kills = count()
        self._start(self._round)

    def _start(self, round_: _Round) -> None:
        """Start the workers that wait, unless they are to wait for their zygote."""
        if not round_.waiting or self._launcher.delays:
            return
        try:
            for worker in round_.waiting:
                if self._is_abandoned():
                    return
                try:
                    leader = self._launcher.start(round_.command, worker, round_.descriptors)
                except (OSError, ValueError) as error:
                    self._use_spare()
                    # The round fails because of this worker, so the others are not started.
                    round_.exits.append(WorkerExit(worker.local_rank, self._launcher.failure(worker, error)))
                    return
                round_.leaders.append(leader)
                is_watched = not self._launcher.has_terminal(worker.local_rank)  # somebody may think for an hour
                if is_watched and self._watchdog is not None and self._launcher.page is not None:
                    self._watchdog.watch(leader, self._launcher.page)
        finally:
            round_.release()
            self._launcher.release()

    def warm_up(self, warm: Warm) -> None:
        """Make a zygote for the workers, if there is none."""
        self._launcher.warm_up(warm)

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the round that runs, by local rank. Empty: none runs."""
        return {} if self._round is None else {leader.local_rank: leader.pid for leader in self._round.leaders}

    def _spared(self) -> Collection[int]:
        """Children of this process that are no strays."""
        return (*self._launcher.spared, *(() if self._watchdog is None else self._watchdog.children))

    def _use_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    # ---- stopping ----

    def stop(self, command: Stop) -> None:
        self._wakes_at = _AT_ONCE
        round_ = self._round
        if round_ is None or round_.number != command.round:
            self._unknown_stops.append(command.round)  # no process of this round is alive, so the answer comes at once
            return
        now = self._clock.now()
        kill_at = now if command.signal == signal.SIGKILL else now + max(0.0, command.grace_s)
        if round_.stopping:
            round_.kill_at = min(round_.kill_at, kill_at)
            return
        if kill_at > now and round_.late_stop is None:
            self._look(round_, now)
            if self._watchdog is not None:
                self._watchdog.find_last(now, hangs=command.hangs)
            round_.late_stop, round_.late_since = command, now
            if self._is_late(round_, now):
                return
        round_.release()
        self._look(round_, now, is_last=True)
        round_.stopping, round_.stopped_at, round_.kill_at = True, now, kill_at
        round_.signal(command.signal)
        if command.signal != signal.SIGKILL:
            round_.signal(signal.SIGCONT)  # a stopped process cannot obey

    def _is_late(self, round_: _Round, now: float) -> bool:
        """The late stop still waits."""
        until = self._awaits_until(round_)
        return self._ends_hung or (until is not None and now < until)

    @property
    def _ends_hung(self) -> bool:
        return self._watchdog is not None and self._watchdog.is_ending

    def _awaits_until(self, round_: _Round) -> float | None:
        """Until when the late stop waits for workers to end by themselves, if no further one ends. None: it does not
        wait for them."""
        stop, since = round_.late_stop, round_.late_since
        if stop is None or self._ends_hung or all(leader.exitcode is not None for leader in round_.leaders):
            return None
        awaits_s = stop.await_exits_s
        return min(max(since, round_.last_exit_at) + awaits_s, since + MOST_AWAITED * awaits_s)

    def fence(self, at: float | None) -> None:
        """Kill the workers at this time on the clock if no stop has killed them before. None: there is no such time."""
        self._fenced_at = None if at is None else at + _MOMENT_S

    def _keep_fence(self, round_: _Round, now: float) -> None:
        # Every message that has come is obeyed by now. A keeper that was suspended alone finds old fences among them.
        if self._fenced_at is None or now < self._fenced_at or (round_.stopping and round_.kill_at <= now):
            return
        self.stop(Stop(round_.number, signal.SIGKILL, 0.0))
        self.say("reknit: the agent has not renewed the fence (--fence-after); its keeper kills this node's workers")

    def _advance(self, round_: _Round, now: float) -> WorkersStopped | None:
        for leader in round_.leaders:
            leader.look()
        alive = {leader.pid for leader in round_.leaders if leader.exitcode is None}
        if alive and round_.killed_at is None and now >= round_.kill_at:
            round_.killed_at = now
            if round_.kill_at > round_.stopped_at:
                round_.overdue = [leader for leader in round_.leaders if leader.exitcode is None]
            round_.signal(signal.SIGKILL)
        strays = self._press_strays(round_, now, bool(alive))
        if alive and (round_.killed_at is None or now < round_.killed_at + STUCK_AFTER_S):
            return None
        if strays and self._strays is not None and not (alive or self._strays.stuck(strays, now)):
            return None
        return self._let_go(round_, now, (*sorted(alive), *strays))

    def _press_strays(self, round_: _Round, now: float, leaders_live: bool) -> list[int]:
        if self._strays is None:
            return []
        strays = self._strays.alive(round_.pids)
        if not leaders_live or round_.killed_at is not None:  # a worker that is still in its grace may need them
            self._strays.press(strays, now, round_.kill_at, round_.pids)
        return strays

    def _let_go(self, round_: _Round, now: float, stuck: tuple[int, ...]) -> WorkersStopped:
        # On a system where strays cannot be seen, this ends those that have stayed in the group of their worker.
        round_.signal(signal.SIGKILL)
        for leader in round_.leaders:
            leader.reap()
            self._streams.release(leader.streams)
        exitcodes = {leader.local_rank: leader.exitcode for leader in round_.leaders if leader.exitcode is not None}
        self.exitcodes, self._round = (round_.number, exitcodes), None
        self._launcher.forget()
        if self._strays is not None and stuck:
            self._strays.give_up(stuck)
        killed = tuple(sorted(leader.rank for leader in round_.overdue if leader.exitcode == -signal.SIGKILL))
        grace_s = round_.kill_at - round_.stopped_at if killed else 0.0
        return WorkersStopped(now, round_.number, self._ports.another(), stuck, killed, grace_s)

    # ---- looking ----

    def events(self, now: float) -> list[Happened]:
        self._launcher.look()
        found: list[Happened] = [WorkersStopped(now, number, self.reserve_port()) for number in self._unknown_stops]
        self._unknown_stops = []
        if self._owes_port:
            self._owes_port = False
            found.append(PortReserved(now, self._ports.another()))
        round_ = self._round
        if self._watchdog is not None:
            is_over = round_ is None or round_.stopping or round_.late_stop is not None
            self._watchdog.hear(() if round_ is None or is_over else round_.leaders, now)
        if round_ is not None:
            found += self._round_events(round_, now)
        elif self._strays is not None:
            self._strays.alive(())
        self._wakes_at = self._next_deadline()
        return found

    def _round_events(self, round_: _Round, now: float) -> list[Happened]:
        found: list[Happened] = []
        self._start(round_)
        if not round_.announced and not round_.waiting:
            round_.announced = True
            found.append(WorkersStarted(now, round_.number))
        self._keep_fence(round_, now)
        if not round_.stopping:
            self._look(round_, now)
            if round_.late_stop is not None and not self._is_late(round_, now):
                self.stop(round_.late_stop)
            if self._strays is not None:
                self._strays.alive(round_.pids)
        if round_.exits:
            found.append(WorkersExited(now, round_.number, tuple(round_.exits)))
            round_.exits = []
        if round_.stopping and (stopped := self._advance(round_, now)):
            found.append(stopped)
        return found

    def _look(self, round_: _Round, now: float, *, is_last: bool = False) -> None:
        ended = [leader for leader in round_.leaders if leader.look()]
        if ended:
            round_.last_exit_at = now
        if self._watchdog is not None:
            if not is_last:
                self._watchdog.look(now)
            ended = self._watchdog.reportable(ended, is_last=is_last)
        round_.exits += map(self._exit, ended)
        self._pauses.look([leader for leader in round_.leaders if self._hung(leader) is None], now)
        if is_last:
            self._forget()

    def _forget(self) -> None:
        """The round is being stopped: no worker is watched any more."""
        self._pauses.forget()
        if self._watchdog is not None:
            self._watchdog.forget()

    def _hung(self, leader: Leader) -> Hung | None:
        return None if self._watchdog is None else self._watchdog.hung(leader)

    def _exit(self, leader: Leader) -> WorkerExit:
        hung = self._hung(leader)
        lines = self._streams.tail(leader.streams, 10_000) if hung is not None or leader.exitcode else ()
        failure = failure_of(leader, lines, hung)
        if failure is not None and self._streams.was_unread(leader.streams):
            failure = unread(failure)
        if failure is not None and hung is None:
            failure = killed(failure, self._memory_kills)
        return WorkerExit(leader.local_rank, failure)

    @property
    def wakes_at(self) -> float | None:
        """When `events` must be called at the latest, on the clock's time. After a command: at once. During a stop:
        when SIGKILL is due, or when its survivors are given up. Otherwise: when a worker may be hung, or the end of a
        hung worker goes on, or a stop has waited for long enough. None: there is no such time."""
        times = (
            self._wakes_at,
            self._launcher.wakes_at,
            None if self._watchdog is None else self._watchdog.hears_at,
        )
        return min((at for at in times if at is not None), default=None)

    def _next_deadline(self) -> float | None:
        if (round_ := self._round) is None:
            return None
        watched_at = None if self._watchdog is None else self._watchdog.wakes_at
        if not round_.stopping:
            deadlines = [self._fenced_at, self._pauses.wakes_at, watched_at, self._awaits_until(round_)]
        else:
            deadlines = [] if self._strays is None else [self._strays.wakes_at]
            if any(leader.exitcode is None for leader in round_.leaders):
                killed_at = round_.killed_at
                deadlines += [round_.kill_at, self._fenced_at] if killed_at is None else [killed_at + STUCK_AFTER_S]
        return min((at for at in deadlines if at is not None), default=None)

    def say(self, line: str) -> None:
        """Show a line on the console, in order with the workers' output. Never waits."""
        self._streams.say(line)

    def resized(self) -> None:
        """Give the workers' terminals the size of the console's terminal, which has changed."""
        if self._streams.resized() and self._round is not None:
            self._round.signal(signal.SIGWINCH)

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything that was said or read is written. False if that takes longer than `deadline_s`."""
        return self._streams.flush(deadline_s)

    # ---- the end ----

    def close(self) -> None:
        """Remove what would outlive this process. Everything else is closed with it."""
        self._launcher.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def end_all(self) -> tuple[int, tuple[int, ...]]:
        """SIGKILL everything at once, in whatever state it is, and read what the workers wrote. May be repeated.

        Returns how many processes ended, and the pids of those that survive.
        """
        leaders: Sequence[Leader] = ()
        if self._round is not None:
            self._round.release()
            leaders, self._round = self._round.leaders, None
        self._forget()
        self._launcher.forget()
        for leader in leaders:
            leader.signal(signal.SIGKILL)
        if self._strays is not None:
            ended, stuck = self._strays.end_all(_CLOSE_S)
        else:
            reap([leader.pid for leader in leaders], _CLOSE_S)
            ended, stuck = len(leaders), ()
        for leader in leaders:
            leader.reap()
            self._streams.release(leader.streams)
        self._wakes_at = None
        return ended, stuck
