"""What it costs a keeper to watch the timers of its workers, beside torch's server of timers.

    python benchmarks/timers.py                     # half a minute
    python benchmarks/timers.py --torch             # with torch's server, in the same run

Rules:

- The workers are real and run under `reknit run`. Each sets and releases timers with a client, which opens the pipe for
  each request, as torch's does. All together do so `--rate` times a second. A timer expires after a minute.
- CPU is the processor time of the keeper, as a share of one core, over `--seconds`. *wakes* are the times per second
  that a thread of the process begins to run again after it has slept (`voluntary_ctxt_switches`).
- *off* is a keeper without a watchdog, and *idle* one whose workers hold a timer and set no other.
- torch's server runs in a thread of a process of its own, with the interval that torch's agent gives it (0.1 s).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent

WORKER = """\
import os, sys, time
from reknit.elastic import timer
pairs, path = float(sys.argv[1]), os.environ.get("TORCHELASTIC_TIMER_FILE")
if path:
    client = timer.FileTimerClient(path)
    client.acquire("whole job", time.time() + 10_000)
up = os.open(f"{sys.argv[2]}/up{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
if not pairs:
    time.sleep(10_000)
begin, done = time.monotonic(), 0
while True:
    while done < (time.monotonic() - begin) * pairs:
        with timer.expires(after=60, scope="step", client=client):
            done += 1
    os.pwrite(up, b"%d" % done, 0)
    time.sleep(0.005)
"""

SERVER = """\
import sys, time
from torch.distributed.elastic.timer import FileTimerServer
FileTimerServer(sys.argv[1], "job", max_interval=0.1).start()
open(f"{sys.argv[1]}.up", "w").close()
time.sleep(10_000)
"""


def wait_for(*paths: Path) -> None:
    give_up = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        if time.monotonic() > give_up:
            raise SystemExit("the workers have not come up within two minutes")
        time.sleep(0.05)


def switches(pid: int) -> int:
    """How often the threads of the process have gone to sleep."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def cost(pid: int, counters: list[Path], seconds: float) -> list[float]:
    """Per second: how much processor time the process uses, how often it wakes up, and how many timers were set."""
    process = psutil.Process(pid)

    def now() -> tuple[float, float, float]:
        set_ = sum(int(path.read_text() or 0) for path in counters)
        return sum(process.cpu_times()[:2]), switches(pid), set_

    time.sleep(1.0)  # what the start has left to do
    before, began = now(), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return [(after - earlier) / took for after, earlier in zip(now(), before, strict=True)]


def measured(what: str, rate: float, args: argparse.Namespace) -> None:
    """Run the workers, and print what they cost the process that watches their timers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "worker.py").write_text(WORKER)
        pipe = path / "torchs"
        on = {"TORCHELASTIC_TIMER_FILE": str(pipe)} if what == "torch" else {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
        argv = [BIN / "reknit", "run", f"--nproc-per-node={args.workers}", path / "worker.py"]
        server = None
        if what == "torch":
            server = subprocess.Popen([sys.executable, "-c", SERVER, pipe])
            wait_for(Path(f"{pipe}.up"))
        run = subprocess.Popen(
            [*argv, str(rate / args.workers), folder],
            env={**os.environ, **({} if what == "off" else on)},
            stderr=subprocess.DEVNULL,
        )
        try:
            counters = [path / f"up{rank}" for rank in range(args.workers)]
            wait_for(*counters)
            watcher = server.pid if server is not None else psutil.Process(run.pid).children()[0].pid
            share, wakes, made = cost(watcher, counters, args.seconds)
            print(f"{what:>8} {made:8.0f} timers/s   CPU {100 * share:5.2f} % of a core   {wakes:7.1f} wakes/s")
        finally:
            for process in (run, server):
                if process is not None:
                    process.terminate()
                    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000, help="timers that are set and released in a second")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--torch", action="store_true", help="measure torch's server as well")
    args = parser.parse_args()
    measured("off", 0, args)
    measured("idle", 0, args)
    measured("reknit", args.rate, args)
    if args.torch:
        measured("torch", 0, args)
        measured("torch", args.rate, args)


if __name__ == "__main__":
    main()
