"""What the end of a round costs, and which failure is to blame.

1. The end of a round is judged once, when no node is expected any more. By then all failures are in the ledger.
2. The end of a round spends a restart if a failure ended the round, unless a member went that had not failed itself.
   When a node dies, the collectives of its peers crash first. Their failures may be journalled before the loss of the
   node, and are its echo.
3. A round whose end spends no restart counts as unspent. The number of unspent rounds is limited. Without a limit, a
   node that dies in every round would keep the job going for ever. A round that runs for `RestartPolicy.steady_s`
   forgives them, and by policy the restarts spent as well.
4. The root cause is the first failure in the journal that does not look like the echo of another failure. If all look
   like echoes, it is the first one.
5. If that worker has made no progress, `hanging.py` says which of the workers without progress is the root cause. The
   others mostly wait for it. They reach the limit at nearly the same time, so that the order of the journal is chance.
6. Whoever asks before the judgement what it will be gets the answer of the same functions: see `Sequel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from attrs import evolve

from .entries import Failed, Node
from .hanging import blamed
from .job import Gathering, Job, Running
from .reasons import BudgetSpent, JobEnd, Unstable, WorkerFailed
from .workers import NoProgress, WorkerFailure

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
    "socket closed",
    "connection refused",
)
"""Parts of the exception's text in a worker whose peer died, in lower case. Seen with gloo, NCCL and TCPStore."""
TIMEOUTS = (
    "collective operation timeout",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "wait timeout after",
    "waiting for clients",
)
"""The same for a worker whose peer did not come: a time limit of torch has ended its wait. Seen with gloo, NCCL and
TCPStore."""


class Cost(Enum):
    """What the end of a round is counted as."""

    RESTART = "restart"
    """The end spends one of the restarts in `RestartPolicy.max_restarts`."""
    UNSPENT = "unspent"
    """The end is one of those in `RestartPolicy.max_unspent`."""


class Sequel(Enum):
    """What follows the end of a round, as far as it is known before the end is judged."""

    ROUND = "round"
    """The terms allow another round, whatever the members still say of this one. The job can end for another reason."""
    END = "end"
    """No round follows. That is certain."""
    UNKNOWN = "unknown"
    """It depends on what the members still say. In most cases the restarts are spent, and a member that goes would
    excuse the failure (rule 2 above)."""


def is_echo(failure: WorkerFailure) -> bool:
    """Whether the failure looks like the consequence of another worker's death or hang."""
    return _says(failure, ECHOES) or _says(failure, TIMEOUTS)


def are_echoes(failures: Sequence[WorkerFailure]) -> bool:
    """Whether all these failures look like echoes, so that another worker must have failed first."""
    return bool(failures) and all(is_echo(f) for f in failures)


def suggests_hang(failure: WorkerFailure) -> bool:
    """Whether this failure suggests that other workers of the job hang, on any node."""
    return isinstance(failure.cause, NoProgress) or _says(failure, TIMEOUTS)


def _says(failure: WorkerFailure, parts: Sequence[str]) -> bool:
    if failure.cause is not None:
        return False  # reknit has ended the worker, and nothing else has
    text = (failure.message or "\n".join(failure.stderr[-5:])).lower()
    return any(part in text for part in parts)


