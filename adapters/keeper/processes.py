"""The workers of this node as operating-system processes.

1. No call waits, except `end_all` and `flush`. `stop` sends a signal and returns. The rest of a stop happens in
   `events`, which the keeper calls whenever the clock wakes up, and at `wakes_at` at the latest.
2. A stop has four stages. (1) Every group gets the signal. (2) When the grace is over, every group gets SIGKILL. (3)
   When the leaders are dead, the strays are ended. (4) Everything is closed. One `WorkersStopped` answers the stop.
3. An exit is reported if the worker ended by itself, that is, if it was found dead before the stop's signal was sent.
4. A process that survives SIGKILL for `STUCK_AFTER_S` seconds is reported as stuck. Nothing waits for it any more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.children import reap
from reknit.adapters.keeper.bootstrap import Reservation
from reknit.adapters.keeper.errors import explain
from reknit.adapters.keeper.streams import Streams, StreamSettings
from reknit.core.agent.commands import StartWorkers, StopWorkers
from reknit.core.agent.events import Event, PortReserved, WorkerExit, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.entries import WorkerFailure

from .launcher import Launcher
from .leaders import Leader
from .strays import STUCK_AFTER_S, Strays
from .wire import StartProcesses, workers_of

if TYPE_CHECKING:
    from reknit.adapters.ports import Clock

    from .forking import Forks

_AT_ONCE = 0.0
_LAST_LINES = 20
"""Number of a worker's last lines that the report of its failure holds."""
_CLOSE_S = 5.0
"""Seconds that `end_all` waits for the end of the processes that it has killed."""


class _Round:
    """The workers of the present round."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leaders: list[Leader] = []
        self.announced = False
        """`WorkersStarted` was reported."""
        self.exits: list[WorkerExit] = []
        """Exits that were not reported yet."""
        self.stopping = False
        self.kill_at = 0.0
        """When SIGKILL is due, on the clock's time. It counts only while `stopping`."""
        self.killed_at: float | None = None
        """When SIGKILL was sent. None: it was not sent."""

    @property
    def pids(self) -> set[int]:
        return {leader.pid for leader in self.leaders}

    def signal(self, signum: int) -> None:
        for leader in self.leaders:
            leader.signal(signum)


