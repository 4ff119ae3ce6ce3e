"""Whether the kernel kills processes because no memory is left, and how much memory was used at most.

The kernel says it in the files of the memory cgroup of this process (cgroup v2 and v1). Where these cannot be read, the
count of the whole host stands in /proc/vmstat. Sources: the kernel's documents cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from attrs import frozen

_ROOT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60
"""Bytes. cgroup v1 shows the absence of a limit as a greater number."""


@frozen
class _Files:
    """The names of the files in the folder of a cgroup."""

    kills: str
    peak: str
    limit: str


_V2 = _Files("memory.events", "memory.peak", "memory.max")
_V1 = _Files("memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes")


def count() -> int | None:
    """Number of processes that the kernel has killed for lack of memory, as far as this process can see. None: this
    cannot be seen."""
    for folder, files in _folders():
        if found := re.search(r"^oom_kill (\d+)$", _read(folder, files.kills), re.MULTILINE):
            return int(found[1])
    found = re.search(r"^oom_kill (\d+)$", _read("/proc", "vmstat"), re.MULTILINE)
    return int(found[1]) if found else None


def usage_text() -> str:
    """`at most 7.5 GiB of 8 GiB were used`. Empty: this is not known."""
    for folder, files in _folders():
        peak, limit = _number(folder, files.peak), _number(folder, files.limit)
        if peak is not None:
            of = f" of {_size(limit)}" if limit is not None and limit < _UNLIMITED else ""
            return f"at most {_size(peak)}{of} were used"
    return ""


def _folders() -> Iterator[tuple[str, _Files]]:
    """Where the files of this process's memory cgroup may lie. In a container it may be mounted as the root."""
    for line in _read("/proc/self", "cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            yield from ((folder, _V2) for folder in (_ROOT + path, _ROOT))
        elif "memory" in names.split(","):
            yield from ((folder, _V1) for folder in (f"{_ROOT}/memory{path}", f"{_ROOT}/memory"))


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read()
    except OSError:
        return ""


def _number(folder: str, name: str) -> int | None:
    text = _read(folder, name).strip()
    return int(text) if text.isdecimal() else None


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
