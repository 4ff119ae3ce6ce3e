"""The workers of one round, as far as the agent's side has been told of them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.keeper.protocol.wire import Exitcodes, Pids, Process, StartProcesses, Stop, workers_of
from reknit.core.agent.worker_words import StartWorkers, WorkerExit
from reknit.core.job.job import EMPTY
from reknit.core.job.workers import WorkerFailure, WorkerRanks

if TYPE_CHECKING:
    from reknit.adapters.host.record import ProcessId

_OS_ERROR = 71  # EX_OSERR of sysexits: a shell has no exit code for this


class RoundWorkers:
    def __init__(self, command: StartWorkers | StartProcesses) -> None:
        self.number = command.round
        self.running: dict[int, WorkerRanks | Process] = {w.local_rank: w for w in workers_of(command)}
        """By local rank: the workers whose exit was not reported yet."""
        self.stop: Stop | None = None
        """The latest request to stop. None: there was none."""
        self.answer_by: float | None = None
        """When the keeper must have answered the stop, on the clock's time. None: no answer is awaited."""
        self.stuck: tuple[int, ...] = ()
        """Processes of this round that survive SIGKILL. A new keeper has found them after the keeper of the round was
        lost. The answer to the stop names them."""

    def ended(self, exits: Sequence[WorkerExit]) -> None:
        """These exits are reported."""
        for exit_ in exits:
            self.running.pop(exit_.local_rank, None)

    def failed(self, why: str, *, only_first: bool, is_limit: bool) -> tuple[WorkerExit, ...]:
        """The workers that ran are gone with their keeper: one exit for each.

        `only_first`: none of them was started, and one failure says so. `is_limit`: the keeper has met a limit of the
        machine, which is what the operator must know, and not that its workers were killed.
        """
        exitcode = _OS_ERROR if only_first or is_limit else -signal.SIGKILL
        exits = tuple(
            WorkerExit(local_rank, WorkerFailure(local_rank, worker.rank, exitcode, message=why))
            for local_rank, worker in sorted(self.running.items())
        )
        self.running.clear()
        return exits[:1] if only_first else exits


class ToldProcesses:
    """What a keeper tells of the processes of a round, besides the events."""

    def __init__(self) -> None:
        self._pids = Pids(-1, EMPTY)
        self._exitcodes = Exitcodes(-1, EMPTY)
        self.processes: tuple[ProcessId, ...] = ()
        """The keeper and the workers of the latest round. Empty if they are on another host."""

    def take(self, message: Pids | Exitcodes, keeper: int, mark: str) -> None:
        """`keeper`: the pid of the keeper that tells this. `mark`: the mark of its workers."""
        if isinstance(message, Exitcodes):
            self._exitcodes = message
            return
        from reknit.adapters.host.lock import remember  # the first worker does not wait for these imports
        from reknit.adapters.host.record import children_of

        self._pids = message
        self.processes = children_of(keeper, message.pids.values())
        remember(mark, self.processes)

    @property
    def left(self) -> tuple[tuple[int, int], ...]:
        """The `processes`, as the next keeper is told of them."""
        return tuple((each.pid, each.start) for each in self.processes)

    def pids(self, round_: int) -> Mapping[int, int]:
        """By local rank. Empty before `WorkersStarted` of the round, and after that of the next one."""
        return self._pids.pids if self._pids.round == round_ else EMPTY

    @property
    def latest(self) -> Mapping[int, int]:
        """By local rank: the pids of the latest round. Any thread may read this."""
        return self._pids.pids

    def exitcodes(self, round_: int) -> Mapping[int, int]:
        """By local rank: how the workers have ended, those included that the stop has ended. Empty before
        `WorkersStopped` of the round, and after that of the next one."""
        return self._exitcodes.exitcodes if self._exitcodes.round == round_ else EMPTY
