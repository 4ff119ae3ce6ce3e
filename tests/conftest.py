"""Fixtures for all tests in this folder, and the profile of those that Hypothesis draws."""

from __future__ import annotations

import compileall
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from reknit.adapters.keeper.process.processes import Processes
from reknit.adapters.runtime.clock import SystemClock
from tests.support import places
from tests.support.alone import ROOT
from tests.support.etcd import Etcd
from tests.support.keepers import Kept
from tests.support.processes import Make, let_go, make_processes
from tests.support.stores import JobStore, hosted
from tests.support.streams import Console

# The tests send these signals, and reknit keeps a signal ignored that was ignored when it started. A shell lets its
# background jobs ignore SIGINT and SIGQUIT, and nohup ignores SIGHUP.
_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for signum, handler in _HANDLERS.items():
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)

# A test has no bound on how long it takes, and finds the same each time. `property_tests/` searches, with a profile of
# its own. Hypothesis has one profile at a time, for the whole process. So each folder loads its own before each of its
# modules and tests. pytest calls the hooks below only for what is in this folder.
settings.register_profile(
    "tests",
    settings.get_profile("default"),
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_collectstart() -> None:
    settings.load_profile("tests")


def pytest_runtest_setup() -> None:
    settings.load_profile("tests")


_ALONE = "REKNIT_TEST_ALONE"
"""Set in the process of tests that are marked `alone`. Its value is the path of the file that holds how they ended."""
_BEGUN = "begun"
_ended: dict[str, tuple[str, str]] = {}
"""How tests that are marked `alone` have ended, by the ids of their nodes: the outcome, and what was said."""


def _runs_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None and _ALONE not in os.environ


_SLOWEST = tuple(f"tests/{room}/" for room in ("nodes", "elastic", "app/python"))
"""These tests start many processes and wait for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_SLOWEST))  # so that no slow file is left for the end
    for item in items:
        if isinstance(item, pytest.Function) and _runs_alone(item):
            item.fixturenames.clear()  # they are made in the test's own process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked `alone` signals, forks or interrupts its own process. A mistake in it, or a slow machine,
    must not end the process that runs the other tests. So the tests of a file that are marked run in a process of their
    own. If one of them ends it, that test has failed, and those after it get another process."""
    if not _runs_alone(pyfuncitem):
        return None
    nodeid = pyfuncitem.nodeid
    if nodeid not in _ended:
        items = (item for item in pyfuncitem.session.items if item.path == pyfuncitem.path)
        said = _run_alone(*(item.nodeid for item in items if _runs_alone(item) and item.nodeid not in _ended))
        _ended.setdefault(nodeid, ("failed", f"it was not run:\n{said}"))
    outcome, said = _ended[nodeid]
    if outcome == "skipped":
        pytest.skip(said)
    if outcome != "passed":
        pytest.fail(f"in a process of its own: {said}", pytrace=False)
    return True


def _run_alone(*nodeids: str) -> str:
    """Run these tests in a process of their own. Notes how they have ended. Returns what the process has printed."""
    argv = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *nodeids]
    with tempfile.NamedTemporaryFile("r") as told:
        env = os.environ | {_ALONE: told.name}
        done = subprocess.run(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True)
        for nodeid, outcome, said in map(json.loads, told):
            _ended[nodeid] = outcome, said
    said = f"status {done.returncode}\n{(done.stdout + done.stderr).decode(errors='replace')}"
    for nodeid, (outcome, _) in _ended.items():
        if outcome == _BEGUN:
            _ended[nodeid] = "failed", f"the process ended with {said}"
    return said


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(nodeid, _BEGUN)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:  # a test whose teardown fails has failed
        said = "\n".join([report.longreprtext, *(f"{name}:\n{text}" for name, text in report.sections)])
        _tell(report.nodeid, report.outcome, said)


def _tell(nodeid: str, outcome: str, said: str = "") -> None:
    """In the process of tests that are marked `alone`: tell what becomes of a test."""
    if _ALONE in os.environ:
        with open(os.environ[_ALONE], "a") as file:
            print(json.dumps([nodeid, outcome, said]), file=file)


_places: list[str] = []


def pytest_sessionfinish() -> None:
    for base in _places:
        places.end(base)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Gives the tests of this process a folder for their locks, and compiles reknit once. Some hundred processes of
    these tests import it. If its bytecode is missing or old and PYTHONDONTWRITEBYTECODE is set, each of them would
    compile it for itself."""
    _places.append(places.begin())
    if not hasattr(session.config, "workerinput"):  # this is not one of the processes that pytest-xdist starts
        for folder in ("core", "adapters", "app"):
            compileall.compile_dir(ROOT / folder, quiet=2)


@pytest.fixture(scope="module", autouse=True)
def no_tracker() -> Iterator[None]:
    """Ends the process that `multiprocessing` starts for queues and events, and keeps until the end of this process.
    Tests of the next file may ask whether this process has children."""
    yield
    tracker: Any = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    if getattr(tracker, "_fd", None) is not None:
        tracker._stop()


@pytest.fixture
def clock() -> Iterator[SystemClock]:
    clock = SystemClock()
    yield clock
    clock.close()


@pytest.fixture
def make(clock: SystemClock, tmp_path: Path) -> Iterator[Make]:
    """A function that makes `Processes` which run a script. Their console is a file."""
    made: list[Processes] = []
    console = os.open(tmp_path / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def make(*argv: str, script: str = "", **settings: Any) -> Processes:
        argv = argv or (sys.executable, "-c", textwrap.dedent(script))
        settings = {"console": (console, console), "log_dir": str(tmp_path / "logs"), **settings}
        made.append(make_processes(clock, *argv, **settings))
        return made[-1]

    yield make
    for workers in made:
        let_go(workers)
    os.close(console)


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    """A function that makes clients with a keeper. They have a folder for temporary files of their own."""
    made: list[Kept] = []
    (tmp_path / "temporary").mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))

    def keep(*argv: str, **settings: Any) -> Kept:
        made.append(Kept(tmp_path, *argv, **settings))
        return made[-1]

    yield keep
    for kept in made:
        kept.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd server for all tests that do not disturb it. Each of these tests has a job of its own."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of one TCPStore for all tests that do not disturb it. Each of these tests has a job of its own."""
    with hosted() as (_, port):
        yield port


@pytest.fixture
def store(port: int) -> Iterator[JobStore]:
    """A job in that TCPStore."""
    with ExitStack() as closing:
        yield JobStore(port, closing)


@pytest.fixture
def out() -> Iterator[Console]:
    console = Console()
    yield console
    console.close()


@pytest.fixture
def err() -> Iterator[Console]:
    console = Console()
    yield console
    console.close()
