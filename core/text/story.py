"""What has become of a job, from the steps of its agents: its rounds, what each node did when, and why.

    node_story(told)  ->  NodeStory       from the steps of one agent
    merged([…])       ->  Story           of the job

1. Nothing is decided here a second time. What a round was, and why it ended, is what the agents have folded.
2. The clocks of nodes differ. All nodes read the same journal, so the beginnings of rounds that two nodes have read
   tell how far their clocks are apart. A difference above `SKEW_S` is taken out.
3. A node may have skipped a part of the journal, and a trace may have holes. What one node has not seen is taken from
   another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import define, evolve, field, frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.events import EntriesRead, StopRequested
from reknit.core.agent.lifecycle import REPEAT_S
from reknit.core.agent.reasons import (
    AlreadyFinished,
    JournalRefused,
    Replaced,
    RunEnd,
    SignalReceived,
    TermsDiffer,
)
from reknit.core.agent.worker_words import WorkerExit, WorkersExited, WorkersStopped
from reknit.core.job.entries import Entry, Joined, Lost, Terms
from reknit.core.job.fold import fold, fold_all
from reknit.core.job.job import EMPTY, Closed, Gathering, Job, Outcome, Running, Unopened, Verdict
from reknit.core.job.reasons import BudgetSpent, Departure, NodeGone, RoundEnd, Unstable, blamed_failure
from reknit.core.job.workers import NoProgress, WorkerFailure

from .describe import killed_text, signal_name
from .doing import Doing, Situation, situation

_CROWD = 64
"""More entries than these are folded at once."""
SKEW_S = 1.0
"""Clocks that differ by less are taken for equal. Seconds."""

Key = tuple[int, int]
"""Names a round: its epoch and its number."""


def round_name(key: Key) -> str:
    """`2`, and `2 of epoch 1` in an epoch that is not the first"""
    epoch, round = key
    return f"{round} of epoch {epoch}" if epoch else str(round)


@frozen
class Told:
    """What a trace tells of one step."""

    time: float
    """When it was made, in seconds since 1970."""
    event: EntriesRead | StopRequested | WorkersExited | WorkersStopped | None = None
    """None: another event, of which the story does not need to know."""
    lost: tuple[Lost, ...] = ()
    """The nodes that the agent declares lost."""
    now: Situation | None = None
    """What the agent does after the step. None: the same as before."""
    end: RunEnd | None = None
    """Why the agent ends with this step. None: it does not."""


@define
class Span:
    """A node did the same for some time. Times are in seconds since 1970."""

    doing: Doing
    key: Key
    """The round that it was about: the one that was gathered, or that of the node's workers."""
    began: float
    ended: float


@frozen
class Remark:
    """Something that concerns one node alone."""

    at: float
    text: str
    """One line."""


@define
class RoundStory:
    """A round, as far as it was seen. Times are in seconds since 1970, and None if the moment was not seen."""

    key: Key
    joined: dict[str, float] = field(factory=dict)
    """By node: when it was there."""
    sealed_at: float | None = None
    members: tuple[str, ...] = ()
    """The nodes, in the order of their ranks."""
    workers: int = 0
    master: str = ""
    ended_at: float | None = None
    failed_at: float | None = None
    """When that happened for which the round has ended. It may have been noticed later."""
    why: RoundEnd | None = None
    """Why it has ended, if the job went on."""
    failures: tuple[tuple[str, WorkerFailure], ...] = ()
    """All failures, each with its node."""
    restarts: int = 0
    """Restarts after its end, those included that were given back."""
    spent: int = 0
    """Restarts of the budget that were spent after its end."""
    outcome: Outcome | None = None
    """How the job has ended with it. None: it went on, or goes on."""
    stopped_by: tuple[int, ...] = ()
    """The job has ended with it because its last agents were stopped by these signals. Empty: that was not so."""
    early: Mapping[str, frozenset[int]] = EMPTY
    """By node: the ranks that its agent found ended without a failure, before it found the first failure of this node.
    If none has failed: all that ended so. Two nodes are not compared, because their clocks may differ."""


