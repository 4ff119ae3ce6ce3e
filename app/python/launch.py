"""The call for everyday use: run a function or a script on several workers, and get what they return.

    def train(lr): ...

    values = launch(train, (0.1,), nproc=4, max_restarts=3)
    launch("train.py", ("--lr", 0.1), nproc=4)

1. Workers, restarts and the meeting of several nodes are those of `reknit run`. The rules at the top of `session.py`
   hold. Of the signals only SIGTERM is taken, while `launch` waits in the main thread of a program that does not handle
   it.
2. A job that does not succeed raises `JobFailed`. The text of this error is the report that `reknit run` prints,
   without the line about the exit status.
3. Whatever raises an error here, for example KeyboardInterrupt or a cancelled task, first ends the workers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Never

from attrs import evolve

from reknit.adapters.keeper.output.console import escaped
from reknit.adapters.runtime.threads import is_main_thread
from reknit.app.input.readers import timer_file
from reknit.app.report import final_lines
from reknit.app.settings import Meeting, Settings
from reknit.app.wiring.surroundings import Prevented
from reknit.core.agent.commands import Result
from reknit.core.agent.states import WorkerState
from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.job.job import EMPTY

from .session import Session, opened_async, start, to_end

Entry = Callable[..., object] | str | os.PathLike[str]


_LOOK_S = 1.0


class JobFailed(Exception):
    """The job has not succeeded. The text is the report that `reknit run` prints, without the line about the exit
    status. `result`: the same as a value."""

    __module__ = "reknit"  # as people import it, and as a traceback shows it

    def __init__(self, report: str, result: Result) -> None:
        super().__init__(report, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of a mapping cannot be pickled, and a pool of processes pickles what its workers raise.
        result = self.result
        copy = evolve(result, return_values=dict(result.return_values), failures=dict(result.failures))
        return JobFailed, (self.args[0], copy)


def report_lines(result: Result, *, restarts: int = 0, is_alone: bool = True, trace: str = "") -> list[str]:
    """The report that `reknit run` prints at the end of a job, without the prefix `reknit: ` of its lines. It names no
    options and no exit status.

    `restarts`: number of restarts that the job has had (`running.loop.agent.job.restarts`). Only the line of a job
    that has succeeded shows it. `is_alone`: the job has one node, so it ends with this agent. `trace`: the folder with
    the trace of the agent (`Session.trace`), which the report of a failed job then names.
    """
    lines = final_lines(result, restarts, is_alone=is_alone, names_options=False, trace=trace)
    return [escaped(line) for line in lines]


def launch(
    entry: Entry,
    args: Iterable[object] = (),
    *,
    nproc: int = 1,
    max_restarts: int = 0,
    nodes: int | tuple[int, int] = 1,
    meeting: Meeting | None = None,
    run_id: str = "",
    start_method: str = "spawn",
    warm: bool | Iterable[str] = False,
    env: Mapping[str, str] = EMPTY,
    grace_s: float = 30.0,
    hang_after_s: float | None = None,
    start_timeout_s: float | None = None,
    say: Callable[[str], None] | None = None,
    **unknown: Never,
) -> dict[int, object]:
    """Run a function or a program on several workers, and wait until they have ended.

    `entry`: a function, which each worker calls as `entry(*args)` in a process of its own. Or the path of a Python
    script (`.py`), which this Python runs, or the name of another program.
    `args`: the arguments of the function, or of the program. Those of a program are texts, paths or numbers.
    `nproc`: number of workers on this node.
    `max_restarts`: number of failures that the job survives. After each one, all workers are started again.
    `nodes`: number of nodes, or the least and the greatest number. Each node makes this call, with the same `nodes`,
    `max_restarts`, `meeting` and `run_id`.
    `meeting`: where the nodes meet. None: the job has one node.
    `run_id`: name of the job. Empty: a random name, which is possible with one node only.
    `start_method`: how a worker that calls a function is started: spawn, fork or forkserver (docs/embedding.md).
    `warm`: the modules of a script are imported once for all workers and restarts (docs/warm.md). True: what most
    scripts with torch import. Names of modules: these. For a function, names are imported in addition to
    what start method forkserver imports anyway.
    `env`: variables for the workers besides those of this process. With more than one worker, OMP_NUM_THREADS is 1
    unless it is set, as with `reknit run`.
    `grace_s`: seconds between the signal that stops workers and SIGKILL.
    `hang_after_s`: a worker that has not called `reknit.progress` for so many seconds has failed (docs/watchdog.md).
    None: progress is not watched.
    `start_timeout_s`: the same for a worker that has not called it since its start. None: as `hang_after_s`.
    `say`: called with each line of reknit's own, in another thread. None: the lines go to stderr.

    Returns what the workers of this node have returned, by global rank. It is None for a worker that is a program. The
    mapping is empty if the job had succeeded before this node came.

    Raises `JobFailed` if the job does not succeed or this node cannot take part in it, `FunctionError` if the function
    cannot be a worker or a value cannot be read in this process, `ValueError` for any other wrong argument, and
    `CannotStart` if a limit of the machine is met. KeyboardInterrupt, SystemExit and a SIGTERM that would kill this
    program stop the workers within `grace_s`, a second one sooner, and are raised: SIGTERM as SystemExit(143). Any
    other exception in the calling thread kills the workers at once and is raised.
    """
    _refuse_unknown(unknown)
    settings = _settings(
        entry,
        args,
        nproc,
        max_restarts,
        nodes,
        meeting,
        run_id,
        start_method,
        warm,
        env,
        {"grace_s": grace_s, "hang_after_s": hang_after_s, "start_timeout_s": start_timeout_s},
    )
    try:
        with start(settings, say=say) as running:
            _await_end(running, settings)
            return _outcome(running, settings)
    except Prevented as error:
        raise _failed(error) from None


async def launch_async(
    entry: Entry,
    args: Iterable[object] = (),
    *,
    nproc: int = 1,
    max_restarts: int = 0,
    nodes: int | tuple[int, int] = 1,
    meeting: Meeting | None = None,
    run_id: str = "",
    start_method: str = "spawn",
    warm: bool | Iterable[str] = False,
    env: Mapping[str, str] = EMPTY,
    grace_s: float = 30.0,
    hang_after_s: float | None = None,
    start_timeout_s: float | None = None,
    say: Callable[[str], None] | None = None,
    **unknown: Never,
) -> dict[int, object]:
    """`launch` as a coroutine. Arguments, value and errors are the same. If it is cancelled, the workers get SIGTERM
    and `grace_s` seconds. The cancellation is raised when the agent has ended, at most five seconds after the grace.

    The event loop is not blocked, except while a function and its arguments are pickled for a start, and while the
    values are read.
    """
    _refuse_unknown(unknown)
    settings = _settings(
        entry,
        args,
        nproc,
        max_restarts,
        nodes,
        meeting,
        run_id,
        start_method,
        warm,
        env,
        {"grace_s": grace_s, "hang_after_s": hang_after_s, "start_timeout_s": start_timeout_s},
    )
    try:
        async with opened_async(settings, say=say) as running:
            await to_end(running)
            return _outcome(running, settings)
    except Prevented as error:
        raise _failed(error) from None


def _await_end(running: Session, settings: Settings) -> None:
    """Wait until the agent has ended. An interrupt stops the workers as it does for `reknit run`, and is raised when
    they have ended, with the report as a note. A second one shortens their time."""
    with _raised_at_sigterm():
        try:
            running.join()
            while not running.flush(_LOOK_S):  # what reads this program's stdout may be slow, and nothing may be lost
                pass
        except (KeyboardInterrupt, SystemExit) as interrupt:
            _leave(running, interrupt)
            if running.loop.result is not None:
                interrupt.add_note("\n".join(_report(running, settings, running.loop.result)))
            raise


def _leave(running: Session, interrupt: BaseException | None) -> None:
    while interrupt is not None:
        running.leave(signal.SIGINT if isinstance(interrupt, KeyboardInterrupt) else signal.SIGTERM)
        interrupt = None
        try:
            running.join()
        except (KeyboardInterrupt, SystemExit) as another:
            interrupt = another


@contextmanager
def _raised_at_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises `SystemExit` in the main thread, if it would kill this program."""
    if not is_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _report(running: Session, settings: Settings, result: Result) -> list[str]:
    restarts, is_alone = running.loop.agent.job.restarts, settings.meeting is None
    return report_lines(result, restarts=restarts, is_alone=is_alone, trace=running.trace)


