"""Functions as workers: what arrives, what comes back, and one clear error for each thing that cannot be."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from reknit.adapters.keeper.client.function_workers import Calls, Function, FunctionError
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses, variables
from reknit.core.agent.worker_words import WorkersExited
from tests.support import called
from tests.support.alone import run_alone
from tests.support.calling import begin, call, queues_and_events_arrive
from tests.support.keepers import Kept, wait_gone
from tests.support.leaks import nothing_left
from tests.support.processes import drive_exits, failures, stop
from tests.support.waiting import is_alive, read_pids

Keep = Callable[..., Kept]


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import pytest: the module `__main__` of this process is an empty one."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


# ---- what arrives and comes back ----


def test_each_function_returns_its_value(keep: Keep) -> None:
    """By local rank. A value of an earlier round is gone."""
    kept = keep("unused")
    begin(kept, *(Function(called.give, ({"rank": i},)) for i in range(3)))
    assert failures(drive_exits(kept.keeper, kept.clock, 3)) == []
    assert kept.keeper.values(0) == {i: {"rank": i} for i in range(3)}
    assert kept.keeper.values(0) == {i: {"rank": i} for i in range(3)}, "asked again"
    assert kept.keeper.values(1) == {}
    kept.stop()
    assert call(kept, called.give, round_=1) is None
    assert kept.keeper.values(0) == {}


def test_the_environment_is_set_before_anything_is_imported(keep: Keep) -> None:
    """A module that reads the rank while it is imported must see its own."""
    kept = keep("unused")
    assert call(kept, called.told, "RANK", env=variables({"RANK": "12"})) == ("12", 12, 0)


def test_a_worker_is_a_process_of_multiprocessing(keep: Keep) -> None:
    """Data loaders look at these. The agent lives, so the parent lives."""
    assert call(keep("unused"), called.identity) == ("rank 10", False, True, "spawn", True)


def test_queues_and_events_can_be_arguments(keep: Keep) -> None:
    """The documentation of torchelastic promises it. A plain pickle of them is refused."""
    queues_and_events_arrive(keep("unused"), "spawn")


@pytest.mark.slow
def test_shared_tensors_are_shared_and_returned_tensors_are_copies(keep: Keep) -> None:
    """What a worker writes into a shared tensor is seen here. What it returns outlives it."""
    torch = pytest.importorskip("torch")

    kept = keep("unused")
    tensor = torch.zeros(1000).share_memory_()
    value = call(kept, called.add, tensor)
    kept.stop()
    assert float(tensor.sum()) == 1000
    assert float(value.sum()) == 2000


def test_the_streams_go_to_files(keep: Keep, tmp_path: Path) -> None:
    """As those of a program."""
    kept = keep("unused")
    both = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}
    assert call(kept, called.speak, "one", "two", **both) is None
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("one\n", "two\n")


@pytest.mark.parametrize("size", [1 << 17, 1 << 26])
def test_a_value_may_be_larger_than_a_pipe(keep: Keep, size: int) -> None:
    """torch's queue holds a worker back until its parent has read the value."""
    assert len(call(keep("unused"), called.big, size)) == size


def test_a_payload_may_be_larger_than_a_pipe(keep: Keep) -> None:
    """And several workers read it, each from its beginning."""
    kept = keep("unused")
    begin(kept, *[Function(called.give, (b"x" * (1 << 22),))] * 3)
    assert failures(drive_exits(kept.keeper, kept.clock, 3)) == []
    assert {len(value) for value in kept.keeper.values(0).values()} == {1 << 22}  # type: ignore[arg-type]  # values are objects to mypy


