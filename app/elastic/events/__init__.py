"""The counterpart of `torch.distributed.elastic.events`: what agents and workers tell the platform around them.

    from reknit.elastic import events
    events.record(events.Event("restarted", events.EventSource.AGENT), "console")

An event goes, as one line of JSON, to the Python logger `torchelastic-events-<destination>`. Destinations are `null`
(the default, which drops events), `console` (stderr) and `dynamic_rendezvous` (dropped as well). A program adds its own
to `events.handlers._log_handlers`, as with torch. docs/events.md says more.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import traceback

from reknit.adapters.observe.destinations import logger_of

from .api import Event, EventSource, NodeState, RdzvEvent
from .handlers import get_logging_handler

__all__ = [
    "Event",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]


def record(event: Event, destination: str = "null") -> None:
    """Hand an event to the handler of `destination`, and return when the handler has taken it. Raises `KeyError` if
    there is no such destination."""
    _get_or_create_logger(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Hand a rendezvous event to the handler of the destination `dynamic_rendezvous`."""
    _get_or_create_logger("dynamic_rendezvous").info(event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make a rendezvous event and record it. Does nothing while the destination `dynamic_rendezvous` drops events.

    `name`: the second half of the event's name, after the caller's file. Empty means the caller's function.
    `hostname`: empty means this host. `pid`: None means this process. If `node_state` is FAILED, the event carries the
    traceback of the exception that is being handled.
    """
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    caller = inspect.stack(0)[1]
    name = f"{os.path.basename(caller.filename)}:{name or caller.function}"
    record_rdzv_event(
        RdzvEvent(
            name=name,
            run_id=run_id,
            message=message,
            hostname=hostname or socket.getfqdn(),
            pid=os.getpid() if pid is None else pid,
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
        )
    )


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    """The logger of a destination. Its level is that of the variable LOGLEVEL, or INFO."""
    return logger_of(destination, get_logging_handler(destination))