def _outcome(running: Session, settings: Settings) -> dict[int, object]:
    """What the workers have returned. Raises `JobFailed`, and `FunctionError`."""
    result = running.loop.result
    if result is None:
        raise AssertionError("the agent has ended without a result")
    if result.state is WorkerState.SUCCEEDED:
        return running.values()
    lines = _report(running, settings, result)
    raise JobFailed("\n".join(lines), result)


def _failed(error: Prevented) -> JobFailed:
    return JobFailed(escaped(str(error)), Result(WorkerState.FAILED, error.why))


def _settings(
    entry: Entry,
    args: Iterable[object],
    nproc: int,
    max_restarts: int,
    nodes: int | tuple[int, int],
    meeting: Meeting | None,
    run_id: str,
    start_method: str,
    warm: Any,
    env: Any,
    seconds: Mapping[str, Any],
) -> Settings:
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise ValueError(f"args must be a tuple of the arguments, not {args!r:.100}")
    if meeting is not None and not run_id:
        raise ValueError("run_id must be given with a meeting: the name of the job, the same on all nodes")
    pair: object = (nodes, nodes) if isinstance(nodes, int) else nodes
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"nodes must be a number, or the least and the greatest number, not {nodes!r:.100}")
    if isinstance(pair[0], int) and isinstance(pair[1], int) and pair[0] > pair[1]:
        raise ValueError(f"nodes must be the least number and then the greatest, not {nodes!r:.100}")
    given = {}
    if nproc != 1 and "OMP_NUM_THREADS" not in os.environ:
        given["OMP_NUM_THREADS"] = "1"  # as in `reknit run`: torch would start a thread per core in every worker
    fields: dict[str, Any] = {"run_id": run_id} if run_id else {}
    if callable(entry):
        given["PYTHONUNBUFFERED"] = "1"  # what a worker prints appears at once, as that of a script does
        fields |= {"function": entry, "args": tuple(args)}
    else:
        fields["command"] = _command(entry, tuple(args))
    try:
        return Settings(
            local_world_size=nproc,
            terms=Terms(min_nodes=pair[0], max_nodes=pair[1], restarts=RestartPolicy(max_restarts=max_restarts)),
            meeting=meeting,
            start_method=start_method,
            warm=warm,
            env={**given, **env} if isinstance(env, Mapping) else env,
            timer_file=timer_file(os.environ),
            **seconds,
            **fields,
        )
    except ValueError as error:
        raise ValueError(_translated(str(error))) from None


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    """Raises `TypeError`, as Python does for an unknown keyword, and lists the keywords. People who know torchrun try
    the names of its options."""
    for name in unknown:
        known = ", ".join(launch.__kwdefaults__ or ())
        raise TypeError(f"launch() got an unexpected keyword argument {name!r}; its keywords are {known}")


