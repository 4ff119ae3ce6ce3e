"""What a failed worker tells about itself: error files of any shape, and tracebacks among other output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from reknit.adapters.keeper.failures import error_files as errors
from reknit.core.job.workers import WorkerFailure

FAILURE = WorkerFailure(local_rank=1, rank=5, exitcode=3, message="ValueError: no", traceback="Traceback …\n")


def stderr_of(script: str, *, name: str = "worker.py", tmp_path: Path) -> list[str]:
    """What a real interpreter writes."""
    path = tmp_path / name
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path)
    return done.stderr.splitlines()


# ---- the error file ----


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """The variable may name a pipe or a device. Root could replace both."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not errors.write(str(pipe), FAILURE, 3), "nobody reads it, and nobody waits for that"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert errors.write(str(pipe), FAILURE, 3)
    assert json.loads(os.read(reader, 1 << 16))["message"]["errorCode"] == 3
    os.close(reader)
    assert pipe.is_fifo()
    assert not errors.write(str(tmp_path), FAILURE, 3)
    assert [*tmp_path.iterdir()] == [pipe]


@pytest.mark.beside_torch
def test_what_torchelastic_writes_is_read(tmp_path: Path) -> None:
    """docs/torchelastic.md#error-file: workers that use torch's own `@record` are understood."""
    path = tmp_path / "error.json"
    script = """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise RuntimeError("first\\nsecond é")

        main()
    """
    (tmp_path / "w.py").write_text(textwrap.dedent(script))
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    assert subprocess.run([sys.executable, "w.py"], cwd=tmp_path, env=env, capture_output=True).returncode == 1
    message, traceback = errors.read(str(path))
    assert message == "RuntimeError: first\nsecond é"
    assert traceback.startswith("Traceback (most recent call last):")


def test_what_we_write_torchelastic_reads(tmp_path: Path) -> None:
    """A scheduler that started us with torchelastic's variable gets torchelastic's file."""
    path = tmp_path / "error.json"
    assert errors.write(str(path), FAILURE, 3)
    written = json.loads(path.read_text())
    stamp = written["message"]["extraInfo"].pop("timestamp")
    assert stamp.isdigit()
    assert written == {
        "message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback …\n"}, "errorCode": 3}
    }
    assert errors.read(str(path)) == ("ValueError: no", "Traceback …\n")
    assert os.listdir(tmp_path) == ["error.json"], "nothing beside it"


def test_write_leaves_out_a_code_of_zero_and_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reporting a failure must not become one, nor leave half a file in the user's folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "error.json"
    assert errors.write(str(path), FAILURE, 0)
    assert "errorCode" not in json.loads(path.read_text())["message"]
    assert not errors.write(str(tmp_path / "missing" / "error.json"), FAILURE, 1)
    assert not errors.write("", FAILURE, 1)
    assert os.listdir(tmp_path) == ["error.json"]


def test_no_file_is_no_news(tmp_path: Path) -> None:
    """Most workers write none."""
    assert errors.read(str(tmp_path / "error.json")) == ("", "")
    assert errors.read("") == ("", "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"message": 3}',
        b'{"message": {}}',
        b'{"message": {"message": 3, "extraInfo": []}}',
        b"\xff\xfe",
        b"[" * 200_000,
        b'"' + b"x" * (5 << 20),
    ],
)
def test_a_broken_file_is_named_and_never_raises(tmp_path: Path, content: bytes) -> None:
    """A worker may die while it writes, or write what it likes."""
    path = tmp_path / "error.json"
    path.write_bytes(content)
    message, traceback = errors.read(str(path))
    assert message.startswith(f"the error file {path} cannot be understood: ")
    assert traceback == ""


def test_a_folder_or_a_fifo_in_its_place(tmp_path: Path) -> None:
    """Nor may it hang."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    assert "cannot be read: Is a directory" in errors.read(str(tmp_path / "folder"))[0]
    assert "it is empty" in errors.read(str(tmp_path / "fifo"))[0]


def test_older_and_odd_forms(tmp_path: Path) -> None:
    """A plain message is torchelastic's older form; bytes and surrogates that are not text are shown."""
    path = tmp_path / "error.json"
    path.write_text('{"message": "plain", "timestamp": 1}')
    assert errors.read(str(path)) == ("plain", "")
    path.write_bytes(b'{"message": {"message": "a \\ud800"}}')
    assert errors.read(str(path)) == ("a \\ud800", "")
    path.write_bytes(b'{"message": "caf\xe9"}')
    assert "cannot be understood" in errors.read(str(path))[0]


