"""The call for everyday use: what it returns, the one error that it raises, and that nothing is left."""

from __future__ import annotations

import asyncio
import functools
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from reknit import (
    CannotStart,
    FunctionError,
    JobFailed,
    Meeting,
    Prevented,
    Settings,
    launch,
    launch_async,
    report_lines,
)
from reknit.core.agent.states import WorkerState
from reknit.core.job.reasons import BudgetSpent
from reknit.runtime import run, start
from tests.support import called
from tests.support.alone import ENV, ROOT, run_alone
from tests.support.leaks import children, nothing_left
from tests.support.meeting import meet
from tests.support.stores import needs_torch
from tests.support.waiting import PATIENCE_S, read_pids, until
from tests.support.warming import needs_linux

START_METHODS = ("spawn", "fork", "forkserver")


def quiet(line: str) -> None:
    """For jobs whose lines nobody needs to see."""


@functools.cache
def first() -> None:
    """What is imported or made once in a process is no leak."""
    launch("true", say=quiet)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads, descriptors, children, handlers, the environment, and the folder for temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # workers need not import pytest
    first()
    with nothing_left(scratch):
        yield


# ---- functions ----


def test_each_worker_calls_the_function_and_its_value_comes_back() -> None:
    """By global rank."""
    assert launch(called.told, ("RANK",), nproc=3) == {rank: (str(rank), rank, 0) for rank in range(3)}


@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_meet(start_method: str) -> None:
    """What the workers are for: they meet at the address in their environment."""
    assert launch(meet, nproc=2, start_method=start_method, say=quiet) == {0: 3, 1: 3}


@pytest.mark.slow
def test_workers_form_a_process_group() -> None:
    """The same with the real torch."""
    needs_torch()
    assert launch(called.sum_of_ranks, nproc=2, say=quiet) == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_failure_starts_all_workers_again(start_method: str) -> None:
    """As often as `max_restarts` allows. The values are those of the last round, which has a port of its own."""
    lines: list[str] = []
    values = launch(called.fail_first, nproc=2, max_restarts=1, start_method=start_method, say=lines.append)
    assert values == {0: "1", 1: "1"}
    assert any("restart 1 of 1" in line for line in lines)
    assert lines[-1].startswith("reknit: round 1")
    first, second = (line.rpartition(":")[2] for line in lines if "master" in line)
    assert len({"0", first, second}) == 3


def test_a_job_that_fails_raises_its_report() -> None:
    """The text is what `reknit run` prints. The result is there as a value."""
    with pytest.raises(JobFailed) as caught:
        launch(called.fail, ("plain",), nproc=2, max_restarts=1, say=quiet)
    report, result = str(caught.value), caught.value.result
    first, second, *_ = report.splitlines()
    assert first.startswith("the job failed: rank ")
    assert first.endswith(" failed, and the only restart is spent")
    assert second.startswith("  rank ")
    assert "exit code 1, ValueError: plain" in second
    assert 'raise ValueError("plain")' in report
    assert "reknit: " not in report
    assert "function_main" not in report, "frames of reknit come before those of the function"
    assert isinstance(result.why, BudgetSpent)
    *told, story = report.splitlines()
    assert told == report_lines(result)
    assert story.startswith("the whole story: reknit explain /")
    assert os.path.isdir(story.rpartition(" ")[2])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.result) == (report, result), "a pool of processes pickles what is raised"


