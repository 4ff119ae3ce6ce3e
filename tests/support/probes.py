"""What a script can see of its own process, and how it can end: a function for each. The script itself is run as
`probes.py NAME…`, and stands in the folder of the test. The worker with local rank i runs name i."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

MARKS = ("TORCHELASTIC_ERROR_FILE", "REKNIT_NODE")
"""Variables that differ from one keeper to the next."""


def show(*what: object) -> None:
    print(*what, sep="\n")


def the_main_module() -> None:
    main = sys.modules["__main__"]
    show(__name__, __file__, __spec__, __package__, type(__loader__).__name__, sorted(vars(main)))


def arguments() -> None:
    show(sys.argv, sys.orig_argv, sys.flags, sys.warnoptions, sys._xoptions, sys.executable, sys.prefix)


def paths() -> None:
    show(sys.path, os.getcwd(), [name for name in sys.modules if "reknit" in name or "custom" in name])


def environment() -> None:
    import subprocess

    show(*sorted(f"{name}={value}" for name, value in os.environ.items() if name not in MARKS))
    show(subprocess.check_output(["sh", "-c", "echo $RANK $PYTHONPATH $REKNIT_ZYGOTE"], text=True))


def streams() -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        show(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.isatty())
    show(sys.stdout.write_through, type(sys.stdout.buffer), sys.stdin.read())


def descriptors() -> None:
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the list was read through it
        show(f"{'fd' if fd > 2 else fd} {os.get_inheritable(fd)} {path}")


def signals() -> None:
    import signal

    show(*((int(signum), signal.getsignal(signum)) for signum in sorted(signal.valid_signals())))
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    # Those from 32 on are libc's own, or for any use.
    show(*(f"{name} {int(mask, 16) & 0x7FFFFFFF:x}" for name, mask in lines))


def the_process() -> None:
    show(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getsid(os.getppid()), os.getpriority(os.PRIO_PROCESS, 0))
    for name in ("cmdline", "comm", "coredump_filter", "oom_score_adj"):
        with open(f"/proc/self/{name}") as file:
            show(file.read())
    show(os.umask(0o22), os.times()[0] < 5, os.sched_getaffinity(0), len(os.listdir("/proc/self/task")))


def limits() -> None:
    import resource

    names = [name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_RTTIME"]
    show(*((name, resource.getrlimit(getattr(resource, name))) for name in names))


def threads() -> None:
    main = threading.main_thread()
    show(threading.current_thread().name, main is threading.current_thread(), threading.active_count())
    thread = threading.Thread(target=lambda: show(threading.current_thread().name))
    thread.start()
    thread.join()
    threading.Thread(target=lambda: (main.join(), print("after the main thread"))).start()


def the_interpreter() -> None:
    import faulthandler
    import locale
    import time
    import warnings

    show(gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval())
    show(faulthandler.is_enabled(), sys.dont_write_bytecode, sys.getfilesystemencoding())
    show(locale.setlocale(locale.LC_ALL), time.tzname, warnings.filters)
    show(sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile())


def the_stack() -> None:
    import traceback

    show(*traceback.format_stack())


class Own:
    """A class of the main module."""


def pickles() -> None:
    import pickle

    main = threading.main_thread()
    show(type(pickle.loads(pickle.dumps(Own()))) is Own, Own.__module__, Own.__qualname__)
    threading.Thread(target=lambda: (main.join(), show(pickle.dumps(Own)))).start()


class Last:
    def __del__(self) -> None:
        os.write(1, b"deleted\n")


def the_end() -> None:
    import atexit

    global last
    atexit.register(show, "first")
    atexit.register(show, "second")
    last = Last()


def random_numbers() -> None:
    import random
    import secrets
    import uuid

    show(len({random.random(), random.getrandbits(64), uuid.uuid4(), secrets.token_hex()}))
    random.seed(3)
    show(random.random())


def multiprocessing() -> None:
    import multiprocessing as mp
    from multiprocessing import resource_tracker

    me, tracker = mp.current_process(), vars(resource_tracker)["_resource_tracker"]
    show(me.name, me.daemon, mp.parent_process(), mp.get_start_method(), len(me.authkey), tracker._fd)


def double(number: int) -> Any:
    import multiprocessing as mp

    parent = mp.parent_process()
    return 2 * number, "RANK" in os.environ, parent is not None and parent.pid == int(os.environ["PARENT"])


def children() -> None:
    import multiprocessing as mp

    os.environ["PARENT"] = str(os.getpid())
    for how in ("fork", "spawn", "forkserver"):
        with mp.get_context(how).Pool(1) as pool:  # type: ignore[attr-defined]  # every context has one
            show(how, pool.map(double, [1, 2]))


def shared_memory() -> None:
    from multiprocessing import shared_memory

    one = shared_memory.SharedMemory(create=True, size=8)
    one.buf[0] = 7
    other = shared_memory.SharedMemory(one.name)
    show(other.buf[0])
    other.close()
    one.close()
    one.unlink()


def a_module_beside() -> None:
    import beside  # type: ignore[import-not-found]  # the test writes it

    show(beside.__file__, beside.NAME, os.path.exists("__pycache__"))


def another_python() -> None:
    import subprocess

    script = "import sys; print(sys.path, sys.argv, 'sitecustomize' in sys.modules)"
    show(subprocess.check_output([sys.executable, "-c", script], text=True))


def execs() -> None:
    os.execv(sys.executable, [sys.executable, "-c", "import os, sys; print(sys.argv, os.environ['RANK'])", "x"])


def an_event_loop() -> None:
    import asyncio

    show(asyncio.run(asyncio.sleep(0, "slept")))


def an_executor() -> None:
    from concurrent.futures import ThreadPoolExecutor

    show([*ThreadPoolExecutor(2).map(abs, [-1, -2])])


def raises() -> None:
    try:
        print({}["x"])
    except KeyError as error:
        raise ValueError("bad") from error


def hooks() -> None:
    sys.excepthook = lambda kind, error, trace: show("hooked", kind, trace.tb_frame, trace.tb_next.tb_next)
    raises()


def exits_with_a_status() -> None:
    sys.exit(7)


def exits_with_a_text() -> None:
    sys.exit("so it ends")


def exits_with_300() -> None:
    sys.exit(300)


def exits_at_once() -> None:
    print("unflushed")
    os._exit(9)


def is_interrupted() -> None:
    raise KeyboardInterrupt


def aborts() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def kills_itself() -> None:
    import signal

    os.kill(os.getpid(), signal.SIGTERM)


def a_thread_raises() -> None:
    thread = threading.Thread(target=lambda: 1 // 0, name="worker")
    thread.start()
    thread.join()
    show("goes on")


def loses_its_output() -> None:
    os.close(1)
    print("lost")


def forks() -> None:
    pid = os.fork()
    if pid == 0:
        show("child")
        sys.exit(3)
    show(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    globals()[sys.argv[1:][int(os.environ["LOCAL_RANK"])]]()
