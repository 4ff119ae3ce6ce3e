"""Functions that tests run as workers. A worker imports this module."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import psutil


class Odd(Exception):
    """An exception that cannot be pickled, and whose `__init__` wants more than its text."""

    def __init__(self, one: int, two: Any) -> None:
        super().__init__(f"odd {one}")
        self.two = two


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot speak")


class Wordy:
    """Cannot be pickled. The error has a text of several lines, or none that can be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class Unreadable:
    """A value that can be pickled and not unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


class Lost:
    """A value that cannot be pickled, because its file is gone."""

    def __reduce__(self) -> Any:
        raise FileNotFoundError("its file is gone")


def refuse() -> NoReturn:
    raise ValueError("not here")


def give(value: object = None) -> object:
    return value


def told(name: str) -> tuple[str | None, int, int]:
    """A variable, the rank that this module would have read while it was imported, and the process group."""
    return os.environ.get(name), int(IMPORTED_RANK or -1), os.getpgid(0) - os.getpid()


IMPORTED_RANK = os.environ.get("RANK")


def identity() -> tuple[str, bool, bool, str, bool]:
    me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    assert parent is not None
    return me.name, me.daemon, parent.is_alive(), str(multiprocessing.get_start_method()), bytes(me.authkey) != b""


def speak(out: str, err: str) -> None:
    print(out)
    print(err, file=sys.stderr)


def fail(kind: str) -> None:
    if kind == "odd":
        raise Odd(1, threading.Lock())
    if kind == "mute":
        raise Mute
    if kind == "keyboard":
        raise KeyboardInterrupt
    if kind == "surrogate":
        raise ValueError("\udcff")
    raise ValueError("plain")


def leave(status: object) -> NoReturn:
    sys.exit(status)  # type: ignore[arg-type]  # whatever a user may write


def end_at_once(status: int) -> NoReturn:
    os._exit(status)


def end_by(signum: int) -> None:
    os.kill(os.getpid(), signum)


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def generate() -> Iterator[int]:
    yield 1


async def wait() -> None:
    pass


def give_generator() -> Iterator[int]:
    return (i for i in range(3))


def give_lock() -> object:
    return threading.Lock()


def big(size: int) -> bytes:
    return b"x" * size


def fill(queue: Any, event: Any, rank: int) -> None:
    """Uses what only `multiprocessing` can hand to a process."""
    event.wait()
    queue.put(rank * rank)


def fork_and_leave(path: str) -> int:
    """Its child lives on, after the function has returned in both processes."""
    pid = os.fork()
    if pid == 0:
        with open(path, "w") as file:
            file.write(f"{os.getpid()}\n")
        signal.pause()
    return 7


def daemonize(path: str) -> int:
    """Leaves a process in a session of its own, which has closed all that it has inherited. It has forked twice."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            # Its pid is told last: whoever knows it may kill everything else.
            told = os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1 << 10)
            os.closerange(0, told)
            os.write(told, b"%d\n" % os.getpid())
            os.close(told)
            signal.pause()
        os._exit(0)
    os.close(write_end)
    os.read(read_end, 1)  # it ends when the daemon has closed its copies
    os.close(read_end)
    return 7


def daemonize_and_pause(path: str) -> None:
    daemonize(path)
    signal.pause()


def fork_and_return_twice() -> int:
    """Its child returns from the function as well."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return 7 if pid else 8


def open_files() -> list[str]:
    """What is open in the worker, besides the standard streams."""
    return sorted(f"{file.path}" for file in psutil.Process().open_files())


def descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass  # this one was used to list the others
    return found


def add(tensor: Any) -> Any:
    """Changes a shared tensor, and returns another one."""
    tensor += 1
    return tensor * 2


def pause() -> None:
    signal.pause()


def makes_daemon_child() -> int:
    """A worker may have children, whatever its host may have."""
    child = multiprocessing.get_context("spawn").Process(target=give)
    child.start()
    child.join()
    return child.exitcode or 0


def told_by_the_system(path: str) -> tuple[list[int], list[int], int, bool]:
    """Signals that are ignored and that have a handler, the process group, and whether a file of the host is open."""
    ignored = [s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN]
    handled = [s for s in signal.valid_signals() if callable(signal.getsignal(s))]
    return list(map(int, ignored)), list(map(int, handled)), os.getpgid(0) - os.getpid(), path in open_files()


def ancestry() -> tuple[int, int, list[str]]:
    """The parent's pid, the agent's pid, and which modules were there before this function was called."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    return os.getppid(), parent.pid or 0, sorted(sys.modules)


def sum_of_ranks() -> float:
    """The workers add their ranks up by gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def fail_first() -> str:
    """Rank 1 fails in the first round."""
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restart == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("the first round")
    if restart == "0":
        signal.pause()
    return restart


def note_and_pause(path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    signal.pause()


def saves_when_told(folder: str) -> None:
    """It writes the name of the signal, and then ends."""

    def save(signum: int, frame: object) -> NoReturn:
        with open(f"{folder}/saved", "w") as file:
            file.write(signal.Signals(signum).name)
        sys.exit(1)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, save)
    note_and_pause(f"{folder}/pids")


def goes_on_when_told(folder: str) -> None:
    signal.signal(signal.SIGINT, lambda signum, frame: open(f"{folder}/told", "w").close())
    while True:
        note_and_pause(f"{folder}/pids")


def outlives_its_timer() -> None:
    from reknit.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.2, scope="call"):
        time.sleep(1000)


def shows_its_stack(path: str, ignores: bool) -> str:
    """From now on SIGUSR2 writes the stack of this process into a file. `ignores`: two other signals have no effect."""
    faulthandler.register(signal.SIGUSR2, file=open(path, "w"), all_threads=False)  # noqa: SIM115  # it stays open
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return "shown"


def reads(path: str) -> str:
    """Waits until somebody writes into a named pipe."""
    with open(path) as file:
        return file.read()