def test_a_worker_has_no_file_of_the_host_or_the_keeper(keep: Keep, tmp_path: Path) -> None:
    """It would hold a lock, a pipe or a port open."""
    with open(tmp_path / "of the host", "w"):
        found = call(keep("unused"), called.descriptors)
    assert not [path for path in found.values() if "of the host" in path]
    extra = {path.split("[")[0] if "pidfd" not in path else "its parent" for fd, path in found.items() if fd > 2}
    assert extra <= {"/memfd:reknit (deleted)", "its parent", "pipe:", "/dev/null"}, found
    pipes = [path for fd, path in found.items() if fd > 2 and path.startswith("pipe:")]
    # Its guard, three ends that it shares with its siblings, and the resource tracker of this process if it has one.
    assert len(pipes) <= 5, found


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, process, variable or handler, however the functions ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nothing_left():
        kept = Kept(tmp_path, "unused")
        begin(kept, Function(called.give), Function(called.fail, ("plain",)), Function(called.pause))
        kept.drive(WorkersExited)
        kept.close()


def test_equal_arguments_are_not_mixed_up(keep: Keep) -> None:
    """Each worker gets its own, also if Python takes them for equal."""
    kept = keep("unused")
    begin(kept, *(Function(called.give, (value,)) for value in (0.0, -0.0, 0, False)))
    assert failures(drive_exits(kept.keeper, kept.clock, 4)) == []
    assert [repr(value) for value in kept.keeper.values(0).values()] == ["0.0", "-0.0", "0", "False"]


# ---- what cannot be ----


