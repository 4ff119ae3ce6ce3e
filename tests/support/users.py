"""Another user of this host. Only root can be one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

NOBODY = 65534


needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def as_nobody(act: Callable[[], object]) -> None:
    """Let another user do this, in a process that ends."""
    if (pid := forked(act, NOBODY)) and os.waitpid(pid, 0)[1]:
        raise AssertionError("the other user could not do that")


def forked(act: Callable[[], object], uid: int | None = None) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid
