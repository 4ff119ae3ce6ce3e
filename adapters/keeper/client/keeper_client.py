"""The agent's side of its keeper: the port `Workers`, carried out by another process.

1. No call waits, except `close` and `flush`, which have a deadline.
2. When the keeper dies, its workers die with it. Each worker that had not ended by itself is reported as failed. So the
   usual policy decides what follows. The client starts a new keeper, which first ends every process that carries this
   agent's mark.
3. A keeper that does not answer in time is killed, and so is a keeper that sends something that is no message. Rule 2
   above then holds.
4. When no further keeper can be started, a start of workers is answered by a failure that says why. A stop is answered
   at once.
5. `keeper_states.py` says what belongs to one keeper. What outlives a keeper is here: the round, the ports, and what is
   owed to the loop.
6. Only the process that opened a client closes it. A copy of the client in a forked child only closes its copies of the
   descriptors.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.adapters.host.children import abandon_in_forks
from reknit.adapters.keeper.output.console import LAST_WORDS_S, ConsoleWriter
from reknit.adapters.keeper.protocol import wire
from reknit.adapters.keeper.protocol.stream import Broken, Limited, StreamEnded
from reknit.adapters.runtime.ports import CannotStart, Clock
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event, Started, StopRequested
from reknit.core.agent.worker_words import (
    PortReserved,
    ReservePort,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStopped,
)
from reknit.core.job.job import EMPTY

from .calling import Calling
from .keeper_connection import KeeperConnection
from .keeper_states import NoKeeper, ReadyKeeper, StartingKeeper
from .round import RoundWorkers, ToldProcesses
from .start import Start, cause

if TYPE_CHECKING:
    from .function_workers import Function

ANSWER_S = 20.0
"""Time between the SIGKILL of a stop and the keeper's answer, at most. Seconds."""
CLOSE_S = 15.0
"""Time for a keeper to end its workers and itself. After that it is killed. Seconds."""
_TRIES = 3
"""Number of keepers that may fail in a row. After that, the next keeper is started with the next start of workers."""
_SWEEP_S = 5.0
_INTERRUPTED = (-signal.SIGINT, -signal.SIGQUIT)
"""Exit codes of a worker that has died of a key of the terminal."""
_KEY_S = 30.0
"""A worker that ends within so many seconds after a key has ended because of it. It may write a checkpoint first."""
_MOST_UNSENT = 1 << 20
"""If the keeper has this many bytes still to take, `say` does not send it further lines."""


