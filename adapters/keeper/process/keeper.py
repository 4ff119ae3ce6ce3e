"""The keeper: the process that holds one agent's workers. The agent is at the other end of a `stream.Stream`.

1. One thread decides. It sleeps until a message comes, a worker ends, the agent dies or a deadline passes.
2. When its agent is gone, the keeper ends everything that it has ever started, and then itself. It watches the stream
   and the agent's pidfd. It needs the pidfd because a forked child of the agent's program holds the stream open.
3. The keeper adopts the processes that its workers leave behind (`PR_SET_CHILD_SUBREAPER`). So a keeper that has no
   child has left no process.
4. A stopped keeper (SIGSTOP) cannot end anything. When its agent dies, the kernel continues it, and the keeper finds
   the end of the stream (`guard.continue_on_news`). If a forked child of the agent's program holds the stream open,
   another rule of the kernel helps: a stopped process group gets SIGHUP and SIGCONT when its last parent outside the
   group dies. For that, the keeper has a process group of its own in the agent's session, and ignores SIGHUP.
   There is one exception (`_terminal`): for a worker that has the terminal, it may join the group of the agent.
5. The keeper ignores signals that a scheduler or a terminal sends to every process of a job. The agent decides when the
   workers end.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from reknit.adapters.host.children import become_subreaper, pidfd_of
from reknit.adapters.host.orphans import end_marked, processes_of
from reknit.adapters.keeper.common.environment import handed_down
from reknit.adapters.keeper.common.guard import continue_on_news
from reknit.adapters.keeper.common.run_folder import CannotMake, LogFolder, remove_abandoned, working_folder
from reknit.adapters.keeper.output.console import LAST_WORDS_S, ConsoleWriter
from reknit.adapters.keeper.protocol.files import Receiver
from reknit.adapters.keeper.protocol.stream import Broken, Stream
from reknit.adapters.keeper.protocol.wire import (
    VERSION,
    Configure,
    Credit,
    Exitcodes,
    Fence,
    Flush,
    Flushed,
    Hello,
    Pids,
    Ping,
    Ready,
    Resized,
    Say,
    Shutdown,
    StartProcesses,
    Stop,
    Unusable,
    Warm,
)
from reknit.adapters.runtime.clock import SystemClock, is_readable
from reknit.core.agent.worker_words import ReservePort, StartWorkers, WorkersStarted, WorkersStopped

from .processes import Processes

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Terminal
    from reknit.adapters.keeper.functions.forks import Forks
    from reknit.adapters.keeper.remote.far_output import FarOutput
    from reknit.adapters.keeper.remote.pings import Pings
    from reknit.adapters.keeper.watchdog.watchdog import Watchdog

_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGTTOU,
)
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
"""The first and the longest pause between two looks whether the console has everything. The pause doubles each time.
Seconds."""
_SWEEP_S = 5.0
_BUG, _OS_ERROR = 70, 71


def keep(
    stream: Stream, agent_pid: int, *, has_console: bool, parcels: int = -1, forks: Forks | None = None
) -> NoReturn:
    """Be the keeper of the agent at the other end of `stream`. Never returns: the process ends here.

    `agent_pid`: the agent's process, which is the parent of this one. 0: the agent runs on another host.
    `has_console`: descriptors 1 and 2 are the console. If False, the workers' output crosses the stream.
    `parcels`: the descriptor of the socket by which the agent sends open files. -1: it sends none.
    `forks`: the workers that are forks of this process. None: every worker is started by exec.
    """
    inherited = {s for s in _IGNORED if signal.getsignal(s) is signal.SIG_IGN}
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)  # this is a handler of the agent, from which the keeper was forked
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    become_subreaper()
    # The collector was off while modules were imported. From now on it leaves out what they hold, which stays in use.
    gc.freeze()
    gc.enable()
    status = 0
    try:
        # The workers do not ignore what the keeper ignores. SIGTTOU is the exception: workers run in the background of
        # a terminal, and after `stty tostop` the first line that a worker writes would stop it.
        given_back = {*_IGNORED} - inherited - {signal.SIGTTOU}
        keeper = Keeper(stream, agent_pid, has_console, given_back, Receiver(parcels), forks)
    except OSError as error:  # a limit of the operator's, not a bug
        stream.send(Unusable(f"the keeper of this node's workers cannot be started: {error.strerror}"))
        os._exit(_OS_ERROR)
    try:
        keeper.serve()
    except OSError as error:  # a limit of the machine: the agent says it, in the order of its own lines
        stream.send(Unusable(error.strerror or str(error)))
        status = _OS_ERROR
    except BaseException as error:
        _show(error)
        status = _BUG
    os._exit(status)  # without waiting for a thread that writes to a console which nobody reads


def _is_read(path: str) -> bool:
    from reknit.adapters.keeper.watchdog.timerpipe import is_read  # needed by few jobs

    return is_read(path)


def _show(error: BaseException) -> None:
    """The traceback of a bug."""
    from traceback import format_exception

    console = ConsoleWriter(2)
    for line in "".join(format_exception(error)).splitlines():
        console.say(line)
    console.flush(LAST_WORDS_S)


def _terminal(wanted: Configure) -> Terminal | None:
    """The agent's, which is the parent of this process. None: no worker has it, and nothing is imported for it."""
    if wanted.terminal is None:
        return None
    from reknit.adapters.keeper.common.spawn import Terminal

    terminal = Terminal.of(os.getppid())
    if not terminal.has_shell and os.isatty(0):
        # The worker joins the agent's group. If this process, its parent, were in another group of the session, the
        # kernel would let Ctrl-Z stop the agent's group. The shell of `ssh -t HOST 'reknit run …; …'` is in this group,
        # and would stop for ever, because nobody could continue it.
        os.setpgid(0, terminal.group)
    return terminal