@frozen
class NodeStory:
    node: str
    began: float
    ended: float
    """When the last step was made."""
    spans: tuple[Span, ...]
    remarks: tuple[Remark, ...]
    rounds: Mapping[Key, RoundStory]
    job: Job
    """The job as the agent has read it last."""
    last: Situation
    """What it did last."""
    end: RunEnd | None = None
    """Why the agent has ended. None: it runs, or was killed."""
    command: str = ""
    """The command line of the workers. Empty: they call a function, or it is not known."""

    @property
    def has_ended(self) -> bool:
        """The agent has ended in order. False: it runs, or was killed."""
        return self.last.doing is Doing.ENDED


@frozen
class Story:
    nodes: tuple[NodeStory, ...]
    """In the order in which they began."""
    rounds: tuple[RoundStory, ...]
    terms: Terms
    skews: Mapping[str, float] = EMPTY
    """By node: seconds by which its clock was ahead of that of the first node. Its times are corrected by them."""
    stopped_by: tuple[int, ...] = ()
    """The signals that have stopped the agents that were left, so that nobody goes on with the job. Empty: somebody may
    go on, or the job has an outcome."""

    @property
    def began(self) -> float:
        return min(node.began for node in self.nodes)

    @property
    def ended(self) -> float:
        return max(node.ended for node in self.nodes)

    @property
    def outcome(self) -> Outcome | None:
        """How the job has ended. None: no agent has read of an end."""
        return self.rounds[-1].outcome if self.rounds else None

    def goes_on_after(self, round: RoundStory) -> bool:
        """A later round was formed."""
        formed = next((each.key for each in reversed(self.rounds) if each.members), round.key)
        return round.key < formed


def lasting(node: NodeStory, now: float) -> NodeStory:
    """The story of an agent that still does what it did last. `now`: in seconds since 1970."""
    for span in node.spans[-1:]:
        span.ended = now
    return evolve(node, ended=now)


# ---- one node --------------------------------------------------------------------------------------------------------


def node_story(told: Iterable[Agent | Told]) -> NodeStory | None:
    """The story of one agent. `told`: the agent before its first step, its steps, and where steps are missing, the
    agent as it was after them. None: it has made no step."""
    teller = _Teller()
    for each in told:
        if isinstance(each, Told):
            teller.take(each)
        else:
            teller.go_on(each)
    return teller.story()


