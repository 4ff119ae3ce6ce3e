"""Waiting for a thing instead of guessing how long it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

PATIENCE_S = 120.0
"""A test that waits for longer than this fails. No test passes because of this limit. Seconds."""
_COMPUTED_S = 0.3
"""Processor time of this process to which that of another is compared. The system counts it in hundredths of a second,
so a much shorter time would say little."""


def until(condition: Callable[[], T | None], what: str = "") -> T:
    """Wait until `condition` gives a true value. Returns that value. What takes long is looked at less often: a look
    takes processor time from what is waited for."""
    begin = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - begin
        if waited_s > PATIENCE_S:
            raise AssertionError(f"waited in vain for {what or condition}")
        time.sleep(min(max(0.005, waited_s / 20), 0.05))
    return value


def processor_share(pid: int) -> float:
    """The processor time that a process uses while this process computes, as a ratio to this process's own. It is about
    0 for a process that sleeps, and about 1 for one that spins."""
    other = psutil.Process(pid)
    before, begin, now = sum(other.cpu_times()[:2]), time.process_time(), time.process_time()
    while now - begin < _COMPUTED_S:
        now = time.process_time()
    return (sum(other.cpu_times()[:2]) - before) / (now - begin)


def is_alive(pid: int) -> bool:
    """Whether the process runs. A dead process that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def descriptors() -> set[str]:
    """The descriptors that are open in this process. Other threads may close some meanwhile, so compare which are new
    and not how many there are."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            pass  # this descriptor was used to list the others
    return found


def read_pids(path: str | os.PathLike[str], count: int) -> list[int]:
    """Wait until `count` processes have written their pids into a file, a line each."""

    def complete() -> list[int]:
        try:
            with open(path) as file:
                lines = file.read().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [int(line) for line in lines] if len(lines) >= count else []

    return until(complete, f"{count} pids in {path}")