@pytest.mark.parametrize("kind", [CannotStart, FunctionError, JobFailed, Prevented])
def test_a_traceback_shows_an_error_by_the_name_that_people_import(kind: type) -> None:
    """And not by the place where it is defined."""
    assert f"{kind.__module__}.{kind.__qualname__}" == f"reknit.{kind.__name__}"


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (called.give_lock, (), "TypeError: the return value, of type lock, cannot be pickled"),
        (called.end_at_once, (0,), "the function has ended without returning"),
        (called.end_at_once, (3,), "exit code 3"),
        (called.interrupt_itself, (), "KeyboardInterrupt"),
    ],
)
def test_each_way_to_fail_is_named(fn: Callable[..., object], args: tuple[object, ...], said: str) -> None:
    """torch waits for ever in some of these cases."""
    with pytest.raises(JobFailed, match=said):
        launch(fn, args, say=quiet)


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (lambda: 1, (), "cannot be pickled, so a worker cannot import it"),
        (functools.partial(lambda: 1), (), "cannot be pickled"),
        (called.give, (threading.Lock(),), "the arguments of give cannot be pickled"),
        (called.generate, (), "a call of it runs nothing"),
        (called.Unreadable, (), "cannot be read here: ValueError: not here"),
    ],
)
def test_a_function_that_cannot_be_a_worker(fn: Callable[..., object], args: tuple[object, ...], said: str) -> None:
    """A mistake of the caller, named in one line."""
    with pytest.raises(FunctionError, match=said):
        launch(fn, args, say=quiet)


# ---- programs ----


