"""Nothing outlives the agent: a second process that only waits for it.

    warden (keeps the terminal's process group)  ── waits, forwards signals, sweeps at the end
      └─ agent (a group of its own)              ── runs the job, watches the life-line
           └─ workers

1. Both are subreapers. When the agent dies, by whatever means, its descendants become the warden's children, which
   kills them. When the warden dies, the agent reads end-of-file on the life-line and does the same to its own.
2. Signals stay blocked in the warden and are taken one by one with `sigwait`: there is no handler, hence no moment in
   which one could be lost, and no wake-up without a signal.
3. No PR_SET_PDEATHSIG for the agent. SIGKILL would make orphans of the workers of a hung agent, which they are not
   while it lives; SIGTERM reads as "leave, with grace", and the life-line already says more ("kill, at once"). When
   both are killed in the same instant neither helps: that needs a pid namespace around reknit.
4. A signal that is ignored when we start (nohup, a shell's background job) stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from .children import become_subreaper, sweep_counting

TYPE_CHECKING = False  # as in core/values
if TYPE_CHECKING:
    from typing import NoReturn

_FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
"""Any other catchable signal that ends a process ends the warden, and the agent sees the end of the life-line."""

_SWEEP_S = 10.0
_CANNOT_START = 71  # sysexits' EX_OSERR


def guard(run: Callable[[int], int]) -> NoReturn:
    """Run `run(life_line)` as the agent in a child process and end with its status.

    The agent must watch the descriptor `life_line`: end-of-file means that the warden is gone, and that everything must
    be killed at once. To be called before anything heavy is imported and before any thread is started.
    """
    _open_standard_files()
    forwarded = {s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    # An inherited SIG_IGN for SIGCHLD would throw away what waitpid is to tell; and with the default disposition some
    # systems drop even a blocked one.
    signal.signal(signal.SIGCHLD, _nothing)
    become_subreaper()
    life_line, held = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded | {signal.SIGCHLD})
    try:
        agent = os.fork()
    except OSError as error:
        _say(f"reknit: cannot start the agent: {error.strerror}")
        _leave(_CANNOT_START)
    if agent == 0:
        os.close(held)
        _be_the_agent(run, life_line, before)
    os.close(life_line)
    _be_the_warden(agent, forwarded)


def _be_the_agent(run: Callable[[int], int], life_line: int, mask: set[signal.Signals | int]) -> NoReturn:
    # The terminal's Ctrl-C then reaches only the warden, which forwards it once.
    os.setpgid(0, 0)
    become_subreaper()
    _keep_descriptors_to_ourselves()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A process outside the terminal's foreground group is stopped when it writes after `stty tostop`: a silent hang.
    # Ignored here, it is ignored in the workers, too.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the agent has handlers, Ctrl-C ends it like SIGTERM does, without a KeyboardInterrupt's traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = 1
    try:
        status = run(life_line)
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _leave(status)


def _be_the_warden(agent: int, forwarded: set[signal.Signals]) -> NoReturn:
    try:
        os.setpgid(agent, agent)  # so that it has happened before the first signal, whichever of us runs first
    except OSError:
        pass  # it has done so, or is dead
    # Ctrl-Z would stop us alone: the job would run on, and nobody would be there to sweep.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    _let_go_of_the_pipes()
    status = _wait_for(agent, forwarded)
    ended, stuck = sweep_counting(_SWEEP_S)
    if os.WIFSIGNALED(status):
        _say(
            f"reknit: the agent was killed by {_signal_name(os.WTERMSIG(status))};"
            f" {ended} left-over {'process was' if ended == 1 else 'processes were'} ended"
        )
    if stuck:
        _say(f"reknit: these processes cannot be killed: {', '.join(map(str, stuck))}")
    _leave(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _wait_for(agent: int, forwarded: set[signal.Signals]) -> int:
    """Forward signals and reap adopted orphans until the agent has ended; its wait status."""
    awaited = forwarded | {signal.SIGCHLD}
    while True:
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            os.kill(agent, signum)  # not reaped yet: the number is still the agent's, even if it is dead
            os.kill(agent, signal.SIGCONT)  # a stopped agent cannot obey
            continue
        while True:  # one SIGCHLD may stand for several children
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == agent:
                return status
            if pid == 0:
                break


def _keep_descriptors_to_ourselves() -> None:
    """What the caller has left open is no business of the workers'."""
    try:
        inherited = [int(fd) for fd in os.listdir("/dev/fd")]
    except OSError:
        return
    for fd in inherited:
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                pass  # the one that the list was read through


def _open_standard_files() -> None:
    """A program started without stdin, stdout or stderr would get our pipes under these numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _let_go_of_the_pipes() -> None:
    """Whoever reads our output sees its end when the agent's job has ended, not when the warden has finished."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _exit_status(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _nothing(signum: int, frame: object) -> None: ...


def _say(line: str) -> None:
    try:
        os.write(2, line.encode() + b"\n")
    except OSError:
        pass  # nobody reads it


def _leave(status: int) -> NoReturn:
    """Exit without the interpreter's tidying up, which takes 4 to 7 ms and may wait for threads."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # closed, or nobody reads it
    os._exit(status & 0xFF)