class KeeperClient:
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
        has_said: Callable[[float], bool] = lambda wait_s: True,
        consoles: Mapping[int, ConsoleWriter] = EMPTY,
        on_death: Callable[[], None] = lambda: None,
        function: Function | None = None,
        console: tuple[int, int] = (1, 2),
        start_method: str = "spawn",
    ) -> None:
        """Starts a keeper at once, unless `start_method` is fork. Raises `CannotStart`.

        `nonce`: the agent's nonce, for the event `Started`.
        `start`: starts the first keeper. `restart`: starts every later one. None: as the first.
        `say`: shows a line while no keeper with a console is ready. `has_said`: see `Surroundings.has_said`.
        `consoles`: needed if the keeper has no console. By stream (1 and 2), where the workers' output goes.
        `on_death`: called when a keeper has died, before the next one is started.
        `function`: what each worker of a `StartWorkers` calls. None: these workers run the command line of `configure`.
        `start_method`: how workers that are functions are started. fork: each start of such workers starts a keeper,
        as a fork of this process, and waits for the end of the last one. `console`: the stdout and stderr of a fork.
        """
        self._calling = Calling(start_method, function, console)
        self._clock = clock
        self._configure = configure
        self._nonce = nonce
        self._start = restart or start
        self._say, self._has_said = say, has_said
        self._consoles = consoles
        self._on_death = on_death
        self._owner = os.getpid()
        self._keeper: NoKeeper | StartingKeeper | ReadyKeeper = NoKeeper("there was none")
        self._ending: KeeperConnection | None = None
        """The keeper that is being ended. An interrupt, for example Ctrl-C, leaves it here for the next `close`."""
        self._failures = 0  # number of keepers that have failed in a row
        self._has_started = False  # the loop was told `Started`: the first keeper was ready
        self._pending: list[Event] = []  # what the loop is told next
        self._round: RoundWorkers | None = None  # the workers that the loop has started and not yet seen stopped
        self.told = ToldProcesses()
        self._port = 0
        """The bootstrap port that the loop was told of. 0: a round has started since, or there is none."""
        self._key: tuple[int, float] | None = None
        """The last key of the terminal that was for a worker, and when it came."""
        self._used_ports: set[int] = set()  # every port that a keeper of this client has reserved
        self._owes_port = False  # the loop has asked for another port and was not answered
        self._fence_at: float | None = None
        self._warm: wire.Warm | None = None
        """What every keeper of this client makes a zygote of. None: there is no zygote."""
        abandon_in_forks(self)
        if self._calling.forks:
            self._has_started = True
            self._pending.append(Started(clock.now(), nonce, self._reserve()))
            return
        try:
            self._begin(start)
        except OSError as error:
            raise CannotStart(f"cannot start the keeper of this node's workers: {cause(error)}") from None

    @property
    def pid(self) -> int:
        """The pid of the keeper, or of the command that reaches it. 0: there is no keeper."""
        return self._keeper.pid

    @property
    def log_dir(self) -> str:
        """The folder of this run on the keeper's host. Empty: there is none, or the keeper is not ready yet."""
        return self._configure.log_dir

    # ---- what the loop wants ----

    def start(self, command: StartWorkers | wire.StartProcesses, functions: Mapping[int, Function] = EMPTY) -> None:
        """`functions`: by local rank, what the processes of the command call. Such a process has an empty `argv`.
        Raises `FunctionError` if one of them cannot be a worker."""
        takes_files = isinstance(self._keeper, NoKeeper) or self._keeper.line.takes_files
        message = self._calling.message(command, functions, takes_files=takes_files)
        self._round, self._port = RoundWorkers(command), 0
        if (start := self._calling.start) is not None:
            self._fork(start)
        elif isinstance(self._keeper, NoKeeper):
            self._failures = 0
            self._replace()
        if isinstance(self._keeper, NoKeeper):
            self._fail(f"cannot start the keeper of this node's workers: {self._keeper.why}", only_first=True)
        else:
            self._keeper.tell(message)

    def _fork(self, start: Start) -> None:
        """Start a keeper that has the functions of the round, in the place of the last one."""
        if (line := self._let_go("the keeper of the last round was ended")) is not None:
            line.shut_down(CLOSE_S)
            self._ending = None
        self._has_said(LAST_WORDS_S)  # otherwise the line about this start could come after the workers' output
        try:
            self._begin(start)
        except OSError as error:
            self._keeper = NoKeeper(cause(error))

    def pids(self, round_: int) -> Mapping[int, int]:
        """The workers' processes by local rank. Empty before `WorkersStarted` of the round, and after the next one."""
        return self.told.pids(round_)

    def values(self, round_: int) -> Mapping[int, object]:
        """By local rank: what the functions of the round have returned, until the next start of workers. Raises
        `FunctionError` if such a value cannot be read in this process."""
        return self._calling.values(round_)

    def _reserve(self) -> int:
        """fork: another bootstrap port, which this process reserves. Otherwise 0, because the keepers reserve them."""
        return self._calling.port(self._used_ports, self._configure.master_port) if self._calling.forks else 0

    def stop(self, command: StopWorkers | wire.Stop) -> None:
        round_ = self._round
        stop = wire.Stop(command.round, command.signal, command.grace_s, command.hangs, command.await_exits_s)
        if isinstance(self._keeper, NoKeeper):
            self._round = None
            self._pending.append(WorkersStopped(self._clock.now(), command.round, self._reserve()))
            return
        if round_ is not None and round_.number == command.round:
            is_ready = isinstance(self._keeper, ReadyKeeper)
            if round_.stop is not None and not (is_ready or round_.running):
                return  # no worker of the round lives, and the next keeper answers the first stop
            round_.stop = stop
            if is_ready:
                self._await_answer(round_, command.grace_s)
        self._keeper.tell(stop)

    def _await_answer(self, round_: RoundWorkers, grace_s: float) -> None:
        by = self._clock.now() + grace_s + ANSWER_S
        round_.answer_by = min(by, round_.answer_by or by)

    def fence(self, at: float | None) -> None:
        """See `ports.Fences`."""
        self._fence_at = at
        self._keeper.fence(at)

    def renew_port(self) -> None:
        if isinstance(self._keeper, NoKeeper):
            self._pending.append(PortReserved(self._clock.now(), self._reserve()))
        else:
            self._owes_port = True
            self._keeper.tell(ReservePort())

    def warm_up(self, warm: wire.Warm) -> None:
        """Have the workers forked from a zygote. To be called when no process of an earlier agent is left, once."""
        self._warm = warm
        self._keeper.tell(warm)

    def resized(self) -> None:
        """Tell the keeper that the console's terminal has another size."""
        self._keeper.tell(wire.Resized())

    def say(self, line: str) -> None:
        """Show a line of reknit's own. If the keeper has the console, the line comes in order with the workers' output.
        Never waits."""
        keeper = self._keeper
        can_show = isinstance(keeper, ReadyKeeper) and not self._consoles and keeper.line.unsent < _MOST_UNSENT
        # Agent and keeper write to one console. A line for the keeper would overtake the lines that wait here.
        if can_show and self._has_said(0.0):
            keeper.tell(wire.Say(line))
        else:
            self._say(line)

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
        times = [self._keeper.wakes_at, self._round.answer_by if self._round is not None else None]
        return min((at for at in times if at is not None), default=None)

    def _listen(self, now: float) -> None:
        keeper = self._keeper
        if isinstance(keeper, NoKeeper):
            return
        try:
            messages = keeper.line.listen(now)
            for message in messages:
                self._take(message, now)
        except Broken as error:
            is_limit = isinstance(error, Limited)
            self._lost(keeper.line, str(error), has_ended=isinstance(error, StreamEnded), is_limit=is_limit)
            return
        if messages:
            if isinstance(self._keeper, ReadyKeeper):
                self._keeper.heard(now)
        elif self._round is not None and self._round.answer_by is not None and now >= self._round.answer_by:
            self._lost(keeper.line, "it did not answer")
        elif why := keeper.overdue(now):
            self._lost(keeper.line, why)
        if isinstance(self._keeper, ReadyKeeper):
            # Output that has just come counts as well: a keeper without credit sends nothing that would wake the clock.
            # A console that was full calls `has_room` when it has room again, which wakes the clock.
            if not any(console.is_full() for console in self._consoles.values()):
                self._keeper.grant()
            self._keeper.ping(now)

    def _take(self, message: object, now: float) -> None:
        keeper = self._keeper
        match message:
            case wire.Hello() | wire.Ping():
                pass  # the stream has checked the version, and that something came is noted by `_listen`
            case wire.Unusable(why, is_usage):
                if self._has_started:
                    raise Limited(why)
                raise CannotStart(why, is_usage=is_usage)
            case wire.Ready() if isinstance(keeper, StartingKeeper):
                self._be_ready(keeper, message, now)
            case wire.Output(stream, text) if isinstance(keeper, ReadyKeeper):
                keeper.note_output()
                if stream in self._consoles:
                    self._consoles[stream].write(text.encode("utf-8", "surrogateescape"), self)
            case wire.Flushed() if isinstance(keeper, ReadyKeeper):
                keeper.owes_flush = False
            case wire.Pids() | wire.Exitcodes():
                self.told.take(message, self.pid, self._configure.mark)
                self._calling.release()
            case _ if isinstance(message, wire.Happened):
                self._pending.append(self._noted(message))

    def _be_ready(self, keeper: StartingKeeper, ready: wire.Ready, now: float) -> None:
        self._keeper = keeper.ready(now, pings=self._configure.pings)
        self._configure = evolve(self._configure, log_dir=ready.log_dir)
        self._used_ports.add(ready.port)
        if (round_ := self._round) is not None:
            round_.stuck = ready.stuck
            if round_.stop is not None:
                self._await_answer(round_, round_.stop.grace_s if round_.running else 0.0)
        if not self._has_started:
            self._has_started, self._port = True, ready.port
            self._pending.append(Started(now, self._nonce, ready.port))

    def _noted(self, event: Event) -> Event:
        if self._calling.forks and isinstance(event, WorkersStopped | PortReserved):
            event = evolve(event, port=self._reserve())  # this keeper will not live to see the next round
        match event:
            case WorkersExited(_, _, exits) if self._round is not None:
                event = self._calling.judged(event, self._round.running)
                self._round.ended(exits)
                self._interrupted(exits)
            case WorkersStopped(_, number, port, stuck):
                self._port = port
                self._used_ports.add(port)
                if self._round is not None and self._round.number == number:
                    event = evolve(event, stuck=stuck or self._round.stuck)
                    self._round = None
            case PortReserved(_, port):
                self._owes_port, self._port = False, port
                self._used_ports.add(port)
        return event

    def _interrupted(self, exits: Sequence[WorkerExit]) -> None:
        """Ctrl-C and Ctrl-\\ reach agent and worker. If the worker with the terminal dies of it, somebody has asked for
        the end of the whole command. If it lives on, as in a debugger, nothing was asked of the agent."""
        now = self._clock.now()
        for exit_ in exits:
            if exit_.local_rank != self._configure.terminal or exit_.failure is None:
                continue
            code = exit_.failure.exitcode
            if self._key is not None and now - self._key[1] < _KEY_S:
                self._pending.append(StopRequested(now, self._key[0]))  # it may save something first, and exit with 1
            elif code in _INTERRUPTED:
                self._pending.append(StopRequested(now, -code))

    def takes_key(self, signum: int) -> bool:
        """Ctrl-C or Ctrl-\\ was pressed. True: a worker runs that has the terminal, and has got this signal."""
        if self._round is None or self._configure.terminal not in self._round.running:
            return False
        self._key = signum, self._clock.now()
        return True

    # ---- keepers that come and go ----

    def _begin(self, start: Start, waiting: Sequence[object] = ()) -> None:
        """Start a keeper. `waiting`: what it is told when it is ready. Raises `OSError`."""
        line = KeeperConnection(self._clock, start)
        self._keeper = StartingKeeper(line, self._clock.now(), waiting)
        self._keeper.fence(self._fence_at)
        line.send(evolve(self._configure, used_ports=tuple(sorted(self._used_ports)), port=self._port))

    def _lost(self, line: KeeperConnection, why: str, *, has_ended: bool = False, is_limit: bool = False) -> None:
        """The keeper is dead or cannot be used any more: end it, say so, and start another one.

        `has_ended`: the keeper has ended by itself. How it has ended then says more than `why`."""
        if isinstance(self._keeper, ReadyKeeper) and self._keeper.was_steady(self._clock.now()):
            self._failures = 0
        how = line.end()
        why = (has_ended and how) or why
        self._keeper = NoKeeper(why)
        if not self._has_started:
            raise CannotStart(f"the keeper of this node's workers could not be started: {why}")
        lost = f"the keeper of this node's workers is lost: {why}"
        self._say(f"reknit: {lost}; its workers are ended, and a new keeper is started")
        self._on_death()
        if self._round is not None:
            self._fail(lost, is_limit=is_limit)
        self._replace()

    def _replace(self) -> None:
        """Start a keeper in the place of the last one, unless too many have failed in a row."""
        self._failures += 1
        self._configure = evolve(self._configure, sweeps=True, left=self.told.left)
        waiting: list[object] = [] if self._warm is None else [self._warm]
        if (round_ := self._round) is not None:
            round_.answer_by = None  # this was for the last keeper: the time of the next one begins when it is ready
            waiting += [round_.stop] if round_.stop is not None else []
        if self._owes_port:
            waiting.append(ReservePort())
        if self._failures <= _TRIES:
            try:
                self._begin(self._start, waiting)
                return
            except OSError as error:
                self._keeper = NoKeeper(cause(error))
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
        keeper = self._keeper
        if not isinstance(keeper, ReadyKeeper):
            return True
        keeper.ask_for_flush()
        give_up = time.monotonic() + deadline_s
        while keeper.owes_flush and self._keeper is keeper:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return False
            keeper.line.wait(left_s)
            self._listen(self._clock.now())
        return self._keeper is keeper  # if not, this keeper has died, and what it had not written is lost

    def close(self) -> None:
        """End workers and keeper, and close all descriptors. Bounded in time. May be repeated, also when it was
        interrupted."""
        if os.getpid() != self._owner:
            return
        self._calling.close()
        if self._consoles:
            self.flush(LAST_WORDS_S)  # output that is still on the wire would be lost with the keeper
        if (line := self._let_go("it was closed")) is None:
            return
        if not line.shut_down(CLOSE_S) and self._configure.mark:
            from reknit.adapters.host.orphans import end_marked  # slow to import, and rarely needed

            end_marked(self._configure.mark, _SWEEP_S, self.told.processes)
        self._ending = None

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. Otherwise the keeper would not see the end of the
        stream when the agent dies."""
        if (line := self._let_go("it is the parent's")) is not None:
            line.abandon()
            self._ending = None

    def _let_go(self, why: str) -> KeeperConnection | None:
        """Have no keeper from now on. Returns the line to the one there was, which its caller ends."""
        if not isinstance(self._keeper, NoKeeper):
            self._ending = self._keeper.line
        self._keeper = NoKeeper(why)
        return self._ending
