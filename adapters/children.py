"""Knowing and ending the descendants of this process.

1. A subreaper adopts every descendant whose parent dies, whatever it did to hide (double fork, setsid). So *this
   process has no child* means *nothing that it ever started is left*, and killing children until there are none ends
   them all.
2. Whoever adopts must also reap.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Sequence
from signal import SIGKILL

_PR_SET_CHILD_SUBREAPER = 36
_NAP_S, _LONG_NAP_S = 0.001, 0.05


def become_subreaper() -> bool:
    """Make this process the one that adopts its orphaned descendants. False where the system has no such thing."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    except (ImportError, OSError, AttributeError):
        return False


def _prctl(option: int, value: int) -> int:
    # `import ctypes` and CDLL cost 1.5 ms before the first worker is spawned, the C part alone 0.4 ms. It is private,
    # so the public way stays behind it.
    try:
        from _ctypes import call_function, dlopen, dlsym

        return int(call_function(dlsym(dlopen(None, 0), "prctl"), (option, value, 0, 0, 0)))  # type: ignore[arg-type]
    except (ImportError, TypeError):
        import ctypes

        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


def children() -> list[int]:
    """The children of this process, dead ones that nobody has reaped included. Empty where there is no /proc."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:  # a child belongs to the thread that forked it, an adopted one to any
        try:
            found += map(int, _read(f"/proc/self/task/{thread}/children").split())
        except FileNotFoundError:
            # Either the thread has just ended, or the kernel was built without these files.
            if not os.path.exists("/proc/self/task/" + thread):
                continue
            return _scan(os.getpid())
        except OSError:
            return _scan(os.getpid())
    return found


def _scan(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # The name in parentheses may hold anything; what follows the last one is: state, parent, …
                fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            except OSError:
                continue  # it has just ended
            if len(fields) > 1 and int(fields[1]) == parent:
                found.append(int(name))
    return found


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def sweep(deadline_s: float, spared: Collection[int] = ()) -> tuple[int, ...]:
    """SIGKILL and reap every child, and those that it leaves behind, until there is none, but for the `spared`.

    Returns the pids that are still there after `deadline_s` seconds: processes that cannot be killed.
    """
    return sweep_counting(deadline_s, spared)[1]


def sweep_counting(deadline_s: float, spared: Collection[int] = ()) -> tuple[int, tuple[int, ...]]:
    """Like `sweep`, and says first how many processes ended."""
    give_up = time.monotonic() + deadline_s
    ended, nap_s = 0, _NAP_S
    while True:
        pids = [pid for pid in children() if pid not in spared]
        for pid in pids:
            signal_process(pid, SIGKILL)
        if spared:
            # No waitpid(-1), which would take the end of a spared one from whoever waits for it.
            count = sum(map(reaped, pids)) if pids else None
        else:
            count = _reap_all()
        if count is None:  # no child: from the kernel itself, that is more certain than any list
            return ended, ()
        ended += count
        # The deadline counts in every case: something that forks faster than we kill must not keep us.
        if time.monotonic() >= give_up or not (pids or os.path.isdir("/proc/self/task")):
            return ended, tuple(pids)
        if count:
            nap_s = _NAP_S
            continue
        # Killing takes a moment and nothing announces it here; this is the end of a run, not the loop.
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONG_NAP_S)


def reap(pids: Sequence[int], deadline_s: float) -> None:
    """Reap these children, which were killed, as they die; after `deadline_s` seconds leave the rest."""
    give_up = time.monotonic() + deadline_s
    for pid in pids:
        nap_s = _NAP_S
        while not reaped(pid) and time.monotonic() < give_up:
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONG_NAP_S)


def reaped(pid: int) -> bool:
    """Is this child dead? Then it is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _reap_all() -> int | None:
    """How many dead children were reaped, None if there is no child at all."""
    count = 0
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return count or None
        if pid == 0:
            return count
        count += 1


def signal_process(pid: int, signum: int) -> None:
    """Send a signal to a child, which may be dead already or not be ours to signal."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # dead; or it changed its user, and then it is reported as what would not die


def signal_group(pgid: int, signum: int) -> None:
    """Send a signal to a process group whose leader is a child not reaped yet, so that the number is still its own."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        pass