class _Teller:
    """Takes the steps of one agent, one after the other."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._remarks: list[Remark] = []
        self._rounds: dict[Key, RoundStory] = {}
        self._began: float | None = None
        self._at = 0.0
        self._node = ""
        self._job = Job()
        self._now: Situation | None = None
        self._end: RunEnd | None = None
        self._lost: set[Lost] = set()
        """What the agent has said of lost nodes. It says it again until it has read it."""
        self._failed_in: Key | None = None
        """The last round in which a worker of this node has failed."""
        self._asked, self._asked_at = 0, 0.0
        """The signal that came last, and when. The agent takes a repetition for the same request, and so must we."""

    def take(self, step: Told) -> None:
        at = self._at = step.time
        if self._began is None:
            self._began = at
        self._end = step.end or self._end
        match step.event:
            case EntriesRead():
                self._read(at, step.event)
            case StopRequested():
                if self._asked != step.event.signal or at - self._asked_at >= REPEAT_S:
                    self._remark(f"asked to stop: {signal_name(step.event.signal)}")
                self._asked, self._asked_at = step.event.signal, at
            case WorkersExited(_, number, exits):
                self._exited(number, exits)
            case WorkersStopped(killed=killed) if killed:
                self._remark(killed_text(step.event))
        for lost in step.lost:
            if lost not in self._lost:
                self._lost.add(lost)
                silent = f"{self._job.terms.silence_s:g} s"
                self._remark(f"nothing was heard of node {lost.node} for {silent}, so it was declared lost")
        self._situation(self._now if step.now is None else step.now)

    def go_on(self, agent: Agent) -> None:
        self._node = agent.spec.node_id
        self._took(None, agent.job)  # when that has happened was not seen
        self._exited(agent.workers.round, agent.workers.exits.values())
        if self._began is not None:
            self._situation(situation(agent))
        elif agent.nonce:
            self._now = situation(agent)

    def story(self) -> NodeStory | None:
        if self._began is None or self._now is None:
            return None
        spans, remarks = tuple(self._spans), tuple(self._remarks)
        rounds, job = self._rounds, self._job
        return NodeStory(self._node, self._began, self._at, spans, remarks, rounds, job, self._now, self._end)

    def _remark(self, text: str) -> None:
        self._remarks.append(Remark(self._at, text))

    def _situation(self, now: Situation | None) -> None:
        if now is None:
            return
        at, was, self._now = self._at, self._now, now
        outage, why = (was.outage, was.unable) if was is not None else ("", "")
        if now.outage and not outage:
            self._remark(f"the store could not be used: {now.outage}")
        elif outage and not now.outage:
            self._remark("the store could be used again")
        if now.unable and now.unable != why:
            self._remark(now.unable)
        if self._spans:
            self._spans[-1].ended = at
        key = (now.epoch, now.round)
        if not self._spans or (self._spans[-1].doing, self._spans[-1].key) != (now.doing, key):
            self._spans.append(Span(now.doing, key, at, at))

    def _exited(self, number: int, exits: Iterable[WorkerExit]) -> None:
        """Workers of this node have ended in the round with this number."""
        job = self._job
        if not isinstance(job.phase, Running) or job.round != number:
            return
        place = next((at for at, member in enumerate(job.members) if member.node.id == self._node), None)
        if place is None:
            return
        round = self._round((job.epoch, number))
        if any(exit.failure is not None for exit in exits):
            self._failed_in = round.key
        elif round.key != self._failed_in:
            (first, _), count = job.members.counted[0][place], job.members[place].local_world_size
            ended = {first + exit.local_rank for exit in exits if 0 <= exit.local_rank < count}
            round.early = {self._node: round.early.get(self._node, frozenset()) | ended}

    # ---- the journal ----

    def _read(self, at: float, event: EntriesRead) -> None:
        if event.is_anew:
            self._job = Job()
        if event.base is not None:
            self._took(at, event.base)
        if len(event.entries) > _CROWD:
            self._took(at, fold_all(self._job, event.entries), event.entries)
            return
        for entry in event.entries:
            self._took(at, fold(self._job, entry), (entry,))

    def _took(self, at: float | None, job: Job, entries: Sequence[Entry] = ()) -> None:
        """The job is this one now, because of these entries. `at`: None if it was not seen when."""
        old, self._job = self._job, job
        phase, epoch = job.phase, job.epoch
        if job is old or isinstance(phase, Unopened):
            return
        for entry in entries:
            if at is not None and isinstance(entry, Joined) and job.live.get(entry.node.id) == entry:
                self._round((epoch, entry.round)).joined.setdefault(entry.node.id, at)
        previous = self._rounds.get((epoch, phase.round - 1))
        if isinstance(phase, Closed):
            if isinstance(old.phase, Closed) and old.epoch == epoch:
                return  # a node says goodbye
            is_unformed = isinstance(old.phase, Gathering) and isinstance(phase.outcome.why, BudgetSpent | Unstable)
            if is_unformed and previous is not None:
                # The round before has ended the job: what was gathered meanwhile is no round.
                last = previous
                self._rounds.pop((epoch, phase.round), None)
            else:
                last = self._round((epoch, phase.round))
            self._ended(at, last, job)
            last.outcome, last.restarts, last.spent = phase.outcome, job.restarts, job.spent
            told = tuple((f.node.id, failure) for f in phase.outcome.failures for failure in f.failures)
            last.failures = told or last.failures
            return
        runs_on = isinstance(phase, Running) and isinstance(old.phase, Running) and old.round == phase.round
        if previous is not None and not runs_on:
            self._ended(at, previous, job)
            previous.why, previous.restarts, previous.spent = job.why, job.restarts, job.spent
            if isinstance(phase, Gathering) and phase.ledger:
                previous.failures = tuple((f.node.id, failure) for f in phase.ledger for failure in f.failures)
        if isinstance(phase, Running):
            self._sealed(at, job)

    def _round(self, key: Key) -> RoundStory:
        return self._rounds.setdefault(key, RoundStory(key))

    def _sealed(self, at: float | None, job: Job) -> None:
        round = self._round((job.epoch, job.round))
        if round.members:
            return
        round.sealed_at = at
        round.members = tuple(m.node.id for m in job.members)
        round.workers = sum(m.local_world_size for m in job.members)
        round.master = f"{job.members[0].address}:{job.members[0].port}"

    def _ended(self, at: float | None, round: RoundStory, job: Job) -> None:
        if at is not None and round.ended_at is None:
            round.ended_at = at
            round.failed_at = at - _noticed_after_s(job)


def _noticed_after_s(job: Job) -> float:
    """Seconds between what has ended a round and its notice."""
    root = blamed_failure(job.why if job.outcome is None else job.outcome.why)
    if root is not None and isinstance(root.failure.cause, NoProgress):
        return root.failure.cause.for_s
    if isinstance(job.why, NodeGone) and job.why.how is Departure.LOST and job.outcome is None:
        return job.terms.silence_s
    return 0.0


# ---- the job ---------------------------------------------------------------------------------------------------------


def merged(nodes: Sequence[NodeStory]) -> Story:
    """The story of the job whose agents these were: at least one. Several agents of one node may follow each other."""
    nodes = sorted(nodes, key=lambda node: node.began)
    skews: dict[str, float] = {}
    reference = max(nodes, key=lambda node: len(node.rounds))
    for at, node in enumerate(nodes):
        ahead_s = _ahead_s(node, reference)
        if abs(ahead_s) > SKEW_S:
            skews[node.node] = ahead_s
            nodes[at] = _shifted(node, -ahead_s)
    rounds: dict[Key, RoundStory] = {}
    for node in nodes:
        for key, round in node.rounds.items():
            rounds[key] = _both(rounds[key], round) if key in rounds else round
    latest = max(nodes, key=lambda node: (node.job.epoch, node.job.round, node.ended))
    known = [rounds[key] for key in sorted(rounds) if rounds[key] != RoundStory(key) and not _is_ahead(rounds, key)]
    end = _last_end(nodes, latest.job)
    stopped_by = _signals(nodes) if isinstance(end, SignalReceived) else ()
    why = known[-1].why if known else None
    if stopped_by and isinstance(why, NodeGone) and why.how in (Departure.LEAVING, Departure.LEFT):
        known[-1] = evolve(known[-1], stopped_by=stopped_by)
    if known and isinstance(end, BudgetSpent):
        known[-1] = evolve(known[-1], outcome=Outcome(Verdict.FAILED, end))
    return Story(tuple(nodes), tuple(known), latest.job.terms, skews, stopped_by)


def _is_ahead(rounds: Mapping[Key, RoundStory], key: Key) -> bool:
    """This round was never gathered, as far as was seen: the job has not gone on after the round before. Only standbys
    have joined it, ahead of time."""
    epoch, number = key
    before = rounds.get((epoch, number - 1))
    return before is not None and bool(before.members) and before.why is None and not rounds[key].members


def _last_agents(nodes: Sequence[NodeStory]) -> dict[str, NodeStory]:
    """By node: its last agent that was not refused."""
    refused = TermsDiffer, JournalRefused, Replaced, AlreadyFinished
    return {node.node: node for node in nodes if not isinstance(node.end, refused)}


def _last_end(nodes: Sequence[NodeStory], job: Job) -> RunEnd | None:
    """Why the last agent has ended, if the job has no outcome and nobody goes on with it. None: otherwise. `job`: as it
    was read last. In it, an agent that has left is not live any more."""
    ended = {name: node for name, node in _last_agents(nodes).items() if node.end is not None}
    if isinstance(job.phase, Closed) or not ended or not ended.keys() >= job.live.keys():
        return None
    return max(ended.values(), key=lambda node: node.ended).end


def _signals(nodes: Sequence[NodeStory]) -> tuple[int, ...]:
    """The signals that have stopped the last agents of nodes."""
    ends = [node.end for node in _last_agents(nodes).values()]
    return tuple(sorted({end.signal for end in ends if isinstance(end, SignalReceived)}))


def _ahead_s(node: NodeStory, reference: NodeStory) -> float:
    """Seconds by which the clock of a node is ahead. 0: it is not known."""
    # An agent that starts the workers of a round has read of the round at once. Another may have read of it much later.
    found = sorted(
        mine - theirs
        for key in _took_part_in(node) & _took_part_in(reference)
        if (mine := node.rounds[key].sealed_at) is not None and (theirs := reference.rounds[key].sealed_at) is not None
    )
    return found[len(found) // 2] if found else 0.0


def _took_part_in(node: NodeStory) -> set[Key]:
    """The rounds whose workers this agent has started."""
    return {span.key for span in node.spans if span.doing in (Doing.LAUNCHING, Doing.RUNNING)} & node.rounds.keys()


def _shifted(node: NodeStory, by_s: float) -> NodeStory:
    def moved(at: float | None) -> float | None:
        return None if at is None else at + by_s

    rounds = {
        key: evolve(
            round,
            joined={name: at + by_s for name, at in round.joined.items()},
            sealed_at=moved(round.sealed_at),
            ended_at=moved(round.ended_at),
            failed_at=moved(round.failed_at),
        )
        for key, round in node.rounds.items()
    }
    return evolve(
        node,
        began=node.began + by_s,
        ended=node.ended + by_s,
        spans=tuple(evolve(span, began=span.began + by_s, ended=span.ended + by_s) for span in node.spans),
        remarks=tuple(evolve(remark, at=remark.at + by_s) for remark in node.remarks),
        rounds=rounds,
    )


def _both(one: RoundStory, other: RoundStory) -> RoundStory:
    """What two nodes have seen of a round. The journal says the same to both, but one may have seen more of it."""
    joined = dict(one.joined)
    for name, at in other.joined.items():
        joined[name] = min(at, joined.get(name, at))
    sealed = one if one.members else other
    more = other if _knowledge(other) > _knowledge(one) else one
    return evolve(
        more,
        joined=joined,
        sealed_at=_earlier(one.sealed_at, other.sealed_at),
        members=sealed.members,
        workers=sealed.workers,
        master=sealed.master,
        ended_at=_earlier(one.ended_at, other.ended_at),
        failed_at=_earlier(one.failed_at, other.failed_at),
        failures=max(one.failures, other.failures, key=len),
        early={**one.early, **other.early},
    )


def _knowledge(round: RoundStory) -> tuple[bool, int, bool]:
    return round.outcome is not None, round.restarts, round.why is not None


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((at for at in (one, other) if at is not None), default=None)


# ---- where the time went ---------------------------------------------------------------------------------------------

TRAINING, DETECTING = "training", "detecting"
KINDS = (TRAINING, DETECTING, "stopping", "meeting", "starting", "standing by", "ending")
"""What the time of a node goes into. Detecting: workers run, but that has happened already for which the round ends."""
_KIND = {
    Doing.STARTING: "starting",
    Doing.GATHERING: "meeting",
    Doing.STANDBY: "standing by",
    Doing.LAUNCHING: "starting",
    Doing.RUNNING: TRAINING,
    Doing.STOPPING: "stopping",
    Doing.FINISHING: "ending",
    Doing.ENDED: "ending",
}


def time_spent(node: NodeStory, rounds: Sequence[RoundStory]) -> dict[str, float]:
    """Seconds of this node by kind."""
    failed_at = {round.key: round.failed_at for round in rounds if round.why is not None or round.failures}
    spent = dict.fromkeys(KINDS, 0.0)
    for span in node.spans:
        length = span.ended - span.began
        happened = failed_at.get(span.key) if span.doing is Doing.RUNNING else None
        late = 0.0 if happened is None else min(length, max(0.0, span.ended - happened))
        spent[_KIND[span.doing]] += length - late
        spent[DETECTING] += late
    return spent
