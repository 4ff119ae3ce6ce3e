"""The ports of one simulated agent. The world carries out what the loop tells them, after the step was made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from reknit.adapters.link.machine import taken
from reknit.adapters.link.messages import Folded
from reknit.core.agent.commands import Append, Beat

from . import store
from . import workers as staff

if TYPE_CHECKING:
    from reknit.core.agent.commands import StopWorkers
    from reknit.core.agent.events import Event
    from reknit.core.agent.worker_words import StartWorkers
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job

    from .hosts import Inputs, Proc
    from .scene import Scene


class SimulatedClock:
    """Implements `ports.Clock`. Time passes only in `Scene.run_for`, so `wait` raises."""

    def __init__(self, world: Scene, proc: Proc) -> None:
        self._world = world
        self._proc = proc

    def now(self) -> float:
        return self._proc.clock(self._world.now)

    def wait(self, until: float | None) -> None:
        raise RuntimeError("nothing waits in a simulated world: `Scene.run_for` lets its time pass")

    def wake(self) -> None:
        """Does nothing: the world turns a loop whenever it has news for it."""

    def fileno(self) -> int:
        raise OSError("a simulated clock has no descriptor")

    def watch(self, fd: int) -> None: ...

    def watch_writable(self, fd: int) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class SimulatedLink:
    """Implements `ports.Link` with the machine that `ThreadedLink` has. The simulated store answers its calls."""

    def __init__(self, world: Scene, proc: Proc) -> None:
        self._world = world
        self._proc = proc

    def append(self, entry: Entry) -> None:
        store.feed(self._world, self._proc, Append(entry))

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        store.feed(self._world, self._proc, Beat(node, count, tuple(watch)))

    def events(self, now: float) -> list[Event]:
        self._proc.link, news = taken(self._proc.link)
        return list(news)

    def folded(self, job: Job) -> None:
        store.feed(self._world, self._proc, Folded(job))

    def close(self) -> None: ...


class SimulatedWorkers:
    """Implements `ports.Workers`."""

    wakes_at = None

    def __init__(self, world: Scene, proc: Proc) -> None:
        self._world = world
        self._proc = proc
        self._inputs = proc.inputs

    def start(self, command: StartWorkers) -> None:
        self._world.later(partial(staff.start, self._world, self._proc, command))

    def stop(self, command: StopWorkers) -> None:
        self._world.later(partial(staff.stop, self._world, self._proc, command))

    def renew_port(self) -> None:
        self._world.later(partial(staff.renew_port, self._world, self._proc))

    def events(self, now: float) -> list[Event]:
        news = self._inputs.workers
        if news:
            self._inputs.workers = []
        return news

    def close(self) -> None: ...


class SimulatedRequests:
    """Implements `ports.Requests`."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def taken(self) -> Sequence[int]:
        signals = self._inputs.signals
        if signals:
            self._inputs.signals = []
        return signals
