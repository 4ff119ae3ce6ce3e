"""What an agent and its keeper say to each other: one JSON object per line, over any pair of byte streams (`stream`).

1. The core's own commands go to the keeper, and the core's own events come back, written by `core/text/codec`. They are
   those of core/agent/worker_words.py. The few other messages are below.
2. A message carries no time, because the keeper may run on a host with another clock. The agent's client gives every
   event that arrives its own time. `Fence` is the exception, and goes to a keeper on this host only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.core.agent.worker_words import (
    PortReserved,
    ReservePort,
    StartWorkers,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.workers import Assignment, WorkerRanks

VERSION = 9
"""The version of the messages. Both sides must have the same."""


# ---- agent → keeper, beside StartWorkers and ReservePort ----


@frozen
class Process:
    """One worker of a `StartProcesses`."""

    local_rank: int
    rank: int
    """The global rank."""
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Variables on top of those with which the environment of every worker begins."""
    stdout: str = ""
    stderr: str = ""
    """The file that the stream is written to. Its folder exists. Empty: the stream goes where the `StreamSettings` of
    the keeper send it."""
    error_file: str = ""
    """The file into which the worker writes why it failed, as the variable TORCHELASTIC_ERROR_FILE. Its folder exists.
    Empty: the worker has no such variable."""
    descriptors: tuple[tuple[int, int], ...] = ()
    """Open files that the worker gets besides its streams: the number in the worker, and which one of the files that
    were sent with the command."""


@frozen
class Warm:
    """Make a zygote: a process that imports modules, and from which the workers are forked (adapters/keeper/zygote).

    It is sent when no process of an earlier agent is left. Otherwise the zygote could be taken for one of these."""

    argv: tuple[str, ...]
    """The command line of the workers."""
    modules: tuple[str, ...] = ()
    """What the zygote imports."""
    paths: tuple[str, ...] = ()
    """`sys.path` while they are imported. Empty: as Python makes it."""
    is_verbose: bool = False
    """Say when a zygote is ready, or was lost."""


@frozen
class StartProcesses:
    """Start these workers, for an agent that has worked out itself what each of them gets.

    Answered as `StartWorkers` is, by the same events.
    """

    round: int
    processes: tuple[Process, ...]
    assignment: Assignment | None = None
    """The ranks of the workers. The keeper makes the variables and the error file of each worker from them, as for
    `StartWorkers`. None: each `Process` says everything."""
    warm: Warm | None = None
    """The workers are forked from a zygote. The keeper makes one if it has none. None: it has one, or needs none."""
    descriptors: int = 0
    """Number of open files that were sent before this message, beside the stream (`files.py`)."""


@frozen
class Stop:
    """`StopWorkers` without its reason, which the keeper does not need. The types of all reasons would have to be
    imported before the first worker starts."""

    round: int
    signal: int
    grace_s: float
    hangs: bool = False
    await_exits_s: float = 0.0


@frozen
class Configure:
    """The agent's first message: what the workers of this keeper are. Answered by `Ready` or `Unusable`."""

    argv: tuple[str, ...]
    run_id: str
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the workers besides the keeper's own environment."""
    withheld: tuple[str, ...] = ()
    """Names of variables in the keeper's environment that workers do not get, because only agents need them."""
    cwd: str = ""
    """The workers' working folder. Empty: that of the keeper."""
    stdin: str | None = None
    """What each worker reads from its standard input, one character per byte (Latin-1). None: workers inherit the
    keeper's standard input."""
    terminal: int | None = None
    """The local rank of the worker that has the terminal of the agent. None: no worker has."""
    streams: StreamSettings = StreamSettings()
    log_base: str = ""
    """The folder in which a folder for this run's files is made. Empty: the host's folder for temporary files."""
    log_dir: str = ""
    """The folder of this run, if an earlier keeper of this agent has made it. Empty: this keeper makes it."""
    master_port: int = 0
    """The bootstrap port of every round. 0: any free one."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, as its device 0."""
    timer_file: str | None = None
    """The path of the pipe through which workers set timers. Empty: the keeper chooses it. None: there is no pipe."""
    used_ports: tuple[int, ...] = ()
    """Bootstrap ports that this agent has used. None of them is reserved again."""
    port: int = 0
    """The bootstrap port that an earlier keeper has reserved for the next round. Other nodes may know it already, so it
    is reserved again. 0: there is none."""
    mark: str = ""
    """Every worker has this text in its environment, in the variable `orphans.MARK`. Empty: it has no such variable."""
    sweeps: bool = False
    """An earlier keeper of this agent was killed. So the keeper first ends every process that carries the mark."""
    left: tuple[tuple[int, int], ...] = ()
    """With `sweeps`: the earlier keeper and its workers, as pid and start time (`hostrecord.ProcessId`). They are ended
    even if they do not carry the mark."""
    hang_after_s: float | None = None
    """A worker that reports no progress for so many seconds is ended, and counts as failed. None: after its first
    progress it is not."""
    start_timeout_s: float | None = None
    """The same for a worker that has made no progress since its start. None: as `hang_after_s` says."""
    pings: bool = False
    """Both sides send `Ping`, because the keeper runs on another host (`remote/pings.py`)."""


