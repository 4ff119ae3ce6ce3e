"""The guard pipe alone: the kernel kills a group at the moment when the last write end is closed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from reknit.adapters.keeper.common.guard import Guard
from tests.support.keepers import wait_gone
from tests.support.waiting import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the signal of a pipe is Linux's")


def guarded(guard: Guard) -> subprocess.Popen[bytes]:
    ticket = guard.ticket(2)
    os.set_inheritable(ticket, True)
    process = subprocess.Popen(["sleep", "1000"], process_group=0, pass_fds=[ticket])
    guard.arm(ticket, process.pid)
    return process


def test_the_end_of_the_guard_kills_every_group_and_nothing_before() -> None:
    """A worker that ends, and others that start, must not set it off."""
    guard = Guard()
    first, second = guarded(guard), guarded(guard)
    first.kill()
    first.wait()
    third = guarded(guard)
    assert is_alive(second.pid)
    assert is_alive(third.pid)
    guard.close()
    guard.close()
    for each in (second, third):
        assert each.wait() == -9
    wait_gone([first.pid])


def test_a_worker_that_is_dead_before_it_is_armed_is_no_error() -> None:
    """`true` may end before its keeper gets to it."""
    guard = Guard()
    ticket = guard.ticket(2)
    dead = subprocess.Popen(["true"], process_group=0)
    dead.wait()
    guard.arm(ticket, dead.pid)
    guard.close()
