"""`reknit status`: what the agents of this host do now, or how a job is in its store. Nothing is changed anywhere."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from reknit.adapters.keeper.output.console import escaped
from reknit.adapters.observe.now import Now, of_live
from reknit.adapters.observe.progress_seen import is_stopped, with_progress
from reknit.adapters.observe.traces import of_this_host
from reknit.adapters.runtime.ports import NoJournal, Refused, Unavailable
from reknit.app.input.meeting import kept
from reknit.app.report import exit_status
from reknit.app.wiring.several_nodes import read_job
from reknit.core.agent.commands import Result
from reknit.core.agent.reasons import JournalRefused, StoreLost
from reknit.core.agent.states import WorkerState
from reknit.core.job.reasons import BudgetSpent
from reknit.core.text.describe import reason_text, time_text
from reknit.core.text.picture import agent_picture, job_picture, workers_picture
from reknit.core.text.story import merged
from reknit.core.text.telling import head_lines

from .arguments import Parsed, Table
from .looking import HELP, clock_of, command_text, fail, latest_run, main, no_agent, show, words_of
from .options import Option, UsageError, borrowed

if TYPE_CHECKING:
    from reknit.core.job.job import Job

_WHAT, _WHERE = "What is shown", "A job in its store"
_SHARED = {
    "rdzv-backend": "where its nodes meet: c10d (the default), etcd or file",
    "rdzv-endpoint": "HOST[:PORT] of the store, or the shared folder",
    "rdzv-id": "name of the job",
    "rdzv-conf": "etcd: protocol, ca_cert, ssl_cert, ssl_cert_key, user, password_file",
    "rdzv-secret": "the secret of the job. Better set REKNIT_RDZV_SECRET",
}
TABLE = Table(
    "reknit status",
    (
        Option("watch", "show it again every second, until Ctrl-C or the end of JOB", short="w", group=_WHAT),
        Option("json", "one JSON object for each agent or job", group=_WHAT),
        *borrowed(_SHARED, _WHERE),
        HELP,
    ),
    "reknit status [--watch] [--json] [JOB…]",
    "Show the jobs whose agents run on this host: round, restarts, who takes part, who is waited for, and how far each"
    " worker is. Workers tell how far they are by reknit.progress().",
    "JOB is the name of a job (--rdzv-id). With --rdzv-endpoint, the job is read from its store, from any host."
    " Nothing is written there. With --watch, reknit waits for a JOB that does not run yet, and says in the end how the"
    " JOB has ended. The exit status is 1 if no such job runs here, and 69 if no such job has begun in the store.",
    mixes=True,
)
_PAUSE_S = 1.0
_LOOKS = 2
"""A job that has begun, and was not seen in so many looks in a row, has ended."""
_NONE = 1
_STORED = "  this is what the agents have written; if all of them were killed, the store does not show it"


def status(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, lambda parsed: _status(parsed, environ))


def _status(parsed: Parsed, environ: Mapping[str, str]) -> int:
    try:
        if parsed["watch"]:
            return _watch(parsed, environ)
        look = _look(parsed, environ)
        if not look.lines:
            return fail(no_agent(words_of(parsed)), _NONE)
        show(look.lines)
        return 0
    except NoJournal as e:
        return fail(f"no such job has begun in this store: {e}", _refused(e))
    except Refused as e:
        return fail(str(e), _refused(e))
    except Unavailable as e:
        return fail(f"the store cannot be reached: {e}", exit_status(Result(WorkerState.FAILED, StoreLost(str(e)))))


def _refused(error: Refused) -> int:
    return exit_status(Result(WorkerState.FAILED, JournalRefused(error.refusal, str(error))))


# ---- again and again ----


def _watch(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Until Ctrl-C, or until the jobs that were named have ended. On a terminal the text stays in its place."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the command line has taken it away
    console, names, is_waiting = Console(), _names(parsed), False
    nothing = f"waiting for job {', '.join(names)}" if names else no_agent(())
    try:
        with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            for look in _looks(parsed, environ):
                if look.is_over:
                    break
                lines = [*_clock(parsed), *(look.lines or [nothing])]
                if live is not None:
                    live.update(Text("\n".join(map(escaped, lines))), refresh=True)
                elif not look.lines:  # said once
                    if not is_waiting:
                        fail(nothing, 0)
                elif not show(lines):
                    return 0  # nobody reads
                is_waiting = not look.lines
        show(look.lines)  # the screen of `live` is gone
    except KeyboardInterrupt:
        pass
    return 0


def _clock(parsed: Parsed) -> Iterator[str]:
    """The time, above what is shown. Not between JSON objects."""
    if not parsed["json"]:
        yield time.strftime("%H:%M:%S")


def _looks(parsed: Parsed, environ: Mapping[str, str]) -> Iterator[_Look]:
    """One look after the other, without an end. If jobs were named, one that is over tells how they have ended."""
    names = () if parsed["rdzv-endpoint"] else _names(parsed)
    since, begun, missed = time.time(), set[str](), 0
    while True:
        try:
            look = _look(parsed, environ)
        except NoJournal:
            look = _Look(())
        here = [(trace, trace.about) for trace in of_this_host() if trace.about and trace.about.job in names]
        # An agent may begin and end between two looks.
        begun |= {about.job for trace, about in here if about.began >= since or trace.is_live}
        missed = 0 if not begun or any(trace.is_live for trace, _ in here) else missed + 1
        if missed == _LOOKS:
            yield _Look(tuple(line for name in names if name in begun for line in _end_lines(name, parsed)), True)
        elif not missed:
            yield look
        time.sleep(_PAUSE_S)


def _end_lines(name: str, parsed: Parsed) -> Iterator[str]:
    """How the latest run of a job has ended, as far as the traces of its agents on this host tell."""
    run = latest_run(name)
    if not run.nodes:
        yield f'job "{name}" has ended, and its trace cannot be read'
        return
    if parsed["json"]:
        latest = max((node.job for node in run.nodes), key=lambda job: (job.epoch, job.round, job.outcome is not None))
        yield json.dumps({"job": {"run_id": name, **job_picture(latest)}})
        return
    story = merged(run.nodes)
    outcome = story.outcome
    yield from head_lines(story, name, clock_of(story.began, story.ended), run.live)
    if outcome is not None and isinstance(outcome.why, BudgetSpent):
        yield reason_text(outcome.why.root)


# ---- one look ----


@frozen
class _Look:
    lines: tuple[str, ...]
    """What is shown. Empty: no such job is there."""
    is_over: bool = False
    """The job has ended, and `lines` tell how."""


def _names(parsed: Parsed) -> tuple[str, ...]:
    """The jobs that were named. In a store, that is one."""
    words = words_of(parsed)
    if not parsed["rdzv-endpoint"]:
        return words
    named = parsed["rdzv-id"] or next(iter(words), "")
    if not named:
        raise UsageError("reknit status with --rdzv-endpoint needs the name of the job: --rdzv-id")
    return (named,)


def _look(parsed: Parsed, environ: Mapping[str, str]) -> _Look:
    if not parsed["rdzv-endpoint"]:
        return _Look(tuple(_lines(parsed)))
    (job_id,) = _names(parsed)
    named = evolve(parsed, values={**parsed.values, "rdzv-backend": parsed["rdzv-backend"] or "c10d"})
    job = read_job(kept(named, environ, "reknit status", ("c10d", "etcd", "file")), job_id)
    data = json.dumps({"job": {"run_id": job_id, **job_picture(job)}})
    if parsed["json"]:
        return _Look((data,), job.outcome is not None)
    rest = () if job.outcome is not None else (_STORED,)
    return _Look((*_job_lines(job_id, job, None), *rest), job.outcome is not None)


def _lines(parsed: Parsed) -> Iterator[str]:
    """What the agents of this host do."""
    if parsed["rdzv-backend"]:
        raise UsageError(f"{parsed.spelled('rdzv-backend')} needs --rdzv-endpoint")
    # The agent that knows of the latest round comes first, and tells of the job.
    agents = sorted(
        of_live(words_of(parsed)), key=lambda now: (*_journal(now), -now.agent.job.epoch, -now.agent.job.round)
    )
    if parsed["json"]:
        yield from (json.dumps(_data(now)) for now in agents)
        return
    for _, same in groupby(agents, _journal):
        first, *others = same
        yield from _job_lines(first.about.job, first.agent.job, time.time() - first.about.began)
        for now in (first, *others):
            yield from _agent_lines(now)


def _journal(now: Now) -> tuple[str, str]:
    """What the agents of one job have in common."""
    return now.about.job, now.agent.job.journal


# ---- as data ----


def _data(now: Now) -> dict[str, Any]:
    about, agent = now.about, now.agent
    return {
        "job": {"run_id": about.job, **job_picture(agent.job)},
        "agent": {
            **agent_picture(agent),
            "for_s": round(now.for_s, 3),
            "version": about.version,
            "pid": about.agent.pid,
            "began": about.began,
            "command": list(about.command),
            "trace": now.path,
        },
        "workers": {
            "round": agent.workers.round if agent.workers.round >= 0 else None,
            "state": agent.workers.state.value,
            "ranks": with_progress(workers_picture(agent), now.progress),
        },
    }


# ---- as text ----


def _agent_lines(now: Now) -> Iterator[str]:
    agent = now.agent
    node = agent.me if agent.nonce else agent.spec.node_id
    text, pid = agent_picture(agent)["text"], now.about.agent.pid
    stopped = ", its process is stopped" if is_stopped(pid) else ""
    yield f"  this node, {node}, {text}, for {time_text(now.for_s)} (agent: pid {pid}{stopped})"
    if now.about.command:
        yield f"    workers: {command_text(now.about.command)}"
    ranks = with_progress(workers_picture(agent), now.progress) if agent.workers.alive else []
    calls = any(worker["progress_s"] is not None for worker in ranks)
    steps = [worker["step"] for worker in ranks if worker["step"] is not None]
    for worker in ranks:
        who = f"pid {worker['pid']}" if worker["pid"] else "not started"
        behind = max(steps) - worker["step"] if worker["step"] is not None else 0
        yield f"    rank {worker['rank']}  {who}  {_progress(worker, calls)}" + (f", {behind} behind" if behind else "")


def _progress(worker: Mapping[str, Any], others_call: bool) -> str:
    """`others_call`: some worker of this node has called `reknit.progress`."""
    if worker["failure"]:
        return str(worker["failure"])
    if worker["state"] == "succeeded":
        return "succeeded"
    if worker["waiting"]:
        return "has returned, and waits for the other workers"
    stopped = "its process is stopped, " if worker["stopped"] else ""
    if worker["progress_s"] is None:
        return f"{stopped}has not called reknit.progress()" if others_call else f"{stopped}{worker['state']}"
    step = "" if worker["step"] is None else f"step {worker['step']}, "
    return f"{stopped}{step}progress {worker['progress_s']:.1f} s ago"


def _job_lines(name: str, job: Job, since_s: float | None) -> Iterator[str]:
    """`since_s`: for how long the agent has run. None: there is none here."""
    told = job_picture(job)
    for_s = "" if since_s is None else f", its agent here has run for {time_text(since_s)}"
    restarts = f"{told['restarts_spent']} of {told['restarts_allowed']} restarts spent"
    ended = told["ended"]
    match told["phase"]:
        case "closed":
            state = f"{ended['verdict']}: {ended['why']}"
        case "unopened":
            state = "not begun"
        case phase:
            state = f"round {job.round} {'runs' if phase == 'running' else 'is gathered'}"
    yield f'job "{name}": {state}, {restarts}{for_s}'
    if told["members"]:
        yield f"  members: {', '.join(_member(member) for member in told['members'])}"
    for title in ("joined", "awaited", "standby", "succeeded", "leaving"):
        if told[title]:
            yield f"  {title}: {', '.join(told[title])}"
    missing = told["min_nodes"] - len(told["joined"]) - len(told["awaited"])
    if told["phase"] == "gathering" and missing > 0:
        yield f"  missing: {missing} more node{'s' * (missing != 1)}, of at least {told['min_nodes']}"
    if told["why"] and not ended:
        yield f"  the round before ended: {told['why']}"


def _member(member: Mapping[str, Any]) -> str:
    first, count = member["first_rank"], member["workers"]
    ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
    return f"{member['node']} ({ranks})"
