"""Loggers of the modules of `reknit.elastic`."""

from __future__ import annotations

import inspect
import logging
import os

from .log_level import get_log_level

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger whose level is that of the variable LOGLEVEL, in capitals or not. A name that is no level, or no
    variable, means WARNING. `name`: None means the caller's module."""
    if name is None:
        caller = inspect.currentframe()
        caller = caller.f_back if caller is not None else None
        name = caller.f_globals.get("__name__", "") if caller is not None else ""
    logger = logging.getLogger(name)
    levels = logging.getLevelNamesMapping()
    logger.setLevel(levels.get(os.environ.get("LOGLEVEL", "").upper(), levels[get_log_level()]))
    return logger
