"""What an agent and its job are now, as plain data for JSON: for /state and `reknit status` (docs/records.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reknit.core.agent.agent import Agent
from reknit.core.job.entries import Failed, Joined, Node
from reknit.core.job.job import Closed, Gathering, Job, Running, Unopened
from reknit.core.job.reasons import blamed_failure
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure

from .describe import failure_text, reason_text
from .doing import Doing, doing, doing_text, takes_part


def job_picture(job: Job) -> dict[str, Any]:
    """The job as the journal tells it."""
    phase, policy = job.phase, job.terms.restarts
    running = isinstance(phase, Running)
    members = [_member(job, at, joined) for at, joined in enumerate(job.members)] if running else []
    outcome = job.outcome
    return {
        "phase": type(phase).__name__.lower(),
        "epoch": job.epoch,
        "round": job.round,
        "restarts_spent": job.spent,
        "restarts_given_back": job.renewed,
        "restarts_allowed": policy.max_restarts,
        "min_nodes": job.terms.min_nodes,
        "max_nodes": job.terms.max_nodes,
        "members": members,
        "standby": [str(j.node) for j in job.live.values() if running and j.node not in job.member_nodes],
        "joined": [] if running else _joined(job),
        "awaited": sorted(map(str, awaited(job))),
        "succeeded": sorted(map(str, job.succeeded)) if running else [],
        "leaving": sorted(map(str, job.leaving)),
        "why": None if job.why is None else reason_text(job.why),
        "failures": _failures(job),
        "ended": None if outcome is None else {"verdict": outcome.verdict.value, "why": reason_text(outcome.why)},
    }


def awaited(job: Job) -> frozenset[Node]:
    """The nodes that were in the round before, and that the next one waits for."""
    return job.phase.expected if isinstance(job.phase, Gathering) else frozenset()


def agent_picture(agent: Agent) -> dict[str, Any]:
    """What the agent does."""
    return {
        "node": str(agent.me) if agent.nonce else agent.spec.node_id,
        "address": agent.spec.address,
        "doing": doing(agent).value,
        "text": doing_text(agent),
        "ready": takes_part(agent),
        "stage": agent.stage.value,
        "outage": agent.contact.outage,
        "leaving": agent.causes.why_leaving is not None,
    }


def workers_picture(agent: Agent) -> list[dict[str, Any]]:
    """The workers of this node in its last round, by local rank."""
    own = agent.workers
    found = []
    for ranks in () if own.assignment is None else own.assignment.workers:
        exit_ = own.exits.get(ranks.local_rank)
        failure = None if exit_ is None else exit_.failure
        state = _STATES.get(doing(agent), "stopped") if exit_ is None else "succeeded" if failure is None else "failed"
        told = None if failure is None else failure_text(failure)
        found.append({"local_rank": ranks.local_rank, "rank": ranks.rank, "state": state, "failure": told})
    return found


_STATES = {Doing.LAUNCHING: "starting", Doing.RUNNING: "running", Doing.STOPPING: "stopping"}
"""How a worker is that has not ended, by what the agent does. Otherwise it was stopped."""


def cause_of(failure: WorkerFailure) -> str:
    """How a worker failed, in a word: `exit`, `signal`, `no_progress`, `timer_expired` or `not_started`."""
    match failure.cause:
        case NoProgress():
            return "no_progress"
        case TimerExpired():
            return "timer_expired"
    if not failure.is_of_worker:
        return "not_started"
    return "signal" if failure.exitcode < 0 else "exit"


def _member(job: Job, group_rank: int, joined: Joined) -> dict[str, Any]:
    first = sum(other.local_world_size for other in job.members[:group_rank])
    return {
        "node": str(joined.node),
        "group_rank": group_rank,
        "address": joined.address,
        "role": joined.role,
        "first_rank": first,
        "workers": joined.local_world_size,
    }


def _joined(job: Job) -> list[str]:
    """The nodes that are there for the round that is gathered."""
    if isinstance(job.phase, Unopened | Closed):
        return []
    return [str(joined.node) for joined in job.live.values() if joined.round >= job.round]


def _failures(job: Job) -> list[dict[str, Any]]:
    """The failures that ended the last round: all of them, as long as they are remembered, else the one that is
    blamed."""
    reported: Sequence[Failed] = ()
    if isinstance(job.phase, Gathering):
        reported = job.phase.ledger
    elif job.outcome is not None:
        reported = job.outcome.failures
    root = blamed_failure(job.why if job.outcome is None else job.outcome.why)
    found = [(entry.node, failure) for entry in reported for failure in entry.failures]
    if not found and root is not None:
        found = [(root.node, root.failure)]
    return [
        {
            "node": str(node),
            "rank": failure.rank,
            "local_rank": failure.local_rank,
            "cause": cause_of(failure),
            "exitcode": failure.exitcode,
            "text": failure_text(failure, node),
            "blamed": root is not None and failure == root.failure,
        }
        for node, failure in found
    ]
