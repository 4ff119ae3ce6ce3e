"""The worker of `hangs.py`: it plays one kind of hang in each round. Rank 1 is the one to blame.

A kind is a function with the arguments (is_culprit, step). It is called at each step by all ranks. The culprit hangs at
step `AT`. The others wait for it, each in its own way.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import itertools
import multiprocessing
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reknit import progress

AT = 3
STEPS = 6
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
FOLDER = os.environ["HANGS_FOLDER"]
Kind = Callable[[bool, int], None]
KINDS: dict[str, Kind] = {}
BEFORE: set[str] = set()
"""Kinds that are called once, before the group is there."""


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def before(function: Kind) -> Kind:
    BEFORE.add(function.__name__)
    return kind(function)


def sleep() -> None:
    time.sleep(1e6)


def one() -> torch.Tensor:
    return torch.ones(4)


# ---- what the others wait in, while the culprit sleeps ----


def waits_in(name: str, wait: Callable[[], object]) -> None:
    def play(is_culprit: bool, step: int) -> None:
        if is_culprit and step == AT:
            sleep()
        wait()

    KINDS[name] = play


def functional() -> None:
    import torch.distributed._functional_collectives as funcol

    funcol.wait_tensor(funcol.all_reduce(one(), "sum", list(range(WORLD))))


def dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()


def sends() -> None:
    if RANK == 1:
        for to in range(WORLD):
            if to != RANK:
                dist.send(one(), to)
    else:
        dist.recv(one(), 1)


def batched() -> None:
    after, last = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    ops = [dist.P2POp(dist.isend, one(), after), dist.P2POp(dist.irecv, one(), last)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def store_of_group() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


calls = itertools.count()


def through_the_store() -> None:
    key = f"key {next(calls)}"
    if RANK == 1:
        store_of_group().set(key, "x")
    else:
        store_of_group().get(key)


def waits_for_a_key() -> None:
    key = f"key {next(calls)}"
    if RANK == 1:
        store_of_group().set(key, "x")
    else:
        store_of_group().wait([key])


def saves() -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"x": one()}, checkpoint_id=os.path.join(FOLDER, f"dcp {os.environ['REKNIT_ROUND']}"))


def in_a_thread_of_a_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.all_reduce, one()).result()


def in_a_thread() -> None:
    thread = threading.Thread(target=dist.all_reduce, args=(one(),), daemon=True)
    thread.start()
    thread.join()


def in_asyncio() -> None:
    asyncio.run(asyncio.to_thread(dist.all_reduce, one()))


def ddp() -> None:
    global _model
    if _model is None:
        _model = DistributedDataParallel(torch.nn.Linear(4, 4))
    _model(torch.ones(2, 4)).sum().backward()


_model: DistributedDataParallel | None = None


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    global _sharded
    if _sharded is None:
        from torch.distributed.device_mesh import init_device_mesh

        _sharded = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        fully_shard(_sharded, mesh=init_device_mesh("cpu", (WORLD,)))
    _sharded(torch.ones(2, 6)).sum().backward()


_sharded: torch.nn.Module | None = None

for name, wait in {
    "all_reduce": lambda: dist.all_reduce(one()),
    "broadcast": lambda: dist.broadcast(one(), 1),
    "barrier": dist.barrier,
    "all_gather": lambda: dist.all_gather([one() for _ in range(WORLD)], one()),
    "all_gather_object": lambda: dist.all_gather_object([None] * WORLD, "x"),
    "broadcast_object_list": lambda: dist.broadcast_object_list(["x"], 1),
    "gather_object": lambda: dist.gather_object("x", [None] * WORLD if RANK == 0 else None) or dist.barrier(),
    "scatter": lambda: dist.scatter(one(), [one() for _ in range(WORLD)] if RANK == 1 else None, src=1),
    "reduce": lambda: dist.reduce(one(), 0) or dist.barrier(),
    "reduce_scatter": lambda: dist.reduce_scatter(one(), [one() for _ in range(WORLD)]),
    "asynchronous": lambda: dist.all_reduce(one(), async_op=True).wait(),
    "recv": sends,
    "batch_isend_irecv": batched,
    "new_group": dist.new_group,
    "functional": functional,
    "dtensor": dtensor,
    "store_get": through_the_store,
    "store_wait": waits_for_a_key,
    "checkpoint": saves,
    "pool": in_a_thread_of_a_pool,
    "thread": in_a_thread,
    "asyncio_thread": in_asyncio,
    "ddp_backward": ddp,
    "fsdp": fsdp,
    "join": lambda: dist.all_gather_into_tensor(torch.ones(4 * WORLD), one()),
}.items():
    waits_in(name, wait)


# ---- what the culprit does, while the others wait in all_reduce ----


def hangs_in(hang: Callable[[], object]) -> None:
    def play(is_culprit: bool, step: int) -> None:
        if is_culprit and step == AT:
            hang()
        dist.all_reduce(one())

    KINDS[f"culprit_{hang.__name__}"] = play


def loops() -> None:
    while True:
        pass


def computes() -> None:
    big = torch.ones(300, 300)
    while True:
        big @ big


def reads_a_queue() -> None:
    queue.Queue().get()


def takes_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_an_event() -> None:
    threading.Event().wait()


def waits_for_a_future() -> None:
    ThreadPoolExecutor(1).submit(time.sleep, 1e6).result()


def waits_for_a_process() -> None:
    subprocess.run(["sleep", "1000000"], check=True)


def waits_for_a_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=sleep, daemon=True)
    child.start()
    child.join()


def reads_a_pipe() -> None:
    os.read(os.pipe()[0], 1)


def opens_a_fifo() -> None:
    path = os.path.join(tempfile.mkdtemp(dir=FOLDER), "fifo")
    os.mkfifo(path)
    with open(path) as file:
        file.read()


def saves_to_a_fifo() -> None:
    path = os.path.join(tempfile.mkdtemp(dir=FOLDER), "fifo")
    os.mkfifo(path)
    torch.save(one(), path)


def waits_for_a_file_lock() -> None:
    path = os.path.join(tempfile.mkdtemp(dir=FOLDER), "lock")
    subprocess.Popen(["flock", path, "sleep", "1000000"])
    time.sleep(0.3)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def reads_a_socket() -> None:
    ours, theirs = socket.socketpair()
    ours.recv(1)
    theirs.close()


def selects() -> None:
    select.select([os.pipe()[0]], [], [])


def sleeps_in_asyncio() -> None:
    asyncio.run(asyncio.sleep(1e6))


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def matches() -> None:
    re.match(r"(a+)+$", "a" * 100 + "b")


def sleeps_with_the_lock_of_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000000)


def sleeps_in_c() -> None:
    ctypes.CDLL(None).sleep(1000000)


def loads_data() -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, at: int) -> int:
            sleep()
            return at

    for _ in torch.utils.data.DataLoader(Slow(), num_workers=1):
        pass


def loads_data_itself() -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, at: int) -> int:
            sleep()
            return at

    for _ in torch.utils.data.DataLoader(Slow()):
        pass


def imports() -> None:
    folder = tempfile.mkdtemp(dir=FOLDER)
    with open(os.path.join(folder, "slow_module.py"), "w") as file:
        file.write("import time; time.sleep(1e6)\n")
    sys.path.insert(0, folder)
    __import__("slow_module")


def waits_in_its_own_backward() -> None:
    class Hangs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            sleep()
            return grads[0]

    Hangs.apply(torch.ones(1, requires_grad=True)).backward()


def trains_in_a_thread() -> None:
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    thread.join()


def polls() -> None:
    while not os.path.exists(os.path.join(FOLDER, "never")):
        time.sleep(0.05)


for hang in (
    loops,
    computes,
    reads_a_queue,
    takes_a_lock,
    waits_for_an_event,
    waits_for_a_future,
    waits_for_a_process,
    waits_for_a_child,
    reads_a_pipe,
    opens_a_fifo,
    saves_to_a_fifo,
    waits_for_a_file_lock,
    reads_a_socket,
    selects,
    sleeps_in_asyncio,
    is_stopped,
    matches,
    sleeps_with_the_lock_of_the_interpreter,
    sleeps_in_c,
    loads_data,
    loads_data_itself,
    imports,
    waits_in_its_own_backward,
    trains_in_a_thread,
    polls,
):
    hangs_in(hang)


# ---- both ----


@kind
def skips_a_collective(is_culprit: bool, step: int) -> None:
    if not (is_culprit and step == AT):
        dist.all_reduce(one())
    dist.barrier() if step == AT else None


@kind
def calls_another_collective(is_culprit: bool, step: int) -> None:
    if is_culprit and step == AT:
        dist.broadcast(one(), 0)
        dist.barrier()
    dist.all_reduce(one())


@kind
def is_late(is_culprit: bool, step: int) -> None:
    """It reports its step two seconds after the others, and hangs then."""
    if is_culprit and step == AT:
        time.sleep(2.0)
        progress(step)
        sleep()
    dist.all_reduce(one())


@kind
def hangs_in_a_hook(is_culprit: bool, step: int) -> None:
    """The others wait in the backward pass of DDP, and so does the culprit, in a hook of its own."""
    x = torch.ones(2, 4, requires_grad=True)
    if is_culprit and step == AT:
        x.register_hook(lambda grad: sleep())
    ddp_model()(x).sum().backward()


def ddp_model() -> DistributedDataParallel:
    global _model
    if _model is None:
        _model = DistributedDataParallel(torch.nn.Linear(4, 4))
    return _model


@kind
def waits_asynchronously_and_sleeps(is_culprit: bool, step: int) -> None:
    work = dist.all_reduce(one(), async_op=True)
    if is_culprit and step == AT:
        work.wait()
        sleep()
    work.wait()
    dist.barrier()


@kind
def is_ended_by_the_time_limit_of_gloo(is_culprit: bool, step: int) -> None:
    """The others die of torch's own time limit before reknit finds them."""
    from datetime import timedelta

    group = groups.setdefault("short", dist.new_group(timeout=timedelta(seconds=1)))
    if is_culprit and step == AT:
        sleep()
    dist.all_reduce(one(), group=group)


groups: dict[str, dist.ProcessGroup] = {}


@before
def never_initializes(is_culprit: bool, step: int) -> None:
    if is_culprit:
        sleep()
    dist.init_process_group("gloo")


def main() -> None:
    name = os.environ["HANGS"].split(",")[int(os.environ["REKNIT_ROUND"])]
    is_culprit, play = RANK == 1, KINDS[name]
    if name in BEFORE:
        progress(0)
        play(is_culprit, AT)
        return
    dist.init_process_group("gloo")
    for step in range(STEPS):
        progress(step)
        play(is_culprit, step)
        if step < AT:
            dist.barrier()


if __name__ == "__main__":
    main()
    print(f"rank {RANK}: it does not hang", flush=True)
    os._exit(3)