@frozen
class Fence:
    """How long the workers may live without another `Fence`. Then the keeper kills them without being told to.

    It is a time, and not a number of seconds from the arrival of the message. Agent and keeper may be suspended when
    the message is on its way, and this must not prolong anything."""

    until: float | None
    """Seconds on the monotonic clock of this host. None: there is no limit."""


@frozen
class Say:
    """A line of reknit's own for the keeper's console, in order with the workers' output."""

    line: str


@frozen
class Flush:
    """Answered by `Flushed` when the console has everything that was said and read before."""


@frozen
class Resized:
    """The console's terminal has another size."""


@frozen
class Credit:
    """The agent has written this many `Output` records. The keeper may send as many more."""

    records: int


@frozen
class Shutdown:
    """The keeper is to end every worker at once, and then itself. Answered by the end of the stream."""


# ---- keeper → agent, beside WorkersStarted, WorkersExited, WorkersStopped and PortReserved ----


@frozen
class Pids:
    """The processes of a round. Sent just before `WorkersStarted`."""

    round: int
    pids: Mapping[int, int]
    """By local rank. A worker that could not be started is missing."""


@frozen
class Exitcodes:
    """How the workers of a round have ended, those that the stop has ended included. Sent just before
    `WorkersStopped`."""

    round: int
    exitcodes: Mapping[int, int]
    """By local rank. A worker that was not started, or that survives SIGKILL, is missing."""


@frozen
class Hello:
    """The keeper's first message."""

    version: int
    pid: int
    host: str


@frozen
class Ready:
    """The keeper can start workers."""

    port: int
    """A bootstrap port that is reserved on the keeper's host. 0: no port is free."""
    log_dir: str = ""
    """The folder of this run on the keeper's host. Empty: there is none."""
    swept: int = 0
    stuck: tuple[int, ...] = ()
    """Number of processes of an earlier keeper that were ended."""


@frozen
class Unusable:
    """The keeper cannot do what it was configured for, or has met a limit of the machine and ends.

    The text is one line for the operator.
    """

    why: str
    is_usage: bool = False
    """The operator asked for something impossible, for example a log folder that cannot be made."""


@frozen
class Output:
    """What workers have written to the console. Only a keeper without a console of its own sends this."""

    stream: int
    text: str
    """The bytes as UTF-8. A byte that is not UTF-8 is a lone surrogate (`surrogateescape`)."""


@frozen
class Flushed:
    """The answer to `Flush`."""


# ---- both ways ----


@frozen
class Ping:
    """The sender lives."""


_Wanted = StartWorkers | StartProcesses | Stop | ReservePort | Fence | Warm
Happened = WorkersStarted | WorkersExited | WorkersStopped | PortReserved
ToKeeper = _Wanted | Configure | Say | Flush | Resized | Credit | Shutdown | Ping
ToAgent = Happened | Hello | Ready | Unusable | Pids | Exitcodes | Output | Flushed | Ping


def workers_of(command: StartWorkers | StartProcesses) -> Sequence[WorkerRanks | Process]:
    """The workers that the command wants started."""
    return command.assignment.workers if isinstance(command, StartWorkers) else command.processes


def variables(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Environment variables as `Configure.env` carries them."""
    return tuple(sorted(env.items()))
