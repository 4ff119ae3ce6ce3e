"""Whether the nodes that are there may go on as the job. Asked in jobs whose journal may be at two places.

Two groups of nodes may not reach each other, and each may have a journal that goes on. Only one of them may form the
next round. Rule 17 of docs/protocol.md says why this is enough for that.

1. More than half of the members of the last sealed round must be there. Half of them are enough if the member with
   group rank 0 is among them.
2. A member is there if its agent process has joined, whichever incarnation it speaks as. A new process on the same host
   is not the member: nobody knows what the old one has said in another journal.
3. A member that said goodbye agrees with whatever follows in the journal in which it has said so. A member that was
   declared lost does not: it may be in the other group.
"""

from __future__ import annotations

from collections.abc import Collection

from .entries import Joined, Node
from .job import Gathering, Job, Unopened, Verdict, coming, ready
from .reasons import AbortedByOperator, JobEnd, NoMajority, TooFewNodes


def has_enough(job: Job) -> bool:
    """The gathered round can count on enough nodes."""
    return coming(job) >= job.terms.min_nodes and has_majority(job)


def can_seal(job: Job) -> bool:
    """A last call would seal the gathered round: nobody is expected, and enough nodes are ready."""
    return isinstance(job.phase, Gathering) and not job.phase.expected and has_enough(job)


def lack(job: Job) -> JobEnd:
    """Why a job without enough nodes is given up. If there is no majority either, that is the reason, because no epoch
    follows then. A node that is still expected has not agreed to anything: it may go on in the other group."""
    nodes = agreeing(job, {joined.nonce for joined in ready(job)})
    if asks_for_majority(job) and not is_majority(job.members, nodes):
        return NoMajority(len(nodes), len(job.members))
    return TooFewNodes(coming(job), job.terms.min_nodes)


def can_open(job: Job, epoch: int) -> bool:
    """Whether this epoch may begin: the first one in a new journal, or the one after a job that has ended.

    A group without a majority may give up, or be aborted, while another group goes on as the job. So after such an end
    no epoch begins.
    """
    outcome = job.outcome
    if outcome is None:
        return isinstance(job.phase, Unopened) and epoch == 0
    is_final = outcome.verdict is Verdict.SUCCEEDED or isinstance(outcome.why, NoMajority)
    is_final = is_final or (job.terms.needs_majority and isinstance(outcome.why, AbortedByOperator))
    return epoch == job.epoch + 1 and not is_final


def asks_for_majority(job: Job) -> bool:
    """The next round needs a majority: the terms say so, and a round was sealed."""
    return job.terms.needs_majority and bool(job.members)


def has_majority(job: Job) -> bool:
    """Enough members of the last sealed round are there, or will be: live, and not leaving. True also if the next
    round needs no majority."""
    return not asks_for_majority(job) or is_majority(job.members, present(job))


def present(job: Job) -> frozenset[Node]:
    """The members of the last sealed round that agree to the next one."""
    return agreeing(job, {joined.nonce for joined in job.live.values() if joined.node not in job.leaving})


def agreeing(job: Job, nonces: Collection[str]) -> frozenset[Node]:
    """The same, if the agent processes with these nonces are there."""
    return frozenset(m.node for m in job.members if m.nonce in nonces) | job.farewells


def is_majority(members: tuple[Joined, ...], nodes: Collection[Node]) -> bool:
    """`members`: at least one, in group rank order. `nodes`: some of them. Two majorities have a node in common."""
    twice = 2 * len(nodes)
    return twice > len(members) or (twice == len(members) and members[0].node in nodes)


def is_over(joined: Joined, job: Job) -> bool:
    """Whether this `Joined` can have no effect any more: it was for a round that is sealed, and its node is in the last
    one."""
    last = job.round - isinstance(job.phase, Gathering)
    return joined.node in job.member_nodes and joined.round <= last


def said_goodbye(job: Job, node: Node) -> frozenset[Node]:
    """`Job.farewells` once this live node has said goodbye."""
    if not job.terms.needs_majority:
        return job.farewells
    nonce = job.live[node.id].nonce
    return job.farewells | {member.node for member in job.members if member.nonce == nonce}
