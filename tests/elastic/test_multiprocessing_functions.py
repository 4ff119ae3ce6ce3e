"""Functions that a program starts as processes, beside torch's context where its behaviour is promised.

What the keeper itself does with functions is tested in `test_function_workers.py`.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from reknit.elastic.multiprocessing.api import MultiprocessContext, SignalException
from reknit.elastic.multiprocessing.shared import SharedKeeper
from tests.elastic import worked
from tests.elastic.shells import leaving_nothing, result_of
from tests.support.alone import ENV, ROOT, run_alone
from tests.support.waiting import is_alive, read_pids

METHODS = ["spawn", "fork", "forkserver"]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with leaving_nothing(tmp_path, monkeypatch):
        yield


def call(fn: Callable[..., Any], *args: tuple[Any, ...], **more: Any) -> PContext:
    """One process for each tuple of arguments."""
    envs = {rank: {"MINE": f"of {rank}", "RANK": str(10 + rank)} for rank in range(len(args))}
    given: dict[str, Any] = {"logs_specs": DefaultLogsSpecs(), **more}
    return start_processes("trainer", fn, dict(enumerate(args)), envs, **given)


def torchs_failures(fn: Callable[..., Any], *args: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    """The failures of torch's context for the same function, by local rank. It runs in a process of its own, because it
    leaves a resource tracker and handlers behind."""
    script = """
        import json, sys
        from torch.distributed.elastic import multiprocessing
        from tests.elastic import worked
        if __name__ == "__main__":
            args = {rank: tuple(given) for rank, given in enumerate(json.loads(sys.argv[2]))}
            context = multiprocessing.start_processes(
                "t", getattr(worked, sys.argv[1]), args, {rank: {} for rank in args},
                multiprocessing.DefaultLogsSpecs(sys.argv[3]),
                start_method="fork",  # otherwise each process imports torch once more
            )
            result = context.wait(timeout=240, period=0.05)
            print(json.dumps({
                rank: {"exitcode": failure.exitcode, "message": failure.message}
                for rank, failure in result.failures.items()
            }))
    """
    told: dict[str, Any] = json.loads(run_alone(script, fn.__name__, json.dumps(args), str(folder)))
    return told


@pytest.mark.parametrize("start_method", METHODS)
def test_values_come_by_local_rank(start_method: str) -> None:
    """Arguments and variables of each rank, and what it returns."""
    context = call(worked.adds, (1, 2), (3, 4), start_method=start_method)
    assert isinstance(context, MultiprocessContext)
    assert context.start_method == start_method
    assert sorted(context.pids()) == [0, 1]
    result = result_of(context)
    assert not result.is_failed()
    assert result.return_values == {
        0: {"sum": 3, "mine": "of 0", "rank": "10"},
        1: {"sum": 7, "mine": "of 1", "rank": "11"},
    }


def test_the_pages_example_runs(tmp_path: Path) -> None:
    """Users begin with it."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/processes.md").read_text(), re.S)
    path = tmp_path / "example.py"
    path.write_text(script.replace("/tmp/logs", str(tmp_path / "logs")))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=ENV)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{0: 0.05, 1: 0.1} {}\n", "")


@pytest.mark.beside_torch
def test_a_failure_is_reported_as_by_torch(tmp_path: Path) -> None:
    """Only the function that failed by itself, with what it raised. The others were ended."""
    ours = result_of(call(worked.fails_or_waits, (0,), (1,)))
    theirs = torchs_failures(worked.fails_or_waits, (0,), (1,), folder=tmp_path)
    assert ours.return_values == {}
    assert list(map(str, ours.failures)) == list(theirs) == ["1"]
    one, other = ours.failures[1], theirs["1"]
    assert one.exitcode == other["exitcode"] == 1
    assert one.message["message"] == other["message"]["message"] == "ValueError: spilt"
    assert one.message["extraInfo"].keys() == other["message"]["extraInfo"].keys()
    assert one.message["extraInfo"]["py_callstack"].endswith("ValueError: spilt\n")
    assert os.path.isfile(one.error_file)


def test_a_launcher_hands_up_the_error_of_its_worker() -> None:
    """A function that starts processes itself, as torch's `record` around it does: the root cause reaches the top."""
    failure = result_of(call(worked.launches, ())).failures[0]
    assert failure.message["message"] == "ValueError: deep"
    assert "in fails" in failure.message["extraInfo"]["py_callstack"]
    assert (failure.exitcode, failure.message["errorCode"]) == (1, 1)


def test_without_files_the_reason_is_known_all_the_same() -> None:
    """With /dev/null as log folder there is no error file. The traceback on stderr tells."""
    failure = result_of(call(worked.fails, ("spilt",), logs_specs=DefaultLogsSpecs("/dev/null"))).failures[0]
    assert failure.message["message"] == "ValueError: spilt"


