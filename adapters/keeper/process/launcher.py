"""Starting one worker: from a command of the agent to a `Process`, and from a `Process` to its leader.

There is one way to start. A worker of `StartWorkers` is first turned into the same value that `StartProcesses` brings.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.adapters.host.orphans import MARK, carry
from reknit.adapters.keeper.common.environment import TELLING, arguments, given_by, whole
from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.common.run_folder import worker_folder
from reknit.adapters.keeper.common.spawn import Leader, spawn, spawn_exitcode
from reknit.adapters.keeper.output.streams import STDERR, STDIN, STDOUT, Streams, file_with
from reknit.adapters.keeper.protocol.wire import Configure, Process, StartProcesses, Warm, variables
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job.workers import WorkerFailure, WorkerRanks

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.spawn import Terminal
    from reknit.adapters.keeper.functions.forks import Forks
    from reknit.adapters.keeper.watchdog.page import Page
    from reknit.adapters.keeper.watchdog.watchdog import Watchdog
    from reknit.adapters.keeper.zygote.warming import Warming
    from reknit.adapters.runtime.ports import Clock


class Launcher:
    """Starts the workers of one keeper."""

    def __init__(
        self,
        clock: Clock,
        streams: Streams,
        wanted: Configure,
        *,
        env: Mapping[str, str],
        given_back: Collection[signal.Signals],
        forks: Forks | None,
        is_abandoned: Callable[[], bool],
        watchdog: Watchdog | None,
        terminal: Terminal | None,
    ) -> None:
        """The arguments are those of `Processes`."""
        self._clock = clock
        self._streams = streams
        self._wanted = wanted
        self._env = dict(env)
        self._given_back = given_back
        self._forks = forks
        self._is_abandoned = is_abandoned
        self._watchdog = watchdog
        self._terminal = terminal
        self._guard: Guard | None = None
        self.page: Page | None = None
        """Where the workers of this round write their progress. None: there are none yet, or there is no page."""
        self._warming: Warming | None = None
        """None: workers are started by exec."""

    def warm_up(self, warm: Warm, env: Mapping[str, str] | None = None) -> None:
        """Make a zygote for the workers, if there is none. `env`: variables of all workers besides those with which the
        environment of every worker begins."""
        if self._warming is not None:
            return
        from reknit.adapters.keeper.zygote.warming import Warming

        try:
            guard = self._guarded()
        except OSError as error:  # no descriptors are left
            self._streams.say(f"reknit: the workers start cold: {error.strerror}")
            return
        self._warming = Warming(
            warm,
            whole(self._env, env or {}, ""),
            telling=TELLING | ({"CUDA_VISIBLE_DEVICES"} if self._wanted.virtual_local_rank else set()),
            clock=self._clock,
            guard=guard,
            given_back=self._given_back,
            is_abandoned=self._is_abandoned,
            say=self._streams.say,
        )

    def begin(self, command: StartWorkers | StartProcesses) -> None:
        """A round begins."""
        self.forget()
        if isinstance(command, StartProcesses) and command.warm is not None and command.processes:
            of_all = set.intersection(*({*process.env} for process in command.processes))
            self.warm_up(command.warm, dict(of_all))
        if self._warming is not None:
            self._warming.begin()

    def look(self) -> None:
        """To be called whenever the clock has woken up, and at `wakes_at`."""
        if self._warming is not None:
            self._warming.look()

    @property
    def delays(self) -> bool:
        """The start of workers should wait."""
        return self._warming is not None and self._warming.delays

    @property
    def wakes_at(self) -> float | None:
        """When `look` must be called at the latest, on the clock's time. None: there is no such time."""
        return None if self._warming is None else self._warming.wakes_at

    def _guarded(self) -> Guard:
        if self._guard is None:
            self._guard = Guard()
            if MARK in self._env:
                carry(self._env[MARK])  # not before: what an earlier agent has left carries the same mark
        return self._guard

    def start(
        self, command: StartWorkers | StartProcesses, worker: WorkerRanks | Process, descriptors: Sequence[int] = ()
    ) -> Leader:
        """Start one of the workers of the command. `descriptors`: the open files that came with the command.
        Raises `OSError` and `ValueError`."""
        process = self._process(command, worker)
        given = dict(process.env)
        ranks = {"local_rank": process.local_rank, "rank": process.rank}
        streams = self._streams.open(
            **ranks,
            role=given.get("ROLE_NAME", ""),
            folder=os.path.dirname(process.error_file),
            paths={STDOUT: process.stdout, STDERR: process.stderr},
            is_direct=self.has_terminal(process.local_rank),
        )
        try:
            guard = self._guarded()
            if self._wanted.stdin is not None:
                streams.ends[STDIN] = file_with(self._wanted.stdin.encode("latin-1"))
            env = whole(self._env, given, process.error_file)
            env |= self._progress(process.local_rank, env)
            if self._watchdog is not None:
                env |= self._watchdog.variables(process.local_rank, env)
            ends = {**streams.ends, **_files(process, descriptors)}
            if process.argv:
                if self._warming is not None:
                    pid = self._warming.start(process.argv, env, ends)
                else:
                    terminal = self._terminal if self.has_terminal(process.local_rank) else None
                    given_back = self._given_back
                    pid = spawn([*process.argv], env, ends, guard=guard, given_back=given_back, terminal=terminal)
            elif self._forks is not None:
                which = process.local_rank
                pid = self._forks.start(which, env, ends, guard=guard, given_back=self._given_back)
            else:
                raise ValueError("there is neither a program nor a function")
        except (OSError, ValueError):
            streams.spawned()
            self._streams.release(streams)
            raise
        streams.spawned()
        if self.page is not None:
            self.page.started(process.local_rank, pid)
        return Leader(pid, self._clock, **ranks, streams=streams, error_file=process.error_file)

    def has_terminal(self, local_rank: int) -> bool:
        """This worker has the terminal of the agent."""
        return self._terminal is not None and local_rank == self._wanted.terminal

    def _progress(self, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """The variables by which a worker tells its progress. Raises `OSError` if it must be told."""
        try:
            if self.page is None:
                from reknit.adapters.keeper.watchdog.page import Page

                self.page = Page(self._wanted.log_dir)
            return self.page.variables(local_rank, env)
        except (OSError, ImportError) as error:  # an import fails if no descriptor is free
            if self._watchdog is not None:
                if isinstance(error, OSError):
                    raise
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
            return {}  # nobody but `reknit status` would have looked at it

    def forget(self) -> None:
        """No process of the round is left: nobody looks at the progress of its workers. May be repeated."""
        if self.page is not None:
            self.page.close()
            self.page = None

    @property
    def spared(self) -> Collection[int]:
        """Children of this process that are no strays."""
        return () if self._warming is None else self._warming.children

    def _process(self, command: StartWorkers | StartProcesses, worker: WorkerRanks | Process) -> Process:
        if isinstance(worker, WorkerRanks):
            argv = tuple(arguments(self._wanted.argv, worker.local_rank))
            worker = Process(worker.local_rank, worker.rank, argv)
        assignment, local_rank = command.assignment, worker.local_rank
        if assignment is None:
            return worker
        ranks = next(ranks for ranks in assignment.workers if ranks.local_rank == local_rank)
        wanted = self._wanted
        virtual = wanted.virtual_local_rank
        given = given_by(self._env, assignment, ranks, run_id=wanted.run_id, virtual_local_rank=virtual)
        folder = worker_folder(wanted.log_dir, command.round, local_rank, must=self._streams.has_files)
        error_file = os.path.join(folder, "error.json") if folder else ""
        return evolve(worker, env=variables({**given, **dict(worker.env)}), error_file=error_file)

    def failure(self, worker: WorkerRanks | Process, error: OSError | ValueError) -> WorkerFailure:
        """Why this worker could not be started."""
        argv = worker.argv if isinstance(worker, Process) else self._wanted.argv
        program = argv[0] if argv else "the function"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        # posix_spawn gives the program as the file name. Any other file is one for the worker's output.
        file = error.filename if isinstance(error, OSError) and error.filename != program else None
        what = f"cannot write to {file}" if file else f"cannot start {program}"
        return WorkerFailure(
            local_rank=worker.local_rank,
            rank=worker.rank,
            exitcode=spawn_exitcode(error),
            message=f"{what}: {reason}",
        )

    def release(self) -> None:
        """All workers of the round were started."""
        if self._forks is not None:
            self._forks.release()

    def close(self) -> None:
        """Close the guard pipe, and end the zygote. May be repeated."""
        if self._warming is not None:
            self._warming.close()
        if self._guard is not None:
            self._guard.close()
            self._guard = None


def _files(process: Process, descriptors: Sequence[int]) -> dict[int, int]:
    """By number in the worker: the open files that the worker gets. Raises `OSError` if one did not arrive."""
    if any(which >= len(descriptors) for _, which in process.descriptors):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the keeper had no descriptor free for it
    return {number: descriptors[which] for number, which in process.descriptors}
