"""Errors that cross processes: a worker writes why it failed into a file, and the agent reads it.

The counterpart of `torch.distributed.elastic.multiprocessing.errors`. The file's form is torch's, so workers may use
either `record`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from logging import getLogger
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from reknit.adapters.keeper.failures.error_files import document

from .error_handler import ErrorHandler
from .handlers import get_error_handler

if TYPE_CHECKING:
    # Not imported otherwise: a worker that records its error imports this file, and should not pay for the core.
    from reknit.core.job.workers import NoProgress, TimerExpired

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

JSON = dict[str, Any]
GlobalRank = int

_NOT_AVAILABLE = "<N/A>"
_NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_TORCH = "torch.distributed.elastic.multiprocessing.errors"
_WIDEST = 60

_logger = getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class ProcessFailure:
    """How a worker failed. What the worker itself says comes from its error file.

    An error file that cannot be understood does not hide the failure: the message says so.
    """

    local_rank: int
    pid: int
    exitcode: int
    """Negative: the worker was killed by that signal."""
    error_file: str
    """The path of the worker's error file. `<N/A>`: the worker has written none."""
    error_file_data: JSON = field(init=False)
    """The whole content of the error file. Without one: `{"message": "<NONE>"}`."""
    message: Any = field(init=False)
    """A text, or the error file's object with `message` and `extraInfo`."""
    timestamp: int = field(init=False)
    """When the worker failed, by its error file. Without one: when this object was made. Seconds since the epoch."""
    cause: NoProgress | TimerExpired | None = field(init=False, default=None, repr=False, compare=False)
    """Why the agent has ended the worker, which was hung. None: the agent has not."""

    def __post_init__(self) -> None:
        self.timestamp = int(time.time())
        self.error_file_data = {"message": "<NONE>"}
        self.message = ""
        # /dev/null stands for no error file.
        found, why = document(self.error_file) if os.path.isfile(self.error_file) else (None, "")
        if why:
            self.message = why
        elif found is None:
            self.error_file = _NOT_AVAILABLE
        else:
            self._take(found)
        if not self.message:
            self.message = self._made_up()

    def _take(self, found: JSON) -> None:
        self.error_file_data = found
        self.message = message = found["message"]
        extra = message.get("extraInfo") if isinstance(message, dict) else None
        at: Any = extra.get("timestamp") if isinstance(extra, dict) else found.get("timestamp")
        try:
            self.timestamp = int(float(at))
        except (TypeError, ValueError, OverflowError):
            pass  # the file has none: the failure was seen just now

    def _made_up(self) -> str:
        if self.exitcode < 0:
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        return _NO_TRACEBACK

    @property
    def has_error_file(self) -> bool:
        """Whether the worker has written an error file."""
        return self.error_file != _NOT_AVAILABLE

    _is_temporary = False
    """The error file is removed when this failure is in use no more."""

    def keep(self, owner: object, *, is_temporary: bool) -> None:
        """Keep the owner of the error file. `is_temporary`: the owner removes the file when nobody uses the owner any
        more."""
        self._owner, self._is_temporary = owner, is_temporary

    @property
    def lasting_error_file(self) -> str:
        """The path for a text that people read later. `<N/A>`: there is no error file, or it is gone by then."""
        return _NOT_AVAILABLE if self._is_temporary else self.error_file

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_owner"}

    @property
    def exit_code(self) -> int:
        """The same as `exitcode`. The documentation uses this name."""
        return self.exitcode

    def signal_name(self) -> str:
        """The signal that killed the worker, for example SIGKILL. `<N/A>`: there was none, or it has no name."""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The local time of `timestamp`, for example 2026-05-01_12:30:00."""
        from datetime import datetime

        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


class ChildFailedError(Exception):
    """Workers of this agent have failed. A `record` around the agent copies the first failure's error file to the
    agent's own.

    If torch's module of the same name is loaded when this error is made, the error is also an instance of torch's
    class. So torch's `record`, and an `except` for torch's class, understand it.
    """

    def __new__(cls, *args: object, **kwargs: object) -> ChildFailedError:
        return super().__new__(_as_torchs(cls), *args, **kwargs)

    def __init__(self, name: str, failures: dict[GlobalRank, ProcessFailure]) -> None:
        """`name`: what has failed. `failures`: by global rank. Raises `ValueError` if there are none."""
        if not failures:
            raise ValueError("failures: there must be at least one")
        self.name = name
        self.failures = failures
        Exception.__init__(self, self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is made again from its text, and the class that also is torch's has no name to find.
        return _remade, (self._plain, self.name, self.failures)

    @property
    def _plain(self) -> type[ChildFailedError]:
        cls = type(self)
        return cls.__bases__[0] if "_is_torchs" in vars(cls) else cls

    def get_first_failure(self) -> tuple[GlobalRank, ProcessFailure]:
        """The failure with the lowest timestamp, and its global rank. If several have it: the first in `failures`."""
        rank = min(self.failures, key=lambda rank: self.failures[rank].timestamp)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report of all failures, in torch's form."""
        title = f"{self.name} FAILED"
        root_rank, _ = self.get_first_failure()
        told = {rank: _told(at, rank, failure) for at, (rank, failure) in enumerate(self.failures.items())}
        lines = [title, *(line for text in told.values() for line in text.split("\n"))]
        width = min(max(map(len, lines)), _WIDEST)
        border, section = boarder_delim * width, section_delim * width
        others = [text for rank, text in told.items() if rank != root_rank] or ["  <NO_OTHER_FAILURES>"]
        root = ["Root Cause (first observed failure):", told[root_rank]]
        return "\n".join(["", border, title, section, "Failures:", *others, section, *root, border])


