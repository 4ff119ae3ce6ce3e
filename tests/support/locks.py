"""Agents that hold locks, and workers that they leave behind: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from reknit.adapters.host.lock import HostLock, take
from reknit.adapters.host.orphans import MARK
from reknit.adapters.host.record import ProcessId, identified
from tests.support.waiting import PATIENCE_S


@contextmanager
def agent(job: str = "j", node: str = "n", then: str = "", **env: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its stdin ends; then it releases it. `then`: what it does meanwhile."""
    code = f"""
import sys
from reknit.adapters.host.lock import take
lock = take({job!r}, "e", {node!r})
{then}
print("holds", flush=True)
sys.stdin.read()
lock.release()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def worker(mark: str, code: str = "print('up', flush=True); import signal; signal.pause()") -> Iterator[int]:
    """A process with that mark, reaped as it ends, as init would."""
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{code}"]
    env = {**os.environ, MARK: mark}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process.pid
        finally:
            process.kill()


def killed(job: str = "j", node: str = "n", then: str = "") -> HostLock:
    """The lock, after its holder was killed."""
    with agent(job, node, then) as process:
        process.kill()
        process.wait(PATIENCE_S)
    return take(job, "e", node)


def known(pid: int) -> ProcessId:
    found = identified(pid)
    assert found is not None
    return found
