"""From the settings to what records torchelastic's events of one agent. Imported only if events are asked for.

1. The agent never waits for a handler, and no handler can end it: see `Delivery`.
2. The destination `console` is no handler here. Its lines go where reknit's own lines go, and stay whole.
3. Somebody who listens to the events of the rendezvous gets them as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from reknit.adapters.host.address import full_host_name
from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.observe.delivery import Delivery
from reknit.adapters.observe.destinations import CONSOLE, RENDEZVOUS, handler_of, is_recorded, is_silent, logger_of
from reknit.adapters.observe.torchelastic_events import About, Events, RendezvousEvents
from reknit.adapters.runtime.loop import Observer
from reknit.app.report import PREFIX, Say
from reknit.app.settings import Settings
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event

from .surroundings import Wired

FLUSH_S = 5.0
"""How long the end of an agent waits for a slow handler. Seconds."""
_ALONE = "reknit"
"""The backend of a job with one node: its nodes meet nowhere."""


class Recording:
    """An observer of one agent's loop. Only the thread that runs the loop calls it. Close it when the loop has
    ended."""

    def __init__(self, settings: Settings, wired: Wired, say: Say) -> None:
        """`say`: shows a line, and does not wait. Raises `UnusableHandler`. May wait a second for the name of the host.

        To be called when there is a keeper already: the handler may start threads, and a process with threads should
        not be forked."""
        self._say = say
        self._deliveries: list[Delivery] = []
        hostname = full_host_name()
        watches = settings.timer_file is not None
        about = About(settings.run_id, _entry_point(settings), _backend(settings), hostname, watches)
        record = self._way_to(settings.event_handler)
        self._events = Events(about, lambda event: record(event.serialize()), _pids_of(wired))
        self._observers: list[Observer] = [self._events]
        if not is_silent(RENDEZVOUS):
            tell = self._way_to(RENDEZVOUS)
            made = RendezvousEvents(settings.run_id, hostname, os.getpid(), lambda event: tell(event.serialize()))
            self._observers.append(made)

    def _way_to(self, destination: str) -> Callable[[str], None]:
        handler = handler_of(destination)
        if handler is CONSOLE:
            return self._say if is_recorded() else lambda line: None
        delivery = Delivery(destination, logger_of(destination, handler))
        self._deliveries.append(delivery)
        return delivery.put

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        for observer in self._observers:
            observer(before, event, after, commands)
        self._show_troubles()

    def close(self, error: str = "") -> None:
        """Give the handlers some seconds for what they have not taken yet. `error`: what the loop has raised."""
        self._events.close(error)
        for delivery in self._deliveries:
            delivery.flush(FLUSH_S)
        self._show_troubles()

    def _show_troubles(self) -> None:
        for delivery in self._deliveries:
            for line in delivery.troubles():
                self._say(PREFIX + line)


def _entry_point(settings: Settings) -> str:
    if settings.function is not None:
        return str(getattr(settings.function, "__qualname__", settings.function))
    return os.path.basename(settings.command[0])


def _backend(settings: Settings) -> str:
    return _ALONE if settings.meeting is None else settings.meeting.backend


def _pids_of(wired: Wired) -> Callable[[int], Mapping[int, int]]:
    """By local rank, the processes of the workers of a round. A port that a program has brought does not tell them."""
    workers = wired.ports.workers
    return workers.pids if isinstance(workers, KeeperClient) else lambda round_: {}
