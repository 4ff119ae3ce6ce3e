"""Where the trace of an agent is.

1. An agent with a log folder has it in `<log folder>/trace`. Otherwise it is in `<place>/traces`. `<place>` is the
   folder of the locks (adapters/host/place.py).
2. `<place>/traces` has an entry for each agent: the folder of its trace, or a link to it. So the traces of this host
   are found without being named.
3. If there are too many entries, an agent that ends removes old ones of agents that have ended. It never removes a
   log folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from reknit.adapters.host.place import open_folder, this_host
from reknit.adapters.host.record import ProcessId, is_alive
from reknit.adapters.runtime.ports import Refused

_IN_LOGS = "trace"
"""The name of the folder with the trace in the log folder of a run."""
_TRACES = "traces"
_MOST_TRACES = 64
_KEPT_S = 86400.0
"""How long an entry is kept of whose agent it cannot be told whether it runs. Seconds."""


def new_folder(job: str, nonce: str, log_dir: str) -> str:
    """Make the folder for the trace of an agent. `log_dir`: the log folder of the run, which stays. Empty: it has none.
    Raises `OSError`."""
    fd, place = _place()
    try:
        folder = os.path.join(place, _TRACES)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        now = time.time()
        began = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}.{int(now % 1 * 1000):03}"  # names sort by it
        path = os.path.join(folder, f"{began}_{_plain(job)}_{nonce[:8]}")
        if not log_dir:
            os.mkdir(path, 0o700)
            return path
        inside = os.path.join(log_dir, _IN_LOGS)
        os.makedirs(inside, mode=0o700, exist_ok=True)
        os.symlink(inside, path)
        return inside
    finally:
        os.close(fd)


def _place() -> tuple[int, str]:
    try:
        return open_folder()
    except Refused as refused:
        raise refused.__cause__ if isinstance(refused.__cause__, OSError) else OSError(0, str(refused)) from None


def _plain(job: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "_" for c in job[:60])


def folders() -> list[str]:
    """The entries for the agents of this host, the oldest first."""
    try:
        fd, place = _place()
    except OSError:
        return []
    try:
        folder = os.path.join(place, _TRACES)
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []
    finally:
        os.close(fd)


def tidy() -> None:
    """If there are too many traces, remove the older half, except for those of agents that run. Raises no error."""
    entries = folders()
    if len(entries) > _MOST_TRACES:
        for path in entries[: -_MOST_TRACES // 2]:
            if not _may_live(path):
                _remove(path)


def _may_live(path: str) -> bool:
    """The agent of this entry runs, or may run. A log folder is not looked into: it may be on a host that hangs."""
    try:
        if os.path.islink(path):
            return time.time() - os.lstat(path).st_mtime < _KEPT_S
        told = about(path)
        if is_live(told):
            return True
        # An agent in another container cannot be seen from here.
        with os.scandir(path) as entries:
            newest = max((entry.stat().st_mtime for entry in entries), default=0.0)
        return told.get("host") != this_host() and time.time() - newest < _KEPT_S
    except OSError:
        return False


def about(path: str) -> dict[str, Any]:
    """What the first file in this folder says of its agent (`traces.Owner`). Empty: there is no such file, or its first
    line is torn."""
    try:
        for name in sorted(os.listdir(path)):
            part = os.path.join(path, name)
            if not os.path.isfile(part):
                continue  # a FIFO would block
            with open(part, encoding="utf-8", errors="replace") as file:
                found = json.loads(file.readline())["about"]
                return found if isinstance(found, dict) else {}
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return {}


def is_live(about: Mapping[str, Any]) -> bool:
    """The agent of this trace runs on this host."""
    agent = about.get("agent")
    if about.get("host") != this_host() or not isinstance(agent, dict):
        return False
    pid, start = agent.get("pid"), agent.get("start")
    return isinstance(pid, int) and isinstance(start, int) and is_alive(ProcessId(pid, start))


def _remove(path: str) -> None:
    try:
        if os.path.islink(path):
            os.unlink(path)
            return
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        pass  # another agent removes it as well
