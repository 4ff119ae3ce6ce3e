"""One worker process, which leads a process group of its own: the *leader*.

A dead leader is not reaped before the round has ended. Until then no other process can get its pid. The pid is also the
number of the group. So the group can be signalled safely even when its leader is dead.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.host.children import descendants, signal_group, signal_process, stat_of
from reknit.adapters.keeper.output.streams import WorkerStreams

from .guard import Guard
from .settling import apart

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock

_CANNOT_EXECUTE = (errno.EACCES, errno.ENOEXEC)


@frozen
class Terminal:
    """The terminal of the agent, for a worker that somebody talks to, for example by `breakpoint()`.

    The worker joins the process group of the agent. So the shell and the kernel treat both as one job: Ctrl-C, Ctrl-Z,
    `fg` and `bg` concern both. If the worker had a group of its own and were given the terminal by tcsetpgrp(3), the
    shell would not know of it."""

    group: int
    """The process group of the agent."""
    has_shell: bool
    """A shell can continue the group after Ctrl-Z. Not so if the group leads the session, for example under
    `ssh -t`."""

    @classmethod
    def of(cls, agent: int) -> Terminal:
        """That of the agent with this pid, which is in the session of this process."""
        group = os.getpgid(agent)
        process = agent
        try:
            while process and os.getpgid(process) == group:  # a script of the user may be between shell and agent
                process = os.getppid() if process == os.getpid() else int(stat_of(str(process))[1])
            return cls(group, process != 0 and os.getsid(process) == os.getsid(0))
        except (OSError, ValueError, IndexError):
            return cls(group, False)


def spawn(
    argv: list[str],
    env: Mapping[str, str],
    ends: Mapping[int, int],
    *,
    guard: Guard,
    given_back: Collection[signal.Signals] = (),
    terminal: Terminal | None = None,
) -> int:
    """Start a process as leader of a new process group, or with a terminal. Returns its pid.

    `ends`: for a descriptor of the new process, the descriptor of this process that it becomes.
    `guard`: kills the group if this process dies.
    `given_back`: signals that this process ignores and the new process does not.
    `terminal`: the process keeps stdin, and belongs to the group of the agent. None: it does not.

    Raises `OSError`. Raises `ValueError` for a command that no process can have, for example one with a null byte.
    """
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = []
    if terminal is None and 0 not in ends and os.isatty(0):
        # The kernel stops a background group that reads from the terminal. The worker would hang without a message.
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    ticket = guard.ticket(above=max(ends, default=2))
    try:
        with apart({**ends, **({ticket: ticket} if ticket >= 0 else {})}) as numbers:
            actions += [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in numbers.items()]
            with _stops_ignored(terminal):
                pid = os.posix_spawnp(
                    argv[0],
                    argv,
                    env,
                    file_actions=actions,
                    setpgroup=0 if terminal is None else terminal.group,
                    setsigmask=(),
                    setsigdef=_defaults(given_back, terminal),
                )
    except BaseException:
        if ticket >= 0:
            os.close(ticket)
        raise
    if ticket >= 0:
        guard.arm(ticket, pid, leads=terminal is None)
    return pid


def _defaults(given_back: Collection[signal.Signals], terminal: Terminal | None) -> set[signal.Signals]:
    """The signals that get their default. Python ignores SIGPIPE and SIGXFSZ."""
    defaults = {signal.SIGPIPE, signal.SIGXFSZ, *given_back}
    if terminal is None:
        return defaults
    # After `bg`, a debugger would set the modes of the terminal that the shell uses. SIGTTOU stops it until `fg`.
    return defaults | {signal.SIGTTOU} if terminal.has_shell else defaults - {signal.SIGTSTP}


@contextmanager
def _stops_ignored(terminal: Terminal | None) -> Iterator[None]:
    """A process that is started meanwhile ignores Ctrl-Z if nobody could continue it."""
    if terminal is None or terminal.has_shell:
        yield
        return
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def spawn_exitcode(error: OSError | ValueError) -> int:
    """The exit code of a worker that could not be started: 127 or 126 as in a shell, else 71 (EX_OSERR of sysexits)."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT:
        return 127
    return 126 if number in _CANNOT_EXECUTE else 71


class Leader:
    """A worker that was started."""

    def __init__(
        self, pid: int, clock: Clock, *, local_rank: int, rank: int, streams: WorkerStreams, error_file: str
    ) -> None:
        self.pid = pid
        self.local_rank = local_rank
        self.rank = rank
        self.streams = streams
        self.error_file = error_file
        """Empty: there is none."""
        self.exitcode: int | None = None
        """None: the worker is alive. Negative: it was killed by that signal."""
        self._reaped = False
        self._watch = PidWatch(pid, clock)

    def look(self) -> bool:
        """True if the worker has died since the last look. The worker is not reaped."""
        if self.exitcode is not None:
            return False
        self.exitcode = self._peek()
        if self.exitcode is None:
            return False
        self._watch.close()  # the pidfd of a dead process stays readable, so the clock would never sleep
        return True

    def _peek(self) -> int | None:
        try:
            if not hasattr(os, "waitid"):  # macOS
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._reaped = pid != 0
                return os.waitstatus_to_exitcode(status) if pid else None
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # Other code of this process has waited for the worker, so its exit code is lost. It counts as a failure.
            self._reaped = True
            return 255
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def signal(self, signum: int) -> None:
        """Signal the worker's group, even if the worker itself is dead. If the worker is alive, signal also those of
        the worker and its descendants that are in other groups. Each of them may have changed its group."""
        if self._reaped:
            return
        elsewhere = [pid for pid in (self.pid, *descendants(self.pid)) if _group(pid) != self.pid]
        signal_group(self.pid, signum)
        for pid in elsewhere:
            signal_process(pid, signum)

    def reap(self) -> bool:
        """Reap the worker if it is dead, and watch it no more. False if it is alive."""
        self._watch.close()
        if self._reaped:
            return True
        try:
            self._reaped = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            self._reaped = True
        return self._reaped


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return pid  # the process has just ended


class PidWatch:
    """Wakes the clock when a child dies. Does nothing on a system without pidfds: SIGCHLD wakes the clock there."""

    def __init__(self, pid: int, clock: Clock) -> None:
        self._clock = clock
        self._fd = -1
        if hasattr(os, "pidfd_open"):
            try:
                self._fd = os.pidfd_open(pid)
            except OSError:
                return  # an old kernel, no free descriptor, or a child that is dead and reaped
            clock.watch(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._clock.unwatch(self._fd)  # before it is closed: see `Poller.remove`
            os.close(self._fd)
            self._fd = -1
