"""Functions as workers of a real keeper."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from reknit.adapters.keeper.client.function_workers import Function
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses
from reknit.core.agent.worker_words import WorkersStarted
from tests.support import called
from tests.support.keepers import Kept
from tests.support.processes import drive_exits, failures


def begin(kept: Kept, *functions: Function, round_: int = 0, **more: Any) -> None:
    processes = tuple(Process(i, 10 + i, (), **more) for i in range(len(functions)))
    kept.keeper.start(StartProcesses(round_, processes), dict(enumerate(functions)))


def call(kept: Kept, fn: Callable[..., object], *args: object, **more: Any) -> Any:
    """Run one function to its end. Returns its failure, or else its value."""
    begin(kept, Function(fn, args), **more)
    found = failures(drive_exits(kept.keeper, kept.clock, 1))
    round_ = more.get("round_", 0)
    values = kept.keeper.values(round_)
    assert len(values) + len(found) == 1
    return found[0] if found else values[0]


def queues_and_events_arrive(kept: Kept, start_method: str) -> None:
    """Three workers get a queue and an event as arguments, and use them."""
    context = multiprocessing.get_context(start_method)
    queue, event = context.SimpleQueue(), context.Event()
    begin(kept, *(Function(called.fill, (queue, event, i)) for i in range(3)))
    kept.drive(WorkersStarted)
    event.set()
    assert sorted(queue.get() for _ in range(3)) == [0, 1, 4]
    assert failures(drive_exits(kept.keeper, kept.clock, 3)) == []
    queue.close()
