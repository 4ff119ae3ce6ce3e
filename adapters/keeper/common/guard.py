"""The guard pipe: the kernel kills every worker group at the moment when the keeper dies.

Without this pipe, workers would live on if agent and keeper are killed in the same instant: no process is left that
could end them.

1. The keeper alone holds the write end of one pipe. Each worker inherits a read end of its own.
2. For each read end the kernel is told to send a signal when the pipe changes: SIGKILL (`F_SETSIG`), to the worker's
   process group (`F_SETOWN`). Nobody writes to the pipe. Its only change comes when the keeper dies, which closes the
   write end.
3. The pipe does not cover a worker that closes the descriptor, a process that leaves the worker's group, and a worker
   whose keeper is killed in the microseconds before `arm`. If the agent is alive and a subreaper, it adopts such
   processes. Otherwise they are found by their mark.
"""

from __future__ import annotations

import fcntl
import os
import signal


class Guard:
    """One pipe for all workers of a keeper. On a system without `F_SETSIG` it does nothing."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def ticket(self, above: int) -> int:
        """A read end for one worker to inherit, with a number above this one. -1: there is none, because the system or
        its limits do not allow it.

        The pipe is opened once more for each worker, because the kernel keeps the receiver of the signal per open file.
        """
        if not hasattr(fcntl, "F_SETSIG"):
            return -1
        try:
            fd = os.open(f"/proc/self/fd/{self._read_end}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return -1
        if fd > above:
            return fd
        try:
            return int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above + 1))
        except OSError:
            return -1
        finally:
            os.close(fd)

    def arm(self, ticket: int, pid: int, *, leads: bool = True) -> None:
        """Have the kernel kill this process when the keeper dies, with its group if it leads one. Closes this process's
        copy of the ticket.

        To be called when the worker has inherited the ticket.
        """
        try:
            fcntl.fcntl(ticket, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(ticket, fcntl.F_SETOWN, -pid if leads else pid)
            fcntl.fcntl(ticket, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        except OSError:
            pass  # the worker is dead already, or the system (for example gVisor) cannot do that
        os.close(ticket)

    def close(self) -> None:
        """Close both ends. This kills every group that is left. May be repeated."""
        for fd in (self._read_end, self._write_end):
            if fd >= 0:
                os.close(fd)
        self._read_end = self._write_end = -1


def continue_on_news(fd: int) -> None:
    """Have the kernel send SIGCONT to this process when data comes on the socket `fd`, or when its other end is closed.

    So a stopped keeper goes on when its agent dies, and ends its workers. The kernel also continues a stopped process
    group that is orphaned, but only if the next parent of the keeper is in another session.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        pass  # the system (for example gVisor) cannot do that, or the stream is no socket
