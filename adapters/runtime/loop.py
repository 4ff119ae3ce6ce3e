"""The loop between the core and the world: the one interpreter of commands.

    agent, commands = step(agent, event);  tell every observer;  carry out each command

1. One event is one step. All commands of a step are carried out, in order, before the next event is fed.
2. The loop decides nothing, never waits, and owns no thread. A shell (`shells`) calls `turn` and waits in between.
3. Observers change nothing. They are told of a step before its commands are carried out. So a line about a start of
   workers comes before anything that these workers write.
4. An observer that raises an error has a bug. The other observers are told, and the commands are carried out, all the
   same. Then `feed` raises the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, assert_never

from attrs import frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Append, Beat, Command, Finish, Result, StopWorkers
from reknit.core.agent.contact import fence_at
from reknit.core.agent.events import EntriesRead, Event, StopRequested, Woken
from reknit.core.agent.step import step
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import ReservePort, StartWorkers

from .ports import Fences

if TYPE_CHECKING:
    from .ports import Clock, Link, Requests, Workers

Observer = Callable[[Agent, Event, Agent, Sequence[Command]], None]
"""Called after every step, before its commands are carried out. It gets the agent before the step, the event, the agent
after the step, and the commands."""


@frozen
class Ports:
    """The ports of one agent. The caller that makes the ports closes them. The loop does not."""

    clock: Clock
    link: Link
    workers: Workers
    requests: Requests


class Loop:
    """One agent and its ports. Only one thread may call the loop. Other threads may call `ports.clock.wake()`."""

    def __init__(self, agent: Agent, ports: Ports, observers: Iterable[Observer] = ()) -> None:
        """`agent`: usually a new one, `Agent(spec)`. It begins with the event `Started` of `ports.workers`."""
        self.agent = agent
        self.ports = ports
        self._fences = ports.workers if isinstance(ports.workers, Fences) else None
        self._observers = tuple(observers)
        self._inbox: deque[Event] = deque()
        """Events that the ports have told and that were not fed yet. If a step raises an error, the next turn feeds the
        rest."""

    @property
    def result(self) -> Result | None:
        """How the agent has ended. None while it runs."""
        return self.agent.result

    @property
    def wakes_at(self) -> float | None:
        """When `turn` must be called at the latest, on the clock of the ports. None: only news can change something."""
        times = next_wake(self.agent), self.ports.workers.wakes_at
        return min((at for at in times if at is not None), default=None)

    def turn(self, now: float | None = None) -> bool:
        """Take what the ports have to tell, and feed it. If they have nothing, feed `Woken` if the agent's deadline has
        passed.

        `now`: the time. None: the clock is asked.
        Returns True if something was fed, or the agent has ended. Then call `turn` again before waiting: the ports may
        have more to tell that does not wake the clock, for example the agent's own entry in a journal in memory.
        """
        if now is None:
            now = self.ports.clock.now()
        self._take_news(now)
        if not self._inbox and (wakes_at := next_wake(self.agent)) is not None and wakes_at <= now:
            self._inbox.append(Woken(now))
        has_news = bool(self._inbox)
        while self._inbox:
            self.feed(self._inbox.popleft())
        return has_news or self.agent.result is not None

    def feed(self, event: Event) -> None:
        """Make one step, and carry out its commands. Does nothing if the agent has its result."""
        before = self.agent
        if before.result is not None:
            return
        after = step(before, event)
        self.agent = after.agent
        if isinstance(event, EntriesRead):
            # Before the commands: what they append belongs to the life of the journal that was folded.
            self.ports.link.folded(after.agent.job)
        errors = self._tell(before, event, after.commands)
        if self._fences is not None:
            # Before the commands: workers that are started now have a fence from the beginning.
            self._fences.fence(fence_at(after.agent))
        for command in after.commands:
            self._carry_out(command)
        if len(errors) > 1:
            raise ExceptionGroup("several observers have failed", errors)
        if errors:
            raise errors[0]

    def _take_news(self, now: float) -> None:
        ports, inbox = self.ports, self._inbox
        if not self.agent.nonce:
            # `Started` comes first. Before it the agent has no nonce, and can neither read nor say anything.
            inbox.extend(ports.workers.events(now))
        for signal in ports.requests.taken():
            inbox.append(StopRequested(now, signal))
        if not self.agent.nonce:
            return
        inbox.extend(ports.workers.events(now))
        inbox.extend(ports.link.events(now))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Append(entry):
                self.ports.link.append(entry)
            case Beat(node, count, watch):
                self.ports.link.beat(node, count, watch)
            case StartWorkers():
                self.ports.workers.start(command)
            case StopWorkers():
                self.ports.workers.stop(command)
            case ReservePort():
                self.ports.workers.renew_port()
            case Finish():
                pass  # the agent holds its result
            case _:
                assert_never(command)

    def _tell(self, before: Agent, event: Event, commands: Sequence[Command]) -> list[Exception]:
        errors: list[Exception] = []
        for observer in self._observers:
            try:
                observer(before, event, self.agent, commands)
            except Exception as error:
                errors.append(error)
        return errors
