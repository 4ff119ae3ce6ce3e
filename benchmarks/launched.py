"""The programs that `benchmarks/launch.py` has launched: workers, and hosts that run an agent themselves.

A program tells what happens by a line in the file REPORT: a word, seconds of the monotonic clock, rank, restart count,
its own pid, the pid of its parent.
"""

from __future__ import annotations

# ---- workers --------------------------------------------------------------------------------------------------------

TELL = """\
import os, sys, time
def tell(what):
    e = os.environ
    line = f"{what} {time.monotonic()} {e['RANK']} {e['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {os.getppid()}\\n"
    report = os.open(e["REPORT"], os.O_WRONLY | os.O_APPEND)
    os.write(report, line.encode())
    os.close(report)
tell("first")
"""

RETURN = TELL + "os._exit(0)\n"

SLEEP = TELL + "time.sleep(600)\n"

FAIL_ONCE = (
    TELL
    + """\
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while os.environ["RANK"] == "0":
        with open(os.environ["REPORT"]) as report:
            if report.read().count("first ") == int(os.environ["WORLD_SIZE"]):
                time.sleep(1.5)  # long enough for a restart without a pause; everybody else is asleep by now
                tell("fails")
                os._exit(1)
        time.sleep(0.01)
    time.sleep(600)
"""
)

LEAVE_BEHIND = (
    TELL
    + """\
import signal
if os.fork() == 0:
    tell("child")
    time.sleep(600)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        tell("daemon")
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
)
"""A worker with one child in its process group, and one that has made itself a daemon."""

TRAIN = (
    TELL
    + """\
from datetime import timedelta
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    if step == 10 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
tell("trained")
dist.barrier()
# Tearing gloo down aborts now and then, with no launcher at all (6 of 14 runs): that is not what is measured.
os._exit(0)
"""
)

# ---- programs that run an agent themselves: started as `python FILE WORKERS SCRIPT` ----------------------------------

_FORK = """\
import os, sys, time
def fork():
    if os.fork() == 0:
        with open(os.environ["REPORT"], "a") as report:
            report.write(f"forked {time.monotonic()} 0 0 {os.getpid()} {os.getppid()}\\n")
        time.sleep(600)
        os._exit(0)
"""

OUR_HOST = (
    _FORK
    + """\
from reknit import Settings
from reknit.runtime import start
running = start(Settings(command=(sys.executable, sys.argv[2]), local_world_size=int(sys.argv[1])))
fork()
running.join()
"""
)

THEIR_HOST = (
    _FORK
    + """\
import threading
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
workers = int(sys.argv[1])
config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=workers, rdzv_backend="c10d",
                      rdzv_endpoint="localhost:0", max_restarts=0)
def fork_later():
    while open(os.environ["REPORT"]).read().count("first ") < workers:
        time.sleep(0.01)
    fork()
threading.Thread(target=fork_later).start()
elastic_launch(config, sys.executable)(sys.argv[2])
"""
)
