"""The functions of a client's workers, as far as the client must know them. Modules that are slow to import are
imported with the first function.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import TYPE_CHECKING

from reknit.adapters.keeper.common.bootstrap import Reservation
from reknit.adapters.keeper.protocol.files import WithFiles
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses
from reknit.core.agent.worker_words import StartWorkers, WorkersExited
from reknit.core.job.job import EMPTY
from reknit.core.job.workers import WorkerRanks

from .start import Start

if TYPE_CHECKING:
    from .function_workers import Calls, Function


METHODS = ("spawn", "fork", "forkserver")


class Calling:
    def __init__(self, start_method: str, function: Function | None, console: tuple[int, int]) -> None:
        """`function`: what each worker of a `StartWorkers` calls. None: these workers run a command line.
        `console`: the descriptors that become stdout and stderr of a keeper that is forked. Raises `ValueError` for a
        start method that `multiprocessing` does not know."""
        if start_method not in METHODS:
            raise ValueError(f"start_method must be one of {', '.join(METHODS)}, not {start_method!r}")
        self.start_method = start_method
        self._console = console
        self._reservation: Reservation | None = None
        self._function = function
        self._calls: Calls | None = None
        """The functions of the round that was started last. None: its workers are programs."""
        self._ranks: dict[int, int] = {}
        """By local rank: the ranks of that round."""

    def message(
        self, command: StartWorkers | StartProcesses, functions: Mapping[int, Function], *, takes_files: bool
    ) -> StartWorkers | StartProcesses | WithFiles:
        """What the keeper must be sent to start these workers. Closes what is left of the last round.

        `takes_files`: the keeper can be given open files. Raises `FunctionError`, `ValueError` for a process without
        a program and a function or with both, and `OSError` if no descriptor is free."""
        self._drop()
        if self._function is not None and isinstance(command, StartWorkers):
            workers = command.assignment.workers
            functions = {worker.local_rank: self._function for worker in workers}
            processes = tuple(Process(worker.local_rank, worker.rank, ()) for worker in workers)
            command = StartProcesses(command.round, processes, command.assignment)
        if isinstance(command, StartWorkers):
            return command
        for process in command.processes:
            if bool(process.argv) == (process.local_rank in functions):
                raise ValueError(f"the worker of local rank {process.local_rank} must be a program or a function")
        if not functions:
            return command
        from .function_workers import Calls, FunctionError

        if not takes_files and not self.forks:
            raise FunctionError("a worker can be a function only if its keeper is on the same host")
        self._ranks = {process.local_rank: process.rank for process in command.processes}
        self._calls = Calls(command.round, functions, self.start_method)
        return command if self.forks else self._calls.parcel(command)

    @property
    def forks(self) -> bool:
        """Workers that are functions are forks of this process, and so is their keeper."""
        return self.start_method == "fork"

    @property
    def start(self) -> Start | None:
        """Starts the keeper that has the functions of this round. None: any keeper can start them."""
        if self._calls is None or not self.forks:
            return None
        return partial(self._calls.fork_keeper, self._ranks, self._console)

    def port(self, used: Container[int], port: int) -> int:
        """fork: reserve a bootstrap port in this process, because the keeper of a round ends before the next round
        begins. Returns the port. 0: none is free. `used`: ports that are not reserved again. `port`: the port that is
        wanted. 0: any."""
        self._release_port()
        try:
            self._reservation = Reservation(used, port)
        except OSError:
            return 0
        return self._reservation.port

    def _release_port(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def release(self) -> None:
        """The workers of the round run: close what only their keeper needed."""
        if self._calls is not None:
            self._calls.release()

    def judged(self, event: WorkersExited, workers: Mapping[int, WorkerRanks | Process]) -> WorkersExited:
        """The event, in which a function that has not returned has failed. `workers`: by local rank."""
        return event if self._calls is None else self._calls.judged(event, workers)

    def values(self, round_: int) -> Mapping[int, object]:
        """By local rank: what the functions of the round have returned. Raises `FunctionError`."""
        return self._calls.values() if self._calls is not None and self._calls.round == round_ else EMPTY

    def close(self) -> None:
        """Close everything. May be repeated."""
        self._drop()
        self._release_port()

    def _drop(self) -> None:
        """Close what is left of the last round."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None