def _remade(cls: type[ChildFailedError], name: str, failures: dict[GlobalRank, ProcessFailure]) -> ChildFailedError:
    return cls(name, failures)


def _told(at: int, rank: GlobalRank, failure: ProcessFailure) -> str:
    name = failure.signal_name()
    killed_by = "" if name == _NOT_AVAILABLE else f" ({name})"
    fields = {
        "time": failure.timestamp_isoformat(),
        "host": _host(),
        "rank": f"{rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.exitcode} (pid: {failure.pid}) {killed_by}",
        "error_file": failure.lasting_error_file,
        "traceback": _traceback(failure.message),
    }
    return "\n".join([f"[{at}]:", *(f"  {name:<10}: {value}" for name, value in fields.items())])


def _host() -> str:
    import socket

    return socket.getfqdn()


def _traceback(message: object) -> str:
    """The traceback, else the message in words. Lines after the first are indented."""
    if not isinstance(message, Mapping):
        return str(message)
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
    return str(stack or message.get("message", _NOT_AVAILABLE)).replace("\n", "\n  ")


def _as_torchs(cls: type[ChildFailedError]) -> type[ChildFailedError]:
    """A subclass of `cls` and of torch's class, if torch's module is loaded. Else `cls`."""
    torchs = getattr(sys.modules.get(_TORCH), "ChildFailedError", None)
    if torchs is None or issubclass(cls, torchs):
        return cls
    if (cls, torchs) not in _both:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _both[cls, torchs] = type(cls.__name__, (cls, torchs), {**names, "_is_torchs": True})
    return _both[cls, torchs]


_both: dict[tuple[type, type], type[ChildFailedError]] = {}
"""By class and torch's class: the class that is both."""


@overload
def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]: ...


@overload
def record(
    fn: None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]: ...


def record(fn: Callable[..., Any] | None = None, error_handler: ErrorHandler | None = None) -> Callable[..., Any]:
    """A decorator for the main function of a worker or of a launcher. What it raises is written to the file that the
    variable TORCHELASTIC_ERROR_FILE names. Without the variable nothing is written.

    Every exception is raised again. `SystemExit(0)` is the exception: the function then returns None.

    Works without arguments (`@record`) and with them (`@record(error_handler=…)`).

    `error_handler`: writes the file. None: what `get_error_handler` returns.
    """
    if fn is None:
        return lambda fn: record(fn, error_handler)
    handler = error_handler or get_error_handler()

    @wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as ended:
            if ended.code == 0:
                return None  # a function that runs a script with runpy ends like this
            raise
        except Exception as error:
            if _is_child_failed(error):
                _hand_up(handler, error)
            else:
                handler.record_exception(error)
            raise

    return recorded


def _is_child_failed(error: Exception) -> bool:
    torchs = getattr(sys.modules.get(_TORCH), "ChildFailedError", ChildFailedError)
    return isinstance(error, (ChildFailedError, torchs))


def _hand_up(handler: ErrorHandler, error: Any) -> None:
    """Copy the error file of the first failure to this process's own."""
    rank, failure = error.get_first_failure()
    if failure.error_file != _NOT_AVAILABLE:
        handler.dump_error_file(failure.error_file, failure.exitcode)
    else:
        _logger.info("rank %s has failed without an error file: decorate its main function with @record", rank)
