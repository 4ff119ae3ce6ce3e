"""Whether a client's workers are functions, and what a client without functions pays for them: nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reknit.adapters.keeper.functions import Function, FunctionError
from reknit.adapters.keeper.wire import Process, StartProcesses
from tests import called
from tests.alone import run_alone
from tests.keepers import Kept

Keep = Callable[..., Kept]


def test_a_client_without_functions_does_not_load_multiprocessing() -> None:
    """A launch of programs would wait for the import."""
    script = """
        import sys
        import reknit.adapters.keeper.client
        print(*sorted({"multiprocessing", "pickle", "reknit.adapters.keeper.functions"} & set(sys.modules)))
    """
    assert run_alone(script) == "\n"


def test_a_keeper_elsewhere_takes_no_functions(keep: Keep) -> None:
    """Open files cannot be sent to another host. A forked keeper of the command line stands for one here."""
    kept = keep("true", how="fork")
    with pytest.raises(FunctionError, match="only if its keeper is on the same host"):
        kept.keeper.start(StartProcesses(0, (Process(0, 0, ()),)), {0: Function(called.give)})
    kept.run()
    kept.stop()
