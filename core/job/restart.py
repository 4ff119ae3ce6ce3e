"""What the end of a round costs, and which failure is to blame.

1. The end of a round is judged once, when no node is expected any more. By then all failures are in the ledger.
2. The end of a round spends a restart if a failure ended the round, unless a member went that had not failed itself.
   When a node dies, the collectives of its peers crash first. Their failures may be journalled before the loss of the
   node, and are its echo.
3. A round whose end spends no restart counts as unspent. The number of unspent rounds is limited. Without a limit, a
   node that dies in every round would keep the job going for ever.
4. The root cause is the first failure in the journal that does not look like the echo of another failure. If all look
   like echoes, it is the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from .entries import Failed, WorkerFailure
from .job import Gathering, Job
from .reasons import BudgetSpent, JobEnd, Unstable, WorkerFailed

ECHOES = (
    "connection reset",
    "connection closed by peer",
    "connection aborted",
    "broken pipe",
    "recvvalue failed",
    "sendbytes failed",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
    "collective operation timeout",
    "socket closed",
    "connection refused",
)
"""Parts of the exception's text in a worker whose peer died, in lower case. Seen with gloo, NCCL and TCPStore."""


def is_echo(failure: WorkerFailure) -> bool:
    """Whether the failure looks like the consequence of another worker's death."""
    text = (failure.message or "\n".join(failure.stderr[-5:])).lower()
    return any(echo in text for echo in ECHOES)


def are_echoes(failures: Sequence[WorkerFailure]) -> bool:
    """Whether all these failures look like echoes, so that another worker must have failed first."""
    return bool(failures) and all(is_echo(f) for f in failures)


def root_cause_of(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The first failure that does not look like an echo, else the first. `failures` must not be empty."""
    return next((f for f in failures if not is_echo(f)), failures[0])


def root_cause(ledger: Sequence[Failed]) -> WorkerFailed:
    """The node and the failure that are blamed for the failures in `ledger`, which must not be empty."""
    failure = root_cause_of([w for f in ledger for w in f.failures])
    return next(WorkerFailed(f.node, failure) for f in ledger if failure in f.failures)


def judge(job: Job, phase: Gathering) -> Job | JobEnd:
    """The job with the end of its last round counted, or why no round may follow."""
    policy = job.terms.restarts
    if isinstance(job.why, WorkerFailed) and phase.excuse is None:
        root = root_cause(phase.ledger)  # more is known by now than when the first failure ended the round
        if job.spent >= policy.max_restarts:
            return BudgetSpent(max_restarts=policy.max_restarts, root=root)
        return evolve(job, phase=evolve(phase, judged=True), spent=job.spent + 1, why=root)
    if job.unspent >= policy.max_unspent:
        return Unstable(max_unspent=policy.max_unspent)
    why = phase.excuse if isinstance(job.why, WorkerFailed) else job.why
    return evolve(job, phase=evolve(phase, judged=True), unspent=job.unspent + 1, why=why)


def backoff_s(job: Job) -> float:
    """Seconds that a member waits before it joins the round that is gathered. 0 if the end spends no restart."""
    policy, restart = job.terms.restarts, job.spent + 1
    if not isinstance(job.why, WorkerFailed) or restart > policy.max_restarts:
        return 0.0  # the round spends no restart, or no restart is left
    # The exponent is capped so that no policy overflows a float.
    return float(min(policy.backoff_s * 2 ** min(restart - 1, 64), policy.backoff_max_s))
