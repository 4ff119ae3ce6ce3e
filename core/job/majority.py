"""Whether the nodes that are there may go on as the job. Asked in jobs whose journal may be at two places.

Two groups of nodes may not reach each other, and each may have a journal that goes on. Only one of them may run the
next round. Rule 17 of docs/protocol.md says why this is enough for that.

1. More than half of the members of the last sealed round must be there. Half of them are enough if the member with
   group rank 0 is among them.
2. A member is there if its agent process has joined, whichever incarnation it speaks as. A process is known by its
   nonce. A new process on the same host is not the member: it does not know what the old one has read in another
   journal.
3. A member that said goodbye agrees with whatever follows in the journal in which it has said so. A member that was
   declared lost does not: it may be in the other group.
4. The last round itself may have been sealed in vain: its members wait for each other, and some of them have gone to
   another journal before they read the seal. So its members count only once a majority of the round before has shown
   that it has read the seal. A member shows it by `Confirmed`, by joining the next round, or by its goodbye.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve

from .entries import Admit, Confirmed, GaveUp, Joined, LastCall, Lost, Node, Steady
from .job import Gathering, Job, Running, Unopened, Verdict, coming, ready
from .memory import without_nodes
from .reasons import JobEnd, NoMajority, TooFewNodes


def has_enough(job: Job) -> bool:
    """The gathered round can count on enough nodes."""
    return coming(job) >= job.terms.min_nodes and has_majority(job)


def can_seal(job: Job) -> bool:
    """A last call would seal the gathered round: nobody is expected, and enough nodes are ready."""
    return isinstance(job.phase, Gathering) and not job.phase.expected and has_enough(job) and can_go_on(job)


def can_go_on(job: Job) -> bool:
    """The nodes that are ready can go on as the job now, without those that are expected or leave."""
    if not job.terms.needs_majority:
        return True
    return missing(job, {joined.nonce for joined in ready(job)}) is None and is_read(job)


def lack(job: Job) -> JobEnd:
    """Why a job without enough nodes is given up. If there is no majority either, that is the reason. A node that is
    still expected has not agreed to anything: it may go on in the other group."""
    return missing(job, {joined.nonce for joined in ready(job)}) or TooFewNodes(coming(job), job.terms.min_nodes)


def can_open(job: Job, epoch: int) -> bool:
    """Whether this epoch may begin: the first one in a new journal, or the one after a job that has ended.

    A group may end while another group goes on as the job. So a majority must have said goodbye here.
    """
    outcome = job.outcome
    if outcome is None:
        return isinstance(job.phase, Unopened) and epoch == 0
    return epoch == job.epoch + 1 and outcome.verdict is not Verdict.SUCCEEDED and missing(job, ()) is None


def has_majority(job: Job) -> bool:
    """Enough members of the last sealed round are there, or will be. True also if the next round needs no majority."""
    return lacking(job) is None


def lacking(job: Job) -> NoMajority | None:
    """What the live nodes lack to go on as the job. None: nothing. Those that leave are about to say goodbye."""
    if not (job.terms.needs_majority and job.members):
        return None
    return missing(job, {joined.nonce for joined in job.live.values()})


def missing(job: Job, nonces: Collection[str]) -> NoMajority | None:
    """What the agent processes with these nonces lack to go on as the job. None: they can, or no majority is needed."""
    if not job.terms.needs_majority:
        return None
    for members, others in ((tuple(m.nonce for m in job.members), job.farewells), (job.former, job.confirmed)):
        there = [nonce for nonce in members if nonce in nonces or nonce in others]
        if members and not is_majority(members, there):
            return NoMajority(len(there), len(members))
    return None


def is_majority(members: Sequence[str], some: Collection[str]) -> bool:
    """`members`: at least one, in group rank order. `some` of them. Two majorities have a member in common."""
    twice = 2 * len(some)
    return twice > len(members) or (twice == len(members) and members[0] in some)


# ---- who has read the last seal ----


def is_read(job: Job) -> bool:
    """A majority of the round before has shown that it has read the last seal."""
    if not job.former:
        return True
    last = last_round(job)
    have = job.confirmed | {joined.nonce for joined in job.live.values() if joined.round > last}
    return is_majority(job.former, [nonce for nonce in job.former if nonce in have])


def has_to_confirm(job: Job, me: Node, nonce: str) -> bool:
    """Whether this node has to say that it has read the last seal. If the members have stayed the same, it is enough
    that they join the next round."""
    if nonce not in job.former or nonce in job.confirmed or not job.is_live(me):
        return False
    if isinstance(job.phase, Gathering):
        return me not in job.phase.expected and job.live[me.id].round < job.phase.round
    members = [member.nonce for member in job.members]
    is_same = members[0] == job.former[0] and set(members) == set(job.former)
    return isinstance(job.phase, Running) and not is_same and job.live[me.id].round <= job.phase.round


def last_round(job: Job) -> int:
    """The round that was sealed last, while one runs or is gathered. -1: none."""
    return job.round - isinstance(job.phase, Gathering)


def confirmed(job: Job, entry: Confirmed) -> Job:
    """The job after this entry."""
    is_asked = isinstance(job.phase, Running | Gathering) and entry.round == last_round(job)
    return _with(job, job.live[entry.node.id].nonce) if is_asked and job.is_live(entry.node) else job


def with_goodbye(job: Job, node: Node) -> Job:
    """The job once this live node has said goodbye. Its agent goes to no other journal."""
    if not job.terms.needs_majority:
        return job
    nonce = job.live[node.id].nonce
    if any(member.nonce == nonce for member in job.members):
        job = evolve(job, farewells=job.farewells | {nonce})
    return _with(job, nonce)


def readers(job: Job) -> tuple[tuple[str, ...], frozenset[str]]:
    """`Job.former` and `Job.confirmed` when the gathered round is sealed."""
    before = tuple(member.nonce for member in job.members) if job.terms.needs_majority else ()
    return (before, job.farewells) if before and not is_majority(before, job.farewells) else ((), frozenset())


def _with(job: Job, nonce: str) -> Job:
    if nonce not in job.former or nonce in job.confirmed:
        return job
    found = job.confirmed | {nonce}
    if is_majority(job.former, found):
        return evolve(job, former=(), confirmed=frozenset())
    return evolve(job, confirmed=found)


# ---- another journal ----

OF_ONE_LIFE = Joined | Lost | LastCall | Admit | Steady | GaveUp
"""What an agent says because of what it has read and heard in one life of the journal. It counts in no other life."""


def is_over(joined: Joined, job: Job) -> bool:
    """Whether this `Joined` can have no effect any more: it was for a round that is sealed, and its node is in the last
    one."""
    return joined.node in job.member_nodes and joined.round <= last_round(job)


def moved(job: Job) -> Job:
    """The fold with which another journal begins that goes on from this one.

    A goodbye counts in one journal only. Nobody knows who comes to the other journal. So whoever has joined the next
    round joins it again there, and offers another port: the round may have been sealed before, and the workers of a
    node that does not come may dial the port with which it was. While that round is gathered, all live nodes are
    expected. Standbys of a running round are gone, and come back as new incarnations. Those among them that were
    members before have shown that they have read the last seal.
    """
    phase = job.phase
    if isinstance(phase, Gathering):
        phase = evolve(phase, expected=frozenset(joined.node for joined in job.live.values()))
    elif isinstance(phase, Running):
        standbys = [joined for joined in job.live.values() if joined.node not in job.member_nodes]
        job = without_nodes(job, [joined.node for joined in standbys])
        for joined in standbys:
            job = _with(job, joined.nonce) if joined.round > phase.round else job
    return evolve(job, phase=phase, farewells=frozenset())
