"""How agents record events: a handler that is slow, hangs or fails does not hold up an agent, and does not end it.

`reknit.elastic.events.record` calls the handler at once, as torch's does. An agent calls `record` of this module: a
thread calls the handler. `flush` waits for it, for a limited time.
"""

from __future__ import annotations

import os
from logging import NullHandler

from reknit.adapters.host.address import full_host_name
from reknit.adapters.observe.delivery import Delivery
from reknit.adapters.observe.destinations import HANDLERS, RENDEZVOUS, handler_of, is_silent, logger_of
from reknit.adapters.observe.records import Event, RdzvEvent
from reknit.adapters.observe.torchelastic_events import RendezvousEvents
from reknit.adapters.runtime.loop import Observer
from reknit.app.settings import NO_EVENTS
from reknit.elastic.utils.logging import get_logger

FLUSH_S = 5.0
"""How long the end of a run waits for a slow handler. Seconds."""
_deliveries: dict[tuple[int, str], Delivery] = {}
"""The key is a process id and a destination. A forked child does not have the threads of its parent, so it needs
deliveries of its own."""
_logger = get_logger(__name__)


def check(destination: str) -> None:
    """Make the handler of a destination, if that was not done. Raises `UnusableHandler`, which is a `ValueError` and a
    `KeyError`, if there is none."""
    handler_of(destination)


def record(event: Event | RdzvEvent, destination: str) -> None:
    """Hand an event to the handler of `destination`, soon."""
    handler = handler_of(destination)
    if isinstance(handler, NullHandler):
        return
    logger, key = logger_of(destination, handler), (os.getpid(), destination)
    if key not in _deliveries:
        _deliveries[key] = Delivery(destination, logger)
    _deliveries[key].put(event.serialize())
    _show_troubles(_deliveries[key])


def flush() -> None:
    """Give the handlers some seconds for what they have not taken yet."""
    for (pid, _), delivery in list(_deliveries.items()):
        if pid == os.getpid():
            delivery.flush(FLUSH_S)
            _show_troubles(delivery)


def _show_troubles(delivery: Delivery) -> None:
    for line in delivery.troubles():
        _logger.warning("%s", line)


def rendezvous_observers(run_id: str, destination: str) -> list[Observer]:
    """What records the events of the rendezvous. Empty if nobody listens. `destination`: that of the other events. If
    they are dropped, the handlers of installed packages are not looked for, because that takes time."""
    is_added = not isinstance(HANDLERS.get(RENDEZVOUS), NullHandler)
    if (destination == NO_EVENTS and not is_added) or is_silent(RENDEZVOUS):
        return []
    return [RendezvousEvents(run_id, full_host_name(), os.getpid(), lambda event: record(event, RENDEZVOUS))]