def test_a_script_runs_under_this_python(tmp_path: Path) -> None:
    """Its arguments may be numbers and paths. It returns nothing."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(sys.executable + sys.argv[2])")
    assert launch(script, (tmp_path / "told", 0.5), nproc=2) == {0: None, 1: None}
    assert [(tmp_path / f"told{rank}").read_text() for rank in range(2)] == [f"{sys.executable}0.5"] * 2


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("warm", [True, ("decimal",)])
def test_a_script_may_be_warm(warm: bool | tuple[str, ...], tmp_path: Path) -> None:
    """With what most scripts import, or with modules by name."""
    if warm is True:
        needs_torch()
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.modules, file=open(sys.argv[1], 'w'))")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}  # torch._dynamo makes this folder
    launch(script, (tmp_path / "told",), warm=warm, env=cache)
    assert ("torch._dynamo" if warm is True else "decimal") in (tmp_path / "told").read_text().split()


def test_a_script_that_fails(tmp_path: Path) -> None:
    """It raises as a function does."""
    (tmp_path / "script.py").write_text("raise SystemExit(5)")
    with pytest.raises(JobFailed, match=r"and max_restarts=0 allows no restart\n  rank 0 failed first .*exit code 5"):
        launch(str(tmp_path / "script.py"), say=quiet)


@pytest.mark.parametrize(
    ("entry", "more", "said"),
    [
        ("no such script.py", {}, "entry must be the path of a script that exists, not 'no such script.py'"),
        ("sh -c true", {}, "entry must be the name of a program alone, with its arguments in args, not 'sh -c true'"),
        (3, {}, "entry must be a function, the path of a script or the name of a program, not 3"),
        ("", {}, "entry must be"),
        ("true", {"args": "abc"}, "args must be a tuple of the arguments, not 'abc'"),
        ("true", {"args": ([],)}, r"args of a program must be texts, paths or numbers, not \[\]"),
        ("true", {"nproc": 0}, "^nproc must be"),
        ("true", {"nproc": "2"}, "^nproc must be"),
        ("true", {"nodes": "2"}, "nodes must be a number, or the least and the greatest number, not '2'"),
        ("true", {"max_restarts": -1}, "^max_restarts must be"),
        ("true", {"nodes": 0}, "^nodes must be"),
        ("true", {"meeting": Meeting("file", folder="/tmp")}, "^run_id must be given with a meeting"),
        (len, {"args": 1}, "^args must be a tuple"),
        ("true", {"nodes": 2}, "^meeting must be given"),
        ("true", {"start_method": "thread"}, "^start_method must be one of spawn, fork, forkserver"),
        ("true", {"env": {"A=B": ""}}, "^env must be"),
        ("true", {"env": ["A=1"]}, r"^env must be a mapping .*, not \['A=1'\]"),
        (len, {"env": {"A": 1}}, r"^env must be a mapping .*, not {'A': 1}"),
        ("true", {"nodes": (2, 1)}, r"^nodes must be the least number and then the greatest, not \(2, 1\)"),
        ("true", {"say": "print"}, "^say must be a function, or None, not 'print'"),
    ],
)
def test_a_wrong_argument_is_named(entry: Any, more: dict[str, Any], said: str) -> None:
    """Before anything is started."""
    with nothing_left(), pytest.raises(ValueError, match=said):
        launch(entry, **more)


# ---- where it is called ----


def test_an_unknown_keyword_is_refused_with_the_known_ones() -> None:
    """Python's own message would leave people who know torchrun without a hint."""
    for call in (launch, lambda *args, **more: asyncio.run(launch_async(*args, **more))):
        with pytest.raises(TypeError, match=r"argument 'nproc_per_node'; its keywords are nproc, max_"):
            call(print, nproc_per_node=2)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_the_output_goes_to_the_programs_own_objects(start_method: str) -> None:
    """A notebook has replaced `sys.stdout`. All that workers have written is there when the call returns, in whole
    lines."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        launch(called.speak, ("to out", "to err"), nproc=2, start_method=start_method)
    assert out.getvalue() == "to out\n" * 2
    assert err.getvalue().count("to err\n") == 2
    assert err.getvalue().startswith("reknit: round 0")


@pytest.mark.parametrize("start_method", START_METHODS)
def test_as_a_coroutine(start_method: str) -> None:
    """Several jobs at once, in the event loop that calls."""

    async def main() -> list[dict[int, object]]:
        jobs = (launch_async(called.give, (i,), nproc=2, start_method=start_method, say=quiet) for i in range(2))
        return list(await asyncio.gather(*jobs))

    assert asyncio.run(main()) == [{0: i, 1: i} for i in range(2)]


def test_a_coroutine_that_fails() -> None:
    """The same error."""
    with pytest.raises(JobFailed, match="ValueError: plain"):
        asyncio.run(launch_async(called.fail, ("plain",), say=quiet))


def test_a_coroutine_that_is_cancelled(tmp_path: Path) -> None:
    """No worker lives on."""

    async def main() -> None:
        task = asyncio.create_task(launch_async(called.note_and_pause, (str(tmp_path / "pids"),), say=quiet))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not children()


def test_a_coroutine_that_is_cancelled_gives_the_workers_time(tmp_path: Path) -> None:
    """A worker that handles SIGTERM can save what it has. The event loop goes on meanwhile."""

    async def main() -> None:
        task = asyncio.create_task(launch_async(called.saves_when_told, (str(tmp_path),), say=quiet))
        await asyncio.to_thread(read_pids, tmp_path / "pids", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (tmp_path / "saved").exists()
    assert not children()


@pytest.mark.alone
def test_an_interrupt_from_the_keyboard(tmp_path: Path) -> None:
    """Ctrl-C, or the stop button of a notebook. The workers end, and KeyboardInterrupt is raised. What is shown of it
    names the command that tells more."""

    def interrupt() -> None:
        read_pids(tmp_path / "pids", 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        launch(called.note_and_pause, (str(tmp_path / "pids"),), say=quiet)
    thread.join()
    (note,) = raised.value.__notes__
    assert note.startswith("the job stopped: SIGINT received\nthe whole story: reknit explain /")
    assert not children()


@pytest.mark.alone
@pytest.mark.parametrize(("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_workers_may_save_their_work_before_an_interrupt_ends_them(
    tmp_path: Path, signum: signal.Signals, error: type[BaseException]
) -> None:
    """They get the signal, and `grace_s`. SIGTERM would otherwise kill this program, and its workers with it."""

    def interrupt() -> None:
        read_pids(tmp_path / "pids", 1)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(error) as raised:
        launch(called.saves_when_told, (str(tmp_path),), grace_s=PATIENCE_S, say=quiet)
    thread.join()
    assert (tmp_path / "saved").read_text() == signum.name
    assert isinstance(raised.value, KeyboardInterrupt) or raised.value.args == (143,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not children()


@pytest.mark.alone
def test_a_second_interrupt_shortens_the_time(tmp_path: Path) -> None:
    """This worker ignores the first one, and would do so for hours."""

    def interrupt() -> None:
        read_pids(tmp_path / "pids", 1)
        os.kill(os.getpid(), signal.SIGINT)
        until((tmp_path / "told").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(called.goes_on_when_told, (str(tmp_path),), grace_s=36_000, say=quiet)
    thread.join()
    assert not children()


def test_a_closure_under_fork() -> None:
    """What cannot be pickled can be called by a fork."""
    local = threading.Lock()
    assert launch(lambda: (local.locked(), 1), start_method="fork", say=quiet) == {0: (False, 1)}


def test_inside_a_running_event_loop() -> None:
    """A notebook always has one. The blocking call works there as anywhere."""

    async def main() -> dict[int, object]:
        return launch(called.give, (1,), say=quiet)

    assert asyncio.run(main()) == {0: 1}


def test_from_a_thread() -> None:
    """Signals can be handled in the main thread only, so the call must need none."""
    values: list[object] = []
    thread = threading.Thread(target=lambda: values.append(launch(called.give, (1,), say=quiet)))
    thread.start()
    thread.join(PATIENCE_S)
    assert values == [{0: 1}]


def _launch_into(queue: Any) -> None:
    queue.put(launch(called.give, (1,), say=quiet))


def test_in_a_daemonic_process() -> None:
    """`multiprocessing` allows such a process no children. The workers are not its children."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_launch_into, args=(queue,), daemon=True)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert queue.get() == {0: 1}
    process.close()
    queue.close()


