"""What an agent writes into the file of its lock: who it is, which processes it has, and a note.

1. Only the agent that holds the lock writes. The file is private to its user, and is removed with the lock. So a record
   that is found without a lock tells of an agent that was killed.
2. A process is named by its pid and its start time, together with the boot of the host and the namespace of pids. A
   later process with the same pid has another start time. So no other process is ever taken for one of the record.
3. The record is one line with a checksum. One call writes it into the locked file. It is not written into a new file
   that takes the place of the old one, because the lock would be lost. A line that was torn counts as no record. Then
   processes are found by their mark only, and the note is lost.
4. The size is bounded: `_MOST` processes and `LONGEST_NOTE` characters.
"""

from __future__ import annotations

import binascii
import json
import os
import time
from collections.abc import Collection

from attrs import frozen

from .children import stat_of
from .place import this_host

_MOST = 1000
"""Upper bound on the processes that a record names. It names the latest."""
LONGEST_NOTE = 256
"""Upper bound on a note, in characters."""
_SHOWN = 80
"""How many characters of a command line are shown."""


@frozen
class ProcessId:
    """A process of this host that cannot be mistaken for another one until the host boots again."""

    pid: int
    start: int
    """When the process was started, in clock ticks since the boot."""


CLEARED = ProcessId(0, 0)
"""In the place of the agent: the agent was found dead, and nothing is left of it but its note."""


@frozen
class HostRecord:
    agent: ProcessId | None
    """None: the record was written before the last boot, or in another namespace of pids. Then it names no process."""
    processes: tuple[ProcessId, ...] = ()
    """The keeper, the workers, and processes that earlier agents have left and nobody has ended yet."""
    note: str = ""
    """A text that another part of reknit keeps here. Empty: there is none."""


def identified(pid: int) -> ProcessId | None:
    """The process with this pid. None: there is none, or no /proc."""
    try:
        return ProcessId(pid, int(stat_of(str(pid))[19]))
    except (OSError, IndexError, ValueError):
        return None


def children_of(keeper: int, pids: Collection[int]) -> tuple[ProcessId, ...]:
    """The keeper, and those of these pids that are its children on this host. Empty if no pid is. So it is for a keeper
    on another host: there `keeper` is the pid of the command that reaches it."""
    found = []
    for pid in pids:
        try:
            fields = stat_of(str(pid))
            if int(fields[1]) == keeper:
                found.append(ProcessId(pid, int(fields[19])))
        except (OSError, IndexError, ValueError):
            pass  # it has ended and was reaped, or there is no /proc
    own = identified(keeper) if found else None
    return (own, *found) if own is not None else ()


def is_alive(process: ProcessId) -> bool:
    """Whether the process is there. A dead process that nobody has reaped does not count."""
    try:
        fields = stat_of(str(process.pid))
        return int(fields[19]) == process.start and fields[0] not in (b"Z", b"X")
    except (OSError, IndexError, ValueError):
        return False


def write(fd: int, record: HostRecord) -> None:
    """Write the record into the file. Raises no error if that fails, for example on a full disk: an agent can do
    without a record."""
    processes = [(each.pid, each.start) for each in record.processes[-_MOST:]]
    agent = None if record.agent is None else (record.agent.pid, record.agent.start)
    body = json.dumps([this_host(), agent, processes, record.note]).encode()
    line = b"%08x %s\n" % (binascii.crc32(body), body)
    try:
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))
    except OSError:
        pass


def read(fd: int) -> HostRecord | None:
    """The record in the file. None: there is none, or it is torn."""
    try:
        checksum, _, body = os.pread(fd, 1 << 20, 0).partition(b"\n")[0].partition(b" ")
        if int(checksum, 16) != binascii.crc32(body):
            return None
        host, agent, processes, note = json.loads(body)
    except (OSError, ValueError):
        return None
    if host != this_host() or agent is None:
        return HostRecord(None, (), note)
    return HostRecord(ProcessId(*agent), tuple(ProcessId(*each) for each in processes), note)


def shown(process: ProcessId) -> str:
    """For people: the pid, when the process was started, and its command line."""
    try:
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").split("\0")
    except OSError:
        words = []
    if not words or not is_alive(process):
        return f"pid {process.pid}"
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / os.sysconf("SC_CLK_TCK")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - ago_s))
    command = "".join(each if each.isprintable() else "?" for each in " ".join(words).strip())
    command = command if len(command) <= _SHOWN else command[: _SHOWN - 1] + "…"
    return f"pid {process.pid}, since {since}: {command}"
