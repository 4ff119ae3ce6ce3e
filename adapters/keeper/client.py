"""The agent's side of its keeper: the port `Workers`, carried out by another process.

1. No call waits, except `close` and `flush`, which have a deadline.
2. When the keeper dies, its workers die with it. Each worker that had not ended by itself is reported as failed. So the
   usual policy decides what follows. The client starts a new keeper, which first ends every process that carries this
   agent's mark.
3. A keeper that does not answer in time is killed, and so is a keeper that sends something that is no message. Rule 2
   above then holds.
4. When no further keeper can be started, a start of workers is answered by a failure that says why. A stop is answered
   at once.
5. Only the process that opened a client closes it. A copy of the client in a forked child only closes its copies of the
   descriptors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakSet

from attrs import evolve

from reknit.adapters.console import LAST_WORDS_S, Console
from reknit.adapters.ports import CannotStart, Clock
from reknit.core.agent.commands import ReservePort, StartWorkers, StopWorkers
from reknit.core.agent.events import Event, PortReserved, Started, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.job import EMPTY

from . import wire
from .calling import Calling
from .line import Line
from .staff import Staff, Told
from .start import Start

if TYPE_CHECKING:
    from .functions import Function

_HELLO_S = 60.0
"""Time for a new keeper to say that it is ready. A keeper that needs longer is killed. Seconds."""
_ANSWER_S = 20.0
"""Time between the SIGKILL of a stop and the keeper's answer, at most. Seconds."""
_CLOSE_S = 15.0
_TRIES = 3
"""Number of keepers that may fail in a row. After that, the next keeper is started with the next start of workers."""
_STEADY_S = 10.0
"""A keeper that fails after it was ready for longer than this begins a new row of failures. Seconds."""
_SWEEP_S = 5.0
_MOST_UNSENT = 1 << 20
"""If the keeper has this many bytes still to take, `say` does not send it further lines."""


