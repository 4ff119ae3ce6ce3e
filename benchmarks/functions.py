"""Four workers that are functions: reknit's keeper beside torch.multiprocessing and multiprocessing, in one run.

What is measured is the time from the first call to the moment when the values of all workers are there and every
process is reaped. reknit's figure contains the start and the end of its keeper. The peers return no values.

1. `light`: the module of the function imports the standard library only.
2. `torch`: the module of the function imports torch.

The program itself has imported torch, as one that calls torch's `start_processes` must. The ways take turns, and each
figure is a median.

    python benchmarks/functions.py [--times 5] [--workers 4]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from reknit.adapters.keeper.client.function_workers import Function
from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.client.start import by_exec
from reknit.adapters.keeper.protocol.wire import Configure, Process, StartProcesses
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.worker_words import WorkersExited

MODULES = {"light": "def work(rank): return rank\n", "torch": "import torch\ndef work(rank): return rank\n"}
METHODS = ("spawn", "fork", "forkserver")
Work = Callable[[int], int]


def with_reknit(work: Work, method: str, count: int) -> None:
    clock = SystemClock()
    configure = Configure(argv=(), run_id="benchmark")
    keeper = KeeperClient(clock, configure, "nonce", lambda: by_exec(dict(os.environ)), start_method=method)
    try:
        processes = tuple(Process(rank, rank, ()) for rank in range(count))
        keeper.start(StartProcesses(0, processes), {rank: Function(work, (rank,)) for rank in range(count)})
        ended = 0
        while ended < count:
            clock.wait(keeper.wakes_at)
            exits = [event.exits for event in keeper.events(clock.now()) if isinstance(event, WorkersExited)]
            ended += sum(map(len, exits))
        values = keeper.values(0)
        if values != {rank: rank for rank in range(count)}:
            raise AssertionError(f"the workers have returned {values}")
    finally:
        keeper.close()
        clock.close()


def with_torch(work: Work, method: str, count: int) -> None:
    import torch.multiprocessing as peer

    peer.start_processes(work, nprocs=count, join=True, start_method=method)


def with_multiprocessing(work: Work, method: str, count: int) -> None:
    # The fork server of multiprocessing lives as long as the program. So only its first use pays for its start.
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=work, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


WAYS = {"reknit": with_reknit, "torch": with_torch, "multiprocessing": with_multiprocessing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    import torch  # noqa: F401  # see the top of this file

    print(f"{'':18}" + "".join(f"{way:>18}" for way in WAYS) + f"{'reknit / torch':>18}")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name, text in MODULES.items():
            (Path(folder) / f"of_{name}.py").write_text(text)
            work = __import__(f"of_{name}").work
            for method in METHODS:
                took: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(options.times):
                    for way, run in WAYS.items():
                        before = time.perf_counter()
                        run(work, method, options.workers)
                        took[way].append(time.perf_counter() - before)
                medians = {way: statistics.median(times) for way, times in took.items()}
                figures = "".join(f"{seconds:17.3f}s" for seconds in medians.values())
                print(f"{name + ' ' + method:18}{figures}{medians['reknit'] / medians['torch']:18.2f}", flush=True)


if __name__ == "__main__":
    main()