class Keeper:
    def __init__(
        self,
        stream: Stream,
        agent_pid: int,
        has_console: bool,
        given_back: set[signal.Signals],
        receiver: Receiver,
        forks: Forks | None,
    ) -> None:
        self._clock = SystemClock()
        self._stream = stream
        self._receiver = receiver
        self._forks = forks
        self._given_back = given_back
        self._agent_fd = pidfd_of(agent_pid) if agent_pid else -1
        self._is_gone = agent_pid != 0 and os.getppid() != agent_pid
        """The agent is dead, or cannot be reached any more."""
        self._is_over = False
        self._workers: Processes | None = None
        self._folder: LogFolder | None = None
        self._has_tidied = False
        self._owes_flush = 0
        self._look_s = _FIRST_LOOK_S
        self._pings: Pings | None = None
        """None: the agent runs on this host."""
        self._far_output = None if has_console else self._without_console()
        """None: this keeper has a console."""
        if agent_pid:
            continue_on_news(stream.source)
        self._clock.watch(stream.source)
        if receiver.fd >= 0:
            self._clock.watch(receiver.fd)
        if self._agent_fd >= 0:
            self._clock.watch(self._agent_fd)
        stream.wants_to_write = self._watch_sink
        # SIGCHLD wakes the clock when an adopted child ends. Adopted children have no pidfd here.
        signal.signal(signal.SIGCHLD, lambda signum, frame: self._clock.wake())

    def serve(self) -> None:
        """Serve until the agent is gone or says `Shutdown`. Then end everything."""
        try:
            self._stream.send(Hello(VERSION, os.getpid(), os.uname().nodename))
            while not (self._is_over or self._is_gone):
                self._clock.wait(self._wakes_at())
                self._take()
                self._report()
        finally:
            self._end()

    # ---- what the agent says ----

    def _take(self) -> None:
        now = self._clock.now()
        self._stream.flush()
        self._receiver.receive()
        try:
            messages = self._stream.receive(now)
        except Broken:
            self._is_gone = True
            return
        if messages and self._pings is not None:
            self._pings.heard(now)
        elif self._pings is not None and self._pings.overdue(now):
            self._is_gone = True
        if self._agent_fd >= 0 and is_readable(self._agent_fd):
            self._is_gone = True
        for message in messages:
            self._obey(message)

    def _obey(self, message: object) -> None:  # noqa: C901  # a dispatcher: one arm per message
        match message:
            case Configure():
                self._configure(message)
            case Shutdown():
                self._is_over = True
            case Credit(records) if self._far_output is not None:
                self._far_output.allow(records)
            case Ping():
                pass  # a ping carries nothing else: `_take` has noted that something came
            case _ if self._workers is None:
                pass  # the keeper could not be configured, and has said so
            case StartWorkers() | StartProcesses():
                count = message.descriptors if isinstance(message, StartProcesses) else 0
                self._workers.start(message, self._receiver.take(count))
            case Stop():
                self._workers.stop(message)
            case Warm():
                self._workers.warm_up(message)
            case Fence(until):
                self._workers.fence(until)
            case ReservePort():
                self._workers.renew_port()
            case Say(line):
                self._workers.say(line)
            case Flush():
                self._owes_flush += 1
                self._look_s = _FIRST_LOOK_S
            case Resized():
                self._workers.resized()

    def _configure(self, wanted: Configure) -> None:
        if wanted.cwd not in ("", working_folder()):
            try:
                os.chdir(wanted.cwd)
            except OSError as error:
                self._stream.send(Unusable(f"the working folder {wanted.cwd}: {error.strerror}"))
                return
        swept, stuck = 0, tuple[int, ...]()
        if wanted.sweeps:
            swept, stuck = end_marked(wanted.mark, _SWEEP_S, processes_of(wanted.left))
        try:
            keeps = bool(wanted.streams.redirects or wanted.streams.tee)
            self._folder = LogFolder(wanted.log_base, wanted.run_id, keeps=keeps, made=wanted.log_dir)
            watchdog = self._watchdog(wanted)
        except CannotMake as error:
            self._stream.send(Unusable(str(error), is_usage=not error.is_limit))
            return
        if wanted.pings:
            from reknit.adapters.keeper.remote.pings import Pings

            self._pings = Pings(self._clock.now())
        self._workers = Processes(
            self._clock,
            evolve(wanted, log_dir=self._folder.path),
            env=handed_down(os.environ, wanted, "" if watchdog is None else watchdog.timer_file, _is_read),
            # Only on Linux is this process a subreaper, so that all its children belong to the job.
            own_children=sys.platform == "linux",
            given_back=self._given_back,
            is_abandoned=self._is_abandoned,
            console=(1, 2) if self._far_output is None else self._far_output.console,
            forks=self._forks,
            watchdog=watchdog,
            terminal=_terminal(wanted),
        )
        try:
            port = self._workers.reserve_port()
        except OSError as error:
            self._stream.send(Unusable(f"--master-port={wanted.master_port}: {error.strerror}", is_usage=True))
            return
        self._stream.send(Ready(port, self._folder.path, swept, stuck))

    def _watchdog(self, wanted: Configure) -> Watchdog | None:
        """None: nothing is to be watched, and nothing is imported for it."""
        if wanted.hang_after_s is None and wanted.start_timeout_s is None and wanted.timer_file is None:
            return None
        from reknit.adapters.keeper.watchdog.watchdog import Watchdog

        return Watchdog(
            self._clock,
            hang_after_s=wanted.hang_after_s,
            start_timeout_s=wanted.start_timeout_s,
            timer_file=wanted.timer_file,
            run_id=wanted.run_id,
        )

    def _is_abandoned(self) -> bool:
        """Whether the agent is gone. This is asked between the starts of many workers."""
        poll = select.poll()
        poll.register(self._stream.source, getattr(select, "POLLRDHUP", 0))
        if self._agent_fd >= 0:
            poll.register(self._agent_fd, select.POLLIN)
        return bool(poll.poll(0))

    # ---- what the agent is told ----

    def _report(self) -> None:
        workers, now = self._workers, self._clock.now()
        if workers is None:
            return
        for event in workers.events(now):
            if isinstance(event, WorkersStarted):
                self._stream.send(Pids(event.round, workers.pids))
            if isinstance(event, WorkersStopped):
                self._stream.send(Exitcodes(*workers.exitcodes))
            self._stream.send(event)
            if not self._has_tidied and isinstance(event, WorkersStarted):
                self._has_tidied = True
                remove_abandoned()
        if self._owes_flush:
            if workers.flush(0.0) and not self._has_output():
                self._owes_flush -= 1
                self._stream.send(Flushed())
            else:
                self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S)
        if self._pings is not None and self._pings.takes_turn(now):
            self._stream.send(Ping())
        if self._far_output is not None:
            self._far_output.hand_on()

    def _wakes_at(self) -> float | None:
        """The next time at which the keeper must look, even if nothing happens. None: there is no such time."""
        times = [waiting.wakes_at for waiting in (self._pings, self._workers) if waiting is not None]
        if self._owes_flush:
            times.append(self._clock.now() + self._look_s)
        return min((at for at in times if at is not None), default=None)

    def _watch_sink(self, is_wanted: bool) -> None:
        if is_wanted:
            self._clock.watch_writable(self._stream.sink)
        else:
            self._clock.unwatch(self._stream.sink)

    def _without_console(self) -> FarOutput:
        from reknit.adapters.keeper.remote.far_output import FarOutput

        return FarOutput(self._clock, self._stream)

    def _has_output(self) -> bool:
        return self._far_output is not None and self._far_output.is_waiting()

    # ---- the end ----

    def _end(self) -> None:
        if self._workers is not None:
            ended, stuck = self._workers.end_all()
            if self._is_gone and ended:
                count = f"{ended} process{'es' * (ended != 1)} of the job"
                self._workers.say(f"reknit: the agent is gone; its keeper has ended {count}")
            if stuck:
                self._workers.say(f"reknit: these processes cannot be killed: {', '.join(map(str, stuck))}")
            # If the agent has waited for the console in vain, waiting once more would only delay its end.
            self._workers.flush(0.0 if self._is_over and self._owes_flush else LAST_WORDS_S)
            self._workers.close()
        if self._folder is not None:
            self._folder.close()
