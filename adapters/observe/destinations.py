"""The places where torchelastic's events go, by name. `docs/events.md` says how a program or a package adds one.

A name is looked for in this order:

1. in `HANDLERS`, to which a program may add;
2. among the entry points of the group `reknit.event_handlers` of the installed packages;
3. in torch's own table, if the program has loaded torch's module. So what a platform has added there is found here;
4. as an import path, `module:name`.

An entry point, or an import path, names a `Handler` of Python's logging, or something that makes one when it is called
without arguments. The handler is made once in a process, and kept in `HANDLERS`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "reknit.event_handlers"
_TORCHS = "torch.distributed.elastic.events.handlers"

CONSOLE = logging.StreamHandler()
"""The destination `console`, unless a program puts another one in its place. Writes to stderr."""
RENDEZVOUS = "dynamic_rendezvous"
"""The destination of the events of a rendezvous. Nobody listens there unless somebody adds a handler."""
_NOBODY = logging.NullHandler()
HANDLERS: dict[str, logging.Handler] = {"console": CONSOLE, RENDEZVOUS: _NOBODY, "null": logging.NullHandler()}
"""By destination: its handler."""
_LOGGERS: dict[str, tuple[logging.Logger, logging.Handler]] = {}
"""By destination: its logger with its handler, once it was used."""


class UnusableHandler(ValueError, KeyError):
    """There is no such destination, or its handler cannot be made. The text is one line. torch raises `KeyError`."""

    __str__ = Exception.__str__  # that of KeyError would put the text into quotes


def check(destination: str) -> None:
    """Raises `UnusableHandler` if there is no such destination. Imports nothing of its handler."""
    _found(destination)


def handler_of(destination: str) -> logging.Handler:
    """The handler of a destination, which is made if need be. Raises `UnusableHandler`."""
    found = _found(destination)
    if isinstance(found, logging.Handler):
        return found
    HANDLERS[destination] = made = _made(destination, found)
    return made


def is_silent(destination: str) -> bool:
    """Whether nobody listens there: the handler drops events. Raises `UnusableHandler`."""
    return isinstance(handler_of(destination), logging.NullHandler)


def logger_of(destination: str, handler: logging.Handler) -> logging.Logger:
    """The logger whose lines are the events of a destination. Its level is that of the variable LOGLEVEL, or INFO."""
    logger, known = _LOGGERS.get(destination, (logging.getLogger(f"torchelastic-events-{destination}"), None))
    if known is not handler:
        logger.setLevel(_level())
        logger.propagate = False  # the destination decides where its events go, and not the program's own logging
        if known is not None:
            logger.removeHandler(known)
        logger.addHandler(handler)
        _LOGGERS[destination] = logger, handler
    return logger


def is_recorded() -> bool:
    """Whether events are recorded at all. Their level is INFO, and the variable LOGLEVEL may ask for less."""
    return _level() <= logging.INFO


def _level() -> int:
    return logging.getLevelNamesMapping().get(os.environ.get("LOGLEVEL", "INFO").upper(), logging.INFO)


def _found(destination: str) -> logging.Handler | EntryPoint:
    known = HANDLERS.get(destination, _NOBODY)
    if known is not _NOBODY:
        return known
    installed = _installed()
    if destination in installed:
        return installed[destination]
    theirs = getattr(sys.modules.get(_TORCHS), "_log_handlers", {})
    if isinstance(handler := theirs.get(destination), logging.Handler):
        return handler
    if destination in HANDLERS:
        return known
    module, colon, name = destination.partition(":")
    if module and colon and name:
        from importlib.metadata import EntryPoint  # slow to import, and rarely needed

        return EntryPoint(destination, destination, GROUP)
    raise UnusableHandler(
        f"no event handler is called {destination!r}; there are {_listed({*HANDLERS, *installed} - {RENDEZVOUS})}."
        " Any other is named by its import path, module:name"
    )


@cache
def _installed() -> dict[str, EntryPoint]:
    """By name: the handlers of the installed packages. Looked up once, because all packages are looked at."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return {point.name: point for point in entry_points(group=GROUP)}


def _listed(names: Iterable[str]) -> str:
    *others, last = sorted(names)
    return f"{', '.join(others)} and {last}" if others else last


def _made(destination: str, point: EntryPoint) -> logging.Handler:
    try:
        found = point.load()
        made = found if isinstance(found, logging.Handler) else found()
    except Exception as error:  # whatever the code of a user raises
        raise UnusableHandler(f"the event handler {destination} cannot be made: {told(error)}") from error
    if not isinstance(made, logging.Handler):
        what = f"{point.value} is no logging.Handler, and makes none, but {_kind(made)}"
        raise UnusableHandler(f"the event handler {destination} cannot be made: {what}")
    if type(made).handleError.__module__.startswith("logging"):
        # logging itself would print a traceback for each event. `Delivery` says in one line what has gone wrong.
        made.handleError = _raise_again  # type: ignore[method-assign]  # its class is logging's, for all handlers
    return made


def _raise_again(record: logging.LogRecord) -> None:
    """Called by a handler in the `except` clause for what it has met."""
    raise  # noqa: PLE0704  # see above


def _kind(value: object) -> str:
    return type(value).__qualname__


def told(error: BaseException) -> str:
    """`ValueError: no such place`, in one line."""
    text = " ".join(str(error).split())
    return f"{_kind(error)}: {text}" if text else _kind(error)
