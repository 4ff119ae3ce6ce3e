"""Errors of workers on their way to the agent. Where torch's behaviour is promised, torch does the same in the test."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.multiprocessing import errors
from reknit.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    get_error_handler,
    record,
)
from tests.support.alone import run_alone

VARIABLE = "TORCHELASTIC_ERROR_FILE"


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which this process records its error."""
    path = tmp_path / "own.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def written(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def error(message: str = "ValueError: no", at: int = 1_700_000_000) -> dict[str, Any]:
    extra = {"py_callstack": f"Traceback (most recent call last):\n  here\n{message}\n", "timestamp": str(at)}
    return {"message": {"message": message, "extraInfo": extra}}


def fails(text: str) -> None:
    raise ValueError(text)


# ---- ProcessFailure ----


@pytest.mark.parametrize(
    "content",
    [error(), {"message": "plain", "timestamp": 5}, {"message": "plain"}, {"message": ""}, None],
    ids=["object", "text", "text without time", "empty", "no file"],
)
@pytest.mark.parametrize("exitcode", [1, -signal.SIGKILL, -200])
def test_a_failure_says_what_torchs_says(tmp_path: Path, content: object, exitcode: int) -> None:
    """Programs read these fields. Only the time is not compared where it is the present one."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure as Torchs

    path = str(tmp_path / "none") if content is None else written(tmp_path / "error.json", content)
    ours, theirs = ProcessFailure(1, 42, exitcode, path), Torchs(1, 42, exitcode, path)
    assert ours.message == theirs.message
    assert ours.error_file == theirs.error_file
    assert ours.error_file_data["message"] == theirs.error_file_data["message"]
    assert ours.signal_name() == theirs.signal_name()
    if isinstance(content, dict) and (content["message"] == error()["message"] or "timestamp" in content):
        assert ours.timestamp == theirs.timestamp
        assert ours.timestamp_isoformat() == theirs.timestamp_isoformat()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 3}', '{"message": {}}'])
def test_an_error_file_that_cannot_be_understood_hides_no_failure(tmp_path: Path, content: str) -> None:
    """A worker can be killed while it writes. torch's agent then dies of its own exception."""
    failure = ProcessFailure(0, 42, 1, written(tmp_path / "error.json", content))
    assert "cannot be understood" in failure.message
    assert failure.error_file == str(tmp_path / "error.json")
    assert failure.timestamp > 1_700_000_000


@pytest.mark.parametrize("at", ["soon", None, "1e400"])
def test_an_error_file_with_a_strange_time_is_read_all_the_same(tmp_path: Path, at: object) -> None:
    """The time only orders the failures. The traceback is what people need."""
    content = error()
    content["message"]["extraInfo"]["timestamp"] = at
    failure = ProcessFailure(0, 42, 1, written(tmp_path / "error.json", content))
    assert failure.message == content["message"]


@pytest.mark.parametrize("path", ["", os.devnull])
def test_a_worker_without_an_error_file_has_no_reply(path: str) -> None:
    """Without a log folder the workers have no error files."""
    assert ProcessFailure(0, 42, 1, path).error_file == "<N/A>"


def test_two_failures_without_a_file_share_nothing(tmp_path: Path) -> None:
    """One program adds its own notes to a failure. In torch they appear in all later failures."""
    ProcessFailure(0, 1, 1, "").error_file_data["note"] = "mine"
    assert "note" not in ProcessFailure(1, 2, 1, "").error_file_data


def test_the_documentations_name_of_the_exit_code_works() -> None:
    """The documentation's example prints `failure.exit_code`, which torch does not have."""
    assert ProcessFailure(0, 42, 7, "").exit_code == 7


def test_a_failure_that_keeps_its_folder_can_be_pickled(tmp_path: Path) -> None:
    """A launcher in a process pool hands it to the program that waits. The folder stays with the launcher."""
    failure = ProcessFailure(0, 42, 1, written(tmp_path / "error.json", error()))
    failure.keep(threading.Lock(), is_temporary=True)
    assert pickle.loads(pickle.dumps(failure)) == failure


# ---- ChildFailedError ----


