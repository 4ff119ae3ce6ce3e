"""The destinations of events."""

from __future__ import annotations

import logging

_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}
"""By destination: its handler. Programs may add their own."""


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """The handler of a destination. Raises `KeyError` if there is none."""
    return _log_handlers[destination]
