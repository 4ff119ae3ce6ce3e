"""The way to a handler: nobody waits for it, and what goes wrong is told."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from reknit.adapters.observe import delivery
from reknit.adapters.observe.delivery import Delivery
from reknit.adapters.observe.destinations import logger_of
from tests.support.handlers import Failing, Hung, Kept
from tests.support.waiting import PATIENCE_S, until


def to(handler: logging.Handler) -> Delivery:
    return Delivery("mine", logger_of("mine", handler))


def test_lines_come_in_order_and_no_thread_is_left() -> None:
    """An idle agent has no thread for events, and a closed one leaves none."""
    kept, before = Kept(), threading.active_count()
    way = to(kept)
    for burst in range(2):
        for number in range(100):
            way.put(f"{burst} {number}")
        way.flush(PATIENCE_S)
        assert threading.active_count() == before
    assert kept.lines == [f"{burst} {number}" for burst in range(2) for number in range(100)]
    assert way.troubles() == []


def test_nobody_waits_for_a_handler_that_hangs() -> None:
    """The agent would not see its workers' ends meanwhile. What is lost is counted. A handler that comes back goes
    on."""
    hung = Hung()
    way = to(hung)
    for number in range(3):
        way.put(str(number))
    hung.hangs.wait(PATIENCE_S)
    way.flush(0.0)
    assert way.troubles() == ["the event handler mine has not taken 3 events"]
    way.put("3")
    way.flush(PATIENCE_S)  # it was given up, and is not waited for again
    assert way.troubles() == ["the event handler mine has not taken 1 event"]
    hung.come_back.set()
    until(lambda: not any(thread.name == "events mine" for thread in threading.enumerate()))
    way.put("4")
    way.flush(PATIENCE_S)
    assert hung.lines == ["0", "4"]
    assert way.troubles() == []


def test_an_error_of_a_handler_is_told_once() -> None:
    """A platform that is down would otherwise fill the console. It may come back, so it gets the further events."""
    failing = Failing()
    way = to(failing)
    for number in range(3):
        way.put(str(number))
    way.flush(PATIENCE_S)
    assert failing.lines == ["0", "1", "2"]
    assert way.troubles() == ["the event handler mine fails: ValueError: no room"]


def test_a_lock_that_an_interrupted_call_has_left_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C came between two steps of the interpreter. Agents in other threads once waited for the lock for ever."""
    monkeypatch.setattr(delivery, "LEFT_S", 0.05)
    kept = Kept()
    way = to(kept)
    interrupted = threading.Thread(target=way._changed.acquire)
    interrupted.start()
    interrupted.join()
    way.put("first")
    way.flush(PATIENCE_S)
    way.put("second")
    way.flush(PATIENCE_S)
    assert kept.lines == ["first", "second"]
    assert way.troubles() == []


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may run for months beside a handler that hangs."""
    monkeypatch.setattr(delivery, "MOST", 2)
    hung = Hung()
    way = to(hung)
    way.put("0")
    hung.hangs.wait(PATIENCE_S)
    for number in range(1, 10):
        way.put(str(number))
    assert way.troubles() == ["2 events wait for the event handler mine: further ones are dropped"]
    hung.come_back.set()
    way.flush(PATIENCE_S)
    assert hung.lines == ["0", "1", "2"]
    assert way.troubles() == ["the event handler mine has not taken 7 events"]


def test_without_a_thread_events_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may be out of processes for a moment, and that is when its events are of interest."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kept = Kept()
    way = to(kept)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        way.put("0")
        way.flush(PATIENCE_S)
        assert way.troubles() == ["the event handler mine has not taken 1 event"]
        way.put("1")
    way.put("2")
    way.flush(PATIENCE_S)
    assert kept.lines == ["1", "2"]
    assert way.troubles() == []


def test_a_process_ends_although_a_handler_hangs() -> None:
    """At its end the interpreter takes the lock of each handler, and a hung handler holds its own."""
    script = """
import logging, threading
from reknit.adapters.observe.delivery import Delivery

hangs = threading.Event()

class Hangs(logging.Handler):
    def emit(self, record):
        hangs.set()
        threading.Event().wait()

logger = logging.getLogger("events")
logger.setLevel("INFO")
logger.addHandler(Hangs())
way = Delivery("mine", logger)
way.put("0")
hangs.wait()
way.flush(0.0)
print(*way.troubles())
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the event handler mine has not taken 1 event\n"), done.stderr
