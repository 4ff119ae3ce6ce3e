"""What a keeper and its zygote say to each other: JSON objects, one per line, over a socket pair.

Files go with the first byte of the line that they belong to (`SCM_RIGHTS`). The standard library alone is imported
here, because a zygote imports this module.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Sequence
from typing import Any

SOCKET = 8
"""The descriptor of the socket in the zygote."""
PLAN = 9
"""The descriptor, in the zygote, of the file with its plan (`program.py`)."""
VARIABLE = "REKNIT_ZYGOTE"
"""Tells a starting Python to be a zygote: `checks` or `holds`, see `program.py`. `hook/sitecustomize.py` removes it
before the program runs. It also has copies of these constants, because it may import nothing."""
HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
"""The folder of the module that makes a Python a zygote."""
_MOST_FILES = 253
_CHUNK = 1 << 16


class Line:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._unread = b""

    def send(self, message: object, descriptors: Collection[int] = ()) -> None:
        """Raises `OSError`, and `TimeoutError` if the other side does not read."""
        data = json.dumps(message).encode() + b"\n"
        if descriptors:
            socket.send_fds(self.socket, [data[:1]], [*descriptors])
            data = data[1:]
        self.socket.sendall(data)

    def receive(self) -> tuple[Any, Sequence[int]]:
        """The next message, and the files that came with it. None: the other side has closed its end. Raises
        `OSError`: `BlockingIOError` or `TimeoutError` if the rest of a message has not come yet. Raises `ValueError`
        for what is no message."""
        files: list[int] = []
        while b"\n" not in self._unread:
            data, descriptors, _, _ = socket.recv_fds(self.socket, _CHUNK, _MOST_FILES)
            files += descriptors
            if not data:
                return None, files
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line), files