class Processes:
    """The processes of this node's workers, inside the keeper."""

    def __init__(
        self,
        *,
        clock: Clock,
        argv: Sequence[str],
        env: Mapping[str, str],
        run_id: str,
        log_dir: str = "",
        streams: StreamSettings | None = None,
        own_children: bool = False,
        given_back: Collection[signal.Signals] = (),
        is_abandoned: Callable[[], bool] = lambda: False,
        used_ports: Collection[int] = (),
        port: int = 0,
        stdin: bytes | None = None,
        stdout: int = 1,
        stderr: int = 2,
        relays: bool = False,
        master_port: int = 0,
        virtual_local_rank: bool = False,
        forks: Forks | None = None,
    ) -> None:
        """`log_dir`: a worker's files are in `<log_dir>/round_<round>/<local_rank>/`. Empty: there are no files.
        `own_children`: True if every child of this process belongs to the job. Then strays are ended as well.
        `given_back`: signals that this process ignores and its workers do not.
        `is_abandoned`: asked between the starts of two workers. If it returns True, no further worker is started.
        `used_ports`: bootstrap ports that are not reserved again.
        `port`: the bootstrap port to reserve first, if it is free. 0: any port.
        `stdin`: what each worker reads from its standard input. None: workers inherit that of this process.
        `stdout`, `stderr`: the descriptors of the console. `relays`: see `Streams`.
        `master_port`: the bootstrap port of every round. 0: another free port for each round.
        `virtual_local_rank`: see `environment`.
        `forks`: the workers without a program, which are forked from this process. None: there are none.
        """
        self._clock = clock
        self._streams = Streams(streams or StreamSettings(), env=env, stdout=stdout, stderr=stderr, relays=relays)
        self._launcher = Launcher(
            clock,
            self._streams,
            argv=argv,
            env=env,
            run_id=run_id,
            log_dir=log_dir,
            given_back=given_back,
            stdin=stdin,
            virtual_local_rank=virtual_local_rank,
            forks=forks,
            is_abandoned=is_abandoned,
        )
        self._is_abandoned = is_abandoned
        self._spare = os.open(os.devnull, os.O_RDONLY)
        """A descriptor in reserve. When no descriptor is left, it is closed, because the report of that failure needs
        one. -1: the reserve was used."""
        self._strays = Strays(clock, lambda: self._launcher.spared) if own_children else None
        self._round: _Round | None = None
        self.exitcodes: tuple[int, dict[int, int]] = (-1, {})
        """The last round that was stopped, and how its workers have ended, by local rank."""
        self._unknown_stops: list[int] = []
        self._master_port = master_port
        self._reservation: Reservation | None = None
        self._used_ports = set(used_ports)
        self._owes_port = False
        self._wakes_at: float | None = None
        if port and not master_port:
            try:
                self._reservation = Reservation((), port)
            except OSError:
                pass  # another process has taken the port: if this node becomes group rank 0, its round fails

    # ---- the port ----

    def reserve_port(self) -> int:
        """The bootstrap port on this host, which stays reserved until the next round has ended. 0: no port is free.

        Raises `OSError` if `master_port` is taken. Once `master_port` is reserved, it stays reserved.
        """
        if self._reservation is None:
            self._reservation = Reservation(self._used_ports, self._master_port)
        return self._reservation.port

    def renew_port(self) -> None:
        self._owes_port = True
        self._wakes_at = _AT_ONCE

    def _another_port(self) -> int:
        """The bootstrap port of the next round. It is another one for each round, for two reasons. The kernel may keep
        the last port busy for a while. And workers of an earlier round, on a node that was cut off, must not reach the
        new round's store.

        A `master_port` is the same in all rounds. It is free again, because the worker that had it is gone."""
        if self._reservation is not None and not self._master_port:
            self._used_ports.add(self._reservation.port)
            self._reservation.release()
            self._reservation = None
        return self.reserve_port()

    # ---- starting ----

    def start(self, command: StartWorkers | StartProcesses, descriptors: Sequence[int] = ()) -> None:
        """`descriptors`: the open files that came with the command. They are closed here."""
        try:
            self._start(command, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)
            self._launcher.release()

    def _start(self, command: StartWorkers | StartProcesses, descriptors: Sequence[int]) -> None:
        if self._round is not None:
            self.end_all()  # the agent never asks for this. Two rounds at the same time would do more harm
        self._round = _Round(command.round)
        self._wakes_at = _AT_ONCE
        for worker in workers_of(command):
            if self._is_abandoned():
                return
            try:
                self._round.leaders.append(self._launcher.start(command, worker, descriptors))
            except (OSError, ValueError) as error:
                self._use_spare()
                # The round fails because of this worker, so the others are not started.
                self._round.exits.append(WorkerExit(worker.local_rank, self._launcher.failure(worker, error)))
                return

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the round that runs, by local rank. Empty: none runs."""
        return {} if self._round is None else {leader.local_rank: leader.pid for leader in self._round.leaders}

    def _use_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    # ---- stopping ----

    def stop(self, command: StopWorkers) -> None:
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
        self._look(round_)
        round_.stopping, round_.kill_at = True, kill_at
        round_.signal(command.signal)
        if command.signal != signal.SIGKILL:
            round_.signal(signal.SIGCONT)  # a stopped process cannot obey

    def _advance(self, round_: _Round, now: float) -> WorkersStopped | None:
        for leader in round_.leaders:
            leader.look()
        alive = {leader.pid for leader in round_.leaders if leader.exitcode is None}
        if alive and round_.killed_at is None and now >= round_.kill_at:
            round_.killed_at = now
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
        if leaders_live and round_.killed_at is None:
            return strays  # a worker that is still in its grace may need them
        self._strays.press(strays, now, round_.kill_at, round_.pids)
        return strays

    def _let_go(self, round_: _Round, now: float, stuck: tuple[int, ...]) -> WorkersStopped:
        # On a system where strays cannot be seen, this ends those that have stayed in the group of their worker.
        round_.signal(signal.SIGKILL)
        for leader in round_.leaders:
            leader.reap()
            self._streams.release(leader.streams)
        exitcodes = {leader.local_rank: leader.exitcode for leader in round_.leaders if leader.exitcode is not None}
        self.exitcodes = round_.number, exitcodes
        if self._strays is not None and stuck:
            self._strays.give_up(stuck)
        self._round = None
        return WorkersStopped(now, round_.number, self._another_port(), stuck)

    # ---- looking ----

    def events(self, now: float) -> list[Event]:
        found: list[Event] = [WorkersStopped(now, number, self.reserve_port()) for number in self._unknown_stops]
        self._unknown_stops = []
        if self._owes_port:
            self._owes_port = False
            found.append(PortReserved(now, self._another_port()))
        round_ = self._round
        if round_ is None:
            if self._strays is not None:
                self._strays.alive(())
        else:
            found += self._round_events(round_, now)
        self._wakes_at = self._next_deadline()
        return found

    def _round_events(self, round_: _Round, now: float) -> list[Event]:
        found: list[Event] = []
        if not round_.announced:
            round_.announced = True
            found.append(WorkersStarted(now, round_.number))
        if not round_.stopping:
            self._look(round_)
            if self._strays is not None:
                self._strays.alive(round_.pids)
        if round_.exits:
            found.append(WorkersExited(now, round_.number, tuple(round_.exits)))
            round_.exits = []
        if round_.stopping and (stopped := self._advance(round_, now)):
            found.append(stopped)
        return found

    def _look(self, round_: _Round) -> None:
        for leader in round_.leaders:
            if leader.look():
                round_.exits.append(WorkerExit(leader.local_rank, self._failure(leader)))

    def _failure(self, leader: Leader) -> WorkerFailure | None:
        exitcode = leader.exitcode or 0
        if exitcode == 0:
            return None
        lines = self._streams.tail(leader.streams, 10_000)
        # A worker that was killed by a signal did not die of an exception that it has printed. (A shell whose command
        # was killed by signal n ends with 128 + n.)
        message, traceback = explain(leader.error_file, lines if 0 < exitcode < 128 else ())
        return WorkerFailure(
            local_rank=leader.local_rank,
            rank=leader.rank,
            exitcode=exitcode,
            pid=leader.pid,
            message=message,
            traceback=traceback,
            stderr=lines[-_LAST_LINES:],
            log=next((os.path.dirname(path) for path in leader.streams.files.values()), ""),
        )

    @property
    def wakes_at(self) -> float | None:
        """When `events` must be called at the latest, on the clock's time. After a command: at once. During a stop:
        when SIGKILL is due, or when its survivors are given up. None: there is no such time."""
        return self._wakes_at

    def _next_deadline(self) -> float | None:
        round_ = self._round
        if round_ is None or not round_.stopping:
            return None
        deadlines = [self._strays.wakes_at] if self._strays is not None else []
        if any(leader.exitcode is None for leader in round_.leaders):
            deadlines.append(round_.kill_at if round_.killed_at is None else round_.killed_at + STUCK_AFTER_S)
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

    def end_all(self) -> tuple[int, tuple[int, ...]]:
        """SIGKILL everything at once, in whatever state it is, and read what the workers wrote. May be repeated.

        Returns how many processes ended, and the pids of those that survive. Everything else that is open here is
        closed with the keeper's process.
        """
        round_, self._round = self._round, None
        if round_ is not None:
            round_.signal(signal.SIGKILL)
        if self._strays is not None:
            ended, stuck = self._strays.end_all(_CLOSE_S)
        else:
            pids = () if round_ is None else [leader.pid for leader in round_.leaders]
            reap(pids, _CLOSE_S)
            ended, stuck = len(pids), ()
        if round_ is not None:
            for leader in round_.leaders:
                leader.reap()
                self._streams.release(leader.streams)
        self._wakes_at = None
        return ended, stuck
