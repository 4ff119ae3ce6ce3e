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
from typing import Any, TextIO

from reknit.adapters.keeper.client import Function
from reknit.adapters.keeper.wire import Process
from reknit.core.job.entries import WorkerFailure

from .errors import ProcessFailure
from .kept import KeptProcesses
from .logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from .numa import bind_function, bind_program
from .redirects import redirect_stderr, redirect_stdout
from .shared import SharedKeeper
from .signals import SignalException, holding_back, put_back, take
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

_logger = getLogger(__name__)


def _validate_full_rank(d: Mapping[int, Any], nprocs: int, what: str) -> None:
    actual, expected = set(d), set(range(nprocs))
    if actual != expected:
        raise RuntimeError(f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}")


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
        self._finalizer = weakref.finalize(self, held.let_go)
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
            _logger.warning("duplicate filters need a log_dir: the lines of %s are not filtered", self.name)
            return None
        file = open(path, "w", errors="replace", buffering=1)  # noqa: SIM115  # `let_go` closes it
        self._open.files.append(file)
        return file

    def start(self) -> None:
        """Start the processes, and take the signals."""
        self._open.signals += take(signal.signal)
        self._start()
        for tail in self._open.tails:
            tail.start()

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


class _KeptContext(PContext):
    """A context whose processes a keeper holds."""

    def __init__(self, *given: Any, kept: KeptProcesses, **more: Any) -> None:
        super().__init__(*given, **more)
        self._kept = self._open.kept = kept
        self._failures: dict[int, ProcessFailure] = {}
        self._result: RunProcsResult | None = None

    def _process(self, local_rank: int, argv: tuple[str, ...] = ()) -> Process:
        env = self.envs[local_rank]
        return Process(
            local_rank=local_rank,
            rank=int(env.get("RANK", local_rank)),
            argv=argv,
            env=tuple(sorted(env.items())),
            stdout=self.stdouts[local_rank],
            stderr=self.stderrs[local_rank],
            error_file=_no_null(self.error_files.get(local_rank, "")),
        )

    def pids(self) -> dict[int, int]:
        return dict(self._kept.pids)

    def _pause(self, seconds: float) -> None:
        self._kept.look(seconds)

    def _poll(self) -> RunProcsResult | None:
        if self._result is None:
            if not self._kept.was_started:
                raise RuntimeError("these processes were not started")
            self._kept.look(0.0)
            self._note_failures()
            if self._failures or len(self._kept.exited) == self.nprocs or not self._kept.is_running:
                self._result = self._ended()
        return self._result

    def _note_failures(self) -> None:
        """Read the error files of processes that have failed by themselves."""
        for rank, told in self._kept.failures.items():
            if rank not in self._failures:
                self._failures[rank] = failure = self._failure(rank, told.exitcode)
                _tell(failure, told)
                _logger.error(
                    "failed (exitcode: %s) local_rank: %s (pid: %s) of %s", told.exitcode, rank, failure.pid, self.name
                )

    def _failure(self, rank: int, exitcode: int) -> ProcessFailure:
        failure = ProcessFailure(rank, self._kept.pids.get(rank, 0), exitcode, self.error_files.get(rank, ""))
        failure.keep(self._logs_specs)
        return failure

    def _ended(self) -> RunProcsResult:
        """End what still runs. The result."""
        has_succeeded = not self._failures and len(self._kept.exited) == self.nprocs
        values = self._values() if has_succeeded else {}
        self.close()
        self._note_ended()
        return RunProcsResult(values, self._failures, self.stdouts, self.stderrs)

    @abstractmethod
    def _values(self) -> dict[int, Any]:
        """What the processes have returned."""

    @abstractmethod
    def _note_ended(self) -> None:
        """Note the processes that this context has ended."""

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        self._kept.stop(death_sig, timeout)


def _no_null(path: str) -> str:
    return "" if path == os.devnull else path


def _tell(failure: ProcessFailure, told: WorkerFailure) -> None:
    """Use what the keeper has found on the process's stderr, or why there is no process, if there is no error file."""
    if failure.has_error_file or not told.message:
        return
    failure.message = told.message
    if told.traceback:
        extra = {"py_callstack": told.traceback, "timestamp": str(failure.timestamp)}
        failure.message = {"message": told.message, "extraInfo": extra}


class SubprocessContext(_KeptContext):
    """Processes that run a program. A process that the context has ended is among the failures, with the exit code that
    it ended with: -15 if it obeyed SIGTERM."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        _shared: SharedKeeper | None = None,
    ) -> None:
        """The parameters are those of `start_processes`."""
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
            kept=KeptProcesses(_shared or SharedKeeper(name), owns=_shared is None),
        )
        self._program = entrypoint
        self._numa_options = numa_options

    def _start(self) -> None:
        argvs = {rank: (self._program, *map(str, self.args[rank])) for rank in range(self.nprocs)}
        bound = {rank: bind_program(argv, rank, self._numa_options) for rank, argv in argvs.items()}
        self._kept.start([self._process(rank, argv) for rank, argv in bound.items()])

    def _values(self) -> dict[int, Any]:
        return dict.fromkeys(range(self.nprocs))

    def _note_ended(self) -> None:
        for rank, exitcode in self._kept.ended.items():
            if exitcode != 0:
                self._failures[rank] = self._failure(rank, exitcode)


class MultiprocessContext(_KeptContext):
    """Processes that run a function. A process that the context has ended is not among the failures."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        _shared: SharedKeeper | None = None,
    ) -> None:
        """The parameters are those of `start_processes`."""
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
            kept=KeptProcesses(_shared or SharedKeeper(name), start_method, owns=_shared is None),
        )
        self.start_method = start_method
        self._function = entrypoint
        self._numa_options = numa_options

    def _start(self) -> None:
        functions = {
            rank: Function(bind_function(self._function, rank, self._numa_options), tuple(self.args[rank]))
            for rank in range(self.nprocs)
        }
        self._kept.start([self._process(rank) for rank in functions], functions)

    def _values(self) -> dict[int, Any]:
        return self._kept.values

    def _note_ended(self) -> None:
        if not self._failures:  # the program has closed the context while they ran
            for rank, exitcode in self._kept.ended.items():
                self._failures[rank] = self._failure(rank, exitcode)
