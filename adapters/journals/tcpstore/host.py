"""Finding out whether this agent hosts the store, and the server process if it does.

The agent finds out by trying, never by comparing names. It listens on the endpoint's port, and connects to the
endpoint. If the connection arrives at its own listener, the endpoint is on this host. So names, interfaces, NAT and
virtual addresses need no rules of their own.

1. The listener takes connections on all addresses. A name may stand for different addresses on different hosts (Debian
   gives a host's own name 127.0.1.1).
2. The listener listens before the server runs. Clients that come early wait in its backlog.
3. The server ends when this process ends. It reads from a socket whose other end only this process has open.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping

from reknit.adapters.host.children import abandon_in_forks, reap, signal_process
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.reasons import Refusal

from . import server
from .client import endpoint

_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers, terminals and `pkill` send to every process of a job. The server never sees them: they are
blocked when it starts."""
_BACKLOG = 4096
PROOF_S = 1.0
"""Time for a connection to be made, and for a probe to arrive. Seconds."""
CONTEST_S = 5.0
"""How long the agent waits for a port that is taken and serves nobody. Seconds."""
_PAUSE_S = 0.1
"""The pause between two tries of such a port. Seconds."""
_PROOFS = 3
"""How often the agent tries at least whether a connection arrives at its own listener, if the endpoint's address is one
of this host. A host under load may stand still for the whole time of a proof. Meanwhile another agent of this host
finds the port in use, and takes this agent for the host of the store."""
_CLOSE_S = 5.0
_NONCE_BYTES = 16


class StoreHost:
    """The server process: a child of this one, in a process group of its own."""

    def __init__(self, listener: socket.socket, env: Mapping[str, str] | None = None) -> None:
        """Start the server. `listener`: the listening socket; it is closed here. `env`: the environment of the server.
        None: that of this process. Raises `OSError` if the process cannot be started."""
        self._port: int = listener.getsockname()[1]
        self._env = os.environ if env is None else env
        self._is_closed = False
        self.cannot_serve = False
        """The server itself has said that it cannot serve, for example because torch is missing. Another server could
        not either."""
        self._start(listener)
        abandon_in_forks(self)

    def _start(self, listener: socket.socket) -> None:
        try:
            self._line, theirs = socket.socketpair()
        except OSError:
            listener.close()
            raise
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", server.__file__],
                self._env,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, listener.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 1),
                    # torch warns on stderr about everything that a stranger sends to the port.
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
                setsigmask=_BLOCKED,
            )
        except BaseException:
            self._line.close()
            raise
        finally:
            theirs.close()
            listener.close()
        self._line.setblocking(False)
        self._said = ""
        self._status: int | None = None

    def failure(self) -> str | None:
        """Why the server has ended or is about to, in one line. None while it runs.

        The server says why before it ends. The kernel resets the server's connections a moment before the server can be
        reaped. A client that asks in this moment must find the reason, and not a broken connection.
        """
        self._hear()
        if not self._said and self._has_ended():
            self._hear()  # it may have spoken and ended since
        if self._said or self._status is None:
            return self._said or None
        how = f"status {self._status}" if self._status >= 0 else signal.Signals(-self._status).name
        return f"the store's server (process {self.pid}) ended with {how}"

    def restart(self) -> None:
        """Start another server at the same port. Its store is empty. Does nothing while the server runs, and after
        `close`. Raises `OSError`."""
        if self._is_closed or self.failure() is None:
            return
        self._end()
        self._start(_listening(self._port))

    def close(self) -> None:
        """End the server, and the store with it. May be repeated."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if not self._has_ended():  # the server is not reaped, so no other process can have its number
            signal_process(self.pid, signal.SIGKILL)
            reap([self.pid], _CLOSE_S)
            self._status = -signal.SIGKILL
        self._line.close()

    def _has_ended(self) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, signal.SIGKILL  # other code of this process has reaped it
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None

    def abandon(self) -> None:
        """To be called in a forked child of this process. Otherwise the child would hold the socket open, and the
        server would not see the end of the agent."""
        self._line.close()

    def _hear(self) -> None:
        """Read what the server has said. It says a line only if it cannot serve."""
        try:
            self._said = self._said or self._line.recv(4096).decode(errors="replace")
        except OSError:
            pass  # it has said nothing
        self.cannot_serve = bool(self._said)


def host_store(
    host: str, port: int, must: bool | None = None, env: Mapping[str, str] | None = None
) -> StoreHost | None:
    """The store at this endpoint if this process is to host it, else None.

    `must`: True or False if that is decided already. None: this function finds out. `env`: the environment of the
    server's process. None: that of this process.

    Raises `Refused` if the store cannot be hosted here although it must be. Takes up to 2 s per address, besides the
    time to resolve the name. It takes a few seconds more if the port is taken and no server answers there.
    """
    if must is False:
        return None
    try:
        listener = _listening(port) if must else _proven(host, port)
        return StoreHost(listener, env) if listener else None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise Refused(Refusal.SETUP, f"cannot host the store at {endpoint(host, port)}: {why}") from None


def _proven(host: str, port: int) -> socket.socket | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    give_up, proofs = time.monotonic() + CONTEST_S, 0
    while True:
        is_ours = any(_is_ours(family, address) for family, _, _, _, address in found)
        # If no interface has the address and no server answers there, the address may still lead to this host (NAT).
        if not is_ours and _is_served(host, port):
            return None
        listener = _listening_if_free(port)
        if listener is not None:
            if _arrives(listener, host, port):
                return listener
            listener.close()
            proofs += 1
        # The port may be held by another agent of this host that is finding out as well, or by an outgoing connection
        # to which the kernel has given this port.
        if not is_ours or _is_served(host, port):
            return None
        if time.monotonic() >= give_up and (listener is None or proofs >= _PROOFS):
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
        socket.create_connection((host, port), PROOF_S).close()
    except OSError:
        return False
    return True


def _listening_if_free(port: int) -> socket.socket | None:
    try:
        return _listening(port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None  # another process listens here already, or this user must not listen here
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
    """True if a connection to the endpoint arrives at the listener.

    A client of the store that connects in the meantime is turned away. It tries again.
    """
    give_up = time.monotonic() + PROOF_S
    nonce = b"\xff" + os.urandom(_NONCE_BYTES - 1)  # a TCPStore on another host ignores a request of kind 255
    arrived: dict[int, socket.socket] = {}
    listener.settimeout(PROOF_S)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        with socket.create_connection((host, port), PROOF_S) as probe:
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
        pass  # no server listens at the endpoint, or it cannot be reached
    finally:
        for sock in arrived.values():
            sock.close()
    return False


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_NONCE_BYTES)
    except OSError:
        return b""
