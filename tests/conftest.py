"""What all tests here rely on."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.clock import Clock
from reknit.adapters.workers.processes import Processes
from tests.etcd import Etcd
from tests.processes import Make

# A shell gives its background jobs the first two ignored, nohup the third. reknit keeps ignored what it finds ignored,
# and the tests send them.
_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for signum, handler in _HANDLERS.items():
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()


@pytest.fixture
def make(clock: Clock, tmp_path: Path) -> Iterator[Make]:
    """Makes `Processes` that run a script; the console is a file."""
    made: list[Processes] = []
    console = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def make(*argv: str, script: str = "", **settings: Any) -> Processes:
        settings = {"log_dir": str(tmp_path / "logs"), "env": os.environ, "run_id": "job", **settings}
        argv = argv or (sys.executable, "-c", textwrap.dedent(script))
        made.append(Processes(clock=clock, argv=argv, stdout=console, stderr=console, **settings))
        return made[-1]

    yield make
    for workers in made:
        workers.close()
    os.close(console)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """For the tests that do it no harm. Each has a job of its own."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd
