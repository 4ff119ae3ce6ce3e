"""Which signals a program loses to its contexts, and when it gets them back. Each test sends real signals."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from reknit.elastic.multiprocessing import api, signals
from reknit.elastic.multiprocessing.signals import VARIABLE, SignalException, holding_back, put_back
from tests.support.leaks import nothing_left


@pytest.fixture(autouse=True)
def all_is_put_back() -> Iterator[None]:
    with nothing_left():
        yield


def send(signum: int) -> None:
    signal.raise_signal(signum)


def taken() -> list[signal.Signals]:
    return api.take_signals()


def test_the_usual_signals_are_taken_and_put_back() -> None:
    """SIGTERM, SIGINT, SIGHUP and SIGQUIT, as in torch. No other one."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    found = taken()
    changed = {number for number, handler in before.items() if signal.getsignal(number) != handler}
    put_back(found)
    assert changed == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT} == set(found)
    assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}


@pytest.mark.alone
def test_a_signal_raises_with_its_number() -> None:
    """The caller hands it on to its processes."""
    found = taken()
    try:
        with pytest.raises(SignalException, match=f"Process {os.getpid()} got signal") as caught:
            send(signal.SIGHUP)
    finally:
        put_back(found)
    assert caught.value.sigval is signal.SIGHUP


def test_the_variable_names_the_signals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A name that is none is a warning, and so is a signal that nobody can take. torch's launcher dies of SIGKILL."""
    monkeypatch.setenv(VARIABLE, "SIGUSR1, SIGNONSENSE,SIGKILL,")
    found = taken()
    put_back(found)
    assert found == [signal.SIGUSR1]
    assert [word in caplog.text for word in ("SIGNONSENSE", "SIGKILL", "an empty name")] == [True] * 3


@pytest.mark.alone
def test_two_contexts_share_a_signal() -> None:
    """The first that is closed must not take the signal from the other, whichever of them it is."""
    for order in ([0, 1], [1, 0]):
        both = [taken(), taken()]
        put_back(both[order[0]])
        with pytest.raises(SignalException):
            send(signal.SIGTERM)
        put_back(both[order[1]])


def test_a_handler_that_the_program_has_set_meanwhile_stays() -> None:
    """It was not ours to put anything in its place."""
    before = signal.getsignal(signal.SIGTERM)
    found = taken()
    signal.signal(signal.SIGTERM, mine := lambda number, frame: None)
    put_back(found)
    assert signal.signal(signal.SIGTERM, before) is mine


def test_another_thread_takes_none_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python allows it to the main thread only. The warning does not come again at each restart."""
    monkeypatch.setattr(signals, "_has_warned", False)
    found: list[signal.Signals] = []

    def takes() -> None:
        found.extend([*taken(), *taken()])

    thread = threading.Thread(target=takes)
    thread.start()
    thread.join()
    assert found == []
    assert caplog.text.count("another thread than the main thread") == 1


@pytest.mark.alone
def test_a_context_that_another_thread_closes_gives_the_signal_back_at_the_latest_when_it_comes() -> None:
    """A finalizer may run in any thread, and only the main thread can set handlers."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    os.environ[VARIABLE] = "SIGUSR1"
    try:
        for _ in range(2):
            thread = threading.Thread(target=put_back, args=(taken(),))
            thread.start()
            thread.join()
        send(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is not signals.raise_signal
    finally:
        del os.environ[VARIABLE]
        signal.signal(signal.SIGUSR1, before)


def test_a_thread_that_python_has_not_started_leaves_no_entry() -> None:
    """A finalizer may run in such a thread too. Up to Python 3.12, `threading.enumerate` would list it for ever."""
    before, is_over = threading.enumerate(), threading.Lock()
    is_over.acquire()

    def put_nothing_back() -> None:
        put_back(())
        is_over.release()

    _thread.start_new_thread(put_nothing_back, ())
    is_over.acquire()
    assert threading.enumerate() == before


def hold(*signums: int, woken: list[bool] | None = None, then: BaseException | None = None) -> list[int]:
    """Get these signals while they are held back, each in a context of its own inside another. Returns how many there
    were after each."""
    counts: list[int] = []
    with holding_back(lambda: woken.append(True) if woken is not None else None) as count:
        for signum in signums:
            with holding_back():
                send(signum)
            counts.append(count())
        if then is not None:
            raise then
    return counts


@pytest.mark.alone
def test_a_signal_is_held_back_and_raised_at_the_end() -> None:
    """In between, a message of the keeper would be lost half way. The wait for the keeper ends at once."""
    found = taken()
    woken: list[bool] = []
    try:
        with pytest.raises(SignalException) as caught:
            hold(signal.SIGTERM, signal.SIGHUP, woken=woken)
        assert caught.value.sigval is signal.SIGTERM
        assert woken == [True, True]
        with pytest.raises(SignalException):
            send(signal.SIGTERM)
    finally:
        put_back(found)
    assert hold() == []


@pytest.mark.alone
def test_a_signal_is_not_lost_to_another_exception() -> None:
    """The caller closes the context then, and would never learn that it should end."""
    found = taken()
    try:
        with pytest.raises(SignalException) as caught:
            hold(signal.SIGTERM, then=ZeroDivisionError())
    finally:
        put_back(found)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


@pytest.mark.alone
def test_a_forked_child_has_the_handlers_of_before() -> None:
    """A process pool of the program must end at SIGTERM, and not raise an exception that nobody there knows."""
    found = taken()
    try:
        if (pid := os.fork()) == 0:
            send(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    finally:
        put_back(found)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
