"""What the job remembers of nodes that are gone, and of epochs that are over. It is bounded, however long a job lives.

1. Of the nodes that are gone, the latest are remembered: `REMEMBERED`, or as many as the largest round had.
2. A node that is forgotten loses its seat. Its incarnation raises `Job.floor`: every incarnation up to the floor counts
   as gone, for every id that is not remembered. So nothing that was said of a forgotten node counts ever again.
3. Of the epochs that are over, the latest `EPOCHS` are remembered, and of all but the last one only the failure that is
   blamed, without its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import evolve

from .entries import Failed, Node, NodeId
from .job import Job, Outcome
from .reasons import AbortedByOperator, BudgetSpent
from .ring import without
from .workers import WorkerFailure

REMEMBERED = 1024
"""Number of gone nodes that every job remembers. A job with a larger round remembers as many as that round had."""
EPOCHS = 16
"""Number of epochs whose outcomes are remembered. An agent that is further behind learns that its epoch is over, and
not how it ended."""
BRIEF = 200
"""Upper bound, in characters, on a text in an outcome that is kept in brief."""


def buried(job: Job, nodes: Iterable[Node]) -> dict[str, Any]:
    """The fields of the job that change when these nodes go, in this order."""
    gone = dict(job.gone)
    for node in nodes:
        gone.pop(node.id, None)  # the latest stand last
        gone[node.id] = node.incarnation
    excess = len(gone) - max(REMEMBERED, job.largest)
    if excess <= 0:
        return {"gone": gone}
    floor, seats = job.floor, dict(job.seats)
    for node_id in list(islice(gone, excess)):
        floor = max(floor, gone.pop(node_id))
        seats.pop(node_id, None)
    return {"gone": gone, "floor": floor, "seats": seats}


def without_nodes(job: Job, nodes: Sequence[Node]) -> Job:
    """The job once these live nodes are gone, in this order. The phase is not changed."""
    if not nodes:
        return job  # nor is anything forgotten
    ids, ring = {node.id for node in nodes}, job.ring
    for node in nodes:
        ring = without(ring, node, job.seats)
    live = {node_id: joined for node_id, joined in job.live.items() if node_id not in ids}
    return evolve(job, live=live, leaving=job.leaving.difference(nodes), ring=ring, **buried(job, nodes))


def unburied(gone: Mapping[NodeId, int], ids: Iterable[NodeId]) -> Mapping[NodeId, int]:
    """The gone nodes once these ids are live. A live node's incarnation tells which ones before it are gone."""
    back = gone.keys() & set(ids)
    return {node_id: incarnation for node_id, incarnation in gone.items() if node_id not in back} if back else gone


def past_of(job: Job) -> tuple[Outcome, ...]:
    """`Job.past` of the epoch after this one."""
    if job.outcome is None:
        return job.past
    return (*(abridged(outcome) for outcome in job.past[-EPOCHS + 1 :]), job.outcome)


def abridged(outcome: Outcome) -> Outcome:
    """The outcome with short texts, and without the failures that are not blamed."""
    match outcome.why:
        case BudgetSpent(root=root) as why:
            failure = _brief(root.failure)
            round = max((f.round for f in outcome.failures), default=0)
            failures = (Failed(root.node, round, (failure,)),)
            return Outcome(outcome.verdict, evolve(why, root=evolve(root, failure=failure, hang=None)), failures)
        case AbortedByOperator(why):
            return Outcome(outcome.verdict, AbortedByOperator(why[:BRIEF]))
        case _:
            return Outcome(outcome.verdict, outcome.why)


def _brief(failure: WorkerFailure) -> WorkerFailure:
    return evolve(failure, message=failure.message[:BRIEF], traceback="", stderr=(), log=failure.log[:BRIEF])
