"""Functions as workers, under every start method: whatever goes wrong is one clear error, and nothing is left."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from reknit.adapters.keeper.client import forking
from reknit.adapters.keeper.client.function_workers import Function, FunctionError
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses
from tests.support import called
from tests.support.alone import run_alone
from tests.support.calling import begin, call
from tests.support.keepers import Kept, wait_gone
from tests.support.leaks import children, nothing_left
from tests.support.processes import drive_exits, failures
from tests.support.waiting import is_alive, read_pids

METHODS = ("spawn", "fork", "forkserver")
Keep = Callable[..., Kept]


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import pytest: the module `__main__` of this process is an empty one."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


FAULTS: tuple[tuple[Function, str, int], ...] = (
    (Function(called.give_lock), "TypeError: the return value, of type lock, cannot be pickled", 1),
    (Function(called.give_generator), "TypeError: give_generator has returned a generator", 1),
    (Function(called.fail, ("odd",)), "Odd: odd 1", 1),
    (Function(called.fail, ("mute",)), "Mute", 1),
    (Function(called.end_at_once, (0,)), "the function has ended without returning: its process has exited", 1),
    (Function(called.end_at_once, (7,)), "", 7),
    (Function(called.leave, (3,)), "", 3),
    (Function(called.fail, ("keyboard",)), "the function has ended without returning: KeyboardInterrupt", 1),
    (Function(called.interrupt_itself), "the function has ended without returning: KeyboardInterrupt", 1),
    (Function(called.end_by, (9,)), "", -9),
)


@pytest.mark.parametrize("start_method", METHODS)
def test_each_failure_says_what_happened(start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one round. Nothing is left, and the host goes on with the next round."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nothing_left():
        kept = Kept(tmp_path, "unused", start_method=start_method)
        processes = tuple(Process(i, i, (), error_file=str(tmp_path / f"{i}.json")) for i in range(len(FAULTS)))
        functions = {i: function for i, (function, _, _) in enumerate(FAULTS)}
        kept.keeper.start(StartProcesses(0, processes), functions)
        seen = drive_exits(kept.keeper, kept.clock, len(FAULTS))  # type: ignore[arg-type]
        found = {failure.local_rank: failure for failure in failures(seen)}
        for local_rank, (_, said, exitcode) in enumerate(FAULTS):
            assert found[local_rank].message.startswith(said)
            assert (found[local_rank].exitcode, local_rank) == (exitcode, local_rank)
        assert kept.keeper.values(0) == {}
        kept.stop()
        assert call(kept, called.give, 7, round_=1) == 7
        kept.close()


@pytest.mark.parametrize("start_method", METHODS)
def test_what_a_worker_has_forked(keep: Keep, start_method: str, tmp_path: Path) -> None:
    """A child that lives on, one that returns from the function as well, and a daemon."""
    kept = keep("unused", start_method=start_method)
    paths = [str(tmp_path / name) for name in ("child", "daemon")]
    functions = (called.fork_and_leave, paths[:1]), (called.daemonize, paths[1:]), (called.fork_and_return_twice, ())
    begin(kept, *(Function(fn, tuple(args)) for fn, args in functions))
    assert failures(drive_exits(kept.keeper, kept.clock, 3)) == []  # type: ignore[arg-type]
    assert kept.keeper.values(0) == {0: 7, 1: 7, 2: 7}
    pids = [pid for path in paths for pid in read_pids(path, 1)]
    assert all(map(is_alive, pids))
    assert kept.stop().stuck == ()
    wait_gone(pids)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_what_cannot_be_pickled_is_named(keep: Keep, start_method: str) -> None:
    """Before anything is started. The next start is not disturbed."""
    kept = keep("unused", start_method=start_method)
    with pytest.raises(FunctionError, match=r"cannot be pickled, .* Define it at the top of a module, or use "):
        begin(kept, Function(lambda: None))
    with pytest.raises(FunctionError, match="the arguments of give cannot be pickled: TypeError"):
        begin(kept, Function(called.give, (called.give_lock(),)))
    assert call(kept, called.give, 7) == 7


@pytest.mark.slow
def test_a_value_of_a_gibibyte(keep: Keep) -> None:
    """It is too large for four bytes of length, and for most buffers on the way."""
    kept = keep("unused", start_method="forkserver")
    value = call(kept, called.big, 1 << 30)
    assert len(value) == 1 << 30


@pytest.mark.parametrize("how", ["driver", "torch"])
def test_fork_is_refused_once_cuda_is_initialised(keep: Keep, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would fail later, in a way that says nothing of the cause. Nothing is started."""
    if how == "driver":
        monkeypatch.setattr(forking, "_target", lambda fd: "/dev/nvidia-uvm")
    else:
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
        monkeypatch.setitem(sys.modules, "torch", torch)
    kept = keep("unused", start_method="fork")
    with pytest.raises(FunctionError, match=r"CUDA is initialised in this process, .* use start method spawn"):
        begin(kept, Function(called.give))
    assert not children()


