"""A worker to be ended: `python stubborn.py FILE [ignore] [grandchild] [die] [exit0]` appends its pids to FILE.

- ignore: the worker ignores SIGTERM.
- grandchild: the worker has a grandchild that is a daemon in a session of its own and ignores every signal that it can.
- die: the worker fails when the grandchild runs.
- exit0: the worker ends with 0 when the grandchild runs.
"""

from __future__ import annotations

import os
import signal
import sys


def note(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(fd, b"%d\n" % os.getpid())
    os.close(fd)


def grandchild(path: str) -> None:
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(signum, signal.SIG_IGN)
            note(path)
            os.write(told, b"!")
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    os.read(ready, 1)


if __name__ == "__main__":
    file, wishes = sys.argv[1], sys.argv[2:]
    if "ignore" in wishes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in wishes:
        grandchild(file)
    note(file)
    if "die" in wishes:
        sys.exit(3)
    if "exit0" in wishes:
        sys.exit(0)
    while True:
        signal.pause()