_PARAMETERS = {"local_world_size": "nproc", "min_nodes": "nodes", "max_nodes": "nodes"}
"""By field of the settings: the parameter of `launch`, where it has another name."""


def _translated(refusal: str) -> str:
    """The error message `Class.field must be …` of a value, with the parameter in the place of the field."""
    field, must, wanted = refusal.partition(" must be ")
    name = field.rpartition(".")[2]
    return f"{_PARAMETERS.get(name, name)}{must}{wanted}"


def _command(entry: object, args: Sequence[object]) -> tuple[str, ...]:
    """The command line of a script or another program. Raises `ValueError` if there is no such script, or if the entry
    is a whole command line."""
    if not isinstance(entry, str | os.PathLike) or not os.fspath(entry):
        raise ValueError(f"entry must be a function, the path of a script or the name of a program, not {entry!r:.100}")
    for arg in args:
        if not isinstance(arg, str | os.PathLike | int | float):
            raise ValueError(f"args of a program must be texts, paths or numbers, not {arg!r:.100}")
    texts = tuple(str(os.fspath(arg) if isinstance(arg, os.PathLike) else arg) for arg in args)
    path = os.fspath(entry)
    if not path.endswith(".py"):
        if " " in path and _is_command_line(path):
            wanted = "the name of a program alone, with its arguments in args"
            raise ValueError(f"entry must be {wanted}, not {path!r:.100}")
        return (path, *texts)
    if not os.path.isfile(path):
        raise ValueError(f"entry must be the path of a script that exists, not {path!r:.100}")
    return (sys.executable, "-u", path, *texts)


def _is_command_line(text: str) -> bool:
    from shutil import which  # slow to import, and rarely needed

    return which(text) is None and which(text.partition(" ")[0]) is not None
