"""Whether this agent hosts the store, and the server process if it does.

Who hosts is found out by trying, never by comparing names: the endpoint is this host's if a connection to it arrives at
our own listener. Names, interfaces, NAT and virtual addresses need no rule of their own then.

1. The listener takes connections on all addresses. A name may stand for another address elsewhere than here (Debian
   gives a host's own name 127.0.1.1).
2. It listens before the server runs: clients that are early wait in its backlog.
3. The server ends when this process does: it holds the other end of a socket that nobody else has.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time

from reknit.adapters.children import reap, signal_process
from reknit.adapters.ports import Refused
from reknit.core.reasons import Refusal

from . import server
from .client import endpoint

_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers, terminals and `pkill` send to every process of a job. From the first moment on, and for ever."""
_BACKLOG = 4096
_PROOF_S = 1.0
_CONTEST_S, _PAUSE_S = 5.0, 0.1
"""For how long what is in the way of a listener is waited for, if it serves nobody."""
_CLOSE_S = 5.0
_NONCE_BYTES = 16


class StoreHost:
    """The server process: a child of this one, in a process group of its own."""

    def __init__(self, listener: socket.socket) -> None:
        """Takes over the listener. Raises `OSError` if there can be no process."""
        self._line, theirs = socket.socketpair()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", server.__file__],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, listener.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 1),
                    # torch's warnings about what others send to the port are nobody's concern here.
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
                setsigmask=_BLOCKED,
            )
        except OSError:
            self._line.close()
            raise
        finally:
            theirs.close()
            listener.close()
        self._line.setblocking(False)
        self._said = ""
        self._status: int | None = None

    def failure(self) -> str | None:
        """Why it does not serve (any more), in one line; None while it runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, signal.SIGKILL  # a sweep of all children was faster
            if not pid:
                return None
            self._status = os.waitstatus_to_exitcode(status)
            self._said = self._last_words()
        if self._said:
            return self._said
        how = f"status {self._status}" if self._status >= 0 else signal.Signals(-self._status).name
        return f"the store's server (process {self.pid}) ended with {how}"

    def close(self) -> None:
        """End it, and the store with it. May be repeated."""
        if self._status is None:
            signal_process(self.pid, signal.SIGKILL)
            reap([self.pid], _CLOSE_S)
            self._status = -signal.SIGKILL
        self._line.close()

    def _last_words(self) -> str:
        try:
            return self._line.recv(4096).decode(errors="replace")
        except OSError:
            return ""


def host_store(host: str, port: int, must: bool | None = None) -> StoreHost | None:
    """The store at this endpoint if it is this process's to host, else None. `must`: decided already.

    Raises `Refused` if it cannot be hosted here although it must be. Takes 2 s per address at most, beside resolving
    the name, or a few more if the port is taken and nobody answers there.
    """
    if must is False:
        return None
    try:
        listener = _listening(port) if must else _proven(host, port)
        return StoreHost(listener) if listener else None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise Refused(Refusal.SETUP, f"cannot host the store at {endpoint(host, port)}: {why}") from None


def _proven(host: str, port: int) -> socket.socket | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    give_up = time.monotonic() + _CONTEST_S
    while True:
        is_ours = any(_is_ours(family, address) for family, _, _, _, address in found)
        # If this host has not the address, and nobody serves there, it may stand for us after all (NAT).
        if not is_ours and _is_served(host, port):
            return None
        listener = _listening_if_free(port)
        if listener is not None:
            if _arrives(listener, host, port):
                return listener
            listener.close()
        # In the way may be another agent that is just trying, or a connection that has been given this very port.
        if not is_ours or _is_served(host, port) or time.monotonic() >= give_up:
            return None
        time.sleep(_PAUSE_S)


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return True


def _is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PROOF_S).close()
    except OSError:
        return False
    return True


def _listening_if_free(port: int) -> socket.socket | None:
    try:
        return _listening(port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None  # somebody serves here already; or may, and we may not
        raise


def _listening(port: int) -> socket.socket:
    try:
        return _bound(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return _bound(socket.AF_INET, "0.0.0.0", port)  # a host without IPv6


def _bound(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _arrives(listener: socket.socket, host: str, port: int) -> bool:
    """Does a connection to the endpoint come out here?

    A client that is early and comes in between is turned away, and tries again.
    """
    give_up = time.monotonic() + _PROOF_S
    nonce = b"\xff" + os.urandom(_NONCE_BYTES - 1)  # a TCPStore elsewhere makes nothing of 255
    arrived: dict[int, socket.socket] = {}
    listener.settimeout(_PROOF_S)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        with socket.create_connection((host, port), _PROOF_S) as probe:
            probe.sendall(nonce)
            while (left_s := give_up - time.monotonic()) > 0:
                for fd, _ in poll.poll(left_s * 1000):
                    if fd == listener.fileno():
                        sock, _ = listener.accept()
                        arrived[sock.fileno()] = sock
                        poll.register(sock, select.POLLIN)
                        continue
                    poll.unregister(fd)
                    with arrived.pop(fd) as sock:
                        if _received(sock) == nonce:
                            return True
    except OSError:
        pass  # nobody is there
    finally:
        for sock in arrived.values():
            sock.close()
    return False


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_NONCE_BYTES)
    except OSError:
        return b""