class Keeper:
    """Implements `ports.Workers`."""

    def __init__(
        self,
        clock: Clock,
        configure: wire.Configure,
        nonce: str,
        start: Start,
        *,
        restart: Start | None = None,
        say: Callable[[str], None] = lambda line: None,
        consoles: Mapping[int, Console] = EMPTY,
        on_death: Callable[[], None] = lambda: None,
        start_method: str = "spawn",
    ) -> None:
        """Starts a keeper at once. Raises `CannotStart`.

        `nonce`: the agent's nonce, for the event `Started`.
        `start`: starts the first keeper. `restart`: starts every later one. None: as the first.
        `say`: shows a line while no keeper with a console is ready.
        `consoles`: needed if the keeper has no console. By stream (1 and 2), where the workers' output goes.
        `on_death`: called when a keeper has died, before the next one is started.
        `start_method`: how workers that are functions are started.
        """
        self._calling = Calling(start_method)
        self._clock = clock
        self._configure = configure
        self._nonce = nonce
        self._start = restart or start
        self._say = say
        self._consoles = consoles
        self._owes_credit = 0
        """Number of `Output` records that were received and not acknowledged by a `Credit` yet."""
        self._on_death = on_death
        self._owner = os.getpid()
        self._line: Line | None = None
        self._is_ready = False
        self._has_started = False
        self._waiting: list[object] = []
        """Messages that are sent when the keeper is ready."""
        self._pending: list[Event] = []
        self._round: Staff | None = None
        self.told = Told()
        self._why = ""
        """Why there is no keeper. Empty: there was always one."""
        self._deadline: float | None = None
        """When the keeper must be ready, on the clock's time. None: it is ready, or there is none."""
        self._failures = 0
        """Number of keepers that have failed in a row."""
        self._used_ports: set[int] = set()
        self._port = 0
        """The bootstrap port that the loop was told of. 0: a round has started since, or there is none."""
        self._ready_at = 0.0
        self._stuck: tuple[int, ...] = ()
        """Processes of a lost keeper that survive SIGKILL. The answer to the stop of their round names them."""
        self._owes_flush = False
        self._owes_port = False
        self._heard_at = self._pings_at = clock.now()
        _open.add(self)
        try:
            self._begin(start)
        except OSError as error:
            raise CannotStart(f"cannot start the keeper of this node's workers: {_cause(error)}") from None

    @property
    def pid(self) -> int:
        """The pid of the keeper, or of the command that reaches it. 0: there is no keeper."""
        return 0 if self._line is None else self._line.pid

    @property
    def log_dir(self) -> str:
        """The folder of this run on the keeper's host. Empty: there is none, or the keeper is not ready yet."""
        return self._configure.log_dir

    def pids(self, round_: int) -> Mapping[int, int]:
        """The workers' processes by local rank. Empty before `WorkersStarted` of the round, and after the next one."""
        return self.told.pids(round_)

    # ---- what the loop wants ----

    def start(self, command: StartWorkers | wire.StartProcesses, functions: Mapping[int, Function] = EMPTY) -> None:
        """`functions`: by local rank, what the processes of the command call. Such a process has an empty `argv`.
        Raises `FunctionError` if one of them cannot be a worker."""
        takes_files = self._line is None or self._line.takes_files
        message = self._calling.message(command, functions, takes_files=takes_files)
        self._round, self._port = Staff(command), 0
        if self._line is None:
            self._failures = 0
            self._replace("there was none")
        if self._line is None:
            self._fail(f"cannot start the keeper of this node's workers: {self._why}", only_first=True)
        else:
            self._tell(message)

    def values(self, round_: int) -> Mapping[int, object]:
        """By local rank: what the functions of the round have returned, until the next start of workers. Raises
        `FunctionError` if such a value cannot be read in this process."""
        return self._calling.values(round_)

    def stop(self, command: StopWorkers) -> None:
        round_ = self._round
        if self._line is None:
            self._round = None
            self._pending.append(WorkersStopped(self._clock.now(), command.round, 0))
            return
        if round_ is not None and round_.number == command.round:
            if round_.stop is not None and not (self._is_ready or round_.running):
                return  # no worker of the round lives, and the next keeper answers the first stop
            round_.stop = command
            if self._is_ready:
                self._await_answer(round_, command.grace_s)
        self._tell(command)

    def _await_answer(self, round_: Staff, grace_s: float) -> None:
        by = self._clock.now() + grace_s + _ANSWER_S
        round_.answer_by = min(by, round_.answer_by or by)

    def renew_port(self) -> None:
        if self._line is None:
            self._pending.append(PortReserved(self._clock.now(), 0))
        else:
            self._owes_port = True
            self._tell(ReservePort())

    def resized(self) -> None:
        """Tell the keeper that the console's terminal has another size."""
        self._tell(wire.Resized())

    def say(self, line: str) -> None:
        """Show a line of reknit's own. If the keeper has the console, the line comes in order with the workers' output.
        Never waits."""
        keeper = self._line
        if keeper is not None and self._is_ready and not self._consoles and keeper.unsent < _MOST_UNSENT:
            keeper.send(wire.Say(line))
        else:
            self._say(line)

    def _tell(self, message: object) -> None:
        if self._line is None or not self._is_ready:
            self._waiting.append(message)
        else:
            self._line.send(message)

    # ---- what the keeper says ----

    def events(self, now: float) -> list[Event]:
        """Raises `CannotStart` if the first keeper is never ready."""
        self._listen(now)
        events, self._pending = self._pending, []
        return events

    @property
    def wakes_at(self) -> float | None:
        if self._pending:
            return 0.0
        times = [self._deadline, self._round.answer_by if self._round is not None else None]
        if self._is_ready and self._configure.pings:
            times += [self._pings_at, self._heard_at + wire.SILENCE_S]
        return min((at for at in times if at is not None), default=None)

    def _listen(self, now: float) -> None:
        line = self._line
        if line is None:
            return
        try:
            messages = line.listen(now)
            for message in messages:
                self._take(message, now)
        except wire.Broken as error:
            is_limit = isinstance(error, wire.Limited)
            self._lost(str(error), has_ended=isinstance(error, wire.Ended), is_limit=is_limit)
            return
        if messages:
            self._heard_at = now
        elif self._deadline is not None and now >= self._deadline:
            self._lost(f"it was not ready within {_HELLO_S:g} s")
        elif self._round is not None and self._round.answer_by is not None and now >= self._round.answer_by:
            self._lost("it did not answer")
        else:
            self._grant(line)
            if self._is_ready and self._configure.pings:  # before, `_HELLO_S` limits how long a login may take
                self._ping(line, now)

    def _grant(self, line: Line) -> None:
        """Allow the keeper to send more output if this side's consoles have room. A console that was full calls
        `has_room` when it has room again, which wakes the clock."""
        if self._owes_credit and not any(console.is_full() for console in self._consoles.values()):
            line.send(wire.Credit(self._owes_credit))
            self._owes_credit = 0

    def _ping(self, line: Line, now: float) -> None:
        if now >= self._heard_at + wire.SILENCE_S:
            self._lost(f"nothing was heard of it for {wire.SILENCE_S:g} s")
        elif now >= self._pings_at:
            self._pings_at = now + wire.PING_S
            line.send(wire.Ping())

    def _take(self, message: object, now: float) -> None:
        match message:
            case wire.Hello():
                pass  # the stream has checked its version
            case wire.Unusable(why, is_usage):
                if self._has_started:
                    raise wire.Limited(why)
                raise CannotStart(why, is_usage=is_usage)
            case wire.Ready():
                self._be_ready(message, now)
            case wire.Output(stream, text):
                self._owes_credit += 1
                if stream in self._consoles:
                    self._consoles[stream].write(text.encode("utf-8", "surrogateescape"), self)
            case wire.Flushed():
                self._owes_flush = False
            case wire.Pids() | wire.Exitcodes():
                self.told.take(message)
                self._calling.release()
            case wire.Ping():
                pass
            case WorkersStarted() | WorkersExited() | WorkersStopped() | PortReserved():
                self._pending.append(self._noted(message))

    def _be_ready(self, ready: wire.Ready, now: float) -> None:
        self._is_ready, self._deadline, self._ready_at = True, None, now
        self._configure = evolve(self._configure, log_dir=ready.log_dir)
        self._stuck = ready.stuck if self._round is not None else ()
        self._used_ports.add(ready.port)
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._tell(message)
        if (round_ := self._round) is not None and round_.stop is not None:
            self._await_answer(round_, round_.stop.grace_s if round_.running else 0.0)
        if not self._has_started:
            self._has_started, self._port = True, ready.port
            self._pending.append(Started(now, self._nonce, ready.port))

    def _noted(self, event: Event) -> Event:
        match event:
            case WorkersExited(_, _, exits) if self._round is not None:
                event = self._calling.judged(event, self._round.running)
                self._round.ended(exits)
            case WorkersStopped(at, round_, port, ()) if self._stuck:
                stuck, self._stuck = self._stuck, ()  # of the last keeper's round, which this one does not know
                return self._noted(WorkersStopped(at, round_, port, stuck))
            case WorkersStopped(_, round_, port):
                self._port = port
                self._used_ports.add(port)
                if self._round is not None and self._round.number == round_:
                    self._round = None
            case PortReserved(_, port):
                self._owes_port, self._port = False, port
                self._used_ports.add(port)
        return event

    # ---- keepers that come and go ----

    def _begin(self, start: Start) -> None:
        """Raises `OSError`."""
        self._line = line = Line(self._clock, start)
        self._is_ready = False
        now = self._clock.now()
        self._heard_at = now
        self._deadline = now + _HELLO_S
        line.send(evolve(self._configure, used_ports=tuple(sorted(self._used_ports)), port=self._port))

    def _lost(self, why: str, *, has_ended: bool = False, is_limit: bool = False) -> None:
        """The keeper is dead or cannot be used any more: end it, say so, and start another one.

        `has_ended`: the keeper has ended by itself. How it has ended then says more than `why`."""
        line, self._line = self._line, None
        if self._is_ready and self._clock.now() - self._ready_at > _STEADY_S:
            self._failures = 0
        self._is_ready, self._deadline = False, None
        how = line.end() if line is not None else ""
        why = (has_ended and how) or why
        self._owes_flush, self._owes_credit = False, 0
        if not self._has_started:
            raise CannotStart(f"the keeper of this node's workers could not be started: {why}")
        lost = f"the keeper of this node's workers is lost: {why}"
        self._say(f"reknit: {lost}; its workers are ended, and a new keeper is started")
        self._on_death()
        if self._round is not None:
            self._fail(lost, is_limit=is_limit)
        self._replace(why)

    def _replace(self, why: str) -> None:
        self._failures += 1
        self._why = why
        self._configure = evolve(self._configure, sweeps=True)
        self._waiting = []
        if (round_ := self._round) is not None:
            round_.answer_by = None  # this was for the last keeper: the time of the next one begins when it is ready
            self._waiting += [round_.stop] if round_.stop is not None else []
        if self._owes_port:
            self._waiting.append(ReservePort())
        if self._failures <= _TRIES:
            try:
                self._begin(self._start)
                return
            except OSError as error:
                self._why = _cause(error)
        self._waiting = []
        if self._owes_port:
            self._owes_port = False
            self.renew_port()
        if self._round is not None and self._round.stop is not None:
            self.stop(self._round.stop)

    def _fail(self, why: str, *, only_first: bool = False, is_limit: bool = False) -> None:
        """Report the workers that run as failed."""
        if self._round is not None and (exits := self._round.failed(why, only_first=only_first, is_limit=is_limit)):
            self._pending.append(WorkersExited(self._clock.now(), self._round.number, exits))

    # ---- the end ----

    def flush(self, deadline_s: float) -> bool:
        """Wait until the keeper's console has everything that was said. False if it has not after `deadline_s`
        seconds."""
        line = self._line
        if line is None or not self._is_ready:
            return True
        if not self._owes_flush:
            self._owes_flush = True
            line.send(wire.Flush())
        give_up = time.monotonic() + deadline_s
        while self._owes_flush:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return False
            line.wait(left_s)
            self._listen(self._clock.now())
        return self._line is line  # if not, this keeper has died, and what it had not written is lost

    def close(self) -> None:
        """End workers and keeper, and close all descriptors. Bounded in time. May be repeated."""
        self._calling.close()
        if os.getpid() == self._owner and self._line is not None:
            if self._consoles:
                self.flush(LAST_WORDS_S)  # output that is still on the wire would be lost with the keeper
        if os.getpid() == self._owner and self._line is not None:
            line, self._line = self._line, None
            if not line.shut_down(_CLOSE_S) and self._configure.mark:
                from reknit.adapters.orphans import end_marked  # slow to import, and rarely needed

                end_marked(self._configure.mark, _SWEEP_S)

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. Otherwise the keeper would not see the end of the
        stream when the agent dies."""
        line, self._line = self._line, None
        if line is not None:
            line.abandon()
        self._calling.close()


def _cause(error: OSError) -> str:
    cause = error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {cause}" if error.filename else cause


def _abandon_all() -> None:
    for keeper in _open:
        keeper.abandon()


_open: WeakSet[Keeper] = WeakSet()
"""All clients of this process. A child that is forked from this process abandons them."""
os.register_at_fork(after_in_child=_abandon_all)
