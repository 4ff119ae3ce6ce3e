"""The named pipe for timers: what is made, read and removed. The pipes and the clients are real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.keeper.common.run_folder import CannotMake, remove_abandoned
from reknit.adapters.keeper.watchdog.timerpipe import TimerPipe
from reknit.adapters.keeper.watchdog.worker_timers import WorkerTimer
from reknit.adapters.runtime.clock import SystemClock
from reknit.elastic.timer import FileTimerClient
from tests.support.alone import run_killed
from tests.support.leaks import nothing_left

ME = {os.getpid(): 3}
"""This process as the worker with rank 3."""
LONG_S = 1e6


class NotingClock(SystemClock):
    """A clock that says what wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: set[int] = set()

    def watch(self, fd: int) -> None:
        super().watch(fd)
        self.watched.add(fd)

    def unwatch(self, fd: int) -> None:
        super().unwatch(fd)
        self.watched.discard(fd)


class Watched:
    """A pipe, its clock, and what the operator is told."""

    def __init__(self, path: str = "") -> None:
        self.said: list[str] = []
        self.clock = NotingClock()
        try:
            self.pipe = TimerPipe(self.clock, path, "job", self.said.append)
        except CannotMake:
            self.clock.close()
            raise
        self.client = FileTimerClient(self.pipe.path)

    def acquire(self, scope: str, after_s: float, signum: int = signal.SIGKILL) -> None:
        FileTimerClient(self.pipe.path, signum).acquire(scope, time.time() + after_s)

    def look(self) -> list[WorkerTimer]:
        return self.pipe.look(self.clock.now(), ME)

    def rest(self) -> None:
        """Look, and wait, as the keeper does, until the pipe is watched again. No timer expires meanwhile."""
        assert self.look() == []
        while not self.clock.watched:
            self.clock.wait(self.pipe.wakes_at)
            assert self.look() == []

    def expired(self) -> list[str]:
        """Wait, as the keeper does, until timers have expired. Returns their scopes."""
        while not (found := self.look()):
            self.clock.wait(self.pipe.wakes_at)
        return [timer.scope for timer in found]

    def left(self) -> list[str]:
        """The scopes of the timers that would end a worker if nothing more was said. None is set after this."""
        found: list[str] = []
        while (at := self.pipe.wakes_at) is not None:
            found += [timer.scope for timer in self.pipe.look(at, ME)]
        return found

    def close(self) -> None:
        self.pipe.close()
        self.clock.close()


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def watched(base: Path) -> Iterator[Watched]:
    with nothing_left(base):
        found = Watched()
        yield found
        found.close()


# ---- what is read ----


def test_a_keeper_that_was_stopped_lets_timers_begin_anew(watched: Watched) -> None:
    """Its workers may have been stopped as well, for example with their container. They have not used up the time."""
    for scope, after_s in (("short", 10.0), ("long", 100.0)):
        watched.acquire(scope, after_s)
    watched.rest()
    later = watched.clock.now() + 95
    assert watched.pipe.look(later, ME) == []
    assert watched.pipe.look(later + 9, ME) == []
    assert [timer.scope for timer in watched.pipe.look(later + 10, ME)] == ["short"]
    watched.acquire("next", 1.0)
    watched.rest()
    assert watched.expired() == ["next"]


def test_a_timer_expires_at_its_time(watched: Watched) -> None:
    """The keeper sleeps until then. Nothing else wakes it."""
    watched.acquire("late", LONG_S)
    watched.acquire("first", 0.05)
    assert watched.expired() == ["first"]


def test_a_timer_that_is_released_does_not_expire(watched: Watched) -> None:
    """Its release may still be in the pipe when its time has come."""
    watched.acquire("a", 0.2)
    watched.look()
    watched.acquire("b", 0.4)
    watched.client.release("a")
    assert watched.expired() == ["b"]


def test_the_other_timers_of_a_worker_that_is_ended_are_forgotten(watched: Watched) -> None:
    """One failure has one reason. The worker is gone before the others run out."""
    watched.acquire("b", -1)
    watched.acquire("a", -2)
    watched.acquire("late", LONG_S)
    assert watched.expired() == ["a"]
    watched.rest()
    assert watched.left() == []


def test_a_timer_without_a_signal_is_a_line_for_the_operator(watched: Watched) -> None:
    """As in torch: nobody is ended. The other timers of the worker stay."""
    watched.acquire("a", -2, 0)
    watched.acquire("b", -1, -5)
    watched.acquire("c", LONG_S)
    assert watched.look() == []
    (line,) = watched.said
    assert line.startswith("reknit: a timer of rank 3 ran out ('a', 'b'); nothing is done")
    assert watched.left() == ["c"]


def test_a_stranger_ends_nobody(watched: Watched) -> None:
    """Nobody signals a process of which a line in a pipe speaks. There is one line, however many requests come."""
    for pid in (os.getppid(), 1):
        for _ in range(3):
            request = f'{{"version": 1, "pid": {pid}, "scope_id": "s", "expiration_time": 1, "signal": 9}}\n'
            Path(watched.pipe.path).write_text(request)
    assert watched.look() == []
    (line,) = watched.said
    assert line.startswith("reknit: the pipe for timers: a process that is no worker here sets a timer: pid")


