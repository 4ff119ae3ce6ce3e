"""Waiting for a thing instead of guessing how long it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""A test fails after that long; none passes because of it."""


def until(condition: Callable[[], T], what: str = "") -> T:
    """The first true value of `condition`."""
    give_up = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise AssertionError(f"waited in vain for {what or condition}")
        time.sleep(0.005)
    return value


def is_alive(pid: int) -> bool:
    """Does it run? The dead that nobody has reaped do not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors() -> set[str]:
    """What is open in this process. Others' threads may close something meanwhile: ask what has come, not how many."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            pass  # the one that listed them
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