def test_teed_lines_reach_the_objects_of_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook only `sys.stdout` itself is shown in the cell."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT, tee={1: Std.ALL})
    result = result_of(call(worked.prints, ("zero",), ("one",), logs_specs=specs))
    assert out.getvalue() == "[trainer1]:one\n"
    assert err.getvalue() == "[trainer1]:one error\n"
    assert Path(result.stdouts[0]).read_text() == "zero\n"


def test_a_function_that_cannot_be_a_worker_is_one_error() -> None:
    """A closure under spawn. Nothing is started."""
    mine = object()
    with pytest.raises(ValueError, match="cannot be pickled"):
        call(lambda: mine, ())


def test_a_start_method_that_is_none_is_refused() -> None:
    """A typing error costs no process."""
    with pytest.raises(ValueError, match="start_method: 'fokr' is none of spawn, fork, forkserver"):
        call(worked.gives, (1,), start_method="fokr")


@pytest.mark.alone
@pytest.mark.slow
def test_a_signal_at_the_very_end_does_not_cost_the_values() -> None:
    """SIGTERM comes while the context of a function that has returned is closed. The next look has the result."""
    context = call(worked.gives, ("value",))
    end = context._close

    def interrupted(*given: Any) -> None:
        end(*given)
        signal.raise_signal(signal.SIGTERM)

    context._close = interrupted  # type: ignore[method-assign]  # as programs patch it
    with pytest.raises(SignalException):
        context.wait()
    result = context.wait(0)
    assert result is not None
    assert result.return_values == {0: "value"}
    context.__dict__.pop("_close")


def test_a_forked_worker_has_what_the_program_had() -> None:
    """A closure, and the handlers of before the start: the worker must end at SIGTERM, and not raise an exception."""
    mine = object()

    def tells() -> bool:
        return mine is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    assert result_of(call(tells, (), start_method="fork")).return_values == {0: True}


HOST = """
    import multiprocessing, sys
    from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from tests.elastic import worked

    def run(method):
        specs = DefaultLogsSpecs("/dev/null")
        context = start_processes("t", worked.gives, {0: (7,)}, {0: {}}, specs, start_method=method)
        result = context.wait()
        context.close()
        assert result.return_values == {0: 7}, result
"""


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.slow
def test_a_daemonic_process_can_be_the_host(start_method: str) -> None:
    """`multiprocessing` allows a daemonic process no children, so torch refuses. A keeper is no such child."""
    run_alone(
        HOST
        + """
    host = multiprocessing.get_context("fork").Process(target=run, args=(sys.argv[1],), daemon=True)
    host.start()
    host.join()
    assert host.exitcode == 0
    """,
        start_method,
    )


def test_an_event_loop_can_be_the_host() -> None:
    """Signals of the loop stay where they are: a context in another thread takes none."""
    run_alone(
        HOST
        + """
    import asyncio, signal

    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        before = signal.getsignal(signal.SIGTERM)
        run("spawn")
        await asyncio.to_thread(run, "spawn")
        assert signal.getsignal(signal.SIGTERM) is before

    asyncio.run(main())
    """
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entrypoint": None}, "^entrypoint must be a function or the path of a program, not None"),
        ({"logs_specs": "/tmp/x"}, "^logs_specs must be what DefaultLogsSpecs.* makes, not '/tmp/x'"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], said: str) -> None:
    """Before anything is started."""
    given: dict[str, Any] = {"entrypoint": len, "args": {0: ("a",)}, "envs": {0: {}}, "logs_specs": DefaultLogsSpecs()}
    with pytest.raises(ValueError, match=said):
        start_processes("trainer", **(given | changes))


def test_the_log_says_why_and_where_the_rest_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback of a redirected process is in a file only. torch's log shows it."""
    logs_specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    result = result_of(call(worked.fails, ("spilt",), logs_specs=logs_specs))
    assert f"of trainer: ValueError: spilt (its stderr: {result.stderrs[0]})\n" in caplog.text
    assert "ValueError: spilt" in Path(result.stderrs[0]).read_text()


def test_a_value_that_cannot_be_returned_is_a_failure() -> None:
    """The function did its work, and the caller must learn why it has no result."""
    failure = result_of(call(worked.gives_a_lambda, ())).failures[0]
    assert "cannot be pickled" in str(failure.message)


def test_what_the_program_itself_ends_is_a_failure(tmp_path: Path) -> None:
    """As in torch: `close` while they run, then the result."""
    context = call(worked.waits, (str(tmp_path / "pids"),))
    alive = read_pids(tmp_path / "pids", 1)
    assert context.wait(0) is None
    context.close()
    assert not any(map(is_alive, alive))
    result = context.wait(0)
    assert result is not None
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: -15}


def test_successive_starts_share_a_keeper() -> None:
    """A restart: the values are those of the second start, and a mistake of the caller costs nothing."""
    shared = SharedKeeper("agent")
    assert result_of(call(worked.fails, ("first",), _shared=shared)).is_failed()
    with pytest.raises(ValueError, match="cannot be pickled"):
        call(lambda: None, (), _shared=shared)
    assert result_of(call(worked.gives, ("second",), _shared=shared)).return_values == {0: "second"}
    shared.close()
