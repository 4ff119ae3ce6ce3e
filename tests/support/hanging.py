"""Workers that hang. Each says that it is in place first: it appends its pid to the file `pids` in its folder."""

from __future__ import annotations

import os
import re
import resource
import signal
import time

from reknit import progress


def in_place(folder: str) -> None:
    fd = os.open(os.path.join(folder, "pids"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(fd, b"%d\n" % os.getpid())
    os.close(fd)


def waits(folder: str) -> None:
    in_place(folder)
    time.sleep(1e6)


def computes(folder: str) -> None:
    """In a call that holds the interpreter's lock and runs no Python."""
    in_place(folder)
    re.match(r"(a+)+$", "a" * 100 + "b")


def ignores(folder: str) -> None:
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    waits(folder)


def stops(folder: str) -> None:
    in_place(folder)
    os.kill(os.getpid(), signal.SIGSTOP)


def forks(folder: str) -> None:
    for _ in range(2):
        if os.fork() == 0:
            waits(folder)
    waits(folder)


def would_leave_a_core(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.chdir(folder)
    waits(folder)


def second_reports(folder: str) -> str:
    """The worker with rank 0 reports three steps and hangs. The other one goes on until it is ended. After a restart
    both return."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        return "done"
    for step in range(3):
        progress(step)
    in_place(folder)
    while True:
        time.sleep(0.01)
        if os.environ["RANK"] == "1":
            progress()
