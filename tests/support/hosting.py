"""A host program with a keeper: `python -m tests.support.hosting HOW COUNT FILE MARK [wish…]`.

HOW is exec or fork. The program starts COUNT workers, which append their pids and those of their children to FILE. When
the workers run, it prints the pid of the keeper, and the pid of its own fork or 0. Then it drives the client until it
is killed. Wishes:

- early: it prints as soon as the keeper is ready, before the workers run.
- forks: it forks when the workers run, and the fork lives on.
- clones: the same as forks, in a way that Python does not notice.
- execs: it becomes another program.
- bystander: it has another thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.protocol.wire import Configure
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.events import Started
from reknit.core.agent.worker_words import WorkersStarted
from tests.support.keepers import SLEEP, ways
from tests.support.processes import drive, start
from tests.support.waiting import read_pids


def main() -> None:
    how, count, file, mark, *wishes = sys.argv[1:]
    if "bystander" in wishes:
        threading.Thread(target=signal.pause, daemon=True).start()
    clock = SystemClock()
    keeper = KeeperClient(
        clock, Configure(argv=("sh", "-c", SLEEP, file), run_id="job", mark=mark), "nonce", ways()[how]
    )
    drive(keeper, clock, Started)
    if "early" in wishes:
        print(keeper.pid, 0, flush=True)
    start(keeper, int(count))
    drive(keeper, clock, WorkersStarted)
    read_pids(file, 2 * int(count))
    fork = 0
    if "forks" in wishes or "clones" in wishes:
        fork = os.fork() if "forks" in wishes else ctypes.CDLL(None).fork()
        if fork == 0:
            while True:
                signal.pause()
    if "early" not in wishes:
        print(keeper.pid, fork, flush=True)
    if "execs" in wishes:
        os.execvp("sleep", ["sleep", "1000"])
    while True:
        clock.wait(keeper.wakes_at)
        keeper.events(clock.now())


if __name__ == "__main__":
    main()
