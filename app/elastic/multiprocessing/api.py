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
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, TextIO

from reknit.adapters.keeper.protocol.wire import Process
from reknit.core.job.restart import root_cause_of
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.describe import how_text

from .errors import ProcessFailure
from .kept import KeptProcesses
from .logger import NAME, look_up
from .logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from .numa import bind_function, bind_program
from .redirects import redirect_stderr, redirect_stdout
from .shared import SharedKeeper
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

START_METHODS = ("spawn", "fork", "forkserver")

logger = getLogger(NAME)
look_up(lambda: logger)  # a program may have patched it
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


class _KeptContext(PContext):
    """A context whose processes a keeper holds."""

    def __init__(self, *given: Any, kept: KeptProcesses, **more: Any) -> None:
        super().__init__(*given, **more)
        self._kept = self._open.kept = kept
        self._failures: dict[int, ProcessFailure] = {}
        self._noted: set[int] = set()
        """The local ranks of failures that were noted. A subclass may have taken some out of `_failures`."""
        self._result: RunProcsResult | None = None

    @property
    def _takes_signals(self) -> bool:
        return self._kept.owns

    @property
    def ended_ranks(self) -> Collection[int]:
        """The local ranks of processes that this context has ended, after the end of all."""
        return self._kept.ended.keys()

    def _process(self, local_rank: int, argv: tuple[str, ...] = ()) -> Process:
        env = self.envs[local_rank]
        for name, value in env.items():
            if not isinstance(value, str):  # the caller's mistake, which types would have shown
                raise TypeError(f"envs: {name} of local rank {local_rank} is {value!r}, and must be a text")
        return Process(
            local_rank=local_rank,
            rank=int(rank) if (rank := env.get("RANK", "")).isdecimal() else local_rank,
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
            have_all_ended = self._judge()
            if self._failures or have_all_ended or not self._kept.is_running:
                return self._ended(has_succeeded=have_all_ended and not self._failures)
        return self._result

    @abstractmethod
    def _judge(self) -> bool:
        """Note the processes that have failed by themselves. True: all processes have ended by themselves."""

    def _note_failures(self) -> None:
        """Read the error files of processes that have failed by themselves. The failure to blame is noted first: of
        several with the same timestamp, callers take the first."""
        told_of = self._kept.failures
        root = root_cause_of(tuple(told_of.values())) if told_of else None
        for rank, told in sorted(told_of.items(), key=lambda item: item[1] is not root):
            if rank not in self._noted:
                self._noted.add(rank)
                self._failures[rank] = failure = self._failure(rank, told.exitcode)
                _tell(failure, told)
                head = f"failed (exitcode: {told.exitcode}) local_rank: {rank} (pid: {failure.pid}) of {self.name}"
                logger.error("%s%s", head, self._said(failure))

    def _said(self, failure: ProcessFailure) -> str:
        """For the log: the first line of the exception, and the file of stderr. Empty: there is neither."""
        message = failure.message.get("message", "") if isinstance(failure.message, dict) else failure.message
        said = f": {str(message).partition(chr(10))[0]:.200}" if failure.has_error_file and message else ""
        stderr = _no_null(self.stderrs[failure.local_rank])
        return said + (f" (its stderr: {stderr})" if stderr else "")

    def _failure(self, rank: int, exitcode: int) -> ProcessFailure:
        failure = ProcessFailure(rank, self._kept.pids.get(rank, 0), exitcode, self.error_files.get(rank, ""))
        specs = self._logs_specs
        failure.keep(specs, is_temporary=isinstance(specs, DefaultLogsSpecs) and specs.is_temporary)
        return failure

    def _ended(self, *, has_succeeded: bool) -> RunProcsResult:
        """End what still runs. The result."""
        values = self._values() if has_succeeded else {}  # the keeper has them until it is closed
        self._result = RunProcsResult(values, self._failures, self.stdouts, self.stderrs)
        try:
            self.close(timeout=self._kept.grace_s)
        finally:  # a signal may have come. The result is there all the same
            self._note_ended()
            self._result.failures = self._failures  # a subclass may have made a new mapping
        return self._result

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
    failure.cause = told.cause
    message = told.message if told.cause is None else how_text(told)
    if failure.has_error_file or not message:
        return
    failure.message = message
    if told.traceback:
        extra = {"py_callstack": told.traceback, "timestamp": str(failure.timestamp)}
        failure.message = {"message": message, "extraInfo": extra}


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
        if any("\0" in text for argv in argvs.values() for text in argv):
            raise ValueError(f"cannot start {self._program}: its command line has a null byte")
        bound = {rank: bind_program(argv, rank, self._numa_options) for rank, argv in argvs.items()}
        self._kept.start([self._process(rank, argv) for rank, argv in bound.items()])

    def _judge(self) -> bool:
        done: set[int] = set()
        self._capture_process_failures(done)
        return len(done - self._kept.ended.keys()) == self.nprocs

    def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
        """Put the processes that have failed into `_failures`, and the local ranks of all that have ended into
        `done_local_ranks`. A subclass may override this. A failure that it takes out does not come again."""
        self._note_failures()
        for rank, exitcode in self._kept.ended.items():
            if exitcode != 0 and rank not in self._noted:
                self._noted.add(rank)
                self._failures[rank] = self._failure(rank, exitcode)
        done_local_ranks |= self._kept.exited.keys() | self._kept.ended.keys()

    def _values(self) -> dict[int, Any]:
        return dict.fromkeys(range(self.nprocs))

    def _note_ended(self) -> None:
        self._capture_process_failures(set())


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
        if start_method not in START_METHODS:
            raise ValueError(f"start_method: {start_method!r} is none of {', '.join(START_METHODS)}")
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
        from reknit.adapters.keeper.client.function_workers import (
            Function,  # slow to import, and not needed for programs
        )

        functions = {
            rank: Function(bind_function(self._function, rank, self._numa_options), tuple(self.args[rank]))
            for rank in range(self.nprocs)
        }
        self._kept.start([self._process(rank) for rank in functions], functions)

    def _judge(self) -> bool:
        self._note_failures()
        return self._is_done()

    def _is_done(self) -> bool:
        """All functions have ended by themselves. A subclass may override this: the processes run on until then."""
        return len(self._kept.exited) == self.nprocs

    def _values(self) -> dict[int, Any]:
        return self._kept.values

    def _note_ended(self) -> None:
        if not self._failures:  # the program has closed the context while they ran
            for rank, exitcode in self._kept.ended.items():
                self._failures[rank] = self._failure(rank, exitcode)
