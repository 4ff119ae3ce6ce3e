"""After `close` a journal or a store's host leaves nothing in this process, however it ended."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore import host as host_module
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.host import host_store
from reknit.adapters.runtime.ports import Journal, Refused, Unavailable
from reknit.core.job.entries import Node, NodeId
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job
from tests.support.alone import run_alone
from tests.support.journals import SHARED, entry, opened, served
from tests.support.leaks import nothing_left
from tests.support.stores import HOST, free_port, needs_torch
from tests.support.waiting import PATIENCE_S, is_alive, until

ME = Node(NodeId("me"))


@pytest.fixture(scope="module", params=SHARED)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Kind of a store, and where it is."""
    with ExitStack() as stack:
        yield request.param, stack.enter_context(served(request.param, tmp_path_factory.mktemp(request.param)))


def used(journal: Journal) -> None:
    """Every call, once."""
    journal.append("t", entry("w", 0))
    journal.beat(ME, 1, [ME])
    batch = journal.read(0, 0.0)
    journal.publish(batch.position, fold_all(Job(), batch.entries))
    journal.read(batch.position, 0.05)


def test_a_journal_that_was_used_leaves_nothing(place: tuple[str, str], tmp_path: Path) -> None:
    """A host process may run a thousand jobs."""
    kind, where = place
    with closing(opened(kind, where, Envelope("first"))) as journal:
        used(journal)  # what is loaded and cached once for all is no leak
    where = str(tmp_path) if kind == "file" else where
    names = ("journal", "lock", "fold", "beats", "me.0")
    with nothing_left(tmp_path, lambda what: Path(what).parts[-1] in (*names, "again")):
        for _ in range(3):
            journal = opened(kind, where, Envelope("again"))
            used(journal)
            journal.close()
            journal.close()


def test_a_journal_that_was_never_used_leaves_nothing(place: tuple[str, str]) -> None:
    """An agent may be prevented between the two."""
    with nothing_left():
        opened(*place, Envelope("unused")).close()


def test_a_journal_that_is_refused_leaves_nothing(place: tuple[str, str]) -> None:
    """A wrong secret ends the agent, and not its host process."""
    with closing(opened(*place, Envelope("secret", "right"))) as right:
        used(right)
    with nothing_left():
        journal = opened(*place, Envelope("secret", "wrong"))
        for call in (lambda: journal.read(0, 0.0), lambda: journal.append("t", entry("w", 0))):
            with pytest.raises(Refused):
                call()
        journal.close()


def test_a_journal_that_is_closed_while_threads_are_in_it_leaves_nothing(place: tuple[str, str]) -> None:
    """The agent closes while its reader waits and its writer writes, at any point of either."""
    with closing(opened(*place, Envelope("busy"))) as first:
        used(first)
    with nothing_left():
        for turns in range(8):
            with in_use(opened(*place, Envelope("busy")), until_beats=turns) as journal:
                journal.close()


@contextmanager
def in_use(journal: Journal, until_beats: int) -> Iterator[Journal]:
    """While one thread reads it and waits, and another beats, and has done so that often. Both end after it."""
    position, is_over, beats = journal.read(0, 0.0).position, threading.Event(), list[object]()
    calls = (lambda: journal.read(position, 600.0), lambda: beats.append(journal.beat(ME, 1, [ME])))

    def repeat(call: Callable[[], object]) -> None:
        with suppress(Unavailable):
            while not is_over.is_set():
                call()

    threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    until(lambda: len(beats) >= until_beats)
    yield journal
    is_over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a call waits on after the close"


def test_a_journal_whose_store_is_gone_leaves_nothing(place: tuple[str, str]) -> None:
    """Outages may last for hours, with a try each second."""
    kind, _ = place
    with socket.socket() as nobody:
        nobody.bind((HOST, 0))
        where = "/proc/nothing" if kind == "file" else f"{HOST}:{nobody.getsockname()[1]}"
        with nothing_left():
            journal = opened(kind, where, Envelope("gone"))
            for _ in range(5):
                with pytest.raises((Unavailable, Refused)):
                    journal.read(0, 0.0)
                with pytest.raises((Unavailable, Refused)):
                    journal.append("t", entry("w", 0))
            journal.close()


