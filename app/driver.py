"""The loop between the core and the world.

    event = next(ports);  agent, commands = step(agent, event);  execute each command

1. One event, one step, all its commands; then the next event. Nothing is decided here.
2. It sleeps in `Clock.wait` only when no port has anything to tell, until the earliest deadline anybody has named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from reknit.core.agent import Agent
from reknit.core.commands import Append, Beat, Command, Finish, ReservePort, StartWorkers, StopWorkers
from reknit.core.events import EntriesRead, Event, Started, StopRequested, Woken
from reknit.core.step import step
from reknit.core.values import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    from reknit.adapters.ports import Clock, Link, Requests, Workers

Observer = Callable[[Agent, Event, Agent, Sequence[Command]], None]
"""Told of every step: the agent before, the event, the agent after, the commands."""


class Ports:
    """One agent's world."""

    def __init__(self, clock: Clock, journal: Link, workers: Workers, requests: Requests) -> None:
        self.clock = clock
        self.journal = journal
        self.workers = workers
        self.requests = requests


def drive(agent: Agent, ports: Ports, nonce: str, observe: Observer) -> Agent:
    """Run an agent to its end; the agent that is returned holds its result."""
    inbox: deque[Event] = deque([Started(ports.clock.now(), nonce, ports.workers.reserve_port())])
    while True:
        event = inbox.popleft() if inbox else Woken(ports.clock.now())
        before, after = agent, step(agent, event)
        agent = after.agent
        for command in after.commands:
            _execute(command, ports)
        if isinstance(event, EntriesRead):
            ports.journal.folded(agent.job)
        # Told afterwards: what is said of a start must not come before it.
        observe(before, event, agent, after.commands)
        if agent.result is not None:
            return agent
        inbox.extend(_news(ports))
        if not inbox:
            ports.clock.wait(_earliest(agent.wakes_at, ports.workers.wakes_at))
            inbox.extend(_news(ports))


def _execute(command: Command, ports: Ports) -> None:
    match command:
        case Append(entry):
            ports.journal.append(entry)
        case StartWorkers():
            ports.workers.start(command)
        case StopWorkers():
            ports.workers.stop(command)
        case ReservePort():
            ports.workers.renew_port()
        case Beat(node, watch):
            ports.journal.beat(node, watch)
        case Finish():
            pass  # the agent holds its result
        case _:
            assert_never(command)


def _news(ports: Ports) -> list[Event]:
    """What the ports have to tell now, without waiting."""
    now = ports.clock.now()
    events: list[Event] = [StopRequested(now, signal) for signal in ports.requests.taken()]
    return [*events, *ports.workers.events(now), *ports.journal.events(now)]


def _earliest(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)
