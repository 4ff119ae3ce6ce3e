"""`reknit stacks`: where the workers of this host stand in their programs now. They are looked at, and run on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import frozen

from reknit.adapters.keeper.watchdog.activity import ThreadStack, activity_of
from reknit.adapters.keeper.watchdog.thread_stacks import dump_command, kernel_of, py_spy_for, pythons_of, threads_in
from reknit.adapters.observe.now import Now, of_live
from reknit.app.input.readers import ranks
from reknit.core.job.workers import Activity
from reknit.core.text.describe import activity_text, ranks_text

from .arguments import Parsed, Table
from .looking import HELP, fail, main, no_agent, show, words_of
from .options import Option

TABLE = Table(
    "reknit stacks",
    (
        Option("rank", "only these ranks, and the stacks of all of them: 0,2", "N,N", "", ranks, group="What is shown"),
        HELP,
    ),
    "reknit stacks [--rank=N,N] [JOB…]",
    "Show where the workers on this host stand in their programs: in groups, and the stacks of one worker of each"
    " group. Workers are stopped for a moment while py-spy looks at them, and run on.",
    "JOB is the name of a job (--rdzv-id). py-spy must be installed, and allowed to look into the workers; otherwise"
    " the state of the process is shown, as the kernel has it. The exit status is 1 if no such worker runs here.",
    mixes=True,
)
_NONE = 1
_LOOK_S = 10.0
"""Time for py-spy to look into one process. Seconds."""
_MISSING = "it is not installed (pip install py-spy)"


@frozen
class _Looked:
    rank: int
    pid: int
    threads: tuple[ThreadStack, ...]
    activity: Activity
    state: str
    """What the kernel says of the process."""
    stopped: int = 0
    """The pid of its process that a signal has stopped. 0: none is stopped."""


def stacks(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _stacks)


def _stacks(parsed: Parsed) -> int:
    wanted, agents, has_any = parsed["rank"], list(of_live(words_of(parsed))), False
    if not agents:
        return fail(no_agent(words_of(parsed)), _NONE)
    for now in agents:
        looked = [_look(rank, pid) for rank, pid in _pids(now).items() if not wanted or rank in wanted]
        if looked:
            has_any = True
            show(_lines(now, looked, shows_all=bool(wanted)))
    return 0 if has_any else fail(_no_worker(agents, wanted), _NONE)


def _no_worker(agents: Sequence[Now], wanted: Collection[int]) -> str:
    """None of these agents has a worker that is `wanted`: which ones they have. `wanted`: empty if it is any."""
    here: dict[str, list[int]] = {}
    for now in agents:
        here.setdefault(now.about.job, []).extend(_pids(now))
    told = [f'job "{job}" has {ranks_text(sorted(own)) if own else "no worker"} here' for job, own in here.items()]
    what = f" of {ranks_text(sorted(wanted))}" if wanted else ""
    return f"no worker{what} runs on this host: {', '.join(told)}"


def _pids(now: Now) -> dict[int, int]:
    """By rank, the workers of this agent that run."""
    made = now.agent.workers.assignment
    if made is None or not now.agent.workers.alive:
        return {}
    known = {each.rank: now.progress.get(each.local_rank) for each in made.workers}
    return {rank: one.pid for rank, one in known.items() if one is not None and one.pid}


def _look(rank: int, pid: int) -> _Looked:
    threads: tuple[ThreadStack, ...] = ()
    pythons = pythons_of(pid)
    subject = pythons[0] if pythons else pid
    kernel = kernel_of(subject)  # before py-spy stops and continues it
    for python in pythons:
        if py_spy := py_spy_for(python):
            try:
                looking, null = dump_command(py_spy, python), subprocess.DEVNULL
                done = subprocess.run(looking, check=False, stdin=null, capture_output=True, timeout=_LOOK_S)
                threads += threads_in(done.stdout, python)
            except (OSError, subprocess.TimeoutExpired):
                pass  # the kernel's word is shown
    stopped = subject if kernel.state == "T" else 0  # in state t, a debugger has stopped it
    return _Looked(rank, pid, threads, activity_of(threads, kernel), kernel.description, stopped)


def _lines(now: Now, looked: Sequence[_Looked], *, shows_all: bool) -> Iterator[str]:
    yield f'job "{now.about.job}", round {now.agent.workers.round}, node {now.about.node}:'
    groups: dict[Activity, list[_Looked]] = {}
    for one in looked:
        groups.setdefault(one.activity, []).append(one)
    for activity, members in groups.items():
        yield f"  {ranks_text([one.rank for one in members])}: {activity_text(activity)}"
    for members in groups.values():
        for one in members if shows_all else members[:1]:
            yield ""
            yield f"rank {one.rank} (pid {one.pid}), innermost call first:"
            if one.stopped:
                yield f"  its process {one.stopped} is stopped by a signal: `kill -CONT {one.stopped}` continues it"
            if not one.threads:
                yield f"  {one.state or 'it has ended, or belongs to another user'}"
            for thread in one.threads:
                yield from (f"  {line}" for line in thread.lines())
    if not any(one.threads for one in looked):
        yield ""
        is_there = any(py_spy_for(one.pid) for one in looked)
        why = "it may not look into the workers (kernel.yama.ptrace_scope)" if is_there else _MISSING
        yield f"no stacks: they are py-spy's, and {why}"
