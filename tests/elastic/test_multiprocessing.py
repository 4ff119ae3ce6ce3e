"""Programs that a program starts: real processes, beside torch's where its behaviour is promised."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, start_processes
from reknit.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from reknit.elastic.multiprocessing.errors import ChildFailedError
from tests.elastic.shells import SH, WAITS, leaving_nothing, result_of, shell
from tests.support.alone import run_alone
from tests.support.waiting import read_pids


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with leaving_nothing(tmp_path, monkeypatch):
        yield


def torchs(*scripts: str, **more: Any) -> Any:
    """The result of torch's context for the same scripts."""
    from torch.distributed.elastic import multiprocessing

    ranks = range(len(scripts))
    specs = multiprocessing.DefaultLogsSpecs("/dev/null")
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    context = multiprocessing.start_processes(
        "trainer", SH, {rank: ("-c", scripts[rank]) for rank in ranks}, {rank: {} for rank in ranks}, specs, **more
    )
    try:
        return context.wait(timeout=240, period=0.05)
    finally:
        context.close()
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


# ---- results ----


@pytest.mark.parametrize(
    "scripts",
    [
        ("true", "true"),
        ("exit 3", "sleep 1000"),
        ("sleep 1000", "kill -9 $$"),
        ("exit 3", "trap 'exit 7' TERM; touch $HOME; sleep 1000 & wait", "true"),
    ],
    ids=["success", "failure", "killed", "sibling"],
)
def test_the_result_is_torchs(scripts: tuple[str, ...]) -> None:
    """A program reads exit codes by local rank. A sibling that was ended is among them, at this level only."""
    ours, theirs = result_of(shell(*scripts)), torchs(*scripts)
    assert ours.return_values == theirs.return_values
    assert ours.is_failed() is theirs.is_failed()
    if scripts[0] != "exit 3" or len(scripts) == 2:  # whether the last one got its trap set in time is a race
        assert {r: f.exitcode for r, f in ours.failures.items()} == {r: f.exitcode for r, f in theirs.failures.items()}
    assert {f.error_file for f in ours.failures.values()} == {f.error_file for f in theirs.failures.values()}
    assert ours.stdouts == ours.stderrs == dict.fromkeys(range(len(scripts)), "")


def test_a_sibling_is_reported_with_the_code_with_which_it_obeyed(tmp_path: Path) -> None:
    """Some programs catch SIGTERM, and end with a code of their own."""
    ready = tmp_path / "ready"
    first = f"while [ ! -e {ready} ]; do sleep 0.01; done; exit 3"
    second = f"trap 'exit 7' TERM; touch {ready}; while true; do sleep 0.01; done"
    third = f"trap 'exit 0' TERM; touch {ready}; while true; do sleep 0.01; done"
    failures = result_of(shell(first, second)).failures
    assert [(rank, failure.exitcode) for rank, failure in failures.items()] == [(0, 3), (1, 7)]
    ready.unlink()
    assert list(result_of(shell(first, third)).failures) == [0], "a sibling that ends with 0 has not failed"


def test_who_failed_first_comes_first() -> None:
    """All times are of the same second, so the order decides which failure is the root cause."""
    assert list(result_of(shell("sleep 1000", "sleep 1000", "exit 3")).failures) == [2, 0, 1]


def test_the_result_can_be_asked_for_again(tmp_path: Path) -> None:
    """Programs poll."""
    context = shell(WAITS, args=(str(tmp_path / "pids"),))
    read_pids(tmp_path / "pids", 1)
    assert context.wait(0) is None
    assert context.wait(0.01) is None
    (pid,) = context.pids().values()
    assert pid in read_pids(tmp_path / "pids", 1)
    os.kill(pid, signal.SIGKILL)
    result = context.wait()
    assert result is not None
    assert context.wait() is context.wait(0) is result
    assert result.failures[0].pid == pid
    assert context.pids() == {0: pid}
    context.close()


