"""What torch's flight recorder says of a hung worker: the last collective that it has entered.

1. torch keeps this record inside the worker. A thread of torch hands it out at a socket, also while the worker's own
   code hangs. Python has no part in that.
2. The socket is there if the script asks for it (`torch.distributed.elastic.control_plane.worker_main`). torch makes it
   at the path that the variable `SOCKET` names. The keeper gives each worker a path of its own, if the recorder is on.
3. The record of gloo and that of NCCL are asked for apart. Of the collectives in both, the last one counts.

The form of the answers was found with torch 2.13 and gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reknit.adapters.keeper.common.environment import SOCKET
from reknit.adapters.keeper.common.run_folder import LogFolder
from reknit.core.job.workers import Collective

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock

NOT_SERVED = "the worker serves none; its script must call worker_main(), and has not, or not yet"
NOT_READ = "it could not be read within 2 s, or is longer than 2 MiB; TORCH_FR_BUFFER_SIZE should be at most 2000"
NOT_ASKED = "reknit could not ask for it, because it can open no further file"
"""Why there is no record of a worker whose recorder is on."""
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""torch's names for the number of collectives that the recorder holds, the older one last. The recorder is on if one of
them is set, and not 0."""
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""torch's names for the record of gloo, and for that of NCCL. The second one exists where torch has NCCL."""
_DEFAULT_GROUP = "default_pg"
"""torch's name for the group that `init_process_group` has made."""
_LONGEST_PATH = 107
"""Bytes that the kernel allows (unix(7))."""
_LONGEST_NAME = 100
_MOST_BYTES = 2 << 20
"""About 4,000 collectives. The keeper takes about 0.05 s to parse them, and does nothing else meanwhile."""


def is_on(env: Mapping[str, str]) -> bool:
    """A worker with these variables keeps a record."""
    return any(env.get(name, "0") not in ("", "0") for name in SIZES)


class RecorderSockets:
    """A path for the socket of each worker of a keeper, and what is asked there. Nothing here waits."""

    def __init__(self) -> None:
        # Not in the folder of the run, which the user chooses: its path may be too long, or be that of a shared disk.
        self._folder = LogFolder("", "torch", keeps=False)
        self._round = 0
        self._paths: dict[int, str] = {}
        """By local rank."""

    def variables(self, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """What this worker gets in its environment besides `env`. Nothing if the recorder is off, if `env` names a
        socket, or if there can be none."""
        path = os.path.join(self._folder.path, f"{self._round}.{local_rank}")
        if not is_on(env) or SOCKET in env or not self._folder.path or len(os.fsencode(path)) > _LONGEST_PATH:
            return {}
        self._paths[local_rank] = path
        return {SOCKET: path}

    def is_expected(self, local_rank: int) -> bool:
        """This worker was given a path, so its recorder is on."""
        return local_rank in self._paths

    def ask(self, local_rank: int, clock: Clock) -> list[RecorderAnswer]:
        """Ask this worker for its records. An empty list if it serves none, which is usual. Raises `OSError` if it
        cannot be asked, for example because no descriptor is free."""
        made: list[RecorderAnswer] = []
        try:
            if self.is_expected(local_rank):
                made.extend(RecorderAnswer(self._paths[local_rank], handler, clock) for handler in HANDLERS)
        except OSError as error:
            for answer in made:
                answer.close()
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                raise
            return []
        return made

    def forget(self) -> None:
        """The round is over. A worker that was killed has left its socket. May be repeated."""
        for path in self._paths.values():
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._paths = {}
        self._round += 1

    def close(self) -> None:
        """May be repeated."""
        self._folder.close()


class RecorderAnswer:
    """The answer of a worker that is asked for one of its records. Nothing here waits."""

    def __init__(self, path: str, handler: str, clock: Clock) -> None:
        """Raises `OSError` if nobody serves at this path."""
        self.is_whole = False
        """All of the answer was read."""
        self._clock = clock
        self._parts: list[bytes] = []
        self._size = 0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.connect(path)
            head = f"POST /handler/{handler} HTTP/1.1", "Host: worker", "Content-Length: 0", "Connection: close"
            self._sock.send("\r\n".join([*head, "", ""]).encode())
        except OSError:
            self._sock.close()
            raise
        clock.watch(self._sock.fileno())

    def is_over(self) -> bool:
        """Read what is there. True if nothing more will come."""
        while self._sock.fileno() >= 0:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return False
            except OSError:  # the worker has ended
                self.close()
                break
            self._parts.append(data)
            self._size += len(data)
            self.is_whole = not data
            if self.is_whole or self._size > _MOST_BYTES:
                self.close()
        return True

    def close(self) -> None:
        """Read no more. May be repeated."""
        if self._sock.fileno() >= 0:
            self._clock.unwatch(self._sock.fileno())
            self._sock.close()

    @property
    def record(self) -> bytes:
        """Empty if the worker has refused (the HTTP status is not 200), or if the answer is not whole."""
        head, _, body = b"".join(self._parts).partition(b"\r\n\r\n")
        return body if self.is_whole and b" 200 " in head.partition(b"\r\n")[0] else b""


def last_collective(*records: bytes) -> Collective | None:
    """The last collective of a worker that is not over. If all are over: the last one. `records`: all that the worker
    has given. What is no record counts as empty. None: there is no collective in them."""
    entries = [entry for record in records for entry in _entries(record)]
    try:
        last = max(entries, key=lambda entry: (not _is_over(entry), entry["time_created_ns"]))
        group = str(last["process_group"][1])[:_LONGEST_NAME]
        name = str(last["profiling_name"]).rpartition(":")[2][:_LONGEST_NAME]
        number = int(last["collective_seq_id"])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    if not name.isidentifier() or not 0 <= number < 2**63:
        return None  # the worker can write anything, and all nodes read what is said of it
    return Collective(name, number, "" if group == _DEFAULT_GROUP else group, _is_over(last))


def _entries(record: bytes) -> list[Any]:
    try:
        return [entry for entry in json.loads(record)["entries"] if not entry["is_p2p"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        return []


def _is_over(entry: Any) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"