KILLED = """
    import os, random, select, signal, sys, time
    from pathlib import Path
    from reknit.adapters.host.children import become_subreaper
    from reknit.adapters.keeper.client.function_workers import Function
    from tests.support import called
    from tests.support.calling import begin
    from tests.support.keepers import Kept
    from tests.support.processes import drive_exits

    start_method, folder, seed = sys.argv[1:]
    assert become_subreaper()

    def host():
        kept = Kept(Path(folder), "unused", start_method=start_method)
        begin(kept, Function(called.daemonize, (os.devnull,)), Function(called.give))
        drive_exits(kept.keeper, kept.clock, 2)
        os.write(told, b"!")
        signal.pause()

    draw, span = random.Random(seed), None
    for _ in range(4):
        heard, told = os.pipe()
        began = time.monotonic()
        if (pid := os.fork()) == 0:
            try:
                host()
            finally:
                os._exit(1)
        os.close(told)
        # The first host is killed when its functions have ended. Its life is the span for the others.
        select.select([heard], [], [], None if span is None else draw.random() * span)
        os.kill(pid, signal.SIGKILL)
        span = span or time.monotonic() - began
        # This process adopts whatever the host leaves. All of it must end by itself.
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        os.close(heard)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
def test_a_host_that_is_killed_at_any_moment_leaves_nothing(start_method: str, tmp_path: Path) -> None:
    """While its keeper starts, while functions start and run, and afterwards. One of them has made a daemon."""
    seed = str(random.random())
    print("seed", seed)
    run_alone(KILLED, start_method, str(tmp_path), seed)


NOTEBOOK = """
    import asyncio, io, os, signal, sys, threading, types
    from reknit import launch, launch_async
    from tests.support.leaks import children

    cell = types.ModuleType("__main__")  # it has no file
    sys.modules["__main__"] = cell
    exec('''if True:
        import signal
        def train(x):
            print("trains")
            return 2 * x
        def waits():
            print("waits", flush=True)
            signal.pause()
    ''', cell.__dict__)

    class Out(io.TextIOBase):  # it has no descriptor
        shown = ""
        def write(self, text):
            self.shown += text
            if "waits" in text:
                os.kill(os.getpid(), signal.SIGINT)  # the stop button
            return len(text)

    async def run(start_method):
        sys.stdout = Out()
        given = {"nproc": 2, "start_method": start_method}
        assert launch(cell.train, (21,), **given) == {0: 42, 1: 42}
        assert await launch_async(cell.train, (4,), **given) == {0: 8, 1: 8}
        assert sys.stdout.shown == "trains\\n" * 4
        try:
            launch(cell.waits, **given)
            raise AssertionError("it was not interrupted")
        except KeyboardInterrupt:
            pass
        assert not children()

    loop = asyncio.new_event_loop()  # `asyncio.run` would take SIGINT, and a kernel does not
    loop.run_until_complete(run(sys.argv[1]))
    loop.close()
"""


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "forkserver"))]
)
def test_a_notebook_can_be_the_host(start_method: str) -> None:
    """Its cells run within an event loop in the main thread. Its `sys.stdout` is an object that shows text in a page.
    What a cell defines is in no file. The stop button sends SIGINT, and the kernel goes on."""
    run_alone(NOTEBOOK, start_method)
