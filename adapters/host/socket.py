"""A second sign that the lock of a node is held, for agents on one host that do not see each other's /tmp.

1. The agent that holds the lock listens on an abstract socket of Linux. Such a socket has a name and no file. It
   belongs to the network namespace, and ends with its process. The agent accepts no connection.
2. Any user may take a name. The kernel says which user listens (SO_PEERCRED). A socket of another user does not
   count. Then only the file of the lock keeps two agents apart.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

_WAIT_S = 0.05
"""A holder that has just been killed keeps its socket a little longer than its lock. Seconds."""
_NAP_S = 0.002


class Busy(Exception):
    """Another agent of this user listens there."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid
        """0: its process is in another namespace of pids."""


def listen(name: str) -> int:
    """A descriptor of a socket that listens under this name. -1: there can be none, for example because another user
    has the name. Raises `Busy`."""
    give_up = time.monotonic() + _WAIT_S
    while True:
        try:
            return _listening(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return -1  # no Linux, a name that is too long, or no descriptor is free
        pid = _listener(name)
        if pid is not None and time.monotonic() >= give_up:
            raise Busy(pid)
        if time.monotonic() >= give_up:
            return -1
        time.sleep(_NAP_S)


def _listening(name: str) -> int:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(_address(name))
        made.listen()
        return made.detach()
    finally:
        made.close()


def _listener(name: str) -> int | None:
    """The process of this user that listens there. None: there is none, or the process of another user does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_address(name))
            found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None  # it has ended, does not listen yet, or other users have filled its queue
    pid, uid, _ = struct.unpack("3i", found)
    return pid if uid == os.geteuid() else None


def _address(name: str) -> bytes:
    return b"\0reknit-%d-" % os.geteuid() + os.fsencode(name)
