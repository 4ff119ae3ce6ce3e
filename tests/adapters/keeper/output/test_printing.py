"""The workers' output through the objects of a program that has replaced `sys.stdout` or `sys.stderr`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from reknit.adapters.keeper.output.printing import Printing
from reknit.adapters.runtime.ports import CannotStart
from tests.support.leaks import nothing_left
from tests.support.waiting import until


class Usual(io.StringIO):
    """An object that writes to a descriptor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def fileno(self) -> int:
        return self.number


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def replaced(monkeypatch: pytest.MonkeyPatch, out: Any, err: Any) -> Printing:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        return Printing()


@pytest.mark.parametrize("nobody", [None, "closed"])
def test_the_usual_objects_are_left_alone(monkeypatch: pytest.MonkeyPatch, nobody: str | None) -> None:
    """The keeper inherits the descriptors, and there is no thread. So it is if there is no object to write to."""
    closed = io.StringIO()
    closed.close()
    assert replaced(monkeypatch, Usual(1), Usual(2)).console == (1, 2)
    assert replaced(monkeypatch, Usual(1), closed if nobody else None).console == (1, 2)


def test_each_stream_goes_to_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, and what is left at the end."""
    out, err = io.StringIO(), io.StringIO()
    printing = replaced(monkeypatch, out, err)
    os.write(printing.console[0], b"one\n")
    until(lambda: out.getvalue() == "one\n")
    os.write(printing.console[0], b"x" * 1000)
    os.write(printing.console[1], b"two\n")
    printing.close()
    printing.close()
    assert (out.getvalue(), err.getvalue()) == ("one\n" + "x" * 1000, "two\n")


def test_only_one_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`contextlib.redirect_stdout` does that."""
    out = io.StringIO()
    printing = replaced(monkeypatch, out, Usual(2))
    assert printing.console[1] == 2
    os.write(printing.console[0], b"one")
    printing.close()
    assert out.getvalue() == "one"


def test_one_object_for_both_gets_one_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the lines come in the order in which they were written."""
    both = io.StringIO()
    printing = replaced(monkeypatch, both, both)
    assert printing.console[0] == printing.console[1]
    printing.close()


def test_a_character_that_comes_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And bytes that are no text do no harm."""
    out = io.StringIO()
    printing = replaced(monkeypatch, out, Usual(2))
    euro = "€".encode()
    os.write(printing.console[0], b"1" + euro[:1])
    until(lambda: out.getvalue() == "1")
    os.write(printing.console[0], euro[1:] + b"\xff")
    printing.close()
    assert out.getvalue() == "1€\ufffd"


def test_an_object_that_fails_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is written than a pipe holds."""
    out = io.StringIO()
    printing = replaced(monkeypatch, out, Usual(2))
    out.close()
    for _ in range(64):
        os.write(printing.console[0], b"x" * 4096)
    printing.close()


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the machine: one error, and nothing left."""

    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(CannotStart, match="can't start new thread"):
        replaced(monkeypatch, io.StringIO(), Usual(2))


@pytest.mark.alone
def test_a_forked_child_has_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it does with its copy of the object harms nobody."""
    out = io.StringIO()
    printing = replaced(monkeypatch, out, Usual(2))
    number = printing.console[0]
    child = os.fork()
    if child == 0:
        try:
            os.fstat(number)
        except OSError:
            printing.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    os.write(number, b"still")
    printing.close()
    assert out.getvalue() == "still"
