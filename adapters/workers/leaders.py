"""One worker process, leader of a process group of its own.

A dead leader is not reaped before the round has ended: until then its pid, which is the group's number, cannot become
somebody else's, so the group can be signalled whatever its leader does.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping

from reknit.adapters.children import signal_group
from reknit.adapters.streams import WorkerStreams
from reknit.core.values import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.adapters.ports import Clock

_CANNOT_EXECUTE = (errno.EACCES, errno.ENOEXEC)


def spawn(argv: list[str], env: Mapping[str, str], ends: Mapping[int, int]) -> int:
    """Start a process as leader of a new process group; its pid. `ends`: descriptor there → descriptor here.

    Raises `OSError`, or `ValueError` for what no command can contain.
    """
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in ends.items()
    ]
    if os.isatty(0):
        # A group in the background that reads the terminal is stopped: a hang without a word.
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    return os.posix_spawnp(
        argv[0],
        argv,
        env,
        file_actions=actions,
        setpgroup=0,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores these
    )


def spawn_exitcode(error: OSError | ValueError) -> int:
    """The exit code that a shell would give for a program that cannot be started; else sysexits' EX_OSERR."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT:
        return 127
    return 126 if number in _CANNOT_EXECUTE else 71


class Leader:
    """A worker that was started."""

    def __init__(
        self, pid: int, clock: Clock, *, local_rank: int, rank: int, streams: WorkerStreams, folder: str
    ) -> None:
        self.pid = pid
        self.local_rank = local_rank
        self.rank = rank
        self.streams = streams
        self.folder = folder
        self.exitcode: int | None = None
        """None while it lives; negative: killed by that signal."""
        self._reaped = False
        self._watch = PidWatch(pid, clock)

    @property
    def error_file(self) -> str:
        return os.path.join(self.folder, "error.json") if self.folder else ""

    def look(self) -> bool:
        """Has it died since the last look? Does not reap it."""
        if self.exitcode is not None:
            return False
        self.exitcode = self._peek()
        if self.exitcode is None:
            return False
        self._watch.close()  # a dead one's stays readable: the clock would spin
        return True

    def _peek(self) -> int | None:
        try:
            if not hasattr(os, "waitid"):  # macOS
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._reaped = pid != 0
                return os.waitstatus_to_exitcode(status) if pid else None
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # Somebody else in this process has waited for it, and knows how it ended. That cannot pass as success.
            self._reaped = True
            return 255
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def signal(self, signum: int) -> None:
        """To its whole group, whether or not it is alive itself."""
        if not self._reaped:
            signal_group(self.pid, signum)

    def reap(self) -> bool:
        """Let go of it. False if it still lives: then it is left to itself."""
        self._watch.close()
        if self._reaped:
            return True
        try:
            self._reaped = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            self._reaped = True
        return self._reaped


class PidWatch:
    """Wakes the clock when a child dies. Without pidfds SIGCHLD has to do that."""

    def __init__(self, pid: int, clock: Clock) -> None:
        self._clock = clock
        self._fd = -1
        if hasattr(os, "pidfd_open"):
            try:
                self._fd = os.pidfd_open(pid)
            except OSError:
                return  # an old kernel, no descriptor left, or dead and reaped
            clock.watch(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._clock.unwatch(self._fd)  # first: see Poller.remove
            os.close(self._fd)
            self._fd = -1