def test_what_the_program_itself_ends_is_a_failure(tmp_path: Path) -> None:
    """As in torch: `close` while they run, then the result."""
    context = shell(WAITS, args=(str(tmp_path / "pids"),))
    read_pids(tmp_path / "pids", 1)
    context.close(signal.SIGINT)
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode in (-signal.SIGINT, 130)


def test_no_process_is_a_success() -> None:
    """torch says the same."""
    assert result_of(shell()) == RunProcsResult()


def test_a_context_that_was_not_started_has_no_result() -> None:
    """An empty result would be taken for a success."""
    context = SubprocessContext("t", SH, {0: ()}, {0: {}}, DefaultLogsSpecs())
    assert context.pids() == {}
    with pytest.raises(RuntimeError, match="not started"):
        context.wait()
    context.close()


def test_a_context_is_started_once() -> None:
    """torch raises the same type."""
    context = shell("true")
    with pytest.raises(ValueError, match="started already"):
        context.start()
    result_of(context)


# ---- arguments, variables, refusals ----


def test_arguments_are_texts_and_variables_come_on_top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in torch. What this process sets between two starts is seen, too."""
    script = f'echo "$0 $1 $BASE $OVER $RANK" > {tmp_path}/out'
    with monkeypatch.context() as patch:
        patch.setenv("BASE", "base")
        patch.setenv("OVER", "base")
        result_of(shell(script, args=(1, [2, 3]), envs={0: {"OVER": "top", "RANK": "7"}}))
    assert (tmp_path / "out").read_text() == "1 [2, 3] base top 7\n"


@pytest.mark.parametrize("what", ["args", "envs"])
def test_ranks_that_do_not_fit_are_refused_as_by_torch(what: str) -> None:
    """Before anything is made."""
    from torch.distributed.elastic import multiprocessing as torchs_module

    given: dict[str, Any] = {"args": {0: ("x",), 1: ("y",)}, "envs": {0: {}, 1: {}}}
    given[what] = {0: given[what][0], 2: given[what][1]}
    texts = []
    for start, specs in (
        (start_processes, DefaultLogsSpecs()),
        (torchs_module.start_processes, torchs_module.DefaultLogsSpecs("/dev/null")),
    ):
        with pytest.raises(RuntimeError) as caught:
            start("t", SH, **given, logs_specs=specs)  # type: ignore[operation]  # torch's function and ours
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_a_variable_that_is_no_text_is_refused() -> None:
    """With torch's type. A number of workers is easily given as a number."""
    envs: dict[int, Any] = {0: {"WORLD_SIZE": 1}}
    with pytest.raises(TypeError, match="WORLD_SIZE of local rank 0 is 1"):
        shell("true", envs=envs)


def test_specs_that_forget_a_rank_are_refused() -> None:
    """Specs are code of the user."""

    class Forgets(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return LogsDest({0: ""}, {0: "", 1: ""})

        @property
        def root_log_dir(self) -> str:
            return ""

    with pytest.raises(RuntimeError, match="stdouts, local rank mapping mismatch"):
        shell("true", "true", logs_specs=Forgets())


@pytest.mark.parametrize("name", ["/no/such/program", "not-executable", "a\0b"])
def test_a_program_that_cannot_be_started_is_one_error(tmp_path: Path, name: str) -> None:
    """With torch's type, and the name of the program. Those that had started are ended."""
    from torch.distributed.elastic import multiprocessing as torchs_module

    if name == "not-executable":
        name = str(tmp_path / name)
        Path(name).touch()
    args: dict[int, tuple[Any, ...]] = {0: (), 1: ()}
    try:
        torchs_module.start_processes("t", name, args, {0: {}, 1: {}}, torchs_module.DefaultLogsSpecs("/dev/null"))
    except Exception as error:
        expected = type(error)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
    with pytest.raises(expected, match="cannot start"):
        start_processes("t", name, args, {0: {}, 1: {}}, DefaultLogsSpecs())


# ---- output ----


class Shown(io.StringIO):
    """A console of a notebook: an object without a descriptor."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation


def test_teed_lines_reach_the_objects_of_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook only `sys.stdout` itself is shown in the cell."""
    out, err = Shown(), Shown()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.ALL)
    result = result_of(
        shell("echo out; echo err >&2", "printf no-end", logs_specs=specs, log_line_prefixes={1: "[one] "})
    )
    assert sorted(out.getvalue().splitlines()) == ["[one] no-end", "[trainer0]:out"]
    assert err.getvalue() == "[trainer0]:err\n"
    assert Path(result.stdouts[0]).read_text() == "out\n"
    assert Path(result.stderrs[0]).read_text() == "err\n"


