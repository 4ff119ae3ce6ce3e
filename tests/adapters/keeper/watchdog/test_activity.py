"""What a worker did, by its stacks and by the kernel. The stacks are like those that py-spy and faulthandler write."""

from __future__ import annotations

import pytest

from reknit.adapters.keeper.watchdog.activity import Frame, Kernel, ThreadStack, activity_of
from reknit.core.job.workers import Activity, Stance

PYTHON = "/usr/lib/python3.12/"
TORCH = "/venv/lib/python3.12/site-packages/torch/"
USER = Frame("load", "/home/me/data.py", 41)
MAIN = Frame("<module>", "/home/me/train.py", 8)
LOADS = ("load", "data.py:41")
COLLECTIVE = (
    Frame("broadcast", TORCH + "distributed/distributed_c10d.py", 2990),
    Frame("_exception_logger.<locals>.wrapper", TORCH + "distributed/c10d_logger.py", 83),
    Frame("broadcast_object_list", TORCH + "distributed/distributed_c10d.py", 3700),
    Frame("_exception_logger.<locals>.wrapper", TORCH + "distributed/c10d_logger.py", 83),
)
BACKWARD = (
    Frame("_engine_run_backward", TORCH + "autograd/graph.py", 829),
    Frame("backward", TORCH + "autograd/__init__.py", 350),
    Frame("Tensor.backward", TORCH + "_tensor.py", 630),
)
FUNCTIONAL = (
    Frame("OpOverloadPacket.__call__", TORCH + "_ops.py", 1200),
    Frame("wait_tensor", TORCH + "distributed/_functional_collectives.py", 140),
)
THREAD_JOIN = (Frame("Thread.join", PYTHON + "threading.py", 1119),)
IDLE, BUSY = Kernel("S", "futex_wait_queue"), Kernel("R")


def main(*frames: Frame, is_busy: bool | None = False, has_gil: bool = False) -> ThreadStack:
    return ThreadStack((*frames, MAIN), 'Thread 7 (idle): "MainThread"', True, is_busy, has_gil)


def other(*frames: Frame, has_gil: bool = False) -> ThreadStack:
    return ThreadStack(frames, 'Thread 8 (idle): "other"', False, False, has_gil)


@pytest.mark.parametrize(
    ("frames", "kernel", "is_busy", "stance"),
    [
        ((*COLLECTIVE, USER), IDLE, False, Stance.COLLECTIVE),
        ((*COLLECTIVE, USER), IDLE, None, Stance.COLLECTIVE),
        ((Frame("_tcp_handler", TORCH + "distributed/rendezvous.py", 270), USER), IDLE, False, Stance.COLLECTIVE),
        ((*BACKWARD, USER), IDLE, False, Stance.WAITING),
        ((*BACKWARD, USER), BUSY, True, Stance.OWN),
        ((*BACKWARD, USER), Kernel("R", has_gpu=True), True, Stance.WAITING),
        ((*FUNCTIONAL, USER), IDLE, False, Stance.WAITING),
        ((Frame("Stream.synchronize", TORCH + "cuda/streams.py", 105), USER), BUSY, True, Stance.WAITING),
        ((USER, *BACKWARD), IDLE, False, Stance.UNKNOWN),  # a hook of the user's
        ((USER, *BACKWARD), Kernel("S", "hrtimer_nanosleep"), False, Stance.OWN),
        ((USER,), IDLE, False, Stance.UNKNOWN),  # work.wait(), for example
        ((USER,), Kernel("S", "poll_schedule_timeout"), False, Stance.UNKNOWN),
        ((USER,), Kernel("S", "futex_do_wait"), False, Stance.UNKNOWN),
        ((USER,), Kernel("S", "do_wait"), False, Stance.OWN),
        ((USER,), Kernel("S", "anon_pipe_read"), None, Stance.OWN),
        ((USER,), BUSY, True, Stance.OWN),
        ((USER,), BUSY, None, Stance.OWN),
        ((USER,), BUSY, False, Stance.UNKNOWN),  # it ran at one look, and not at the other
        ((USER,), Kernel("R", has_gpu=True), True, Stance.WAITING),
        ((Frame("Condition.wait", PYTHON + "threading.py", 327), USER), IDLE, False, Stance.OWN),
        ((Frame("_writer", TORCH + "distributed/checkpoint/filesystem.py", 9), USER), IDLE, False, Stance.UNKNOWN),
        ((USER,), Kernel("T"), False, Stance.STOPPED),
        ((*COLLECTIVE, USER), Kernel("T"), False, Stance.STOPPED),
    ],
)
def test_where_the_main_thread_stands(
    frames: tuple[Frame, ...], kernel: Kernel, is_busy: bool | None, stance: Stance
) -> None:
    """In a collective, in something like it, in work of its own, or nobody knows."""
    assert activity_of([main(*frames, is_busy=is_busy)], kernel).stance is stance


