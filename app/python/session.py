"""Running agents from a program: in a thread of their own, or in an asyncio event loop.

    result = run(Settings(command=("python", "train.py"), local_world_size=2))

    with start(settings) as running:  # a notebook or a server: the agent lives in a thread
        running.leave()               # what SIGTERM is to `reknit run`
        result = running.join()

    result = await run_async(settings)

1. reknit takes no signal, does not write `os.environ`, and waits for no child process of the program.
2. A child process, the keeper, holds the workers. If the program dies, however it dies, the keeper ends them and
   itself.
3. A program may run any number of agents, of one job or of several jobs.
4. A program such as a daemon may have closed descriptors 0, 1 or 2. reknit opens /dev/null in their place. Otherwise
   its own descriptors would get these numbers, and what the program prints would go there. /dev/null stays open when
   the agent has ended, because the program may use it by then.
5. Workers write to the descriptors 1 and 2. If the program has replaced `sys.stdout` or `sys.stderr`, as a notebook
   does, their output goes to these objects (`printing.py`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attrs import evolve

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.output.console import LAST_WORDS_S, READER_S, ConsoleWriter
from reknit.adapters.keeper.output.printing import Printing
from reknit.adapters.keeper.process.boot import open_standard
from reknit.adapters.runtime import shells
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.loop import Loop, Observer
from reknit.adapters.runtime.ports import CannotStart, Workers
from reknit.adapters.runtime.threads import sheltered
from reknit.app.report import PREFIX, Reporter
from reknit.app.settings import NO_EVENTS, Settings
from reknit.app.wiring.surroundings import Surroundings, Wired
from reknit.app.wiring.wiring import wire
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Result

if TYPE_CHECKING:
    from asyncio import Future

    from reknit.app.wiring.recording import Recording

OpenWorkersHere = Callable[[SystemClock, str, str], Workers]


def _for_objects(settings: Settings, printing: Printing) -> Settings:
    """A program that has put objects in the place of its streams, as a notebook does, gets lines without times."""
    lines = settings.streams.lines
    if printing.console == (1, 2) or lines.has_times is not None:
        return settings
    return evolve(settings, streams=evolve(settings.streams, lines=evolve(lines, has_times=False)))


class Session:
    """One agent with its ports and its keeper. The function `start` makes one and lets its agent run. Close it, or use
    `with`."""

    def __init__(
        self,
        settings: Settings,
        *,
        environ: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
        observers: Iterable[Observer] = (),
        workers: OpenWorkersHere | None = None,
        rewire: Callable[[Wired], None] = lambda wired: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens everything. The agent does not run yet.

        `environ`: the variables with which the workers' environment begins. None: a copy of `os.environ`.
        `say`: called with each line of reknit's own, in the thread that runs the agent. None: the keeper writes these
        lines to this program's stderr.
        `observers`: called after every step, in the thread that runs the agent.
        `workers`: makes the port of the workers, from the clock of the agent, its nonce and the mark of its workers
        (`Surroundings.workers`). `say` must be given then. None: a keeper holds the workers.
        `rewire`: may change the wiring before the agent begins. It closes what it brings.
        `on_end`: called in the agent's thread when the agent has ended.

        For a job with several nodes, this may wait some seconds for the store. Raises `Prevented` if the agent cannot
        begin, `CannotStart` if no keeper can be started or a limit of the machine is met, `FunctionError` if the
        function of the settings cannot be a worker, `UnusableHandler`, which is a `ValueError`, if there is no such
        handler of events, and `ValueError` if `settings` or `say` is of a wrong type.
        """
        _check(settings, say)
        self._owner = os.getpid()
        self._thread: shells.LoopThread | None = None
        self._is_closed = False
        open_standard()  # rule 4 above
        self._clock = SystemClock()
        self._wishes = shells.Wishes(self._clock)
        self._recording: Recording | None = None
        self._on_end = on_end
        try:
            self._printing = Printing()
        except BaseException:
            self._clock.close()
            raise
        settings = _for_objects(settings, self._printing)
        self._console = ConsoleWriter(self._printing.console[1], style=settings.streams.lines)
        """Where lines go while no keeper can show them, unless the program wants them itself."""
        world = Surroundings(
            clock=self._clock,
            requests=self._wishes,
            environ=dict(os.environ if environ is None else environ),
            say=say or self._console.say,
            has_said=self._console.flush,
            console=self._printing.console,
            workers=partial(workers, self._clock) if workers is not None else None,
        )
        try:
            self._wired = wired = wire(settings, world, os.urandom(8).hex())
        except BaseException:
            self._close_own()
            raise
        try:
            rewire(wired)
            for note in wired.notes:
                (say or wired.keeper.say)(PREFIX + note)
            own = self._own_observers(settings, wired, say or wired.keeper.say)
            self.loop = Loop(Agent(wired.spec), wired.ports, [*own, *wired.observers, *observers])
            """For reading only: `loop.agent` is the agent as it is now, and `loop.agent.job` is the job."""
        except BaseException:
            self._let_go()
            raise

    def _own_observers(self, settings: Settings, wired: Wired, say: Callable[[str], None]) -> list[Observer]:
        reporter = Reporter(say, verbose=settings.verbose, names_options=False)
        if settings.event_handler == NO_EVENTS:
            return [reporter]
        from reknit.app.wiring.recording import Recording

        self._recording = Recording(settings, wired, say)
        return [reporter, self._recording]

    def start(self) -> None:
        """Run the agent in a thread of its own. Raises `CannotStart`, and closes everything, if there is no thread to
        be had."""
        if self._thread is not None or self._is_closed:
            raise RuntimeError("an agent is started once, and not after it was closed")
        self._thread = thread = shells.LoopThread(self.loop, self._on_end)
        try:
            thread.start()
        except RuntimeError as error:  # how Python says that no further thread can be started
            self._thread = None
            self.close()
            raise CannotStart(f"the system allows no thread for the agent: {error}") from None
        except BaseException:  # a signal's handler has raised an error while this waited for the thread to begin
            self.close()
            raise

    def join(self, timeout_s: float | None = None) -> Result | None:
        """Wait until the agent has ended. None: it has not ended within `timeout_s` seconds. Raises what the agent's
        thread has raised: `CannotStart` if the first keeper has failed, or a bug of reknit or of an observer."""
        if self._thread is None or os.getpid() != self._owner:
            raise RuntimeError("the agent was not started by this process")
        return self._thread.join(timeout_s)

    def flush(self, deadline_s: float) -> bool:
        """Wait until all that the workers have written is written to this program's streams. False if that takes longer
        than `deadline_s` seconds."""
        workers = self._wired.ports.workers  # a program may have brought others, which write where they want
        return not isinstance(workers, KeeperClient) or workers.flush(deadline_s)

    def values(self) -> dict[int, object]:
        """What the workers of this node have returned, by global rank: None for a worker that is a program. Empty
        unless the job has succeeded. To be called before `close`. Raises `FunctionError` if a value cannot be read in
        this process."""
        if self._is_closed or os.getpid() != self._owner:
            raise RuntimeError("the values are gone with the agent: ask for them before it is closed")
        result = self.loop.result
        if result is None or not result.return_values:
            return {}
        returned = self._wired.keeper.values(self.loop.agent.job.round)
        # The ranks of one node are contiguous, in the order of its local ranks.
        return {rank: returned.get(local_rank) for local_rank, rank in enumerate(sorted(result.return_values))}

    @property
    def trace(self) -> str:
        """The folder with the trace of the agent, for `reknit explain`. Empty: there is none."""
        return self._wired.trace

    async def run_async(self) -> Result:
        """Run the agent in the event loop that calls this. Raises as `join` does. If this coroutine is cancelled, the
        workers run on. Then call `leave` and run it again, or call `close`."""
        return await shells.run_async(self.loop)

    def leave(self, signum: int = signal.SIGTERM) -> None:
        """Ask the node to leave. Its workers get the signal, and `Settings.grace_s` to end. Another call shortens that
        time."""
        if os.getpid() == self._owner:
            self._wishes.ask(signum)

    def close(self) -> None:
        """Kill the workers that still run, end the keeper and all threads, and close all descriptors. May be repeated.

        In a forked child of the program this does nothing: the agent is its parent's.
        """
        if self._is_closed or os.getpid() != self._owner:
            return
        try:
            if self.loop.result is not None:
                self.flush(READER_S)
            elif self._thread is not None:
                self._wishes.ask(signal.SIGKILL)
                self._thread.wait(_END_S)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """An error, for example of the program's own `say`, keeps nothing open. An interrupt may come between any two
        lines: then another call does the rest, for which what was wired needs the clock."""
        self._on_end = lambda: None  # it may hold on to what holds on to this agent
        error: Exception | None = None
        for part in (self._recording, self._wired):
            try:
                if part is not None:
                    part.close()
            except Exception as raised:
                error = error or raised
        self._close_own()
        self._is_closed = True
        if error is not None:
            raise error

    def _close_own(self) -> None:
        try:
            self._console.close(LAST_WORDS_S)
        finally:
            try:
                self._printing.close()
            finally:
                self._clock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        sheltered(self.close)