def test_while_no_worker_runs_everything_is_left_out(watched: Watched) -> None:
    """The requests of a round that has ended must not touch the next one. The pipe is emptied all the same: otherwise
    the clock would never sleep."""
    watched.acquire("a", LONG_S)
    watched.look()
    watched.acquire("b", -1)
    assert watched.pipe.look(watched.clock.now() + 10, {}) == []
    assert watched.pipe.look(watched.clock.now() + 20, ME) == []
    assert watched.left() == []
    assert watched.said == []


def test_a_round_begins_without_timers(watched: Watched) -> None:
    """The workers of the round before are gone. One of the next round may get the pid of one of them."""
    watched.acquire("a", LONG_S)
    watched.rest()
    watched.pipe.renew()
    assert watched.left() == []


def test_many_requests_cost_few_looks(watched: Watched) -> None:
    """A thousand timers in a second must not wake the keeper a thousand times. No request is lost meanwhile."""
    watched.acquire("last to expire", 2 * LONG_S)
    assert watched.look() == []
    for number in range(100):
        watched.acquire(str(number), LONG_S)
        watched.client.release(str(number))
    wakes, until = 0, watched.clock.now() + LONG_S
    while not watched.clock.watched:
        watched.clock.wait(min(until, watched.pipe.wakes_at or until))
        watched.look()
        wakes += 1
    assert wakes <= 5
    assert watched.left() == ["last to expire"]
    assert watched.said == []


def test_a_pause_ends_when_a_timer_expires(watched: Watched) -> None:
    """A short timer must not wait for the end of the pause."""
    watched.acquire("soon", 0.01)
    now = watched.clock.now()
    watched.pipe.look(now, ME)
    assert not watched.clock.watched, "a pause has begun"
    assert watched.pipe.wakes_at is not None
    assert watched.pipe.wakes_at <= now + 0.02
    assert watched.expired() == ["soon"]


# ---- what is made, and removed ----


def test_a_pipe_without_a_path_is_in_a_scratch_folder(base: Path) -> None:
    """A killed keeper leaves the folder, and a later one removes it."""
    with nothing_left(base):
        path = run_killed("""
            from reknit.adapters.keeper.watchdog.timerpipe import TimerPipe
            from reknit.adapters.runtime.clock import SystemClock
            pipe = TimerPipe(SystemClock(), "", "job", print)
            print(pipe.path)
        """).strip()
        assert Path(path).parent.parent == base
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert remove_abandoned() == 1


@pytest.mark.parametrize("left", ["nothing", "pipe", "empty file"])
def test_what_an_earlier_agent_has_left_is_replaced(base: Path, left: str) -> None:
    """A killed agent must not keep the next one from starting. `mktemp` is a usual way to find a name."""
    path = base / "timers"
    if left == "pipe":
        os.mkfifo(path)
    elif left == "empty file":
        path.touch()
    found = Watched(str(path))
    assert found.pipe.path == str(path)
    assert path.is_fifo()
    found.acquire("a", -1)
    assert found.expired() == ["a"]
    found.close()
    found.pipe.close()
    assert list(base.iterdir()) == []
    assert found.said == []


@pytest.mark.parametrize("there", ["file", "folder", "link", "no folder"])
def test_nothing_else_is_removed(base: Path, there: str) -> None:
    """torch removes whatever has this name, for example a script of the user."""
    path = base / "timers"
    if there == "file":
        path.write_text("precious")
    elif there == "folder":
        path.mkdir()
    elif there == "link":
        path.symlink_to(base / "nowhere")
    else:
        path = base / "missing" / "timers"
    before = sorted(base.rglob("*"))
    with nothing_left(base), pytest.raises(CannotMake, match=r"TORCHELASTIC_TIMER_FILE.*timers: ") as error:
        Watched(str(path))
    assert not error.value.is_limit
    assert sorted(base.rglob("*")) == before


def test_the_pipe_of_another_agent_is_left_alone(base: Path) -> None:
    """An agent that is itself a worker inherits the variables of the agent above. torch would take the pipe away."""
    path = base / "timers"
    outer = Watched(str(path))
    inner = Watched(str(path))
    assert inner.pipe.path != str(path)
    inner.pipe.renew()
    inner.pipe.renew()
    (line,) = inner.said
    assert line.startswith(f"reknit: TORCHELASTIC_TIMER_FILE={path} is a pipe of another agent; the workers of")
    assert line.endswith(inner.pipe.path)
    inner.close()
    outer.acquire("a", -1)
    assert outer.expired() == ["a"]
    outer.close()
    assert list(base.iterdir()) == []


def test_a_pipe_that_was_removed_is_made_again_for_the_next_round(base: Path) -> None:
    """Something cleans the folder for temporary files now and then."""
    path = base / "timers"
    found = Watched(str(path))
    path.unlink()
    found.pipe.renew()
    found.acquire("a", -1)
    assert found.expired() == ["a"]
    path.unlink()
    path.write_text("mine now")
    found.pipe.renew()
    (line,) = found.said
    assert line.startswith("reknit: the timers of this round are not watched: the pipe for timers (TORCHELASTIC_")
    assert line.endswith(f"{path}: it is there already, and no pipe; remove it, or choose another path")
    assert found.look() == []
    assert found.pipe.wakes_at is None
    path.unlink()
    found.pipe.renew()
    found.acquire("b", -1)
    assert found.expired() == ["b"]
    path.unlink()
    path.write_text("mine again")
    found.close()
    assert path.read_text() == "mine again"
