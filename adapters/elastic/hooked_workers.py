"""The port `Workers` of an agent whose workers are started and stopped by the methods of a class.

The thread that runs the loop gives commands. The thread that called `run()` takes them from `taken`, carries them out
by calling methods, which may take minutes, and reports what has happened.

1. The loop's side never waits. `news` is woken when there is a command to take.
2. While no worker of a round runs, the port answers the stop of that round itself.
3. After `dismiss` nobody carries out commands. The port then answers all of them itself.
4. The bootstrap port of a round is reserved in this process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from attrs import evolve

from reknit.adapters.keeper.common.bootstrap import Reservation
from reknit.adapters.runtime.ports import Clock
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event, RestartsLimited, Started
from reknit.core.agent.worker_words import (
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.workers import Assignment, WorkerFailure


class HookedWorkers:
    """Implements `ports.Workers`."""

    def __init__(self, clock: Clock, nonce: str, *, news: Callable[[], None], master_port: int = 0) -> None:
        """`clock`: the clock of the loop. `news`: called when there is a command to take. `master_port`: the bootstrap
        port of every round. 0: each round gets another free port."""
        self._clock = clock
        self._news = news
        self._master_port = master_port
        self._used_ports: set[int] = set()
        self._reservation: Reservation | None = None
        self._lock = threading.Lock()
        """Held for a moment by either side, while it looks at the fields below."""
        self._commands: list[StartWorkers | StopWorkers] = []
        self._over = -1
        """The last round of which no worker runs any more."""
        self._is_dismissed = False
        self._told: deque[Event] = deque([Started(0.0, nonce, self._another_port())])
        """Events that the loop has not taken yet. Their time, and the ports that they bring, are filled in when it
        does."""
        self._is_told = threading.Event()
        """Set when the loop has taken all events."""
        self._answered = -1
        """The last round whose stop was answered. The answer has brought the port that is reserved now."""

    # ---- the side of the loop ----

    def start(self, command: StartWorkers) -> None:
        self._give(command)

    def stop(self, command: StopWorkers) -> None:
        self._give(command)

    def _give(self, command: StartWorkers | StopWorkers) -> None:
        with self._lock:
            self._commands.append(command)
            self._answer()
        self._news()

    def renew_port(self) -> None:
        self._told.append(PortReserved(0.0, 0))

    def events(self, now: float) -> list[Event]:
        found: list[Event] = []
        while self._told:
            event = self._told.popleft()
            match event:
                case WorkersStopped(round=round_):
                    # A stop that was given twice is answered twice. The loop ignores the second answer and its port.
                    event = evolve(event, port=self._port() if round_ <= self._answered else self._another_port())
                    self._answered = max(self._answered, round_)
                case PortReserved():
                    event = PortReserved(0.0, self._another_port())
            found.append(evolve(event, at=now))
        with self._lock:
            if not self._told:  # otherwise something was reported just now
                self._is_told.set()
        return found

    @property
    def wakes_at(self) -> float | None:
        return 0.0 if self._told else None

    def close(self) -> None:
        self._news = lambda: None  # it holds on to what holds on to this port
        if self._reservation is not None:
            self._reservation.release()

    def _port(self) -> int:
        return self._master_port if self._reservation is None else self._reservation.port

    def _another_port(self) -> int:
        """A bootstrap port for the next round. 0: no port is free."""
        if self._reservation is not None:
            self._used_ports.add(self._reservation.port)
            self._reservation.release()
            self._reservation = None
        try:
            self._reservation = Reservation(self._used_ports, self._master_port)
        except OSError:
            pass  # the port that was asked for is taken: if this node gets group rank 0, its workers find that out
        return self._port()

    # ---- the side of the thread that carries out commands ----

    def taken(self) -> StartWorkers | StopWorkers | None:
        """The next command. None: there is none now."""
        with self._lock:
            return self._commands.pop(0) if self._commands else None

    def put_back(self, command: StartWorkers | StopWorkers) -> None:
        """Let `taken` return this command again, before the others."""
        with self._lock:
            self._commands.insert(0, command)

    def has_start(self) -> bool:
        """A round is to be started."""
        with self._lock:
            return any(isinstance(command, StartWorkers) for command in self._commands)

    def report_started(self, round_: int, assignment: Assignment | None = None) -> None:
        """`assignment`: the ranks that the workers really got. None: those of the command."""
        self._tell(WorkersStarted(0.0, round_, assignment))

    def report_success(self, round_: int, local_world_size: int) -> None:
        """All workers of the round have succeeded, and no process of it is left."""
        self._tell(WorkersExited(0.0, round_, tuple(WorkerExit(rank) for rank in range(local_world_size))), over=round_)

    def report_failures(self, round_: int, failures: tuple[WorkerFailure, ...]) -> None:
        self._tell(WorkersExited(0.0, round_, tuple(WorkerExit(failure.local_rank, failure) for failure in failures)))

    def report_stopped(self, round_: int) -> None:
        """The answer to the stop of the round: no process of it is left."""
        self._tell(WorkersStopped(0.0, round_, 0), over=round_)

    def report_limit(self, left: int) -> None:
        """The program bears only so many more failures of its workers."""
        self._tell(RestartsLimited(0.0, left))

    def await_told(self, limit_s: float) -> bool:
        """Wait until the loop has taken what was reported. False: it has not within so many seconds."""
        return not self._told or self._is_told.wait(limit_s)

    def dismiss(self) -> None:
        """Take no further command. No worker runs."""
        with self._lock:
            self._is_dismissed = True
            self._answer()
        self._clock.wake()

    def _tell(self, event: Event, *, over: int = -1) -> None:
        """`over`: the round that is over with this event."""
        with self._lock:
            self._is_told.clear()
            self._told.append(event)
            self._over = max(self._over, over)
            self._answer()
        self._clock.wake()

    def _answer(self) -> None:
        """Answer the commands that need nobody to carry them out."""
        commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, StopWorkers) and (self._is_dismissed or command.round <= self._over):
                self._told.append(WorkersStopped(0.0, command.round, 0))
            elif isinstance(command, StartWorkers) and self._is_dismissed:
                failure = WorkerFailure(0, command.assignment.workers[0].rank, 1, message="the agent is ending")
                self._told.append(WorkersExited(0.0, command.round, (WorkerExit(0, failure),)))
            else:
                self._commands.append(command)
