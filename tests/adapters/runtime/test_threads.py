"""Waiting for the end of a thread, and again after an interrupt: for the class, and for whatever owns such a thread."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reknit.adapters.elastic.foreign_rendezvous import ForeignRendezvous
from reknit.adapters.journals.in_memory import MemoryJournal
from reknit.adapters.keeper.output.console import ConsoleWriter
from reknit.adapters.keeper.output.printing import Printing
from reknit.adapters.keeper.output.relay import Relay, Tap
from reknit.adapters.link import ThreadedLink
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.threads import Thread, sheltered
from reknit.core.job.entries import Joined, Node, NodeId
from reknit.elastic.multiprocessing.tail_log import TailLog
from tests.support.interrupts import interrupted, is_interrupted_at_look
from tests.support.leaks import nothing_left
from tests.support.waiting import PATIENCE_S, until


@pytest.mark.alone
def test_a_wait_can_be_repeated_after_an_interrupt() -> None:
    """`threading.Thread.join` alone would take the thread for ended."""
    go = threading.Event()
    thread = Thread(go.wait, name="x")
    assert thread.wait(0), "it was not started"
    thread.start()
    interrupted(lambda: thread.wait(PATIENCE_S))
    assert not thread.wait(0.01)
    go.set()
    assert thread.wait(PATIENCE_S)
    assert thread.wait(None)
    assert thread not in threading.enumerate()


def test_a_thread_that_raises_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a bug in a thread would cost every close its whole deadline."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    thread = Thread(lambda: 1 / 0, name="x")  # type: ignore[arg-type,return-value]
    thread.start()
    assert thread.wait(PATIENCE_S)


@pytest.mark.alone
def test_an_interrupt_does_not_break_off_a_sheltered_call() -> None:
    """It comes while the call is waited for. What the call has made is undone then."""
    undone: list[str] = []
    go = threading.Event()

    def make() -> str:
        threading.Timer(0.2, go.set).start()  # after the interrupt, which comes at any rate
        return "made" if go.wait(PATIENCE_S) else ""

    interrupted(lambda: sheltered(make, undo=undone.append))
    assert undone == ["made"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.alone
def test_an_interrupt_at_any_moment_lets_a_sheltered_call_be_made() -> None:
    """It neither hangs nor is it left out. Only before it has begun is that so, as for every function."""
    made: list[int] = []
    for look in itertools.count(1):
        is_interrupted = is_interrupted_at_look(look, partial(sheltered, partial(made.append, look)))
        assert made == [*range(1, look + 1)]
        if not is_interrupted:
            break
    assert look > 5


@pytest.mark.alone
def test_two_interrupts_at_once_break_off_no_sheltered_call() -> None:
    """A terminal that is closed may send one signal, and its shell another. What was made is undone all the same."""
    undone: list[str] = []

    def raises(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def make() -> str:
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), signum)
        return "made"

    before = [signal.signal(signum, raises) for signum in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        with pytest.raises(KeyboardInterrupt):
            sheltered(make, undo=undone.append)
    finally:
        for signum, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(signum, handler)
    assert undone == ["made"]


def test_a_sheltered_call_raises_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no thread is to be had."""
    for _ in range(2):
        assert sheltered(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            sheltered(lambda: 1 / 0)
        monkeypatch.setattr(threading.Thread, "start", _none_to_be_had)


def _none_to_be_had(*args: object, **more: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.alone
def test_a_forked_child_does_not_wait_for_its_parents_thread() -> None:
    """The thread does not run there, so the wait would be for ever."""
    go = threading.Event()
    thread = Thread(go.wait, name="x")
    thread.start()
    if (pid := os.fork()) == 0:
        os._exit(0 if thread.wait(None) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    go.set()
    assert thread.wait(PATIENCE_S)


def test_a_thread_cannot_wait_for_itself() -> None:
    """That would be a wait for ever."""
    said: list[str] = []

    def wait() -> None:
        try:
            thread.wait(None)
        except RuntimeError as error:
            said.append(str(error))

    thread = Thread(wait, name="x")
    thread.start()
    assert thread.wait(PATIENCE_S)
    assert said == ["a thread cannot wait for its own end"]


# ---- those who own a thread ----


class Held:
    """Something whose thread is held up until `release`. Closing it has to wait."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.is_held = threading.Event()

    def hold(self, *args: object) -> None:
        self.is_held.set()
        assert self.go.wait(PATIENCE_S)

    def release(self) -> None:
        self.go.set()


class Text(io.StringIO):
    """A stream of the program that takes its time."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def write(self, text: str) -> int:
        self._held.hold()
        return super().write(text)


def printing(held: Held, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    with patch.context() as patched:
        patched.setattr(sys, "stdout", Text(held))
        patched.setattr(sys, "stderr", sys.__stderr__)
        made = Printing()
    os.write(made.console[0], b"line\n")
    return made.close


def link(held: Held, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    journal, clock = MemoryJournal(), SystemClock()
    patch.setattr(journal, "append", held.hold)
    made = ThreadedLink(journal, clock, "nonce")
    made.append(Joined(Node(NodeId("a"), 0), "a", 0, address="x", port=1))
    return lambda: (made.close(), clock.close())


def console(held: Held, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    fd = os.open(folder / "console", os.O_WRONLY | os.O_CREAT)
    made = ConsoleWriter(fd)
    patch.setattr(made, "_write", held.hold)
    patch.setattr("reknit.adapters.keeper.output.console.LEAVES_S", PATIENCE_S)
    made.say("x")

    def close() -> None:
        made.close(0.0)
        os.close(fd)

    return close


def relay(held: Held, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    read_end, write_end = os.pipe()
    made = Relay(lambda line: None)
    patch.setattr(made, "_write_file", held.hold)
    patch.setattr("reknit.adapters.keeper.output.relay.LEAVES_S", PATIENCE_S)
    made.add(Tap(read_end, None, file=2))
    os.write(write_end, b"line\n")
    os.close(write_end)
    return made.close


def tail_log(held: Held, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    (folder / "log").write_text("line\n")
    return TailLog("x", {0: str(folder / "log")}, Text(held)).start().stop


def foreign(held: Held, folder: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr("reknit.adapters.elastic.foreign_rendezvous.CLOSE_S", PATIENCE_S)
    made = ForeignRendezvous(SimpleNamespace(next_rendezvous=held.hold), 0, 1.0)
    wired: Any = SimpleNamespace(close=lambda: None, spec=None, ports=SimpleNamespace(clock=SystemClock(), link=None))
    patch.setattr("reknit.adapters.elastic.foreign_rendezvous.evolve", lambda value, **more: value)
    made.rewire(wired)
    made._join(Joined(Node(NodeId("a"), 0), "a", 0, address="x", port=1))
    return lambda: (made.close(), wired.ports.clock.close())


OWNERS = [printing, link, console, relay, tail_log, foreign]


@pytest.mark.parametrize("make", OWNERS)
@pytest.mark.alone
def test_an_interrupted_close_can_be_repeated(
    make: Callable[..., Callable[[], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second close waits for the thread as the first one did, and leaves nothing."""
    held = Held()
    with nothing_left():
        close = make(held, tmp_path, monkeypatch)
        until(held.is_held.is_set)
        interrupted(close)
        releases = threading.Timer(0.05, held.release)
        releases.start()
        close()
        assert held.go.is_set(), "the thread still ran when the second close returned"
        releases.join()
