"""The counterpart of `torch.distributed.elastic.events.handlers`: the destinations of events."""

from __future__ import annotations

import logging

from reknit.adapters.observe.destinations import HANDLERS, handler_of

_log_handlers = HANDLERS
"""By destination: its handler. Programs may add their own."""


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """The handler of a destination. Raises `UnusableHandler`, which is a `KeyError`, if there is none."""
    return handler_of(destination)