SESSION = """
import sys, types
from reknit import FunctionError, launch
sys.modules["cloudpickle"] = None  # as if it were not installed
main = types.ModuleType("__main__")
exec("def train(): return 7", main.__dict__)
sys.modules["__main__"] = main
try:
    launch(main.train)
except FunctionError as error:
    print(error)
"""


def test_a_function_of_an_interactive_session() -> None:
    """No worker can import it. The error says what to do."""
    said = run_alone(SESSION)
    assert said.startswith("train or one of its arguments is defined in an interactive session")
    assert (
        "define it in a module, install cloudpickle (pip install 'reknit[notebook]'), or use start method fork" in said
    )


# ---- several nodes, and the level below ----


def test_two_nodes(tmp_path: Path) -> None:
    """Each call returns what its own workers have returned."""
    meeting = Meeting("file", folder=str(tmp_path / "journal"))

    async def node() -> dict[int, object]:
        return await launch_async(
            called.told, ("WORLD_SIZE",), nproc=2, nodes=2, meeting=meeting, run_id="two", say=quiet
        )

    async def main() -> list[dict[int, object]]:
        return list(await asyncio.gather(node(), node()))

    one, other = asyncio.run(main())
    assert sorted([*one, *other]) == [0, 1, 2, 3]
    assert len(one) == len(other) == 2
    assert {value[0] for value in [*one.values(), *other.values()]} == {"4"}  # type: ignore[index]  # values are objects to mypy


def test_a_node_that_cannot_take_part(tmp_path: Path) -> None:
    """The same error, with the reason."""
    meeting = Meeting("file", folder=str(tmp_path / "journal"))
    settings = Settings(command=("sleep", "600"), meeting=meeting, run_id="job", node_id="a")
    with start(settings, say=quiet) as running:
        until(lambda: running.loop.agent.job.members)
        with pytest.raises(JobFailed, match="this node cannot take part: the job runs on other terms"):
            launch("true", meeting=meeting, run_id="job", max_restarts=7, say=quiet)


