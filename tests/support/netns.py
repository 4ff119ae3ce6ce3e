"""Network namespaces for nodes. A bridge connects them. Each has an address, and a cable that can be cut."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pytest

INTERFACE = "veth0"
"""The name of the network interface that leads out of each namespace."""
_CLONE_NEWNET = 0x40000000


class Network:
    """Namespaces with the addresses 10.73.0.1, 10.73.0.2 and so on.

    `with Network(3) as network: Popen(…, preexec_fn=network.enter(0))`
    """

    def __init__(self, size: int) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._bridge = f"rk{self._id}"
        self.addresses = [f"10.73.0.{i + 1}" for i in range(size)]

    def enter(self, i: int) -> Callable[[], None]:
        """A function for `preexec_fn` that moves the new process into namespace `i`."""
        fd, libc = self._open[i], ctypes.CDLL(None, use_errno=True)

        def move() -> None:
            if libc.setns(fd, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

        return move

    def cut(self, i: int) -> None:
        """Cut the cable of namespace `i`. From now on no packet reaches it or comes from it, and no process is told."""
        _ip("bridge", "link", "set", "dev", self._port(i), "state", "0")

    def mend(self, i: int) -> None:
        _ip("bridge", "link", "set", "dev", self._port(i), "state", "3")

    def __enter__(self) -> Self:
        self._open: list[int] = []
        try:
            _ip("ip", "link", "add", self._bridge, "type", "bridge", "stp_state", "0")
            _ip("ip", "link", "set", self._bridge, "up")
            for i in range(len(self.addresses)):
                self._add(i)
        except (OSError, subprocess.CalledProcessError) as e:
            self._remove()
            pytest.skip(f"no network namespaces here: {getattr(e, 'stderr', '') or e}")
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def _add(self, i: int) -> None:
        space, port = self._space(i), self._port(i)
        _ip("ip", "netns", "add", space)
        self._open.append(os.open(f"/run/netns/{space}", os.O_RDONLY))
        _ip("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space)
        _ip("ip", "link", "set", port, "master", self._bridge, "up")
        inside = ("ip", "-n", space)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", f"{self.addresses[i]}/24", "dev", INTERFACE)
        _ip(*inside, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        for fd in self._open:
            os.close(fd)
        for i in range(len(self.addresses)):
            # The namespace goes at once, or when its last process has ended. The other end of its cable goes with it.
            subprocess.run(["ip", "link", "del", self._port(i)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._space(i)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def _space(self, i: int) -> str:
        return f"rk{self._id}-{i}"

    def _port(self, i: int) -> str:
        return f"rk{self._id}-{i}"


def _ip(*command: str) -> None:
    """Run a command. Raises OSError if there is no such program, and CalledProcessError if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True)
