"""The workers of this node as operating-system processes.

1. Nothing here waits, except `close`. `stop` sends a signal and returns; what follows happens in `events`, which the
   driver calls whenever the clock wakes up, and at `wakes_at` at the latest.
2. A stop has stages: signal every group → SIGKILL the groups when the grace is over → once the leaders are dead, end
   the strays → let go of everything. It is answered once, by `WorkersStopped`.
3. An exit is reported if the worker ended by itself: found dead before the stop's signal was sent.
4. What survives SIGKILL for `STUCK_AFTER_S` is reported as stuck, and nothing waits for it any more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence

from reknit.adapters.bootstrap import Reservation
from reknit.adapters.children import reap, sweep
from reknit.adapters.errors import explain
from reknit.adapters.streams import Streams, StreamSettings
from reknit.core.commands import StartWorkers, StopWorkers
from reknit.core.entries import WorkerFailure
from reknit.core.events import Event, PortReserved, WorkerExit, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.ranks import Assignment, WorkerRanks
from reknit.core.values import TYPE_CHECKING

from .environment import arguments, environment
from .leaders import Leader, spawn, spawn_exitcode
from .strays import STUCK_AFTER_S, Strays

if TYPE_CHECKING:
    from reknit.adapters.ports import Clock

_AT_ONCE = 0.0
_STDERR_LINES = 20
_CLOSE_S = 5.0


class _Round:
    def __init__(self, number: int) -> None:
        self.number = number
        self.leaders: list[Leader] = []
        self.announced = False
        self.exits: list[WorkerExit] = []
        """Not reported yet."""
        self.stopping = False
        self.kill_at = 0.0
        self.killed_at: float | None = None

    @property
    def pids(self) -> set[int]:
        return {leader.pid for leader in self.leaders}

    def signal(self, signum: int) -> None:
        for leader in self.leaders:
            leader.signal(signum)


class Processes:
    """Implements `ports.Workers`."""

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
        spared: Collection[int] = (),
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """`log_dir`: a worker's files are in `<log_dir>/round_<round>/<local_rank>/`; empty: it has none, and no error
        file. `own_children`: every child of this process belongs to the job, but for those in `spared`, which outlive
        even `close`. `stdout`, `stderr`: the console.
        """
        self._clock = clock
        self._argv = tuple(argv)
        self._env = dict(env)
        self._run_id = run_id
        self._log_dir = log_dir
        self._streams = Streams(streams or StreamSettings(), env=env, stdout=stdout, stderr=stderr)
        self._spared = spared
        self._strays = Strays(clock, spared) if own_children else None
        self._round: _Round | None = None
        self._unknown_stops: list[int] = []
        self._reservation: Reservation | None = None
        self._used_ports: set[int] = set()
        self._owes_port = False
        self._wakes_at: float | None = None

    # ---- the port ----

    def reserve_port(self) -> int:
        """A bootstrap port on this host, kept until the next round has ended. 0 if there is none to be had."""
        if self._reservation is None:
            self._reservation = Reservation(self._used_ports)
        return self._reservation.port

    def renew_port(self) -> None:
        self._owes_port = True
        self._wakes_at = _AT_ONCE

    def _another_port(self) -> int:
        """Every round gets another one: neither what the last round's store leaves behind is in the way, nor is this
        store in reach of workers of an earlier round on a node that was cut off."""
        if self._reservation is not None:
            self._used_ports.add(self._reservation.port)
            self._reservation.release()
            self._reservation = None
        return self.reserve_port()

    # ---- starting ----

    def start(self, command: StartWorkers) -> None:
        if self._round is not None:
            self._end_at_once(self._round)  # against the protocol; two rounds side by side would be worse
        self._round = _Round(command.round)
        self._wakes_at = _AT_ONCE
        for worker in command.assignment.workers:
            try:
                self._round.leaders.append(self._start_one(command.round, command.assignment, worker))
            except (OSError, ValueError) as error:
                # The job fails of this one: the others need not exist.
                self._round.exits.append(WorkerExit(worker.local_rank, self._not_started(worker, error)))
                return

    def _start_one(self, round_: int, assignment: Assignment, worker: WorkerRanks) -> Leader:
        folder = self._make_folder(round_, worker.local_rank)
        ranks = {"local_rank": worker.local_rank, "rank": worker.rank}
        streams = self._streams.open(**ranks, role=assignment.role, folder=folder)
        error_file = os.path.join(folder, "error.json") if folder else ""
        env = environment(self._env, assignment, worker, run_id=self._run_id, error_file=error_file)
        try:
            pid = spawn(arguments(self._argv, worker.local_rank), env, streams.ends)
        except (OSError, ValueError):
            streams.spawned()
            self._streams.release(streams)
            raise
        streams.spawned()
        return Leader(pid, self._clock, **ranks, streams=streams, folder=folder)

    def _make_folder(self, round_: int, local_rank: int) -> str:
        if not self._log_dir:
            return ""
        folder = os.path.join(self._log_dir, f"round_{round_}", str(local_rank))
        try:
            os.makedirs(folder)
        except FileExistsError:
            # The folder of an earlier run: its error file would be taken for this worker's.
            try:
                os.unlink(os.path.join(folder, "error.json"))
            except FileNotFoundError:
                pass
        except OSError:
            if self._streams.has_files:
                raise
            return ""  # a disk that is full is no reason to fail for want of an error file
        return folder

    def _not_started(self, worker: WorkerRanks, error: OSError | ValueError) -> WorkerFailure:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        # posix_spawn reports the program as the file name; any other file is one of the worker's output.
        file = error.filename if isinstance(error, OSError) and error.filename != self._argv[0] else None
        what = f"cannot write to {file}" if file else f"cannot start {self._argv[0]}"
        return WorkerFailure(
            local_rank=worker.local_rank,
            rank=worker.rank,
            exitcode=spawn_exitcode(error),
            message=f"{what}: {reason}",
        )

    # ---- stopping ----

    def stop(self, command: StopWorkers) -> None:
        self._wakes_at = _AT_ONCE
        round_ = self._round
        if round_ is None or round_.number != command.round:
            self._unknown_stops.append(command.round)  # nothing of it is alive, which is an answer
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
            return strays  # they may still be of use to a worker that ends in good order
        self._strays.press(strays, now, round_.kill_at, round_.pids)
        return strays

    def _let_go(self, round_: _Round, now: float, stuck: tuple[int, ...]) -> WorkersStopped:
        # Where strays cannot be seen this is what ends them, if they stayed in their group.
        round_.signal(signal.SIGKILL)
        for leader in round_.leaders:
            leader.reap()
            self._streams.release(leader.streams)
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
        # Who was killed by a signal (128 + n: a shell says so) did not die of the exception that it printed before.
        message, traceback = explain(leader.error_file, lines if 0 < exitcode < 128 else ())
        return WorkerFailure(
            local_rank=leader.local_rank,
            rank=leader.rank,
            exitcode=exitcode,
            pid=leader.pid,
            message=message,
            traceback=traceback,
            stderr=lines[-_STDERR_LINES:],
            log=leader.folder if leader.streams.files else "",
        )

    @property
    def wakes_at(self) -> float | None:
        """When `events` must be called at the latest: at once after a command, else the next SIGKILL or its verdict."""
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
        """A line on the console, in order with the workers' output. Never waits."""
        self._streams.say(line)

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything that was said or read is written; False if it is not by then."""
        return self._streams.finish(deadline_s)

    # ---- the end ----

    def close(self) -> None:
        """Leave nothing behind, whatever state the workers are in: kill, reap, write what was read. May be repeated."""
        if self._round is not None:
            self._end_at_once(self._round)
        elif self._strays is not None:
            sweep(_CLOSE_S, self._spared)
        self._streams.finish(_CLOSE_S)
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        self._wakes_at = None

    def _end_at_once(self, round_: _Round) -> None:
        round_.signal(signal.SIGKILL)
        if self._strays is not None:
            sweep(_CLOSE_S, self._spared)
        else:
            reap([leader.pid for leader in round_.leaders], _CLOSE_S)
        for leader in round_.leaders:
            leader.reap()
            self._streams.release(leader.streams)
        self._round = None