def both(tmp_path: Path) -> tuple[dict[int, ProcessFailure], dict[int, Any]]:
    """The same failures as ours and as torch's: rank 5 is the first."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure as Torchs

    files = [
        written(tmp_path / "0.json", error("RuntimeError: late", 1_700_000_009)),
        written(tmp_path / "1.json", error("ValueError: the first", 1_700_000_001)),
        written(tmp_path / "2.json", {"message": "in words", "timestamp": 1_700_000_005}),
        written(tmp_path / "3.json", {"message": {"message": "no stack", "extraInfo": {"timestamp": "1700000006"}}}),
    ]
    what = {rank: (at, 100 + at, -9 if at else 3, files[at]) for at, rank in enumerate([4, 5, 6, 7])}
    return {r: ProcessFailure(*w) for r, w in what.items()}, {r: Torchs(*w) for r, w in what.items()}


def test_the_report_is_torchs_to_the_letter(tmp_path: Path) -> None:
    """People and tools read this block in logs."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError as Torchs

    ours, theirs = both(tmp_path)
    one, other = ChildFailedError("train.py", ours), Torchs("train.py", theirs)
    assert str(one) == str(other)
    assert one.format_msg("#", "+") == other.format_msg("#", "+")
    assert one.get_first_failure()[0] == other.get_first_failure()[0] == 5
    alone, alone_theirs = ChildFailedError("t", {4: ours[4]}), Torchs("t", {4: theirs[4]})
    assert str(alone) == str(alone_theirs)
    assert "<NO_OTHER_FAILURES>" in str(alone)


def test_of_failures_in_one_second_the_first_listed_is_to_blame() -> None:
    """Times have whole seconds. The context lists a worker that failed by itself before those that it has ended."""
    failures = {3: ProcessFailure(3, 3, 1, ""), 0: ProcessFailure(0, 1, -15, "")}
    for failure in failures.values():
        failure.timestamp = 5
    assert ChildFailedError("t", failures).get_first_failure()[0] == 3


def test_an_error_about_no_failure_is_refused() -> None:
    """It would have no root cause to report."""
    with pytest.raises(ValueError, match="at least one"):
        ChildFailedError("t", {})


class Special(ChildFailedError):
    pass


@pytest.mark.parametrize("cls", [ChildFailedError, Special])
def test_the_error_survives_pickling(tmp_path: Path, cls: type[ChildFailedError]) -> None:
    """A launcher in a process pool hands it to the program that waits."""
    failed = cls("train.py", both(tmp_path)[0])
    again = pickle.loads(pickle.dumps(failed))
    assert isinstance(again, cls)
    assert (str(again), again.name, again.failures) == (str(failed), failed.name, failed.failures)