def test_a_huge_message_is_shortened(tmp_path: Path) -> None:
    """It goes into the journal, which everybody reads."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "a" * 10**6, "extraInfo": {"py_callstack": "b" * 10**6}}}))
    message, traceback = errors.read(str(path))
    assert len(message) < 5_000
    assert len(traceback) < 40_000
    assert "characters left out" in message
    path.write_text(json.dumps({"message": {"message": "💥" * 10**5, "extraInfo": {"py_callstack": "\0é" * 10**5}}}))
    assert len(json.dumps(errors.read(str(path)))) < 40_000, "etcd takes 1.5 MiB of JSON, and one emoji is 12 bytes"


def test_explain_prefers_a_sound_file_then_stderr_then_the_complaint(tmp_path: Path) -> None:
    """A half-written error file must not hide a traceback that is there."""
    path = tmp_path / "error.json"
    told = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "KeyError: 'k'"]
    assert errors.explain(str(path), told)[0] == "KeyError: 'k'"
    path.write_text("{")
    assert errors.explain(str(path), told)[0] == "KeyError: 'k'"
    assert "cannot be understood" in errors.explain(str(path), ["nothing"])[0]
    path.write_text('{"message": "sound"}')
    assert errors.explain(str(path), told) == ("sound", "")


# ---- stderr ----


def test_an_uncaught_exception(tmp_path: Path) -> None:
    """A worker that does not use `@record` is reported as well."""
    lines = stderr_of("import sys\nprint('noise', file=sys.stderr)\n{}['k']\n", tmp_path=tmp_path)
    message, traceback = errors.from_stderr(lines)
    assert message == "KeyError: 'k'"
    assert traceback.splitlines() == lines[1:]


def test_a_text_of_several_lines(tmp_path: Path) -> None:
    """CUDA's errors are like this; a log line or a blank one ends them."""
    lines = stderr_of("raise RuntimeError('CUDA error\\nCompile with\\n\\nx')", tmp_path=tmp_path)
    assert errors.from_stderr(lines)[0] == "RuntimeError: CUDA error\nCompile with"
    assert errors.from_stderr([*lines[:4], "[W1120 a.cpp] warn"])[0] == "RuntimeError: CUDA error"


def test_a_chain_is_kept_and_its_last_is_the_message(tmp_path: Path) -> None:
    """The cause is often in the first, what ended the worker in the last."""
    script = """
        try:
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise KeyError("k") from error
        except KeyError:
            raise ValueError("last")
    """
    lines = stderr_of(script, tmp_path=tmp_path)
    message, traceback = errors.from_stderr(["before", *lines])
    assert message == "ValueError: last"
    assert traceback.splitlines() == lines


def test_only_the_last_of_unrelated_ones() -> None:
    """An exception that was logged and survived is not the one."""
    first = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "OSError: survived"]
    last = ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "ValueError: fatal"]
    assert errors.from_stderr([*first, "went on", *last]) == ("ValueError: fatal", "\n".join(last) + "\n")


def test_the_noise_of_a_dying_interpreter_is_passed_over() -> None:
    """`Exception ignored in` comes after the real one and explains nothing."""
    real = ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "ValueError: fatal"]
    noise = ["Exception ignored in: <function D.__del__>", "Traceback (most recent call last):", '  File "d", line 1']
    assert errors.from_stderr([*real, *noise, "AttributeError: shutdown"])[0] == "ValueError: fatal"
    assert errors.from_stderr([*noise, "AttributeError: shutdown"])[0] == "AttributeError: shutdown"


@pytest.mark.parametrize("name", ["worker.py", "imports.py"])
def test_a_syntax_error(tmp_path: Path, name: str) -> None:
    """In the script itself it has no header; in a module it has one."""
    (tmp_path / "broken.py").write_text("x = = 1\n")
    script = "x = = 1\n" if name == "worker.py" else "import broken\n"
    lines = stderr_of(script, name=name, tmp_path=tmp_path)
    message, traceback = errors.from_stderr(["before", *lines])
    assert message == "SyntaxError: invalid syntax"
    assert traceback.splitlines() == lines


def test_an_exception_group(tmp_path: Path) -> None:
    """asyncio's task groups raise these; the group's own line is the message, its members stay in the traceback."""
    script = """
        def f():
            raise TypeError("inner")
        found = []
        try:
            f()
        except TypeError as error:
            found.append(error)
        raise ExceptionGroup("several", [*found, ValueError(2)])
    """
    lines = stderr_of(script, tmp_path=tmp_path)
    message, traceback = errors.from_stderr(["before", *lines, "after"])
    assert message == "ExceptionGroup: several (2 sub-exceptions)"
    assert traceback.splitlines() == lines


def test_torch_puts_a_prefix_before_each_line() -> None:
    """With a process group, torch's own hook writes `[rank1]: `; the first line without it ends the traceback."""
    plain = ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "    f()", "ValueError: a", "", "b"]
    lines = ["noise", *(f"[rank1]: {line}" for line in plain)]
    for after in ([], ["went on"], ["[rank1]:[W1120] destroy_process_group() was not called"]):
        message, traceback = errors.from_stderr([*lines, *after])
        assert message == "ValueError: a\n\nb"
        assert traceback.splitlines() == plain


def test_the_beginning_may_be_lost() -> None:
    """Only the end of stderr is kept: the header of a very long traceback is gone."""
    lines = ["    middle()", '  File "b.py", line 2, in g', "    f()", "RecursionError: too deep"]
    assert errors.from_stderr(lines) == ("RecursionError: too deep", "\n".join(lines[1:]) + "\n")


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["hello", "  indented"],
        ["Traceback (most recent call last):"],
        ["Traceback (most recent call last):", '  File "b.py", line 2'],
        ["[rank0]: Traceback (most recent call last):"],
        ["  + Exception Group Traceback (most recent call last):", "  | "],
        ['  File "b.py", line 2'],
        ['  File "b.py", line 2', "went on"],
        ["During handling of the above exception, another exception occurred:", "Traceback (most recent call last):"],
    ],
)
def test_fragments_do_no_harm(lines: list[str]) -> None:
    """Stderr may end anywhere."""
    message, _ = errors.from_stderr(lines)
    assert message == ""
