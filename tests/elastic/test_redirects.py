"""Redirecting this process's own streams. Each test runs in an interpreter of its own, because it has real streams."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from reknit.elastic.multiprocessing.api import get_std_cm
from reknit.elastic.multiprocessing.redirects import redirect, redirect_stderr, redirect_stdout
from tests.support.alone import run_alone
from tests.support.leaks import nothing_left


@pytest.mark.parametrize(
    "module", ["reknit.elastic", pytest.param("torch.distributed.elastic", marks=pytest.mark.slow)]
)
def test_python_c_and_children_go_to_the_file_and_back(tmp_path: Path, module: str) -> None:
    """Libraries in C print too. torch's own function passes the same test."""
    told = run_alone(
        """
        import ctypes, importlib, os, sys
        redirects = importlib.import_module(sys.argv[1] + ".multiprocessing.redirects")
        libc = ctypes.CDLL(None)
        print("before")
        with redirects.redirect_stdout(sys.argv[2]):
            print("python")
            libc.printf(b"c\\n")
            libc.fflush(None)
            os.system("echo child")
        print("after")
        with redirects.redirect_stderr(sys.argv[2] + ".err"):
            print("error", file=sys.stderr)
            print("shown")
        """,
        module,
        str(tmp_path / "out"),
    )
    assert told.split() == ["before", "after", "shown"]
    assert sorted((tmp_path / "out").read_text().split()) == ["c", "child", "python"]
    assert (tmp_path / "out.err").read_text() == "error\n"


def test_a_program_without_a_real_stdout_can_redirect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook `sys.stdout` has no descriptor. torch raises there."""
    monkeypatch.setattr("sys.stdout", io.StringIO())
    with nothing_left(), redirect_stdout(str(tmp_path / "out")):
        import os

        os.write(1, b"by descriptor\n")
    assert (tmp_path / "out").read_text() == "by descriptor\n"


def test_an_exception_passes_and_the_stream_is_back(tmp_path: Path) -> None:
    """A worker's function that raises must have its stderr for the traceback."""
    with nothing_left(), pytest.raises(ZeroDivisionError), redirect_stderr(str(tmp_path / "err")):
        raise ZeroDivisionError
    with nothing_left(), pytest.raises(FileNotFoundError), redirect_stderr(str(tmp_path / "no" / "err")):
        pass


def test_another_stream_is_refused(tmp_path: Path) -> None:
    """As in torch."""
    with pytest.raises(ValueError, match="unknown standard stream <stdin>"), redirect("stdin", str(tmp_path / "in")):
        pass


def test_no_path_means_no_redirect(tmp_path: Path) -> None:
    """Contexts give an empty path for a stream that goes to the console."""
    with get_std_cm("", redirect_stdout):
        pass
    with get_std_cm(str(tmp_path / "out"), redirect_stdout):
        print("kept")
    assert (tmp_path / "out").read_text() == "kept\n"
