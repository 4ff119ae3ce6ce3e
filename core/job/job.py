"""The job: what every agent knows after folding the same journal. `fold` in `fold.py` is its only author.

    Unopened -> Gathering(0) -> Running(0) -> Gathering(1) -> Running(1) … -> Closed
                                                                                └-> Gathering(0) of the next epoch

A *live* node has joined and is not gone. In a running round the live nodes are members or standbys; while
gathering they are *expected* (members of the last round that have not come back) or *ready*.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from .entries import Admission, Failed, Joined, Node, NodeId, Terms
from .ranks import Members, members
from .reasons import JobEnd, LongOver, NodeGone, RoundEnd

EMPTY: Mapping[Any, Any] = MappingProxyType({})
"""The default of every field that is a mapping. It cannot be changed, so all values may share it."""


class Verdict(Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"


@frozen
class Outcome:
    """How an epoch of the job ended. The same on every agent."""

    verdict: Verdict
    why: JobEnd
    failures: tuple[Failed, ...] = ()
    """What the nodes reported of the last round."""


@frozen
class Unopened:
    """Nobody has fixed the terms yet."""


@frozen
class Gathering:
    """Waiting until nobody is expected any more and there are nodes enough."""

    round: int
    expected: frozenset[Node] = frozenset()
    """Members of the last round that may still have workers. The next round is not sealed while there is one."""
    ledger: tuple[Failed, ...] = ()
    """Failures of the last round, in journal order."""
    excuse: NodeGone | None = None
    """The first member that went without having failed itself: the failures of its peers are its echo."""
    judged: bool = False
    """The end of the last round has been counted, as a restart or as unspent."""
    short: bool = False
    """There were too few nodes at some moment. The round is gathered like the first, with a last call for newcomers."""

    @cached_property
    def told(self) -> Mapping[Node, Failed]:
        """What each node has told of its failures. Computed once: all workers of a thousand nodes may fail together."""
        return {failed.node: failed for failed in self.ledger}


@frozen
class Running:
    round: int


@frozen
class Closed:
    round: int
    outcome: Outcome


Phase = Unopened | Gathering | Running | Closed


@frozen
class Job:
    """The state of a job that all agents share. `fold` computes it from the entries of the journal: equal journals make
    equal jobs. The mappings are never changed in place."""

    phase: Phase = Unopened()
    """Whether a round is gathered or runs, or the job is over."""
    terms: Terms = Terms()
    """What must be equal on all nodes, as the agent that opened the job has set it."""
    journal: str = ""
    """The id of the journal. Empty: no agent has opened the job."""
    epoch: int = 0
    """0 in a new journal. One more each time that an ended job begins again in the same journal."""
    past: tuple[Outcome, ...] = ()
    """Outcomes of the latest epochs before this one (see `memory`)."""
    live: Mapping[NodeId, Joined] = EMPTY
    """The latest `Joined` of every live node, in the order in which they came."""
    gone: Mapping[NodeId, int] = EMPTY
    """The nodes that have gone last and whose ids are not live, with their incarnations, in the order in which they
    went."""
    floor: int = -1
    """Every id that is neither live nor in `gone` counts as gone up to this incarnation."""
    leaving: frozenset[Node] = frozenset()
    """Nodes that were told to leave, and have not left yet."""
    members: Members = field(default=Members(), converter=members)
    """Of the last sealed round, in group rank order."""
    why: RoundEnd | None = None
    """What ended the round before the one that runs or is gathered. None before the first."""
    succeeded: frozenset[Node] = frozenset()
    """Members of the last sealed round whose workers all exited with 0."""
    ring: tuple[Node, ...] = ()
    """All live nodes, in the order in which they watch each other (see `ring`)."""
    seats: Mapping[NodeId, int] = EMPTY
    """The places in rank order of the nodes that are live or in `gone`. Holes are not filled."""
    spent: int = 0
    """Restarts that failures of workers have cost and that were not given back (`RestartPolicy.max_restarts`)."""
    renewed: int = 0
    """Restarts that were spent and given back (`RestartPolicy.renews`)."""
    unspent: int = 0
    """Rounds that have ended for another reason (`RestartPolicy.max_unspent`), since a round was steady."""
    size: int = 0
    """Nodes in the first round."""
    largest: int = 0
    """Nodes in the largest round of the epoch."""

    @property
    def round(self) -> int:
        """The round that runs or is gathered; the last one once closed."""
        return 0 if isinstance(self.phase, Unopened) else self.phase.round

    @property
    def member_nodes(self) -> Set[Node]:
        """The nodes of `members`."""
        return self.members.nodes

    @property
    def restarts(self) -> int:
        """Restarts that failures of workers have cost, with those that were given back."""
        return self.spent + self.renewed

    @property
    def outcome(self) -> Outcome | None:
        """How the job has ended. None: it has not."""
        return self.phase.outcome if isinstance(self.phase, Closed) else None

    def is_live(self, node: Node) -> bool:
        """`node` has joined, and neither left nor was lost or replaced since."""
        joined = self.live.get(node.id)
        return joined is not None and joined.node == node

    def is_expected(self, node: Node) -> bool:
        """A round is gathered, and `node` has not come back from the last one."""
        return isinstance(self.phase, Gathering) and node in self.phase.expected

    def is_gone(self, node: Node) -> bool:
        """`node` has left, or was lost or replaced. It never comes back under the same incarnation."""
        joined = self.live.get(node.id)
        if joined is not None:
            return node.incarnation < joined.node.incarnation
        return self.gone.get(node.id, self.floor) >= node.incarnation

    def highest_incarnation(self, node_id: NodeId) -> int:
        """The highest that can have been live. -1: none."""
        joined = self.live.get(node_id)
        return self.gone.get(node_id, self.floor) if joined is None else joined.node.incarnation

    def outcome_of(self, epoch: int) -> Outcome | None:
        """How this epoch, or one before it, has ended. None: the epoch has not ended."""
        if epoch >= self.epoch:
            return self.outcome
        age = self.epoch - epoch
        return self.past[-age] if age <= len(self.past) else Outcome(Verdict.FAILED, LongOver(epoch))


def ready(job: Job) -> list[Joined]:
    """Live nodes that could be seated now: no workers of the last round, and not leaving. In journal order."""
    busy = (job.phase.expected if isinstance(job.phase, Gathering) else job.member_nodes) | job.leaving
    return [j for j in job.live.values() if j.node not in busy] if busy else list(job.live.values())


def coming(job: Job) -> int:
    """How many nodes a gathered round can count on: all ready nodes, and all expected nodes that do not leave."""
    return len(job.live) - len(job.leaving)


def has_enough(job: Job) -> bool:
    """The gathered round can count on enough nodes."""
    return coming(job) >= job.terms.min_nodes


def can_seal(job: Job) -> bool:
    """A last call would seal the gathered round: nobody is expected, and enough nodes are ready."""
    return isinstance(job.phase, Gathering) and not job.phase.expected and has_enough(job)


def can_open(job: Job, epoch: int) -> bool:
    """Whether this epoch may begin: the first one in a new journal, or the one after a job that has not succeeded."""
    outcome = job.outcome
    if outcome is None:
        return isinstance(job.phase, Unopened) and epoch == 0
    return epoch == job.epoch + 1 and outcome.verdict is not Verdict.SUCCEEDED


def can_join(job: Job, joined: Joined) -> bool:
    """Whether this incarnation can take part at all."""
    if isinstance(job.phase, Closed) or joined.local_world_size < 1:
        return False  # the job is over; or no rank would be its own
    node, known = joined.node, job.live.get(joined.node.id)
    if known is None or known.nonce != joined.nonce:
        # The speaker may be dead. If it lives, it reads what it had not, and joins again, as a higher incarnation.
        return job.highest_incarnation(node.id) <= joined.seen < node.incarnation
    return True


def lacking(job: Job) -> int:
    """How many more entries it takes, at least, before the gathered round can be sealed; 1 if none is gathered."""
    if not isinstance(job.phase, Gathering):
        return 1
    return max(1, len(job.phase.expected), job.terms.min_nodes - coming(job))


def room(job: Job) -> int:
    """The most nodes that the next round may have."""
    if job.size and job.terms.admission is Admission.NEVER:
        return min(job.size, job.terms.max_nodes)
    return job.terms.max_nodes


def admissible(job: Job) -> tuple[Node, ...]:
    """Standbys for which the running round would be ended: there is room, and no member has succeeded."""
    return tuple(j.node for j in ready(job)) if _is_open(job) else ()


def has_admissible(job: Job) -> bool:
    """Whether there are any. Newcomers stand last, so this looks at few, however many nodes there are."""
    return _is_open(job) and any(
        j.node not in job.member_nodes and j.node not in job.leaving for j in list(job.live.values())[::-1]
    )


def _is_open(job: Job) -> bool:
    if not isinstance(job.phase, Running) or job.succeeded or len(job.members) >= room(job):
        return False
    return len(job.live) != len(job.members)  # else there is nobody but members