_END_S = 15.0
_GOODBYE_S = 5.0
"""Seconds after the grace in which an agent that was cancelled can say goodbye to the other nodes."""
_AGAIN_S = 1.0
"""A cancellation that comes sooner after another one is the same one. Some libraries repeat it until the task ends."""


def _check(settings: object, say: object) -> None:
    """Raises `ValueError` for arguments that would only fail later, in the thread of the agent."""
    if not isinstance(settings, Settings):
        raise ValueError(f"settings must be a Settings, not {settings!r:.100}")
    if say is not None and not callable(say):
        raise ValueError(f"say must be a function, or None, not {say!r:.100}")


def start(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    observers: Iterable[Observer] = (),
) -> Session:
    """Run an agent in a thread of its own, and return at once. Arguments and errors are those of `Session`."""
    _check(settings, say)
    if settings.function is not None:
        from reknit.adapters.keeper.client.function_workers import (
            end_import,  # slow to import, and not needed for programs
        )

        end_import(settings.start_method)  # only in the main thread it ends a worker without a traceback

    def started() -> Session:
        running = Session(settings, environ=environ, say=say, observers=observers)
        running.start()
        return running

    return sheltered(started, undo=Session.close)


def run(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    observers: Iterable[Observer] = (),
) -> Result:
    """Run an agent until it has ended, and close it. Arguments and errors are those of `Session`.

    An exception in the calling thread, for example KeyboardInterrupt, ends the workers and is raised.
    """
    with start(settings, environ=environ, say=say, observers=observers) as running:
        result = running.join()
    if result is None:
        raise AssertionError("a join without a timeout waits for the result")
    return result


