"""Whether a client's workers are functions, and what a client without functions pays for them: nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from reknit.adapters.keeper.client.function_workers import Function, FunctionError
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses
from tests.support import called
from tests.support.alone import run_alone
from tests.support.keepers import Kept
from tests.support.processes import drive_exits, failures

Keep = Callable[..., Kept]


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import pytest: the module `__main__` of this process is an empty one."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


def test_a_client_without_functions_does_not_load_multiprocessing() -> None:
    """A launch of programs would wait for the import."""
    script = """
        import sys
        import reknit.adapters.keeper.client.keeper_client
        unwanted = {"multiprocessing", "pickle", "reknit.adapters.keeper.client.function_workers"}
        print(*sorted(unwanted & set(sys.modules)))
    """
    assert run_alone(script) == "\n"


def test_a_keeper_elsewhere_takes_no_functions(keep: Keep) -> None:
    """Open files cannot be sent to another host. A forked keeper of the command line stands for one here."""
    kept = keep("true", how="fork")
    with pytest.raises(FunctionError, match="only if its keeper is on the same host"):
        kept.keeper.start(StartProcesses(0, (Process(0, 0, ()),)), {0: Function(called.give)})
    kept.run()
    kept.stop()


def test_a_worker_is_a_program_or_a_function(keep: Keep) -> None:
    """Both, or neither, is a mistake of the caller. A round may mix the two kinds."""
    kept = keep("unused")
    with pytest.raises(ValueError, match="local rank 1 must be a program or a function"):
        kept.keeper.start(StartProcesses(0, (Process(1, 0, ()),)))
    with pytest.raises(ValueError, match="local rank 1 must be a program or a function"):
        kept.keeper.start(StartProcesses(0, (Process(1, 0, ("true",)),)), {1: Function(called.give)})
    kept.keeper.start(
        StartProcesses(0, (Process(0, 0, ("true",)), Process(1, 1, ()))), {1: Function(called.give, (7,))}
    )
    assert failures(drive_exits(kept.keeper, kept.clock, 2)) == []
    assert kept.keeper.values(0) == {1: 7}


def test_an_unknown_start_method_is_refused(tmp_path: Path) -> None:
    """Before a keeper is started."""
    with pytest.raises(ValueError, match="start_method must be one of spawn, fork, forkserver, not 'thread'"):
        Kept(tmp_path, "unused", start_method="thread")
