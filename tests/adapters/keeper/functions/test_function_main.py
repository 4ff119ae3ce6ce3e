"""What becomes of a function in its worker: one clear line for each way in which it can end."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import called
from tests.support.calling import call
from tests.support.keepers import Kept

Keep = Callable[..., Kept]


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import pytest: the module `__main__` of this process is an empty one."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (called.give_generator, (), "TypeError: give_generator has returned a generator: nothing of it has run"),
        (called.give_lock, (), "TypeError: the return value, of type lock, cannot be pickled: TypeError: cannot"),
        (called.fail, ("plain",), "ValueError: plain"),
        (called.fail, ("odd",), "Odd: odd 1"),
        (called.fail, ("mute",), "Mute"),
        (called.fail, ("surrogate",), "ValueError: \\udcff"),
        (called.fail, ("keyboard",), "the function has ended without returning: KeyboardInterrupt"),
        (called.interrupt_itself, (), "the function has ended without returning: KeyboardInterrupt"),
        (called.end_at_once, (0,), "the function has ended without returning: its process has exited with status 0"),
    ],
)
def test_each_failure_says_what_happened(
    keep: Keep, tmp_path: Path, fn: Callable[..., object], args: tuple[object, ...], said: str
) -> None:
    """torch waits for ever on the last three."""
    failure = call(keep("unused"), fn, *args, error_file=str(tmp_path / "error.json"))
    assert failure.message.startswith(said)
    assert (failure.local_rank, failure.rank, failure.exitcode) == (0, 10, 1)
    if fn is called.fail:
        assert "in fail" in failure.traceback


def test_a_failure_without_an_error_file_is_told_by_its_traceback(keep: Keep) -> None:
    """On a full disk, for example."""
    failure = call(keep("unused"), called.fail, "plain")
    assert failure.message == "ValueError: plain"


@pytest.mark.parametrize(("status", "exitcode"), [(3, 3), ("text", 1), (True, 1)])
def test_another_exit_is_a_failure_with_its_status(keep: Keep, status: object, exitcode: int) -> None:
    """As for a program."""
    assert call(keep("unused"), called.leave, status).exitcode == exitcode


@pytest.mark.parametrize("status", [0, None])
def test_an_exit_without_an_error_returns_none(keep: Keep, status: object) -> None:
    """Scripts that became functions end so."""
    assert call(keep("unused"), called.leave, status) is None