def root_cause_of(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The failure to blame (rules 4 and 5 above). `failures` must not be empty."""
    first = next((f for f in failures if not is_echo(f)), failures[0])
    return blamed(failures)[0] if isinstance(first.cause, NoProgress) else first


def root_cause(ledger: Sequence[Failed]) -> WorkerFailed:
    """The node and the failure that are blamed for the failures in `ledger`, which must not be empty."""
    failures = [w for f in ledger for w in f.failures]
    root = root_cause_of(failures)
    node = next(f.node for f in ledger if root in f.failures)
    return blaming(node, root, failures)


def blaming(node: Node, root: WorkerFailure, failures: Sequence[WorkerFailure]) -> WorkerFailed:
    """The reason that blames `root`, of these failures."""
    return WorkerFailed(node, root, blamed(failures)[1] if isinstance(root.cause, NoProgress) else None)


def judge(job: Job, phase: Gathering) -> Job | JobEnd:
    """The job with the end of its last round counted, or why no round may follow."""
    policy = job.terms.restarts
    if cost(job, phase) is Cost.RESTART:
        root = root_cause(phase.ledger)  # more is known by now than when the first failure ended the round
        if not affords(job, Cost.RESTART):
            return BudgetSpent(max_restarts=policy.max_restarts, root=root)
        return evolve(job, phase=evolve(phase, judged=True), spent=job.spent + 1, why=root)
    if not affords(job, Cost.UNSPENT):
        return Unstable(max_unspent=policy.max_unspent)
    why = phase.excuse if isinstance(job.why, WorkerFailed) else job.why
    return evolve(job, phase=evolve(phase, judged=True), unspent=job.unspent + 1, why=why)


def cost(job: Job, phase: Gathering) -> Cost:
    """What the end of the last round is counted as, by what the journal shows of it."""
    has_failed = isinstance(job.why, WorkerFailed) and phase.excuse is None
    return Cost.RESTART if has_failed else Cost.UNSPENT


def affords(job: Job, cost: Cost) -> bool:
    """Whether the terms allow another round after an end that is counted as `cost`."""
    policy = job.terms.restarts
    return job.spent < policy.max_restarts if cost is Cost.RESTART else job.unspent < policy.max_unspent


def is_strained(job: Job) -> bool:
    """Whether the job has had ends of rounds that a steady round would forgive."""
    return bool(job.unspent or (job.spent and job.terms.restarts.renews))


def steadied(job: Job, round: int) -> Job:
    """The job after `round` was said to be steady. The same job if another round runs, or none."""
    return forgiven(job) if job.phase == Running(round) else job


def forgiven(job: Job) -> Job:
    """The job once its running round has proved steady."""
    if not is_strained(job):
        return job
    renewed = job.spent if job.terms.restarts.renews else 0
    return evolve(job, unspent=0, spent=job.spent - renewed, renewed=job.renewed + renewed)


def sequel(job: Job, round: int) -> Sequel:
    """What follows the end of `round`, which runs or has ended, if its members do not all succeed."""
    # A round that runs may yet prove steady before it ends.
    jobs = (job, forgiven(job)) if isinstance(job.phase, Running) else (job,)
    afforded = {affords(after, cost) for after in jobs for cost in _possible(job, round)}
    if len(afforded) != 1:
        return Sequel.UNKNOWN
    return Sequel.ROUND if afforded.pop() else Sequel.END


def is_last(job: Job, round: int) -> bool:
    """Whether no restart is left for a failure in `round`, which is not judged yet. Another round follows only if
    something excuses the failure."""
    return Cost.RESTART in _possible(job, round) and not affords(job, Cost.RESTART)


def _possible(job: Job, round: int) -> tuple[Cost, ...]:
    """What the end of `round` can still be counted as. Empty: it was judged, and the job may go on without the node
    that asks."""
    phase = job.phase
    if isinstance(phase, Running) and phase.round == round:
        return tuple(Cost)
    if not isinstance(phase, Gathering) or phase.round != round + 1 or phase.judged:
        return ()
    # An excuse is never taken back, and nothing that is said after the end of a round makes it a failure.
    return (Cost.UNSPENT,) if cost(job, phase) is Cost.UNSPENT else tuple(Cost)


def backoff_s(job: Job) -> float:
    """Seconds that a member waits before it joins the round that is gathered. 0 if the end spends no restart."""
    policy = job.terms.restarts
    if not isinstance(job.why, WorkerFailed) or not affords(job, Cost.RESTART):
        return 0.0  # the round spends no restart, or no restart is left
    # The exponent is capped so that no policy overflows a float.
    return float(min(policy.backoff_s * 2 ** min(job.spent, 64), policy.backoff_max_s))