# ---- the store's host ----


def test_a_store_that_is_closed_leaves_nothing() -> None:
    """Its port, its process and the line to it."""
    needs_torch()
    port = free_port()
    with nothing_left():
        for _ in range(2):
            host = host_store(HOST, port)
            assert host is not None
            StoreClient(HOST, port, PATIENCE_S).close()
            host.close()
            host.close()


def test_a_store_whose_server_was_killed_leaves_nothing() -> None:
    """Whoever ended it, it is reaped."""
    with nothing_left():
        host = host_store(HOST, free_port())
        assert host is not None
        os.kill(host.pid, signal.SIGKILL)
        until(lambda: not is_alive(host.pid))
        host.close()


def test_a_store_whose_server_was_reaped_by_others_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host process that reaps all its children frees the number for somebody else."""
    host = host_store(HOST, free_port())
    assert host is not None
    os.kill(host.pid, signal.SIGKILL)
    os.waitpid(host.pid, 0)
    monkeypatch.setattr(host_module, "signal_process", lambda *_: pytest.fail("signalled a number of nobody's"))
    host.close()


@pytest.mark.parametrize("fault", ["socketpair", "posix_spawn"])
def test_a_store_that_cannot_be_started_leaves_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors or processes are exhausted: the listener must not stay bound."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    port = free_port()
    with nothing_left(), monkeypatch.context() as patched:
        patched.setattr(socket if fault == "socketpair" else os, fault, fail)
        with pytest.raises(Refused, match="too many open files"):
            host_store(HOST, port)
    again = host_store(HOST, port)
    assert again is not None
    again.close()


def test_the_servers_environment_is_the_one_that_was_given() -> None:
    """The mark by which a killed agent's server is found goes along with its start; the host's environment stays."""
    with nothing_left():
        host = host_store(HOST, free_port(), env={**os.environ, "REKNIT_TEST": str(os.getpid())})
        assert host is not None
        environ = until(psutil.Process(host.pid).environ)  # empty for a moment, until the program has taken over
        assert environ["REKNIT_TEST"] == str(os.getpid())
        host.close()


# ---- the oracle ----


def test_the_oracle_sees_every_kind_of_leak() -> None:
    """A test that finds no leak is worth what its oracle sees."""
    script = """
        import os, pathlib, signal, subprocess, tempfile, threading
        import tests.support.waiting
        from tests.support.leaks import nothing_left

        tests.support.waiting.PATIENCE_S = 0.05
        folder = pathlib.Path(tempfile.mkdtemp())
        gate = threading.Event()
        old = signal.getsignal(signal.SIGUSR1)
        leaks = {
            "descriptor": (os.pipe, lambda ends: [os.close(end) for end in ends]),
            "thread": (lambda: threading.Thread(target=gate.wait).start(), lambda _: gate.set()),
            "child": (lambda: subprocess.Popen(["sleep", "600"]), lambda child: (child.kill(), child.wait())),
            "handler": (lambda: signal.signal(signal.SIGUSR1, print), lambda old: signal.signal(signal.SIGUSR1, old)),
            "environment": (lambda: os.environ.update(LEAK="x"), lambda _: os.environ.pop("LEAK")),
            "file": ((folder / "left").touch, lambda _: (folder / "left").unlink()),
        }
        for kind, (leak, mend) in leaks.items():
            try:
                with nothing_left(folder):
                    made = leak()
            except AssertionError as e:
                assert kind in str(e), (kind, str(e))
                print(kind)
            mend(made)
    """
    assert run_alone(script).split() == ["descriptor", "thread", "child", "handler", "environment", "file"]