def test_what_cannot_be_pickled_is_named(keep: Keep) -> None:
    """Before anything is started."""

    def local() -> None:
        pass

    kept = keep("unused")
    with nothing_left():
        for fn in (local, lambda: None, functools.partial(local)):
            with pytest.raises(FunctionError, match=r"cannot be pickled, .* Define it at the top of a module, or use "):
                begin(kept, Function(fn))
        with pytest.raises(FunctionError, match="the arguments of give cannot be pickled: TypeError"):
            begin(kept, Function(called.give, (called.give_lock(),)))
        with pytest.raises(FunctionError, match="the arguments of give cannot be pickled: FileNotFoundError"):
            begin(kept, Function(called.give, (called.Lost(),)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo\n\nthree"), "ValueError: one two three"),
        (called.Mute(), "Mute"),
        (ValueError("x" * 5000), "x"),
    ],
)
def test_the_text_of_an_error_is_one_line(keep: Keep, error: Exception, said: str) -> None:
    """Whatever the exception of the user's own class has to say, and even if it fails to."""
    with pytest.raises(FunctionError) as caught:
        begin(keep("unused"), Function(called.give, (called.Wordy(error),)))
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_limit_on_descriptors_is_no_mistake_of_the_caller(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue is pickled by duplicating its descriptors."""

    def dup(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    queue = multiprocessing.get_context("spawn").SimpleQueue()
    kept = keep("unused")
    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(OSError, match="Too many open files"):
        begin(kept, Function(called.give, (queue,)))
    queue.close()


@pytest.mark.parametrize("fn", [called.generate, functools.partial(called.generate), called.wait])
def test_a_function_that_runs_nothing_is_refused(keep: Keep, fn: Callable[..., object]) -> None:
    """A call only makes a generator or a coroutine. The job would succeed and have done nothing."""
    with pytest.raises(FunctionError, match="a call of it runs nothing"):
        begin(keep("unused"), Function(fn))


def test_a_value_that_cannot_be_read_here_is_named(keep: Keep) -> None:
    """It is the caller's mistake, and no failure of the worker."""
    kept = keep("unused")
    begin(kept, Function(called.Unreadable))
    assert failures(drive_exits(kept.keeper, kept.clock, 1)) == []
    with pytest.raises(FunctionError, match="local rank 0 has returned cannot be read here: ValueError: not here"):
        kept.keeper.values(0)


def test_a_child_that_outlives_its_worker_is_ended_with_the_round(keep: Keep, tmp_path: Path) -> None:
    """The value is there all the same."""
    kept = keep("unused")
    assert call(kept, called.fork_and_leave, str(tmp_path / "pid")) == 7
    (pid,) = read_pids(tmp_path / "pid", 1)
    assert is_alive(pid)
    kept.stop()
    wait_gone([pid], kept.mark)


def test_a_child_that_returns_too_writes_no_value(keep: Keep) -> None:
    """Its value would take the place of the worker's."""
    assert call(keep("unused"), called.fork_and_return_twice) == 7


# ---- the module of the script ----

SCRIPT = """
import sys
from pathlib import Path
from tempfile import mkdtemp
from tests.support.keepers import Kept
from tests.support.calling import call

class Value:
    def __init__(self, text): self.text = text
def work(text):
    return Value(text + "!")
if __name__ == "__main__":
    kept = Kept(Path(mkdtemp()), "unused")
    try:
        found = call(kept, work, "from main")
        print(getattr(found, "text", found))
    except ValueError as error:
        print(error)
    kept.close()
"""


def run_file(path: Path, script: str) -> str:
    path.write_text(script)
    return run_alone("import os, sys; os.execv(sys.argv[1], sys.argv[1:])", sys.executable, str(path))


def test_a_function_of_the_script_works(tmp_path: Path) -> None:
    """The usual case. The worker imports the script under another name, as with `multiprocessing`."""
    assert run_file(tmp_path / "script.py", SCRIPT) == "from main!\n"


def test_a_function_without_a_file_needs_cloudpickle() -> None:
    """A notebook: the worker has nothing that it could import."""
    assert run_alone(SCRIPT) == "from main!\n"
    without = run_alone("import sys; sys.modules['cloudpickle'] = None\n" + SCRIPT)
    assert without == (
        "work or one of its arguments is defined in an interactive session, which a worker cannot import: "
        "define it in a module, install cloudpickle (pip install 'reknit[notebook]'), or use start method fork\n"
    )


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    """The worker would start workers while it imports the script."""
    script = SCRIPT.replace('__name__ == "__main__"', "True").replace("ValueError", "ZeroDivisionError")
    said = run_file(tmp_path / "script.py", script)
    assert "stderr=('reknit: a worker imports this script, and the script starts workers again: put the start" in said
    assert "traceback=''" in said


def test_a_daemonic_process_may_be_the_host(tmp_path: Path) -> None:
    """`multiprocessing` allows it no children. The workers are children of the keeper, and may have some."""
    script = """
import multiprocessing, sys
from pathlib import Path
from tests.support import called
from tests.support.calling import begin, call
from tests.support.keepers import Kept
from tests.support.calling import call

def host(folder):
    kept = Kept(Path(folder), "unused")
    print(call(kept, called.makes_daemon_child), flush=True)
    kept.close()
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=host, args=(sys.argv[1],), daemon=True)
    process.start()
    process.join()
"""
    assert run_alone(script, str(tmp_path)) == "0\n"


def test_many_workers_share_one_payload() -> None:
    """The files of 256 workers fit into the usual limit of 1024 descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    shared = functools.partial(called.give, b"x" * 100)
    calls = Calls(0, {i: Function(shared, (str(i)[:0], None)) for i in range(256)}, "spawn")
    parcel = calls.parcel(StartProcesses(0, tuple(Process(i, i, ()) for i in range(256))))
    assert 256 < len(parcel.descriptors) <= 261, "the three ends of `Together`, and a tracker at most"
    calls.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_start_that_was_replaced_before_the_keeper_was_ready_does_no_harm(keep: Keep) -> None:
    """The files of the first start are closed by then. It fails, or has never begun, and the second one runs."""
    kept = keep("unused")
    begin(kept, Function(called.give, ("first",)))
    stop(kept.keeper, 0.0)
    begin(kept, Function(called.give, ("second",)), round_=1)
    kept.drive_until(lambda: kept.keeper.values(1))
    assert kept.keeper.values(1) == {0: "second"}
    kept.stop(round_=1)
