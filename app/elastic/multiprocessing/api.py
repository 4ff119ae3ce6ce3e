"""Processes that a program starts, watches and ends as one. The counterpart of
`torch.distributed.elastic.multiprocessing.api`.

1. A context holds one start of `nprocs` processes. A keeper carries it out (docs/design.md#keeper). So the processes
   end when the program dies, however it dies, and when a context is dropped without `close`.
2. All or nothing: when one process fails, the others are ended.
3. While a context is open, this process raises `SignalException` at the signals that the variable
   TORCHELASTIC_SIGNALS_TO_HANDLE names. `close` puts back what was there. See `signals.py`.
4. A context belongs to the thread that uses it, and to the process that made it. In a forked child it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from logging import getLogger
from typing import TYPE_CHECKING, Any, TextIO

from .errors import ProcessFailure
from .logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from .redirects import redirect_stderr, redirect_stdout
from .signals import SignalException, holding_back, put_back, raise_signal, take
from .tail_log import TailLog

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "redirect_stderr",
    "redirect_stdout",
    "to_map",
]

if TYPE_CHECKING:
    from .contexts import MultiprocessContext, SubprocessContext
    from .kept import KeptProcesses

logger = getLogger(__name__)
_terminate_process_handler = raise_signal


def _validate_full_rank(d: Mapping[int, Any], nprocs: int, what: str) -> None:
    actual, expected = set(d), set(range(nprocs))
    if actual != expected:
        raise RuntimeError(f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}")


def take_signals(names: str | None = None) -> list[signal.Signals]:
    """See `signals.take`. The names that torch has in this module are looked up here, as programs patch them here."""
    return take(signal.signal, _terminate_process_handler, logger.warning, names)


def _get_kill_signal() -> signal.Signals:
    return signal.SIGKILL


def _get_default_signal() -> signal.Signals:
    return signal.SIGTERM


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """A context that redirects a stream of this process. `std_rd`: the file. Empty: nothing is redirected."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


@dataclass
class RunProcsResult:
    """How the processes ended, by local rank."""

    return_values: dict[int, Any] = field(default_factory=dict)
    """What the functions returned, if all succeeded. A program returns None."""
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    """Those that failed by themselves come first."""
    stdouts: dict[int, str] = field(default_factory=dict)
    """The path of stdout.log. Empty: the output was not redirected."""
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether a process has failed."""
        return len(self.failures) > 0


class _Open:
    """What a context holds open, besides its processes. It is let go of by `close`, or when the context is dropped."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.kept: KeptProcesses | None = None
        self.tails: list[TailLog] = []
        self.files: list[TextIO] = []
        self.signals: list[signal.Signals] = []

    def let_go(self) -> None:
        """May be repeated. In a forked child this does nothing."""
        if os.getpid() != self.owner:
            return
        try:
            if self.kept is not None:
                self.kept.let_go()  # first: afterwards no process writes any more
        finally:
            tails, self.tails = self.tails, []
            for tail in tails:
                tail.stop()
            files, self.files = self.files, []
            for file in files:
                file.close()
            signals, self.signals = self.signals, []
            put_back(signals)


class PContext(ABC):
    """The base of contexts, for processes that are started in whatever way."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        """Names the files, and starts nothing. The parameters are those of `start_processes`."""
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        dest = logs_specs.reify(envs)
        _validate_full_rank(dest.stdouts, self.nprocs, "stdouts")
        _validate_full_rank(dest.stderrs, self.nprocs, "stderrs")
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.tee_stdouts = dest.tee_stdouts
        self.tee_stderrs = dest.tee_stderrs
        self.error_files = dest.error_files
        self._logs_specs = logs_specs
        self._open = held = _Open()
        weakref.finalize(self, held.let_go)  # for a context that is dropped without `close`
        held.tails = [
            TailLog(name, dest.tee_stdouts, sys.stdout, log_line_prefixes),
            TailLog(name, dest.tee_stderrs, sys.stderr, log_line_prefixes),
        ]
        self.filtered_stdout = self._filter(dest.filtered_stdout, duplicate_stdout_filters)
        self.filtered_stderr = self._filter(dest.filtered_stderr, duplicate_stderr_filters)
        for file, needles, files in (
            (self.filtered_stdout, duplicate_stdout_filters, dest.tee_stdouts),
            (self.filtered_stderr, duplicate_stderr_filters, dest.tee_stderrs),
        ):
            if file is not None:
                held.tails.append(TailLog(name, files, file, log_line_prefixes, log_line_filter=_any_of(needles)))

    def _filter(self, path: str, needles: list[str] | None) -> TextIO | None:
        """The file for lines that match one of these texts."""
        if not needles:
            return None
        if not path:
            logger.warning("duplicate filters need a log_dir: the lines of %s are not filtered", self.name)
            return None
        file = open(path, "w", errors="replace", buffering=1)  # noqa: SIM115  # `let_go` closes it
        self._open.files.append(file)
        return file

    def start(self) -> None:
        """Start the processes, and take the signals."""
        if self._takes_signals:
            with holding_back():  # a signal that comes in between must not keep this list from being put back
                self._open.signals += take_signals()
        self._start()
        for tail in self._open.tails:
            tail.start()

    @property
    def _takes_signals(self) -> bool:
        """False: whoever uses this context has taken them."""
        return True

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """The result, if all processes have succeeded or one has failed. Else None. Does not wait for it."""

    def _pause(self, seconds: float) -> None:
        """Wait until something may have happened, for so many seconds at most."""
        time.sleep(seconds)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until the processes have ended. None: they run on after `timeout` seconds.

        `timeout`: 0 only looks. A negative number waits for ever.
        `period`: the longest pause between two looks, in seconds. The end of a process is noticed at once.

        Raises `SignalException` in the main thread. Then call `close`, with the signal.
        """
        give_up = time.monotonic() + timeout if timeout >= 0 else float("inf")
        while (result := self._poll()) is None:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return None
            self._pause(min(max(period, 0.001), left_s))
        return result

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """By local rank. Empty before the start."""

    @abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None: ...

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """End the processes, and let go of everything. May be repeated. In a forked child this does nothing.

        `death_sig`: the signal for the processes. None: SIGTERM.
        `timeout`: seconds until SIGKILL.

        A signal that comes meanwhile shortens the timeout, and raises `SignalException` when all is closed.
        """
        if os.getpid() != self._open.owner:
            return
        with holding_back():
            try:
                self._close(death_sig or _get_default_signal(), timeout)
            finally:
                self._open.let_go()


def _any_of(needles: list[str] | None) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles or ())


def __getattr__(name: str) -> object:
    if name not in ("MultiprocessContext", "SubprocessContext"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import contexts  # which imports this module

    value = getattr(contexts, name)
    globals()[name] = value
    return value
