"""Workers as real processes, driven as the loop drives them. The events are kept.

`__all__` also holds what scripts need that run alone (`from tests.support.processes import *`).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import fields

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.common.spawn import Leader
from reknit.adapters.keeper.output.console import LAST_WORDS_S, PLAIN
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.keeper.process.processes import Processes
from reknit.adapters.keeper.protocol.wire import Configure, Stop
from reknit.adapters.keeper.watchdog.page import Page
from reknit.adapters.keeper.watchdog.watchdog import Watchdog
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import StartWorkers, WorkersExited, WorkersStopped
from reknit.core.job.reasons import AllSucceeded
from reknit.core.job.workers import Assignment, TimerExpired, WorkerFailure, WorkerRanks
from tests.support.alone import STUBBORN
from tests.support.waiting import PATIENCE_S, is_alive, read_pids, until

__all__ = [
    "FOR_EVER",
    "STUBBORN",
    "SystemClock",
    "WorkersExited",
    "WorkersStopped",
    "assignment",
    "drive",
    "drive_exits",
    "failures",
    "is_alive",
    "make_processes",
    "os",
    "read_pids",
    "resource",
    "signal",
    "start",
    "stop",
    "stopped",
    "sys",
    "until",
]

FOR_EVER = 1e6
Make = Callable[..., Processes]


def assignment(count: int, round_: int = 0) -> Assignment:
    return Assignment(
        round=round_,
        group_rank=1,
        group_world_size=2,
        world_size=2 * count,
        role="trainer",
        role_world_size=2 * count,
        master_addr="node-a",
        master_port=4711,
        workers=tuple(WorkerRanks(local_rank=i, rank=count + i, role_rank=count + i) for i in range(count)),
        restart_count=1,
        max_restarts=3,
    )


def make_processes(clock: SystemClock, *argv: str, **options: Any) -> Processes:
    """`options`: fields of `Configure`, and arguments of `Processes`."""
    names = {field.name for field in fields(Configure)} - {"env"}
    wanted = {name: options.pop(name) for name in names & options.keys()}
    return Processes(
        clock,
        Configure(argv, **{"run_id": "job", "streams": StreamSettings(lines=PLAIN), **wanted}),
        **{"env": os.environ, **options},
    )


def start(workers: Processes | KeeperClient, count: int = 1, round_: int = 0) -> None:
    workers.start(StartWorkers(round_, assignment(count, round_)))


class Driven(Protocol):
    """Workers that tell what has happened to them: those in a keeper, or those of its client."""

    @property
    def wakes_at(self) -> float | None: ...

    def events(self, now: float) -> Sequence[Event]: ...


def stop(
    workers: Processes | KeeperClient,
    grace_s: float = FOR_EVER,
    round_: int = 0,
    signum: int = signal.SIGTERM,
    *,
    await_exits_s: float = 0.0,
) -> None:
    if isinstance(workers, Processes):
        workers.stop(Stop(round_, signum, grace_s, await_exits_s=await_exits_s))
    else:
        workers.stop(StopWorkers(round_, signum, grace_s, AllSucceeded(), await_exits_s=await_exits_s))


class ToldWatchdog(Watchdog):
    """A watchdog with a further source, which finds workers hung when a test says so."""

    def __init__(self, clock: SystemClock) -> None:
        super().__init__(clock)
        self.leaders: list[Leader] = []
        """All workers that were started, in this order."""
        self.has_news = False

    def watch(self, leader: Leader, page: Page) -> None:
        self.leaders.append(leader)
        super().watch(leader, page)

    def find(self, cause: TimerExpired, *local_ranks: int, signum: int = signal.SIGABRT) -> None:
        """These workers are hung."""
        for leader in self.leaders:
            if leader.local_rank in local_ranks:
                self.expire(leader, cause, signum)
        self.has_news = True

    @property
    def hears_at(self) -> float | None:
        return 0.0 if self.has_news else super().hears_at

    def hear(self, leaders: Sequence[Leader], now: float) -> None:
        self.has_news = False
        super().hear(leaders, now)


def drive(workers: Driven, clock: SystemClock, kind: type[Event]) -> list[Event]:
    """Drive the workers until an event of this kind has come. Returns all events that came."""
    seen: list[Event] = []
    give_up = clock.now() + PATIENCE_S
    while not any(isinstance(event, kind) for event in seen):
        assert clock.now() < give_up, f"waited in vain for {kind.__name__}, got {seen}"
        wakes_at = workers.wakes_at
        clock.wait(give_up if wakes_at is None else min(wakes_at, give_up))
        seen += workers.events(clock.now())
    return seen


def drive_exits(workers: Driven, clock: SystemClock, count: int) -> list[Event]:
    """Drive the workers until so many of them have exited. Returns all events that came."""
    seen: list[Event] = []
    while sum(len(event.exits) for event in seen if isinstance(event, WorkersExited)) < count:
        seen += drive(workers, clock, WorkersExited)
    return seen


def failures(seen: list[Event]) -> list[WorkerFailure]:
    exits = [exit_ for event in seen if isinstance(event, WorkersExited) for exit_ in event.exits]
    return [exit_.failure for exit_ in exits if exit_.failure]


def stopped(seen: list[Event]) -> WorkersStopped:
    (event,) = [event for event in seen if isinstance(event, WorkersStopped)]
    return event


def let_go(workers: Processes) -> None:
    """End the workers as the keeper does, and close what the keeper leaves open until its process ends."""
    workers.end_all()
    workers._streams.close(LAST_WORDS_S)
    workers._use_spare()
    workers._ports.release()
    workers._launcher.close()
