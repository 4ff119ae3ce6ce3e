"""Starting a keeper in a process of its own on this host.

1. A library starts its keeper by exec. The interpreter is isolated (`-I`) and gets explicit paths: a module in the
   working folder must not take the place of one of the standard library. The keeper inherits nothing else of the host
   program.
2. The command line forks its keeper before it has a second thread. So the keeper shares what is already imported.
3. On this host the stream is a socket pair. The keeper inherits the console (descriptors 0 to 2), and gets the
   environment that the caller chooses.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from attrs import frozen

from reknit.adapters.host.children import pidfd_of
from reknit.adapters.keeper.common.settling import apart
from reknit.adapters.keeper.process import boot
from reknit.adapters.keeper.protocol.stream import Stream
from reknit.adapters.keeper.protocol.wire import ToAgent, ToKeeper

_WIRE, _PARCELS = 3, 4
"""The descriptors of the stream and of the socket for open files, in a keeper that is started by exec."""
_OS_ERROR = 71  # sysexits' EX_OSERR


@frozen(eq=False)
class Keeping:
    """A keeper that was started, as its agent sees it."""

    stream: Stream
    pid: int
    """The pid of a child of this process: the keeper, or the command that reaches it."""
    fd: int
    """A descriptor that is readable when this child has ended. -1: the system has none."""
    parcels: socket.socket | None = None
    """Takes open files for the keeper. None: this keeper cannot be given any."""


Start = Callable[[], Keeping]
"""Starts a keeper. Raises `OSError` if no process or descriptor is left."""


def by_exec(env: Mapping[str, str], console: tuple[int, int] = (1, 2)) -> Keeping:
    """Start a keeper on this host in a new interpreter. `env`: its environment, which its workers inherit. `console`:
    the descriptors of this process that become the keeper's stdout and stderr."""
    _check()
    ours, theirs = socket.socketpair()
    try:
        # Whatever may fail comes before the start: afterwards there is a process that must not be lost.
        stream = stream_of(ours, ToAgent)
    except OSError:
        theirs.close()
        raise
    try:
        parcels, taker = socket.socketpair()
        try:
            parcels.setblocking(False)
            argv = [sys.executable, "-I", "-S", boot.__file__, os.pathsep.join(paths())]
            argv += [str(_WIRE), str(os.getpid()), str(_PARCELS)]
            given = {_WIRE: theirs.fileno(), _PARCELS: taker.fileno()}
            given |= {number: fd for number, fd in enumerate(console, 1) if fd != number}
            with apart(given) as ends:
                pid = spawned(argv, env, [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in ends.items()])
        except BaseException:
            parcels.close()
            raise
        finally:
            taker.close()
    except BaseException:
        stream.close()
        raise
    finally:
        theirs.close()
    return Keeping(stream, pid, pidfd_of(pid), parcels)


def by_fork(become: Callable[[socket.socket, int], NoReturn] | None = None) -> Keeping:
    """Start a keeper on this host as a fork of this process, which must have one thread. It has the same
    environment.

    `become`: called in the child, with its end of the stream and the pid of this process. None: the child keeps nothing
    of this process but the console."""
    _check()
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    try:
        stream = stream_of(ours, ToAgent)
    except OSError:
        theirs.close()
        raise
    try:
        pid = os.fork()
    except OSError:
        stream.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            stream.close()  # this comes first, because the process may have no other descriptor free
            os.setpgid(0, 0)
            (become or _become)(theirs, agent)
        finally:
            os._exit(_OS_ERROR)  # otherwise the program of the agent would run a second time in this process
    theirs.close()
    try:
        os.setpgid(pid, pid)  # the child does the same. One of the two is first
    except OSError:
        pass  # the child has done so already, or is dead
    return Keeping(stream, pid, pidfd_of(pid))


def _check() -> None:
    """Raises `OSError` on a host where no process can know its own descriptors."""
    if not os.path.exists("/dev/fd"):
        why = "reknit needs it, and it is there only if /proc is mounted"
        raise FileNotFoundError(errno.ENOENT, why, "/dev/fd")


def _become(wire: socket.socket, agent: int) -> NoReturn:
    from reknit.adapters.keeper.process.keeper import (
        keep,  # imported in the child, so that the agent does not wait for the import
    )

    boot.close_all_but(wire.fileno())
    keep(stream_of(wire, ToKeeper), agent, has_console=True)


def cause(error: OSError) -> str:
    """Why no keeper could be started: part of a line for the operator."""
    why = error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {why}" if error.filename else why


def spawned(argv: list[str], env: Mapping[str, str], actions: list[tuple[int, int, int]]) -> int:
    return os.posix_spawnp(
        argv[0],
        argv,
        dict(env),
        file_actions=actions,
        setpgroup=0,
        setsigmask=(),
        # A host program may ignore SIGCHLD. The keeper would inherit that, and could not learn how its workers end.
        setsigdef=(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
    )


def stream_of(wire: socket.socket, incoming: object) -> Stream:
    """The stream over this socket. The socket is closed if there can be no stream."""
    # Two descriptors, so that an event loop can watch one for reading and one for writing.
    try:
        sink = os.dup(wire.fileno())
    except OSError:
        wire.close()
        raise
    return Stream(wire.detach(), sink, incoming)


def paths() -> list[str]:
    """Where the keeper finds reknit, attrs and psutil: the folders in which this process finds them."""
    import attr

    here = os.path.abspath(boot.__file__)
    for _ in range(5):  # process, keeper, adapters, reknit, and the folder that holds the package
        here = os.path.dirname(here)
    found = [here, os.path.dirname(os.path.dirname(os.path.abspath(attr.__file__)))]
    return list(dict.fromkeys([*found, *(path for path in map(str, sys.path) if path.endswith("-packages"))]))
