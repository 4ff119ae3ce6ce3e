"""The functions of a client's workers, as far as the client must know them. Modules that are slow to import are
imported with the first function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reknit.core.agent.commands import StartWorkers
from reknit.core.agent.events import WorkersExited
from reknit.core.job.job import EMPTY
from reknit.core.job.ranks import WorkerRanks

from .parcels import Parcel
from .wire import Process, StartProcesses

if TYPE_CHECKING:
    from .functions import Calls, Function


class Calling:
    def __init__(self, start_method: str, function: Function | None) -> None:
        """`function`: what each worker of a `StartWorkers` calls. None: these workers run a command line."""
        self.start_method = start_method
        self._function = function
        self._calls: Calls | None = None
        """The functions of the round that was started last. None: its workers are programs."""

    def message(
        self, command: StartWorkers | StartProcesses, functions: Mapping[int, Function], *, takes_files: bool
    ) -> StartWorkers | StartProcesses | Parcel:
        """What the keeper must be sent to start these workers. Closes what is left of the last round.

        `takes_files`: the keeper can be given open files. Raises `FunctionError`, and `OSError` if no descriptor is
        free."""
        self.close()
        if self._function is not None and isinstance(command, StartWorkers):
            workers = command.assignment.workers
            functions = {worker.local_rank: self._function for worker in workers}
            processes = tuple(Process(worker.local_rank, worker.rank, ()) for worker in workers)
            command = StartProcesses(command.round, processes, command.assignment)
        if not functions or not isinstance(command, StartProcesses):
            return command
        from .functions import Calls, FunctionError

        if not takes_files:
            raise FunctionError("a worker can be a function only if its keeper is on the same host")
        self._calls = Calls(command.round, functions, self.start_method)
        return self._calls.parcel(command)

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
        """May be repeated."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None
