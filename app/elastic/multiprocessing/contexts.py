"""The contexts of programs and of functions, over a keeper. `api` exports them, as torch's module does."""

from __future__ import annotations

import os
import signal
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from reknit.adapters.keeper.protocol.wire import Process
from reknit.core.job.restart import root_cause_of
from reknit.core.job.workers import WorkerFailure
from reknit.core.text.describe import how_text

from . import api
from .api import PContext, RunProcsResult
from .errors import ProcessFailure
from .kept import KeptProcesses
from .logs import DefaultLogsSpecs, LogsSpecs
from .numa import bind_function, bind_program
from .shared import SharedKeeper

START_METHODS = ("spawn", "fork", "forkserver")


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
                api.logger.error("%s%s", head, self._said(failure))

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
        from reknit.adapters.keeper.client.functions import Function  # slow to import, and not needed for programs

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