@pytest.mark.parametrize("cls", [ChildFailedError, Special])
def test_torchs_record_understands_the_error(tmp_path: Path, own_file: Path, cls: type[ChildFailedError]) -> None:
    """A launcher of the user is decorated with torch's `record`, and uses reknit for its workers."""
    from torch.distributed.elastic.multiprocessing import errors as torchs

    failures, _ = both(tmp_path)

    @torchs.record
    def main() -> None:
        raise cls("train.py", failures)

    with pytest.raises(cls) as caught:
        main()
    assert isinstance(caught.value, torchs.ChildFailedError)
    message = json.loads(own_file.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: the first", -9)


def test_record_understands_torchs_error(tmp_path: Path, own_file: Path) -> None:
    """The other way round: reknit's `record` around torch's launcher."""
    from torch.distributed.elastic.multiprocessing import errors as torchs

    _, failures = both(tmp_path)

    @record
    def main() -> None:
        raise torchs.ChildFailedError("train.py", failures)

    with pytest.raises(torchs.ChildFailedError):
        main()
    assert json.loads(own_file.read_text())["message"]["errorCode"] == -9


def test_without_torch_the_error_is_a_plain_one() -> None:
    """An agent without torch must not import it for its class."""
    run_alone("""
        import sys
        from reknit.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
        error = ChildFailedError("t", {0: ProcessFailure(0, 1, 1, "")})
        assert type(error) is ChildFailedError
        assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
    """)


# ---- record and the error file ----


def test_the_error_file_is_torchs(own_file: Path) -> None:
    """torch's agent reads the files of workers that use reknit's `record`, and the other way round."""
    from torch.distributed.elastic.multiprocessing.errors import record as torchs

    found = []
    for decorate in (record, torchs):
        with pytest.raises(ValueError, match="spilt"):
            decorate(fails)("spilt milk")
        found.append(json.loads(own_file.read_text()))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert ours["message"].keys() == theirs["message"].keys()
    assert ours["message"]["message"] == theirs["message"]["message"] == "ValueError: spilt milk"
    extra, extra_theirs = ours["message"]["extraInfo"], theirs["message"]["extraInfo"]
    assert extra.keys() == extra_theirs.keys()
    assert type(extra["timestamp"]) is type(extra_theirs["timestamp"])
    assert extra["py_callstack"].splitlines()[-3:-2] == extra_theirs["py_callstack"].splitlines()[-3:-2]
    assert extra["py_callstack"].splitlines()[-1] == "ValueError: spilt milk"


@pytest.mark.parametrize("decorate", [record, record(), lambda fn: record(fn, ErrorHandler())])
def test_record_returns_what_the_function_returns(own_file: Path, decorate: Any) -> None:
    """With and without arguments. torch's cannot be used with any."""

    def adds(a: int, *, b: int) -> int:
        "Adds."
        return a + b

    recorded = decorate(adds)
    assert recorded(1, b=2) == 3
    assert (recorded.__name__, recorded.__doc__) == ("adds", "Adds.")
    assert not own_file.exists()


@pytest.mark.parametrize(
    "ended", [SystemExit(), SystemExit(0), SystemExit(3), SystemExit("why"), KeyboardInterrupt()], ids=repr
)
def test_what_ends_a_program_is_treated_as_torch_does(own_file: Path, ended: BaseException) -> None:
    """`SystemExit(0)` becomes a return. The others pass, and none is recorded."""
    from torch.distributed.elastic.multiprocessing.errors import record as torchs

    def ends() -> None:
        raise ended

    outcomes = []
    for decorate in (record, torchs):
        try:
            outcomes.append(repr(decorate(ends)()))
        except BaseException as error:
            outcomes.append(repr(error))
    assert outcomes[0] == outcomes[1]
    assert not own_file.exists()


def test_without_the_variable_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that is decorated also runs without an agent."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="spilt"):
        record(fails)("spilt")
    assert not list(tmp_path.iterdir())


def test_an_error_file_that_cannot_be_written_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker's own exception must reach its stderr. In torch an `OSError` takes its place."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no" / "folder"))
    with pytest.warns(UserWarning, match="Unable to write error to file"), pytest.raises(ValueError, match="spilt"):
        record(fails)("spilt")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_recorded(own_file: Path) -> None:
    """Its traceback still says where it was raised."""

    @record
    def main() -> None:
        raise Unspeakable

    with pytest.raises(Unspeakable):
        main()
    message = json.loads(own_file.read_text())["message"]
    assert "Unspeakable" in message["message"]
    assert "in main" in message["extraInfo"]["py_callstack"]


def test_a_handler_of_the_user_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`error_handler` is there for handlers of one's own, and people replace `get_error_handler`."""
    seen: list[str] = []

    class Mine(ErrorHandler):
        def initialize(self) -> None:
            seen.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            seen.append(str(e))

    with pytest.raises(ValueError, match="one"):
        record(error_handler=Mine())(fails)("one")
    monkeypatch.setattr(errors, "get_error_handler", Mine)
    with pytest.raises(ValueError, match="two"):
        record(fails)("two")
    assert seen == ["initialize", "one", "initialize", "two"]
    monkeypatch.undo()
    assert type(get_error_handler()) is ErrorHandler


def test_the_first_failures_file_is_handed_up(tmp_path: Path, own_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler reads the agent's file, and finds the worker's error with its exit code. An older file in the same
    place is logged before it is replaced."""
    own_file.write_text('{"message": "older"}')
    failures, _ = both(tmp_path)

    @record
    def main() -> None:
        raise ChildFailedError("train.py", failures)

    with pytest.raises(ChildFailedError):
        main()
    expected = error("ValueError: the first", 1_700_000_001)
    expected["message"]["errorCode"] = -9
    assert json.loads(own_file.read_text()) == expected
    assert "older" in caplog.text


def test_a_failure_without_a_file_is_only_logged(own_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing to hand up, and the hint says how to get it."""
    caplog.set_level("INFO")

    @record
    def main() -> None:
        raise ChildFailedError("train.py", {3: ProcessFailure(0, 1, 1, "")})

    with pytest.raises(ChildFailedError):
        main()
    assert not own_file.exists()
    assert "rank 3 has failed without an error file" in caplog.text


@pytest.mark.parametrize("content", [{"message": "in words"}, error()])
def test_the_exit_code_goes_where_torch_puts_it(tmp_path: Path, own_file: Path, content: object) -> None:
    """Only an object has a place for the code."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler as Torchs

    source = written(tmp_path / "worker.json", content)
    found = []
    for handler in (ErrorHandler(), Torchs()):
        handler.dump_error_file(source, 7)
        found.append(json.loads(own_file.read_text()))
    assert found[0] == found[1]


def test_a_failure_without_a_traceback_shows_its_message(tmp_path: Path) -> None:
    """As of a worker that an agent has found unhealthy: the message is all that there is."""
    path = tmp_path / "error.json"
    message = {"message": "the script starts workers again", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
    path.write_text(json.dumps({"message": message}))
    shown = str(ChildFailedError("train", {0: ProcessFailure(0, 42, 1, str(path))}))
    assert "traceback : the script starts workers again" in shown