def test_what_is_named() -> None:
    """The call that the user has written, and where."""
    found = activity_of([main(*COLLECTIVE, USER)], IDLE)
    assert found == Activity(Stance.COLLECTIVE, "broadcast_object_list", "data.py:41")
    assert activity_of([main(*BACKWARD, USER)], IDLE) == Activity(Stance.WAITING, "backward", "data.py:41")
    assert activity_of([main(*FUNCTIONAL, USER)], IDLE) == Activity(Stance.WAITING, "wait_tensor", "data.py:41")
    assert activity_of([main(USER)], IDLE) == Activity(Stance.UNKNOWN, *LOADS)
    library = Frame("fit", "/venv/lib/python3.12/site-packages/lightning/trainer.py", 5)
    assert activity_of([main(*COLLECTIVE, library, USER)], IDLE).site == "lightning/trainer.py:5"


@pytest.mark.parametrize(
    "file", ["threading.py", "queue.py", "concurrent/futures/_base.py", "asyncio/base_events.py", "selectors.py"]
)
def test_a_thread_that_is_in_a_collective_counts_for_the_one_that_waits_for_it(file: str) -> None:
    """And a thread in anything else does not."""
    waits = main(Frame("wait", PYTHON + file, 1), USER)
    assert activity_of([other(*COLLECTIVE, MAIN), waits], IDLE).stance is Stance.WAITING
    assert activity_of([other(USER), waits], IDLE) == Activity(Stance.UNKNOWN, *LOADS), "work.wait(), perhaps"
    assert activity_of([other(Frame("get", PYTHON + "queue.py", 1), USER), waits], IDLE).stance is Stance.OWN
    assert activity_of([waits], IDLE) == Activity(Stance.OWN, *LOADS)


def test_a_call_in_c_that_keeps_the_lock_of_the_interpreter() -> None:
    """The main thread would go on, if it could."""
    assert activity_of([other(USER, has_gil=True), main(*COLLECTIVE, USER)], IDLE).stance is Stance.OWN
    assert activity_of([main(USER, has_gil=True)], IDLE).stance is Stance.OWN
    assert activity_of([main(*COLLECTIVE, USER, is_busy=True, has_gil=True)], BUSY).stance is Stance.COLLECTIVE


def test_without_stacks_the_kernel_alone_may_tell() -> None:
    """A worker need not be Python."""
    assert activity_of([], Kernel("S", "hrtimer_nanosleep")) == Activity(Stance.OWN)
    assert activity_of([], IDLE) == Activity(Stance.UNKNOWN)
    assert activity_of([], BUSY) == Activity(Stance.UNKNOWN), "it may be ending"
    assert activity_of([], Kernel()) == Activity(Stance.UNKNOWN)
    assert activity_of([], Kernel("T")) == Activity(Stance.STOPPED)
    assert activity_of([ThreadStack((), "Thread 7", True)], IDLE) == Activity(Stance.UNKNOWN)


def test_the_same_call_has_the_same_place_in_other_folders() -> None:
    """Nodes may have installed the program in different folders, and only some of them py-spy."""
    assert Frame("f", "/home/a/train.py", 3).site == Frame("f", "/scratch/b/train.py", 3).site == "train.py:3"
    assert Frame("f", "/x/lib/python3.11/threading.py", 3).site == "threading.py:3"


def test_what_the_kernel_explains() -> None:
    """In words for the report."""
    assert Kernel("S", "futex_do_wait").description == "state S, waits in futex_do_wait"
    assert Kernel().description == Kernel().remark == Kernel("S").remark == ""
    assert Kernel("T").remark == "it was stopped by a signal"
    assert Kernel("D", "nfs_wait").remark == "the kernel does not let it run, it waits in nfs_wait"
