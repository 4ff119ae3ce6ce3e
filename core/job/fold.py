"""fold(job, entry) -> job: what an entry of the journal means.

1. Total: it never raises. What is stale, repeated or said by the gone returns the same job, with a comment that says
   why that is sound.
2. Every test of membership compares incarnations. Only seats go by the stable id. A node that comes back is another
   node in an old seat. Compared by name alone it would be a member, and would run a round a second time.
3. Nobody is sealed while anyone is expected: the maximum being reached, or a last call, must not start a round over
   members whose workers still run.
4. There is no time here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from attrs import evolve

from .crowds import comes_back, newcomers, reports, reports_late, returning
from .entries import (
    Aborted,
    Admit,
    Entries,
    Entry,
    Failed,
    Filler,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    NodeId,
    Opened,
    Steady,
    Succeeded,
)
from .job import (
    Closed,
    Gathering,
    Job,
    Outcome,
    Running,
    Unopened,
    Verdict,
    admissible,
    can_join,
    can_open,
    can_seal,
    coming,
    has_enough,
    room,
)
from .memory import buried, past_of, unburied, without_nodes
from .reasons import AbortedByOperator, AllSucceeded, Departure, JobEnd, NodeGone, NodesAdmitted, RoundEnd, TooFewNodes
from .restart import judge, root_cause, steadied
from .ring import with_nodes
from .sealing import sealed


def fold(job: Job, entry: Entry) -> Job:  # noqa: C901  # a dispatcher: one arm per entry
    """The job after one more entry. `Job()` is the job before the first one. An entry that does not fit is ignored."""
    if isinstance(entry, Opened):
        return _opened(job, entry)
    if isinstance(job.phase, Unopened) or isinstance(entry, Filler):
        return job  # said before the terms were fixed: the node joins again after it has read them
    if isinstance(entry, LastCall | Admit | Steady | GaveUp | Aborted) and entry.epoch != job.epoch:
        return job  # a late copy, meant for an epoch that is over
    match entry:
        case Joined():
            job = _joined(job, entry)
        case LastCall():
            # A last call counts only if nobody is expected and there are enough nodes. Otherwise it is said again.
            return sealed(job) if entry.round == job.round and can_seal(job) else job
        case Admit():
            job = _admitted(job, entry)
        case Steady():
            return steadied(job, entry.round)
        case GaveUp():
            job = _given_up(job, entry)
        case Failed():
            job = _failed(job, entry)
        case Succeeded():
            job = _succeeded(job, entry)
        case Lost():
            # The gone accuse nobody: of two that accuse each other, the first in the journal stays.
            if job.is_live(entry.by) and entry.by != entry.node:
                job = _departed(job, entry.node, NodeGone(entry.node, Departure.LOST, entry.by))
        case Leaving():
            job = _leaving(job, entry.node)
        case Left():
            job = _left(job, entry)
        case Aborted():
            job = _closed(job, Verdict.ABORTED, AbortedByOperator(entry.why))
        case _:
            assert_never(entry)
    return _settled(job)


def fold_all(job: Job, entries: Sequence[Entry]) -> Job:
    """The job after these entries, which are folded in order. A crowd is folded at once (`crowds`)."""
    if not isinstance(entries, Entries):
        return _folded(job, entries)
    known = entries.folded
    if known is None or known[0] is not job:
        known = entries.folded = (job, _folded(job, entries))
    after = known[1]
    return after if isinstance(after, Job) else job


def _folded(job: Job, entries: Sequence[Entry]) -> Job:
    at = 0
    while at < len(entries):
        job, count = _crowd_folded(job, entries, at)
        if not count:
            job, count = fold(job, entries[at]), 1
        at += count
    return job


def _crowd_folded(job: Job, entries: Sequence[Entry], at: int) -> tuple[Job, int]:
    """The job after the crowd that begins at this index, and the number of its entries. 0: there is no crowd."""
    if isinstance(entries[at], Joined):
        if len(new := newcomers(job, entries, at)) > 1:
            return _settled(_with_new(job, new)), len(new)
        if len(back := returning(job, entries, at)) > 1:
            return _settled(_with_returned(job, back)), len(back)
    elif isinstance(entries[at], Failed) and len(failed := reports(job, entries, at)) > 1:
        return _settled(_with_reports(job, failed)), len(failed)
    return job, 0


def _opened(job: Job, entry: Opened) -> Job:
    if not can_open(job, entry.epoch):
        return job  # two agents opened at once, or a late copy: each agent compares the terms with its own
    job = evolve(job, **buried(job, (joined.node for joined in job.live.values())))
    return Job(
        phase=Gathering(round=0, judged=True, short=True),
        terms=entry.terms,
        journal=job.journal or entry.journal,
        epoch=entry.epoch,
        past=past_of(job),
        gone=job.gone,
        floor=job.floor,
    )


def _joined(job: Job, entry: Joined) -> Job:
    if not can_join(job, entry):
        return job
    known = job.live.get(entry.node.id)
    if known is None:
        return _with_new(job, {entry.node.id: entry})
    if entry.node.incarnation > known.node.incarnation:
        # The host has a new agent. It ended the workers of the old agent before it said its first `Joined`.
        job = _departed(job, known.node, NodeGone(known.node, Departure.REPLACED))
        return _with_new(job, {entry.node.id: entry})
    if isinstance(job.phase, Gathering) and comes_back(job, job.phase, entry):
        return _with_returned(job, {entry.node.id: entry})
    return job  # a repetition; or a second agent with that id: it sees that it is not in, and takes over or ends


def _with_new(job: Job, nodes: Mapping[NodeId, Joined]) -> Job:
    nodes = {node_id: _for_this_round(job, joined) for node_id, joined in nodes.items()}
    ring = with_nodes(job.ring, (joined.node for joined in nodes.values()), job.seats)
    return evolve(job, live={**job.live, **nodes}, ring=ring, gone=unburied(job.gone, nodes))


def _with_returned(job: Job, nodes: Mapping[NodeId, Joined]) -> Job:
    phase = job.phase
    if isinstance(phase, Gathering):
        phase = evolve(phase, expected=phase.expected.difference(joined.node for joined in nodes.values()))
    return evolve(job, phase=phase, live={**job.live, **nodes})


def _with_reports(job: Job, reports: Sequence[Failed]) -> Job:
    phase = job.phase
    return evolve(job, phase=evolve(phase, ledger=(*phase.ledger, *reports))) if isinstance(phase, Gathering) else job


def _for_this_round(job: Job, joined: Joined) -> Joined:
    """The `Joined` of a new node, for the round that it joins now. A late copy may name a later round."""
    round = job.round + isinstance(job.phase, Running)
    return joined if joined.round <= round else evolve(joined, round=round)


def _admitted(job: Job, entry: Admit) -> Job:
    nodes = admissible(job)
    if not nodes or entry.round != job.round + 1:
        return job  # the standbys are gone, or another round has taken them in meanwhile
    return _ended(job, NodesAdmitted(nodes))


def _given_up(job: Job, entry: GaveUp) -> Job:
    phase = job.phase
    if not isinstance(phase, Gathering) or entry.round != phase.round:
        return job  # the round was sealed after all
    if has_enough(job):
        return job  # the missing node joined while this was on its way
    return _closed(job, Verdict.FAILED, TooFewNodes(coming(job), job.terms.min_nodes), phase.ledger)


def _failed(job: Job, entry: Failed) -> Job:
    phase = job.phase
    if not entry.failures or not job.is_live(entry.node):
        return job  # a node that is gone reports nothing
    if isinstance(phase, Running) and entry.round == phase.round and _is_working(job, entry.node):
        return _ended(job, root_cause((entry,)), ledger=(entry,))
    if isinstance(phase, Gathering) and reports_late(job, phase, entry):
        told = phase.told.get(entry.node)
        if told is None:
            return _with_reports(job, (entry,))
        if len(entry.failures) > len(told.failures):  # more of its workers have failed since
            known = {failure.rank for failure in told.failures}
            later = tuple(failure for failure in entry.failures if failure.rank not in known)
            merged = evolve(told, failures=(*told.failures, *later))  # the first one stays the first
            ledger = tuple(merged if f is told else f for f in phase.ledger)
            return evolve(job, phase=evolve(phase, ledger=ledger))
    return job  # a repetition, or of a round whose end is judged already


def _succeeded(job: Job, entry: Succeeded) -> Job:
    phase = job.phase
    last = phase.round if isinstance(phase, Running) else phase.round - 1 if isinstance(phase, Gathering) else None
    if entry.round != last or entry.node not in job.member_nodes or not job.is_live(entry.node):
        return job  # about another round, or from a node that is gone
    if isinstance(phase, Gathering) and (entry.node not in phase.expected or _has_failed(phase, entry.node)):
        return job  # a late copy: the node has joined the next round, or has said before that it failed
    job = evolve(job, succeeded=job.succeeded | {entry.node})
    if job.succeeded == job.member_nodes:
        return _closed(job, Verdict.SUCCEEDED, AllSucceeded())
    return job


def _leaving(job: Job, node: Node) -> Job:
    if not job.is_live(node) or node in job.leaving:
        return job  # gone already, or a repetition
    working = _is_working(job, node)
    job = evolve(job, leaving=job.leaving | {node})
    match job.phase:
        case Running() if working:
            # The node stays expected: its workers may be in their grace, and only `Left` says that they are gone.
            return _ended(job, NodeGone(node, Departure.LEAVING))
        case Gathering() as phase if node in phase.expected:
            return evolve(job, phase=_excused(job, phase, NodeGone(node, Departure.LEAVING)))
        case _:
            return job  # a standby, or a node whose work is done: no round changes


def _left(job: Job, entry: Left) -> Job:
    """The goodbye of a node. Its `Joined` may not have been seen yet: then it counts no more."""
    node, known = entry.node, job.live.get(entry.node.id)
    if job.is_live(node):
        return _departed(job, node, NodeGone(node, Departure.LEFT))
    if entry.seen < job.highest_incarnation(node.id) or job.is_gone(node):
        return job  # a repetition; or its agent has not read a later incarnation, which may be alive while it is dead
    if known is not None:
        # `node` came to replace the known incarnation, which is gone then. It left before its `Joined` was seen.
        job = _departed(job, known.node, NodeGone(known.node, Departure.REPLACED))
    return evolve(job, **buried(job, (node,)))


def _departed(job: Job, node: Node, why: NodeGone) -> Job:
    """`node` is gone for ever."""
    if not job.is_live(node):
        return job  # nobody knows this node, or it is gone already
    working, before = _is_working(job, node), job
    job = without_nodes(job, (node,))
    match job.phase:
        case Running() if working:
            return _ended(job, why)
        case Gathering() as phase if node in phase.expected:
            return evolve(job, phase=evolve(_excused(before, phase, why), expected=phase.expected - {node}))
        case _:
            return job


def _excused(job: Job, phase: Gathering, why: NodeGone) -> Gathering:
    """A member that goes without having failed itself excuses what its peers fail of."""
    if phase.excuse is not None or _has_failed(phase, why.node):
        return phase
    if why.node not in job.member_nodes or job.live[why.node.id].round >= phase.round:
        return phase  # it is expected because the journal was founded again: it was no member, or was back (rule 16)
    return evolve(phase, excuse=why)


def _ended(job: Job, why: RoundEnd, *, ledger: tuple[Failed, ...] = ()) -> Job:
    """The running round is over; its live members are expected back."""
    expected = frozenset(m.node for m in job.members if job.is_live(m.node))
    phase = Gathering(round=job.round + 1, expected=expected, ledger=ledger)
    return evolve(job, phase=phase, why=why)


def _settled(job: Job) -> Job:
    """Draw the conclusions of an entry while gathering: too few? judge? seal?"""
    phase = job.phase
    if not isinstance(phase, Gathering):
        return job  # nothing is gathered
    if not phase.short and not has_enough(job):
        phase = evolve(phase, short=True)
        job = evolve(job, phase=phase)
    if phase.expected:
        return job
    if not phase.judged:
        verdict = judge(job, phase)
        if not isinstance(verdict, Job):
            return _closed(job, Verdict.FAILED, verdict, phase.ledger)
        job = verdict
    count = coming(job)
    if count >= room(job) or (not phase.short and count >= job.terms.min_nodes):
        return sealed(job)
    return job


def _closed(job: Job, verdict: Verdict, why: JobEnd, failures: tuple[Failed, ...] = ()) -> Job:
    if isinstance(job.phase, Closed):
        return job  # closed is for ever
    return evolve(job, phase=Closed(round=job.round, outcome=Outcome(verdict, why, failures)))


def _is_working(job: Job, node: Node) -> bool:
    """A member of the running round that has not succeeded: without it the round cannot go on."""
    return isinstance(job.phase, Running) and node in job.member_nodes and node not in job.succeeded


def _has_failed(phase: Gathering, node: Node) -> bool:
    return node in phase.told
