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

from attrs import evolve

from reknit.adapters.keeper.output.console import escaped
from reknit.adapters.observe.now import Now, of_live
from reknit.adapters.observe.progress_seen import is_stopped, with_progress
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.app.input.meeting import kept
from reknit.app.report import exit_status
from reknit.app.wiring.several_nodes import read_job
from reknit.core.agent.commands import Result
from reknit.core.agent.reasons import JournalRefused, StoreLost
from reknit.core.agent.states import WorkerState
from reknit.core.text.describe import time_text
from reknit.core.text.picture import agent_picture, job_picture, workers_picture

from .arguments import Parsed, Table
from .looking import HELP, fail, main, show, words_of
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
        Option("watch", "show it again every second, until Ctrl-C", short="w", group=_WHAT),
        Option("json", "one JSON object for each agent or job", group=_WHAT),
        *borrowed(_SHARED, _WHERE),
        HELP,
    ),
    "reknit status [--watch] [--json] [JOB…]",
    "Show the jobs whose agents run on this host: round, restarts, who takes part, who is waited for, and how far each"
    " worker is. Workers tell how far they are by reknit.progress().",
    "JOB is the name of a job (--rdzv-id). With --rdzv-endpoint, the job is read from its store, from any host."
    " Nothing is written there. The exit status is 1 if no such job runs here.",
    mixes=True,
)
_PAUSE_S = 1.0
_LOOKS = 2
"""A job that has begun, and was not seen in so many looks in a row, has ended."""
_NONE = 1


def status(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, lambda parsed: _status(parsed, environ))


def _status(parsed: Parsed, environ: Mapping[str, str]) -> int:
    try:
        if not parsed["watch"]:
            lines = list(_lines(parsed, environ))
            if not lines:
                return fail(_nothing(parsed), _NONE)
            show(iter(lines))
            return 0
        return _watch(parsed, environ)
    except Refused as e:
        return fail(str(e), exit_status(Result(WorkerState.FAILED, JournalRefused(e.refusal, str(e)))))
    except Unavailable as e:
        return fail(f"the store cannot be reached: {e}", exit_status(Result(WorkerState.FAILED, StoreLost(str(e)))))


def _nothing(parsed: Parsed) -> str:
    jobs = ", ".join(words_of(parsed))
    return f"no agent of job {jobs} runs on this host" if jobs else "no agent runs on this host"


def _watch(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Until Ctrl-C, or until the jobs that were named have ended. On a terminal the text stays in its place."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the command line has taken it away
    console, has_begun, missed = Console(), False, 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            while True:
                found = list(_lines(parsed, environ))
                has_begun, missed = has_begun or bool(found), 0 if found else missed + 1
                if words_of(parsed) and has_begun and missed == _LOOKS:
                    break
                lines = [time.strftime("%H:%M:%S"), *(found or [_nothing(parsed)])]
                if live is not None:
                    live.update(Text("\n".join(map(escaped, lines))), refresh=True)
                elif not show(iter(lines)):
                    return 0  # nobody reads
                time.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return 0
    return fail(_nothing(parsed), 0)


def _lines(parsed: Parsed, environ: Mapping[str, str]) -> Iterator[str]:
    if parsed["rdzv-endpoint"]:
        job_id = parsed["rdzv-id"] or next(iter(words_of(parsed)), "")
        if not job_id:
            raise UsageError("reknit status with --rdzv-endpoint needs the name of the job: --rdzv-id")
        named = evolve(parsed, values={**parsed.values, "rdzv-backend": parsed["rdzv-backend"] or "c10d"})
        job = read_job(kept(named, environ, "reknit status", ("c10d", "etcd", "file")), job_id)
        if parsed["json"]:
            yield json.dumps({"job": {"run_id": job_id, **job_picture(job)}})
        else:
            yield from _job_lines(job_id, job, None)
        return
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
    ranks = with_progress(workers_picture(agent), now.progress) if agent.workers.alive else []
    steps = [worker["step"] for worker in ranks if worker["step"] is not None]
    for worker in ranks:
        who = f"pid {worker['pid']}" if worker["pid"] else "not started"
        behind = max(steps) - worker["step"] if worker["step"] is not None else 0
        yield f"    rank {worker['rank']}  {who}  {_progress(worker)}" + (f", {behind} behind" if behind else "")


def _progress(worker: Mapping[str, Any]) -> str:
    if worker["failure"]:
        return str(worker["failure"])
    if worker["state"] == "succeeded":
        return "succeeded"
    if worker["waiting"]:
        return "has returned, and waits for the other workers"
    stopped = "its process is stopped, " if worker["stopped"] else ""
    if worker["progress_s"] is None:
        return f"{stopped}has reported no progress"
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