def test_filters_collect_lines_of_teed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that match any text, of all ranks that are shown, with their prefix."""
    monkeypatch.setattr(sys, "stdout", Shown())
    monkeypatch.setattr(sys, "stderr", Shown())
    specs = DefaultLogsSpecs(str(tmp_path), tee={0: Std.ALL, 1: Std.OUT, 2: Std.ALL}, local_ranks_filter={0, 1})
    script = "echo keep me; echo drop; echo 'or me'; echo keep err >&2"
    context = shell(
        *[script] * 3,
        logs_specs=specs,
        duplicate_stdout_filters=["keep", "or me"],
        duplicate_stderr_filters=["err"],
    )
    result = result_of(context)
    folder = Path(result.stdouts[0]).parent.parent
    lines = (folder / "filtered_stdout.log").read_text().splitlines()
    assert sorted(lines) == [f"[trainer{rank}]:{text}" for rank in (0, 1) for text in ("keep me", "or me")]
    assert (folder / "filtered_stderr.log").read_text() == "[trainer0]:keep err\n"


def test_filters_without_files_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """torch's context cannot be made: it opens a path below /dev/null."""
    result_of(shell("true", logs_specs=DefaultLogsSpecs("/dev/null"), duplicate_stdout_filters=["x"]))
    assert "duplicate filters need a log_dir" in caplog.text


def test_output_that_is_not_redirected_reaches_the_console_before_the_result() -> None:
    """What a program prints after `wait` must come after the last line of its processes."""
    told = run_alone("""
        from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
        specs = DefaultLogsSpecs("/dev/null")
        for _ in range(3):
            context = start_processes("t", "/bin/sh", {0: ("-c", "seq 1000; printf end")}, {0: {}}, specs)
            context.wait()
            print(" after", flush=True)
    """)
    assert told == ("".join(f"{n}\n" for n in range(1, 1001)) + "end after\n") * 3


# ---- errors ----


def test_an_error_file_of_the_program_is_read() -> None:
    """The program is decorated with `record`. The message is torch's object."""
    script = (
        f"exec {sys.executable} -c 'from reknit.elastic.multiprocessing.errors import record\n"
        '@record\ndef main(): raise ValueError("spilt")\nmain()\''
    )
    failure = result_of(shell(script)).failures[0]
    assert failure.exitcode == 1
    assert failure.message["message"] == "ValueError: spilt"
    assert "in main" in failure.message["extraInfo"]["py_callstack"]
    assert os.path.isfile(failure.error_file), "a launcher copies it later"
    # The text may be read when the file is gone.
    assert failure.error_file not in str(ChildFailedError("job", {0: failure}))
    assert failure.error_file not in str(ChildFailedError("job", {0: pickle.loads(pickle.dumps(failure))}))


@pytest.mark.parametrize("redirects", [Std.NONE, Std.ERR])
def test_without_an_error_file_the_traceback_on_stderr_is_used(tmp_path: Path, redirects: Std) -> None:
    """torch shows a hint to its documentation instead."""
    specs = DefaultLogsSpecs(str(tmp_path), redirects)
    script = f"exec {sys.executable} -c 'int(\"x\")'"
    failure = result_of(shell(script, logs_specs=specs)).failures[0]
    assert failure.message["message"] == "ValueError: invalid literal for int() with base 10: 'x'"
    assert "Traceback" in failure.message["extraInfo"]["py_callstack"]
    assert failure.error_file == "<N/A>"