async def run_async(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    observers: Iterable[Observer] = (),
) -> Result:
    """`run` as a coroutine, which never blocks the event loop. What a cancellation does is described at `to_end`."""
    async with opened_async(settings, environ=environ, say=say, observers=observers) as running:
        return await to_end(running)


async def to_end(running: Session) -> Result:
    """Run an agent until it has ended. If this is cancelled, the workers get SIGTERM and `Settings.grace_s`. The
    cancellation is raised when the agent has ended, and at the latest `_GOODBYE_S` after the grace: the host of a store
    does not stay for other nodes. Another cancellation shortens the grace."""
    import asyncio

    loop = asyncio.get_running_loop()
    cancelled: BaseException | None = None
    ends_at, latest = None, 0.0
    while True:
        bound = asyncio.timeout_at(ends_at)
        try:
            async with bound:
                result = await running.run_async()
        except asyncio.CancelledError as error:
            now = loop.time()
            if cancelled is None:
                cancelled, ends_at = error, now + running.loop.agent.spec.grace_s + _GOODBYE_S
                running.leave()
            elif now - latest > _AGAIN_S:
                running.leave()
            latest = now
        except TimeoutError:
            if cancelled is None or not bound.expired():
                raise
            raise cancelled from None
        else:
            if cancelled is not None:
                raise cancelled
            return result


@asynccontextmanager
async def opened_async(
    settings: Settings,
    *,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    observers: Iterable[Observer] = (),
) -> AsyncIterator[Session]:
    """A context with an agent that does not run yet. It is opened and closed in a thread, so that the event loop is not
    blocked. Arguments and errors are those of `Session`."""
    import asyncio  # slow to import, and loaded already where this is called

    # What runs in a thread is a future and no task. The end of `asyncio.run` cancels every task, even one that nobody
    # has cancelled by name, and a cancelled `asyncio.to_thread` loses what its thread returns, or never begins.
    in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
    opening = in_thread(partial(Session, settings, environ=environ, say=say, observers=observers))
    try:
        running = await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The thread goes on opening. What it opens must be closed, whoever has lost interest.
        opening.add_done_callback(_close_opened)
        await asyncio.wait([opening])
        raise
    try:
        yield running
    finally:
        await asyncio.shield(in_thread(running.close))


def _close_opened(opening: Future[Session]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
