"""A real keeper with its client in this process, driven as the loop drives it. The events are kept."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from reknit.adapters.keeper.client import start as starting
from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.client.start import Keeping, Start
from reknit.adapters.keeper.output.console import PLAIN, ConsoleWriter
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.keeper.protocol.wire import Configure
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.events import Event, Started
from reknit.core.agent.worker_words import WorkersStarted, WorkersStopped
from tests.support.processes import drive, start, stop
from tests.support.waiting import PATIENCE_S, is_alive, read_pids, until

MARK = "REKNIT_MARK"
SLEEP = "echo $$ >> $0; sleep 1000 & echo $! >> $0; wait"
"""A worker for `sh -c`, with a child. Both pids go to the file that is the first argument."""
STUBBORN = f"trap '' TERM; {SLEEP}"
"""As `SLEEP`, but both processes ignore SIGTERM."""


class Kept:
    """A client, its clock, the lines that it has said, and the file that is the console of its keeper."""

    def __init__(
        self,
        folder: Path,
        *argv: str,
        how: str | Start = "exec",
        restart: Start | None = None,
        is_remote: bool = False,
        start_method: str = "spawn",
        **configure: Any,
    ) -> None:
        """`is_remote`: the keeper has no console. The output crosses the wire, and the client writes it to the file."""
        self.clock = SystemClock()
        self.said: list[str] = []
        self.has_said = True
        """Whether the lines in `said` count as written."""
        self.mark = configure.setdefault("mark", f"test-{uuid.uuid4().hex}")
        self.console = folder / "console"
        self.seen: list[Event] = []
        self._file = os.open(self.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if is_remote else -1
        shown = ConsoleWriter(self._file, has_room=self.clock.wake) if is_remote else None
        self.consoles = {1: shown, 2: shown} if shown else {}
        start_ = ways()[how] if isinstance(how, str) else how
        try:
            self.keeper = KeeperClient(
                self.clock,
                Configure(argv=argv, **{"run_id": "job", "streams": StreamSettings(lines=PLAIN), **configure}),
                "nonce",
                with_console(self.console, start_),
                restart=None if restart is None else with_console(self.console, restart),
                say=self.said.append,
                has_said=lambda wait_s: self.has_said,
                consoles=self.consoles,
                start_method=start_method,
            )
        except BaseException:
            self._let_go()
            raise

    @property
    def pid(self) -> int:
        return self.keeper.pid

    def drive(self, kind: type[Event]) -> list[Event]:
        """Drive the client until an event of this kind has come. Returns all events that came meanwhile."""
        seen = drive(self.keeper, self.clock, kind)
        self.seen += seen
        return seen

    def drive_until(self, condition: Callable[[], object]) -> None:
        give_up = self.clock.now() + PATIENCE_S
        while not condition():
            assert self.clock.now() < give_up, f"waited in vain, got {self.seen}, {self.said}"
            self.seen += self.keeper.events(self.clock.now())
            self.clock.wait(min(self.keeper.wakes_at or give_up, self.clock.now() + 0.01))

    def ready(self) -> int:
        """Wait until the keeper is ready. Returns the bootstrap port that it has reserved."""
        (event,) = [event for event in self.drive(Started) if isinstance(event, Started)]
        return event.port

    def run(self, count: int = 1, round_: int = 0) -> None:
        start(self.keeper, count, round_)
        self.drive(WorkersStarted)

    def stop(self, grace_s: float = 0.0, round_: int = 0) -> WorkersStopped:
        """Stop the round, and wait for the answer."""
        stop(self.keeper, grace_s, round_)
        (event,) = [event for event in self.drive(WorkersStopped) if isinstance(event, WorkersStopped)]
        return event

    def flushed(self) -> str:
        """Wait until everything that was written so far is on the console. Returns the text of the console."""
        assert self.keeper.flush(PATIENCE_S)
        assert all(console.flush(PATIENCE_S) for console in self.consoles.values())
        return self.console.read_text(errors="backslashreplace")

    def close(self) -> None:
        self.keeper.close()
        self._let_go()

    def _let_go(self) -> None:
        self.clock.close()
        for console in self.consoles.values():
            console.close(PATIENCE_S)
        self.consoles = {}
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def ways() -> dict[str, Start]:
    """How a keeper is started on this host."""
    return {"exec": lambda: starting.by_exec(dict(os.environ)), "fork": starting.by_fork}


def with_console(path: Path, start: Start) -> Start:
    """`start`, with a file as the keeper's console."""

    def started() -> Keeping:
        before = os.dup(1), os.dup(2)
        console = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.close(console)
        try:
            return start()
        finally:
            for fd, saved in enumerate(before, 1):
                os.dup2(saved, fd)
                os.close(saved)

    return started


def in_turn(starts: Sequence[Start]) -> Start:
    """A start that does something else at each call: the next of these."""
    left = list(starts)

    def started() -> Keeping:
        return left.pop(0)()

    return started


def killed_at_once(start: Start) -> Start:
    """A start whose keeper is killed before it can say anything."""

    def started() -> Keeping:
        keeping = start()
        os.kill(keeping.pid, 9)
        return keeping

    return started


def marked(mark: str) -> list[int]:
    """The pids of all processes on this host that carry the mark and live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and is_alive(process.pid):
                found.append(process.pid)
        except psutil.Error:
            pass  # the process has just ended
    return found


def wait_gone(pids: Sequence[int], mark: str = "") -> float:
    """Wait until none of these processes lives, and none that carries the mark. Returns the seconds that it took."""
    before = time.monotonic()
    until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")
    if mark:
        until(lambda: not marked(mark), "the end of all that carries the mark")
    return time.monotonic() - before


def worker_pids(path: Path, workers: int) -> list[int]:
    """The pids of workers that run `SLEEP`, and of their children."""
    return read_pids(path, 2 * workers)