def test_an_agent_that_cannot_begin(tmp_path: Path) -> None:
    """The same error once more: the job has not succeeded."""
    (tmp_path / "file").touch()
    with pytest.raises(JobFailed, match="file"):
        launch("true", meeting=Meeting("file", folder=str(tmp_path / "file")), run_id="job", say=quiet)


def test_settings_hold_a_function() -> None:
    """The level below has the values as well, until the agent is closed."""
    with start(Settings(function=called.give, args=("x",), local_world_size=2), say=quiet) as running:
        assert running.values() == {} or running.loop.result
        result = running.join(PATIENCE_S)
        assert result is not None
        assert result.state is WorkerState.SUCCEEDED
        assert running.values() == {0: "x", 1: "x"}
    with pytest.raises(RuntimeError, match="before it is closed"):
        running.values()


def test_a_result_becomes_the_report() -> None:
    """For programs that use `run` and `start`."""
    result = run(Settings(command=("false",)), say=quiet)
    assert report_lines(result)[0].startswith("the job failed")
    assert report_lines(run(Settings(command=("true",)), say=quiet), restarts=2) == [
        "the job succeeded after 2 restarts"
    ]


@pytest.mark.parametrize(
    "call",
    [
        "launch(print, nproc=2)",
        "launch(print, nproc=2, start_method='forkserver')",
        "print(local_elastic_agent.LocalElasticAgent(WorkerSpec('t', 1, entrypoint=print)).run().failures)",
    ],
    ids=["spawn", "forkserver", "agent"],
)
@pytest.mark.slow
def test_a_script_without_a_guard(tmp_path: Path, call: str) -> None:
    """Each worker imports the script, which starts workers. One sentence says so, before everything else that is said
    of the failure, and no worker shows its traceback."""
    imports = "from reknit import launch\nfrom reknit.elastic.agent.server import WorkerSpec, local_elastic_agent"
    script = tmp_path / "script.py"
    script.write_text(f"{imports}\n{call}\n")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENV, timeout=240)
    said = [line for line in ran.stderr.splitlines() if "round 0: 1 node" not in line]
    assert said[0] == (
        "reknit: a worker imports this script, and the script starts workers again: put the start below "
        'the line `if __name__ == "__main__":`'
    )
    assert ran.stderr.count("Traceback") == ("launch" in call), "that of the program's own call"


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_function_below_the_guard(tmp_path: Path, start_method: str) -> None:
    """The program knows the function, and can pickle it. No worker finds it. The report says where it must stand."""
    script = tmp_path / "script.py"
    script.write_text(
        "from reknit import launch\n"
        'if __name__ == "__main__":\n'
        "    def train(): pass\n"
        f"    launch(train, start_method={start_method!r})\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENV, timeout=240)
    report = ran.stderr.partition("JobFailed: ")[2]
    assert "Can't get attribute 'train'" in report
    assert 'nothing that stands below `if __name__ == "__main__":`. Define functions and classes above' in report


@needs_linux
def test_a_lazy_module_is_not_loaded_to_see_what_a_function_needs(tmp_path: Path) -> None:
    """It loads itself when it is asked for any attribute, and may fail."""
    (tmp_path / "optional.py").write_text("raise ImportError('a dependency is missing')")
    script = tmp_path / "script.py"
    script.write_text("""if True:
        import importlib.util
        from reknit import launch
        spec = importlib.util.find_spec("optional")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        optional = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(optional)
        def train(): return 3
        if __name__ == "__main__":
            print(launch(train, start_method="forkserver"))
    """)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENV, timeout=240)
    assert ran.stdout == "{0: 3}\n", ran.stderr


@pytest.mark.slow
def test_the_example() -> None:
    """As its first lines say. It survives the failure of a worker."""
    needs_torch()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "launch_function.py")], capture_output=True, text=True, env=ENV
    )
    assert done.stdout == "".join(f"worker {rank} has found the slope 3.00\n" for rank in range(2)), done.stderr
    assert "RuntimeError: a failure on purpose" in done.stderr
    assert "restart 1 of 1" in done.stderr
