"""`reknit run` after its command line was understood: runs one agent in this process until it ends.

This is the process that the user started. It handles signals, and adopts and reaps processes that have lost their
parent. Its keeper writes the workers' output. A library does none of this: see app/python/session.py.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.host.children import become_subreaper, children, reaped, sweep
from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.client.start import by_fork
from reknit.adapters.keeper.output.console import LAST_WORDS_S, READER_S, ConsoleWriter
from reknit.adapters.keeper.output.streams import is_same
from reknit.adapters.runtime import shells
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.loop import Loop, Observer
from reknit.app.report import PREFIX, Reporter, exit_status, final_lines
from reknit.app.settings import NO_EVENTS, Settings
from reknit.app.wiring.surroundings import Surroundings, Wired
from reknit.app.wiring.wiring import wire
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command, Result
from reknit.core.agent.events import Event, Started
from reknit.core.agent.reasons import SignalReceived
from reknit.core.agent.states import WorkerState
from reknit.core.job.reasons import BudgetSpent

from .signals import Signals
from .terminal import restored

if TYPE_CHECKING:
    from reknit.app.wiring.recording import Recording

_LOOK_S = 0.2
"""Pause between two looks for a signal, while this process waits for a reader of its console. Seconds."""
_SWEEP_S = 5.0
_WAITS = "the job has ended; this command waits until its output is read (a signal ends the wait)"


def run(settings: Settings, environ: Mapping[str, str], console: ConsoleWriter, notices: Sequence[str] = ()) -> int:
    """Run one agent until it has ended. Returns the exit status. To be called in a process with one thread.

    `environ`: the variables with which the workers' environment begins. `notices`: lines to show first. Raises
    `Prevented` and `CannotStart`.
    """
    become_subreaper()
    clock = SystemClock()
    own = {*children()}  # an entry point may have started something before it became this process
    signals = Signals(clock, settings.signals)
    world = Surroundings(
        clock=clock,
        requests=signals,
        environ=environ,
        say=_unsaid if settings.streams.lines.is_quiet else console.say,
        has_said=console.flush,
        start=by_fork,
        on_keeper_death=lambda: _sweep_adopted(own),
        children=own,
    )
    try:
        wired = wire(settings, world, os.urandom(8).hex())
        signals.on_child = lambda: _reap_adopted({wired.keeper.pid, *own})
        signals.on_resize = wired.keeper.resized
        signals.takes_key = wired.keeper.takes_key
        # Ctrl-Z would stop this process alone. Its workers would run on, and their end would go unnoticed. The signal
        # is ignored only after the keeper was started. Otherwise the keeper would take this for a wish of the user, and
        # let the workers ignore the signal as well. A worker that has the terminal is stopped with this process.
        if signal.SIGTSTP not in settings.signals and not (settings.terminal is not None and _has_shell()):
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        gc.freeze()  # imported modules stay in use: see `cli`
        gc.enable()
        with restored(settings.terminal is not None):
            try:
                return _run(settings, environ, console, wired, notices)
            finally:
                wired.close()
    finally:
        # The signals stay taken until the process ends. A further SIGTERM would otherwise kill it, and the scheduler
        # would not see the exit status of the job.
        clock.close()


def _run(
    settings: Settings, environ: Mapping[str, str], console: ConsoleWriter, wired: Wired, notices: Sequence[str]
) -> int:
    keeper = wired.keeper
    for notice in (*notices, *wired.notes):
        keeper.say(PREFIX + notice)
    observers: list[Observer] = [Reporter(keeper.say, verbose=settings.verbose), *wired.observers]
    if settings.streams.redirects or settings.streams.tee:
        observers.append(_announcing(keeper))
    recording = None if settings.event_handler == NO_EVENTS else _recording(settings, wired)
    if recording is not None:
        observers.append(recording)
    loop, began = Loop(Agent(wired.spec), wired.ports, observers), wired.ports.clock.now()
    result = _result(loop, recording)
    last = [PREFIX + line for line in _final(settings, result, loop, began, wired.trace)]
    writer = keeper.pid
    is_quiet = settings.streams.lines.is_quiet
    for line in last:
        keeper.say(line)
    _leave_error_file(result, environ)
    _wait_for_reader(console, wired, result)
    if keeper.pid != writer or (is_quiet and result.state is not WorkerState.SUCCEEDED):
        # The keeper has died, perhaps before it had written these lines. The agent has said so, and what it says last
        # must be the origin of the status. A quiet keeper has written none.
        for line in last:
            console.say(line)
    return exit_status(result)


def _final(settings: Settings, result: Result, loop: Loop, began: float, trace: str) -> Iterator[str]:
    ran_s, is_alone, restarts = loop.agent.at - began, settings.meeting is None, loop.agent.job.restarts
    is_own = isinstance(result.why, BudgetSpent) and result.why.root.node.id == loop.agent.me.id
    terminal = settings.terminal if is_own else None  # a worker of another node has another one
    streams = settings.streams
    shown = settings.local_world_size if is_alone and not (streams.redirects or streams.shown) else 0
    return final_lines(result, restarts, ran_s=ran_s, is_alone=is_alone, terminal=terminal, shown=shown, trace=trace)


def _unsaid(line: str) -> None:
    """Takes a line that nobody wants."""


def _recording(settings: Settings, wired: Wired) -> Recording:
    """What records events. Raises `UsageError` if the handler cannot be used."""
    from reknit.adapters.observe.destinations import UnusableHandler
    from reknit.app.wiring.recording import Recording

    from .options import UsageError

    try:
        return Recording(settings, wired, wired.keeper.say)
    except UnusableHandler as error:
        raise UsageError(f"--event-log-handler: {error}") from None


def _result(loop: Loop, recording: Recording | None) -> Result:
    if recording is None:
        return shells.run(loop)
    try:
        result = shells.run(loop)
    except BaseException:
        from traceback import format_exc

        recording.close(format_exc())
        raise
    recording.close()
    return result


def _announcing(keeper: KeeperClient) -> Observer:
    """An observer that shows where the workers' output goes, when the keeper has made the folder."""

    def announce(before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        if isinstance(event, Started) and keeper.log_dir:
            keeper.say(f"{PREFIX}the workers' output: {keeper.log_dir}")

    return announce


def _wait_for_reader(console: ConsoleWriter, wired: Wired, result: Result) -> None:
    """Wait until this process and the keeper have written all output and the report (`reknit run … | less`). The wait
    is short if a signal has ended this agent, or comes meanwhile.

    If stdout is another place than stderr, it may be data for another program, and none of it may be lost. Then only a
    signal, or a reader that ends, ends the wait. Otherwise the wait ends after `READER_S`."""

    def has_written(within_s: float) -> bool:
        return console.flush(within_s) and wired.keeper.flush(within_s)

    is_asked, waited_s, are_apart = isinstance(result.why, SignalReceived), 0.0, not is_same(1, 2)
    left_s = LAST_WORDS_S if is_asked else READER_S
    while left_s > 0 and not has_written(min(_LOOK_S, left_s)):
        waited_s += _LOOK_S
        if wired.ports.requests.taken():
            is_asked, left_s = True, min(left_s, LAST_WORDS_S)
        if is_asked or not are_apart:
            left_s -= _LOOK_S
        elif waited_s - _LOOK_S < READER_S <= waited_s:
            console.say(PREFIX + _WAITS)
    if left_s <= 0:
        console.close(0.0)  # nobody reads: what is left is dropped, and nothing waits for it again


def _sweep_adopted(own: set[int]) -> None:
    """End the processes of a dead keeper. They are children of this process now."""
    sweep(_SWEEP_S, own)


def _has_shell() -> bool:
    """A shell can continue this process and the worker that has the terminal after Ctrl-Z."""
    from reknit.adapters.keeper.common.spawn import Terminal

    return Terminal.of(os.getpid()).has_shell


def _reap_adopted(own: set[int]) -> None:
    """Reap dead children that this process has adopted. A subreaper, or the first process of a container, gets every
    process that has lost its parent."""
    for pid in children():
        if pid not in own:
            reaped(pid)


def _leave_error_file(result: Result, environ: Mapping[str, str]) -> None:
    """Write the root cause into the file that TORCHELASTIC_ERROR_FILE names. A scheduler may have given this variable
    to the agent."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path and isinstance(result.why, BudgetSpent):
        from reknit.adapters.keeper.failures.error_files import write

        failure = result.why.root.failure
        write(path, failure, failure.exitcode)
