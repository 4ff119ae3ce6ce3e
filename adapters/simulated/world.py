"""A whole cluster under one virtual clock. The agents and their loops are real, and everything else is simulated.

1. Time jumps to the next thing that can happen. Nothing here sleeps, and there are no random numbers: all delays come
   from `luck`, which depends on the seed alone.
2. The world is no kinder than the real one. Appends land late, twice or never. Reads bring a part of the journal, and
   may have been made before the agent was suspended. Each agent's clock has a zero of its own.
3. Faults are functions of a world (`faults`, `staff`). A caller makes them happen now, or schedules them with `after`.
4. Watchers are told of every step before the world does what the agent wants. They see the world as it was when the
   agent decided.
"""

from __future__ import annotations

from functools import partial

from reknit.adapters.link.machine import begun
from reknit.adapters.runtime.loop import Loop, Ports
from reknit.core.agent.agent import Agent
from reknit.core.agent.events import Started

from . import store, workers
from .hosts import Proc
from .ports import SimulatedClock, SimulatedLink, SimulatedRequests, SimulatedWorkers
from .scene import Scene, Watcher

__all__ = ["Watcher", "World"]


class World(Scene):
    """One cluster."""

    def begin(self, proc: Proc) -> None:
        """Start the process of an agent. `proc`: has an unused name and clock, and the number of earlier processes."""
        ports = Ports(
            SimulatedClock(self, proc),
            SimulatedLink(self, proc),
            SimulatedWorkers(self, proc),
            SimulatedRequests(proc.inputs),
        )
        proc.started_at = self.now
        proc.agent = Agent(proc.spec)
        proc.loop = Loop(proc.agent, ports, [partial(self._stepped, proc)])
        self.procs.append(proc)
        port, nonce = self.free_port(), f"n{proc.number}"
        proc.link, calls = begun(nonce, store.LOOK_S)
        self.happen(proc, lambda at: Started(at, nonce=nonce, port=port))
        store.make(self, proc, calls)

    def kill(self, proc: Proc) -> None:
        """Kill the agent by SIGKILL. Its keeper notices, and kills the workers a moment later."""
        if not proc.up:
            return
        proc.dead, proc.dead_at = True, self.now
        store.outlive(self, proc)
        self.after(0.1 + 0.1 * self.luck("warden", 4), lambda: workers.die(self, proc))
        if proc.spec.hosts_journal:
            store.kill(self)

    def ask_to_leave(self, proc: Proc, signal: int) -> None:
        """Send this signal to the agent."""
        proc.told_at = self.now
        self.after(0.0, partial(self._asked, proc, signal))

    def _asked(self, proc: Proc, signal: int) -> None:
        if proc.suspended:
            proc.inbox.append(partial(self._asked, proc, signal))
        elif proc.up:
            proc.inputs.signals.append(signal)
            self.turn(proc, proc.clock(self.now))

    def finished(self, proc: Proc) -> None:
        if proc.spec.hosts_journal:
            self.after(0.1, lambda: store.kill(self))
