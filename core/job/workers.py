"""What the agents of a job say of single workers: their ranks, and how a worker failed.

A keeper imports this module, and nothing else of the job. It is imported before the first worker starts.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen


@frozen
class WorkerRanks:
    """The ranks of one worker, as in its environment: LOCAL_RANK, RANK and ROLE_RANK."""

    local_rank: int
    rank: int
    role_rank: int


@frozen
class Assignment:
    """All that one node needs to start its workers of one round. The numbers are those of the workers' environment."""

    round: int
    group_rank: int
    group_world_size: int
    world_size: int
    role: str
    role_world_size: int
    master_addr: str
    master_port: int
    workers: tuple[WorkerRanks, ...]
    restart_count: int = 0
    """Number of restarts that the job has spent before this round."""
    max_restarts: int = 0
    """`RestartPolicy.max_restarts` of the job."""


@frozen
class TimerExpired:
    """A timer that the worker has set itself has run out."""

    scope: str = ""
    """The name of the timer."""


class Stance(Enum):
    """Whether a worker that hangs waits for other workers."""

    COLLECTIVE = "collective"
    """It does: it is in a collective or at the job's TCPStore."""
    WAITING = "waiting"
    """It probably does: in the backward pass, for its GPU, or for a thread of its own that is in a collective."""
    UNKNOWN = "unknown"
    """This cannot be told."""
    OWN = "own"
    """It does not: it computes, sleeps, or waits for something else."""
    STOPPED = "stopped"
    """It does not: a signal has stopped it."""


@frozen
class Collective:
    """A collective of torch, for example an all-reduce, as one worker has seen it."""

    name: str
    """`all_reduce`"""
    number: int
    """Which one of the worker's collectives in this group it is, from 1. It is the same on all workers of the group if
    they enter the same collectives."""
    group: str = ""
    """The description of its process group. Empty: the default group."""
    is_over: bool = False


@frozen
class Activity:
    """What a worker did when it was found to hang."""

    stance: Stance
    op: str = ""
    """The collective, or the function, that the worker was in. Empty: this is not known."""
    site: str = ""
    """`train.py:88`: the line of the user's code from which `op` was called. Empty: this is not known."""
    collective: Collective | None = None
    """The last one that the worker has entered, as torch's flight recorder says. None: this is not known."""


UNSEEN = Activity(Stance.UNKNOWN)
"""Nothing is known of what the worker did."""


@frozen
class NoProgress:
    """The worker has reported no progress for too long. Several workers mostly wait for one of them: `hanging.blamed`
    says which."""

    for_s: float
    """Seconds since the last progress when the worker was found, to the tenth. It may be a little less than
    `--hang-after` allows: workers that wait for each other are found together."""
    step: int | None = None
    """The step of the last progress. None: no step was reported with it."""
    since_start: bool = False
    """True: the worker has reported no progress since its start. Perhaps it still starts, or never calls
    `reknit.progress`."""
    activity: Activity | None = None
    """What the worker did. None: nobody has looked."""


@frozen
class WorkerFailure:
    """How one worker failed, as its own agent saw it."""

    local_rank: int
    rank: int
    exitcode: int
    """As in torchelastic: a negative number means that the worker was killed by that signal. 126, 127 and 71 mean that
    the worker could not be started."""
    pid: int = 0
    """The pid of the worker that has ended with this exit code. 0: no process has, see `is_of_worker`."""
    message: str = ""
    """`Type: text` of the exception from the worker's error file, or why the worker could not be started."""
    traceback: str = ""
    """The traceback of that exception. Empty if none is known."""
    stderr: tuple[str, ...] = ()
    """The last lines that the worker wrote to its stderr, as far as the keeper read them."""
    log: str = ""
    """Folder or file with the worker's output. Empty if the output is in no file."""
    cause: TimerExpired | NoProgress | None = None
    """Why reknit has ended the worker, which was hung. `traceback` then holds its stacks. None: reknit has not."""

    @property
    def is_of_worker(self) -> bool:
        """Whether a process of the worker was seen to end with `exitcode`. False: reknit has chosen `exitcode`, because
        the worker could not be started, or was lost with its keeper.

        The pid tells this: whoever has seen a process end knows its pid. A field of its own could contradict the pid.
        """
        return self.pid != 0
