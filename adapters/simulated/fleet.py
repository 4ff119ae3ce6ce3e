"""A fleet: a job of thousands of nodes, simulated for months, with the `step` and `fold` that real agents run.

The small world (`world`) plays every beat of every agent. The fleet leaves out what two laws of the core allow, and
nothing else:

1. A quiet stretch is computed (core/agent/quiet.py). While nothing but beats happens to a crew, its beats are not
   played.
2. Alike agents share a step (core/agent/alike.py). A *crew* has one agent that steps for all. An agent leaves it at an
   event of its own, and comes back when it is alike again.

The rest is as real as in the small world: each crew has a real link, with its calls, failures and pauses. The store has
a latency and a rate. So a thousand entries take the time that they take.

3. What happens at one time happens in the order of the nodes' names, then in the order in which it was planned.
4. A random member of a crew makes some of the steps itself (`audits`). If it differs from what the crew has done in its
   name, the simulation ends with `Unlike`.
5. All times are multiples of 2^-20 s, so that sums of them are exact.
6. A beat is up to one `Terms.beat_s` away from where it would be without crews: an agent that comes to a crew beats
   with the crew from then on.

Here is what happens, and no judgement: faults and delays are the caller's (`Delays`).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from math import ceil
from operator import itemgetter
from random import Random
from typing import Protocol, assert_never

from attrs import define, evolve, field, fields, frozen

from reknit.adapters.link.machine import LOOK_S, begun, taken
from reknit.adapters.link.machine import step as link_step
from reknit.adapters.link.messages import (
    LANES,
    Appended,
    BatchRead,
    Beaten,
    Call,
    CallFailed,
    Folded,
    Input,
    Read,
    SendBeat,
    SendEntry,
)
from reknit.adapters.runtime.ports import Batch
from reknit.core.agent.agent import Agent, Heard, Silence, Spec
from reknit.core.agent.alike import (
    PULSE,
    Own,
    apart,
    are_alike,
    as_other,
    but_pulse,
    by_standing,
    can_share,
    command_as_other,
    entry_as_others,
    event_as_other,
    standing,
)
from reknit.core.agent.commands import Append, Beat, Command, Finish, Result, StopWorkers
from reknit.core.agent.events import EntriesRead, Event, Started, StopRequested, Woken
from reknit.core.agent.quiet import after_beats, beats_before, quiet_until
from reknit.core.agent.silence import EXPECTED, watched
from reknit.core.agent.step import Step, step
from reknit.core.agent.timers import STAGGERED
from reknit.core.agent.worker_words import (
    PortReserved,
    ReservePort,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.entries import Entries, Entry, Node, NodeId, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Gathering, Job, Running
from reknit.core.job.ranks import Members
from reknit.core.job.ring import NEIGHBOURS
from reknit.core.job.workers import Activity, NoProgress, Stance, WorkerFailure

from .crew import Arrival, Coming, Crew, HeldBack, Reply, are_links_alike, coming_as_other, link_as_other, part

PORT = 29400
"""All agents offer this port. Nobody connects to it."""
GRID = 2.0**20
SEEKS_S = 4.0
"""So long after something has happened to a crew, it looks for another one that is alike. Seconds."""
NO_JOB = fields(Agent).job.default
"""The fold with which every agent begins."""
FOLDS, MOST_KEPT = 64, 500_000
"""Folds are forgotten after at least so many more, and so many places of nodes in them."""
LAST = "~"
"""Comes after the names of all nodes."""
STUFF_S = 0.1
"""Seconds of appends that land at one time."""
HELD_S, MOST_HELD_S = 0.002, 1.5
"""Seconds for which the store holds back a read, for each entry that the reader waits for, and at most."""


class Unlike(AssertionError):
    """An agent would have decided otherwise than was decided in its name. An audit has found that. The message shows
    what differs. This is a bug of the simulator."""


@frozen
class StoreSpeed:
    """How fast the store is. Times in seconds."""

    way_s: float = 0.01
    """From a node to the store, or back."""
    appends_per_s: float = 5000.0
    """Entries that it takes in a second."""
    reads_per_s: float = 2_000_000.0
    """Entries that it hands out in a second, to all nodes together."""
    fails_s: float = 0.3
    """After which a call fails, if the store does not answer."""


class Delays(Protocol):
    """How long the workers of nodes take. Nodes with the same delay stay in one crew: so use few different ones.

    Each method says which of these nodes have which delay in seconds. It keeps their order."""

    def starts(self, round: int, nodes: Iterable[NodeId]) -> Mapping[float, Sequence[NodeId]]:
        """From the start of the workers until all of them run."""
        ...

    def stops(self, round: int, nodes: Iterable[NodeId], grace_s: float) -> Mapping[float, Sequence[NodeId]]:
        """From the signal until the last worker is gone, at most `grace_s` and a moment."""
        ...


@frozen
class Constant:
    """The same delays for all nodes."""

    start: float = 0.1
    stop: float = 0.1

    def starts(self, round: int, nodes: Iterable[NodeId]) -> Mapping[float, Sequence[NodeId]]:
        return {self.start: [*nodes]}

    def stops(self, round: int, nodes: Iterable[NodeId], grace_s: float) -> Mapping[float, Sequence[NodeId]]:
        return {min(self.stop, grace_s + 0.05): [*nodes]}


class Onlooker(Protocol):
    """Looks at what happens in a fleet, and changes nothing."""

    def landed(self, at: float, before: Job, entries: Sequence[Entry], job: Job) -> None:
        """Entries are in the journal."""
        ...

    def stepped(self, at: float, crew: Crew, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        """The agent of a crew has made a step. `crew.agent`: after it."""
        ...


@define(eq=False)
class Fleet:
    """One job, under a virtual clock."""

    terms: Terms
    seed: int = 0
    speed: StoreSpeed = StoreSpeed()
    delays: Delays = Constant()
    grace_s: float = 30.0
    store_timeout_s: float = 300.0
    """Seconds after which an agent ends that cannot reach the store."""
    local_world_size: int = 1
    audits: float = 0.05
    """The part of the steps of crews that a member makes as well. 0: none."""
    watchers: list[Onlooker] = field(factory=list)
    now: float = field(default=0.0, init=False)
    job: Job = field(default=NO_JOB, init=False)
    """The fold of the journal."""
    crews: list[Crew] = field(factory=list, init=False)
    of: dict[NodeId, Crew] = field(factory=dict, init=False)
    """The crew of each node that has an agent."""
    results: dict[NodeId, Result] = field(factory=dict, init=False)
    """How the last agent of each node has ended, if it has."""
    steps: int = field(default=0, init=False)
    """Steps that were made."""
    shared: int = field(default=0, init=False)
    """Steps that agents would have made, beats aside, if none had stepped for others."""
    audited: int = field(default=0, init=False)
    is_store_out: bool = field(default=False, init=False)
    emptied_at: float | None = field(default=None, init=False)
    """When the last agent has ended. Later ones may have started. None: never."""
    _frozen: dict[Node, Agent] = field(factory=dict, init=False)
    """Nodes that do not beat, each with its agent as it was after its last beat."""
    _nearest: tuple[Job, Set[Node], Set[Node]] | None = field(default=None, init=False)
    """A fold, the nodes that did not beat, and who watches them. The last answer of `_near`."""
    _begins: int = field(default=0, init=False)
    """The position of the first entry that is kept."""
    _journal: list[Entry] = field(factory=list, init=False)
    _folds: dict[int, Job] = field(factory=lambda: {0: NO_JOB}, init=False)
    """The folds of the journal up to each position at which a read may have ended."""
    _batches: dict[tuple[int, int], Entries] = field(factory=dict, init=False)
    _most_folds: int = field(default=FOLDS, init=False)
    """When so many folds are kept, those that all agents have read are forgotten."""
    _arriving: list[tuple[Crew, SendEntry, list[tuple[NodeId, Entry]]]] = field(factory=list, init=False)
    """What comes to the store now, and of which crew it is."""
    _free_at: float = field(default=0.0, init=False)
    """When the store has taken all that was appended."""
    _heap: list[tuple[float, str, int, Callable[[], None]]] = field(factory=list, init=False)
    _count: int = field(default=0, init=False)
    _born: int = field(default=0, init=False)
    _audit_luck: Random = field(factory=lambda: Random(0), init=False)

    def __attrs_post_init__(self) -> None:
        self._audit_luck = Random(f"audits of {self.seed}")

    # ---- time ----

    def after(self, delay_s: float, what: Callable[[], None], name: str = "") -> None:
        """Call `what` in so many seconds."""
        self._plan(self.now + max(0.0, delay_s), name, what)

    def _plan(self, at: float, name: str, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (_on_grid(at), name, self._count, what))

    def run_until(self, until: float) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, _, what = heapq.heappop(heap)
            what()
        self.now = max(self.now, until)

    @property
    def is_over(self) -> bool:
        """No agent is left."""
        return not self.crews

    # ---- what happens to nodes ----

    def start(self, nodes: Iterable[NodeId], delay_s: float = 0.0) -> None:
        """Start an agent on each of these nodes that has none. They are alike if none of them was there before."""
        self.after(delay_s, lambda: self._started([node for node in nodes if node not in self.of]))

    def fail(self, node: NodeId, *, local_rank: int = 0, message: str = "RuntimeError: a worker has failed") -> bool:
        """A worker raises an exception. False: the node has no workers that run."""
        crew = self._running_alone(node)
        if crew is None:
            return False
        self._happen(crew, WorkersExited(0.0, crew.agent.workers.round, (_exit(crew.agent, local_rank, 1, message),)))
        return True

    def hang(self, node: NodeId, for_s: float) -> bool:
        """The workers have made no progress for so long, and the agent of this node notices it first. False: the node
        has no workers that run."""
        crew = self._running_alone(node)
        if crew is None:
            return False
        self._happen(crew, _hung(crew.agent, for_s, Activity(Stance.OWN, "load", "data.py:41")))
        return True

    def kill(self, node: NodeId) -> bool:
        """The node is gone, with its agent and its workers. False: it has no agent."""
        crew = self._alone(node)
        if crew is None:
            return False
        self._freeze(crew)
        self._end(crew)
        self._look_for_silence()
        return True

    def ask_to_leave(self, node: NodeId, signal: int = 15) -> bool:
        """The agent gets this signal. False: the node has no agent."""
        crew = self._alone(node)
        if crew is not None:
            self._happen(crew, StopRequested(0.0, signal))
        return crew is not None

    def cut(self, node: NodeId) -> bool:
        """The node cannot reach the store. False: it has no agent."""
        crew = self._alone(node)
        if crew is None:
            return False
        self._freeze(crew)
        crew.is_cut = True
        self._hang_up(crew)
        self._look_for_silence()
        return True

    def mend(self, node: NodeId) -> None:
        """The node can reach the store again."""
        crew = self.of.get(node)
        if crew is not None and crew.is_cut:
            crew.is_cut = False
            self._thaw(crew)

    def suspend(self, node: NodeId) -> bool:
        """The agent of the node stands still. Its workers run on. False: it has no agent."""
        crew = self._alone(node)
        if crew is None:
            return False
        self._freeze(crew)
        crew.is_suspended, crew.quiet_until = True, None  # what it misses is not computed
        self._look_for_silence()
        return True

    def resume(self, node: NodeId) -> None:
        """The agent goes on."""
        crew = self.of.get(node)
        if crew is not None and crew.is_suspended:
            crew.is_suspended = False
            crew.wakes_at = None
            self._thaw(crew)
            self._happen(crew, Woken(0.0))
            if not crew.is_over and crew.parked is not None and self._unread(crew):
                self._return_read(crew)

    def lose_store(self) -> None:
        """The store answers nobody."""
        if not self.is_store_out:
            for crew in list(self.crews):
                self._catch_up(crew)
            self.is_store_out = True
            for crew in list(self.crews):
                self._hang_up(crew)

    def restore_store(self) -> None:
        """The store answers again. Each link finds out at its next try."""
        self.is_store_out = False

    # ---- agents ----

    def _started(self, nodes: Sequence[NodeId]) -> None:
        if not nodes:
            return
        owns = {}
        for node in nodes:
            self._born += 1
            self.results.pop(node, None)
            spec = Spec(
                node,
                f"{node}.net",
                self.terms,
                local_world_size=self.local_world_size,
                grace_s=self.grace_s,
                store_timeout_s=self.store_timeout_s,
            )
            owns[node] = Own(spec, Node(node), f"n{self._born}", PORT)
        first = owns[nodes[0]]
        link, calls = begun(first.nonce, LOOK_S)
        crew = Crew(agent := Agent(first.spec), link, owns, agent.job)
        self._add(crew)
        self._happen(crew, Started(0.0, first.nonce, PORT))
        if not crew.is_over:
            self._make(crew, calls)

    def _add(self, crew: Crew) -> None:
        self.crews.append(crew)
        self.of.update(dict.fromkeys(crew.owns, crew))

    def _end(self, crew: Crew) -> None:
        crew.is_over = True
        self.crews.remove(crew)
        for node in crew.owns:
            del self.of[node]
        if not self.crews:
            self.emptied_at = self.now

    def _alone(self, node: NodeId) -> Crew | None:
        """The crew of this node alone, which has caught up. None: it has no agent."""
        crew = self.of.get(node)
        if crew is None:
            return None
        self._catch_up(crew)
        return crew if len(crew.owns) == 1 else self._parted(crew, [node])

    def _running_alone(self, node: NodeId) -> Crew | None:
        found = self.of.get(node)
        if found is None or not found.agent.workers.alive or found.agent.workers.stopping is not None:
            return None
        if found.agent.workers.up_at is None:
            return None
        return self._alone(node)

    def _parted(self, crew: Crew, ids: Sequence[NodeId]) -> Crew:
        """These agents of a crew, which is larger, as a crew of their own. The crew has caught up."""
        pulse, other = crew.agent, part(crew, ids)
        self._add(other)
        self._part_arriving(crew, other)
        other.agent = self._hearing(other.agent, pulse, crew.asked)
        if crew.name not in crew.owns:  # another agent steps for the rest
            own = next(iter(crew.owns.values()))
            link = link_as_other(crew, own)
            crew.coming = [(at, n, coming_as_other(what, crew, own)) for at, n, what in crew.coming]
            crew.agent, crew.link = self._hearing(as_other(pulse, own), pulse, crew.asked), link
        self._schedule(other)
        self._schedule(crew)
        return other

    def _part_arriving(self, crew: Crew, other: Crew) -> None:
        """`other` has left the crew at the moment at which an entry of all of them comes to the store. Both get an
        answer."""
        arriving, self._arriving = self._arriving, []
        for whose, call, said in arriving:
            there = [pair for pair in said if whose is crew and pair[0] in other.owns]
            here = [pair for pair in said if whose is not crew or pair[0] not in other.owns]
            self._arriving += [(whose, call, here)] * bool(here) + [(other, call, there)] * bool(there)

    def _split(self, crew: Crew, groups: Sequence[Sequence[NodeId]]) -> list[Crew]:
        """A crew for each of these groups of its agents. The agents that are in no group stay in this crew. If each is
        in a group, the largest group stays."""
        kept = max(groups, key=len) if sum(map(len, groups)) == len(crew.owns) else None
        return [crew, *(self._parted(crew, ids) for ids in groups if ids is not kept)]

    def _hearing(self, agent: Agent, before: Agent, asked: Job) -> Agent:
        """The agent, with what it would have heard of the nodes that it watches. `before`: the one whose pulse it
        has. `asked`: `Crew.asked`."""
        silence = before.silence
        if not silence.watch:
            return agent
        at = agent.contact.acked_at
        watch = watched(asked, agent.me)
        spared_s = max((heard.spared_s for heard in silence.heard.values()), default=0.0)
        heard = {} if at is None else {node: Heard(self._counter(node, at), 0.0, spared_s) for node in watch}
        return evolve(agent, silence=Silence(watch, heard, silence.heard_at, silence.spares_until))

    # ---- counters ----

    def _counter(self, node: Node, at: float) -> int:
        """The counter of this node at this time. 0: it has never beat."""
        if node in self._frozen:
            return _count(self._frozen[node], at)
        crew = self.of.get(node.id)
        if crew is None or crew.owns[node.id].me != node:
            return 0
        agent = crew.agent
        is_behind = crew.quiet_until is not None and (agent.contact.beat_at or 0.0) <= at
        return agent.contact.sent + beats_before(agent, at + 1 / GRID) if is_behind else _count(agent, at)

    def _freeze(self, crew: Crew) -> None:
        """The node of this crew of one beats no more."""
        agent, contact = crew.agent, crew.agent.contact
        n = beats_before(agent, self.now + 1 / GRID) if crew.quiet_until is not None else 0
        if n and contact.beat_at is not None:
            beat_at = contact.beat_at + n * agent.job.terms.beat_s
            agent = evolve(agent, contact=evolve(contact, sent=contact.sent + n, beat_at=beat_at))
        self._frozen.setdefault(agent.me, agent)

    def _thaw(self, crew: Crew) -> None:
        if not crew.is_cut and not crew.is_suspended:
            if self._frozen.pop(crew.owns[crew.name].me, None) is not None:
                self._look_for_silence()  # whoever watches it need not play every beat any more

    def _look_for_silence(self) -> None:
        """Some node beats no more: whoever watches it plays every beat from now on."""
        for crew in list(self.crews):
            if not crew.is_over:
                self._listen(crew)

    def _listen(self, crew: Crew) -> None:
        """Find out which agents of this crew watch a node that does not beat."""
        job = crew.agent.job
        for node in [node for node in self._frozen if not job.is_live(node) and not self.job.is_live(node)]:
            if not any(other.agent.job.is_live(node) for other in self.crews):
                del self._frozen[node]  # it is gone for all
        near = self._near(job)
        hears = [node.id for node in near if node.id in crew.owns and crew.owns[node.id].me == node]
        if not hears and crew.hears_silence:
            crew.hears_silence = False
            self._schedule(crew)
        for node_id in sorted(hears):
            alone = self._alone(node_id)
            if alone is not None and not alone.hears_silence:
                alone.hears_silence = True
                self._schedule(alone)

    def _near(self, job: Job) -> Set[Node]:
        """Who watches a node that does not beat, as far as this fold tells."""
        if self._nearest is None or self._nearest[0] is not job or self._nearest[1] != self._frozen.keys():
            silent = [node for node in self._frozen if job.is_live(node)]
            self._nearest = job, frozenset(self._frozen), _watchers(job, silent)
        return self._nearest[2]

    # ---- one step ----

    def _happen(self, crew: Crew, what: Event) -> None:
        """An event of all agents of this crew, now or when they are no longer suspended."""
        if crew.is_over:
            return
        if crew.is_suspended:
            self._put(crew, 0.0, what)
            return
        self._catch_up(crew)
        for some in self._alike_after(crew, what) if len(crew.owns) > 1 and isinstance(what, EntriesRead) else [crew]:
            self._feed(some, what if what.at == self.now else evolve(what, at=self.now))

    def _catch_up(self, crew: Crew) -> None:
        """Compute the beats before now."""
        if crew.quiet_until is None or crew.is_suspended:
            return
        agent = crew.agent
        n = beats_before(agent, self.now)
        if n:
            at = (agent.contact.beat_at or 0.0) + n * agent.job.terms.beat_s
            counts = {node: self._counter(node, at) for node in watched(agent.job, agent.me)}
            crew.agent, crew.asked = after_beats(agent, n, counts), agent.job

    def _alike_after(self, crew: Crew, read: EntriesRead) -> list[Crew]:
        """Crews of agents that stand alike in the job also after this read."""
        before, entries = crew.agent.job, read.entries
        job = fold_all(before if read.base is None else read.base, entries)
        touched: Set[NodeId] = {node for node in islice(job.live, STAGGERED) if node in crew.owns}
        if read.base is not None:
            touched = crew.owns.keys()
        elif not isinstance(job.phase, Running) or job.round == before.round:
            touched |= entries.names & crew.owns.keys()
        # Else a round is sealed, and all of its members have come back.
        if not _are_same(before.members, job.members):
            members = {node.id for node in job.member_nodes}
            touched |= min(crew.owns.keys() - members, crew.owns.keys() & members, key=len)
        if not touched:
            return [crew]
        groups = by_standing(job, {crew.owns[node].me for node in touched})
        for kind in entries.kinds:
            groups = [some for group in groups for some in apart(group, kind)]
        return self._split(crew, sorted(sorted(node.id for node in group) for group in groups))

    def _feed(self, crew: Crew, event: Event) -> None:
        """One step of the agent of this crew, in the name of all."""
        before, many = crew.agent, len(crew.owns)
        if before.result is not None:
            return
        after = step(before, event)
        if many > 1 and not can_share(after.agent):
            self._each(crew, event)
            return
        self.steps += 1
        self.shared += many
        shift = after.agent.me.incarnation - before.me.incarnation
        if many > 1 and self.audits and self._audit_luck.random() < self.audits:
            self._audit(crew, before, event, after, shift)
        crew.agent = after.agent
        if shift:
            for own in crew.owns.values():
                self._frozen.setdefault(own.me, before)  # nobody beats under this name any more
            crew.owns = {n: evolve(own, me=Node(n, own.me.incarnation + shift)) for n, own in crew.owns.items()}
        for watcher in self.watchers:
            watcher.stepped(self.now, crew, before, event, after.commands)
        if isinstance(event, EntriesRead):
            self._tell_link(crew, Folded(after.agent.job))
        # What the link is told is told to the links of all. What the workers are told may part the crew.
        for command in sorted(after.commands, key=lambda command: not isinstance(command, Append | Beat)):
            self._carry_out(crew, command)
        if not crew.is_over:
            self._settle(crew, event)

    def _settle(self, crew: Crew, event: Event) -> None:
        """Find out when to look at the crew next."""
        if isinstance(event, EntriesRead) and self._frozen:
            self._listen(crew)
        self._schedule(crew)
        if not crew.seeks:
            crew.seeks = True
            self.after(SEEKS_S, partial(self._seek, crew), crew.name)

    def _each(self, crew: Crew, event: Event) -> None:
        """The agents of this crew go ways that cannot be renamed: each makes the step itself."""
        alone = self._split(crew, [[node] for node in crew.owns])
        for one in alone:
            self._feed(one, event_as_other(event, crew.agent, one.owns[one.name]) if one is not crew else event)

    def _audit(self, crew: Crew, before: Agent, event: Event, made: Step, shift: int) -> None:
        """A random agent of the crew makes the step itself."""
        members = list(crew.owns)
        own = crew.owns[members[self._audit_luck.randrange(len(members))]]
        mine = step(as_other(before, own), event_as_other(event, before, own))
        then = evolve(own, me=Node(own.me.id, own.me.incarnation + shift))
        told = as_other(made.agent, then)
        wanted = tuple(_unwatched(command_as_other(command, made.agent, then)) for command in made.commands)
        self.audited += 1
        if but_pulse(mine.agent) == but_pulse(told) and tuple(map(_unwatched, mine.commands)) == wanted:
            return
        names = (f.name for f in fields(Agent) if f.name not in PULSE)
        differ = [name for name in names if getattr(mine.agent, name) != getattr(told, name)]
        differences = "\n".join(f"{n}: {getattr(mine.agent, n)} instead of {getattr(told, n)}" for n in differ)
        raise Unlike(
            f"at {self.now:g}, {own.me} would not have done what {crew.name} did in its name\nevent: {event}\n"
            f"it would want {mine.commands}, and not {wanted}\n{differences}\nbefore: {as_other(before, own)}"
        )

    # ---- what the agents want done ----

    def _carry_out(self, crew: Crew, command: Command) -> None:  # a dispatcher: one arm per command
        match command:
            case Append() | Beat():
                if isinstance(command, Beat):
                    crew.asked = crew.agent.job
                self._tell_link(crew, command)
            case StartWorkers(round):
                self._with_delays(crew, self.delays.starts(round, crew.owns), WorkersStarted(0.0, round))
            case StopWorkers(round):
                if command.hangs:
                    self._report_hang(crew)
                crew.coming = [c for c in crew.coming if not isinstance(c[2], WorkersStopped)]
                stops = self.delays.stops(round, crew.owns, command.grace_s)
                self._with_delays(crew, stops, WorkersStopped(0.0, round, PORT))
            case ReservePort():
                self._put(crew, 0.01, PortReserved(0.0, PORT))
            case Finish(result):
                for node, own in crew.owns.items():
                    done = command_as_other(command, crew.agent, own)
                    self.results[node] = done.result if isinstance(done, Finish) else result
                    # An agent that has not read its goodbye may still watch it. The store keeps the counter.
                    self._frozen.setdefault(own.me, crew.agent)
                self._end(crew)
                self._look_for_silence()
            case _:
                assert_never(command)

    def _with_delays(self, crew: Crew, delays: Mapping[float, Sequence[NodeId]], what: Event) -> None:
        """`what` happens to these agents of the crew after their delays, in seconds."""
        firsts = {nodes[0]: delay_s for delay_s, nodes in delays.items()}
        for some in self._split(crew, [*delays.values()]):
            self._put(some, max(firsts[next(iter(some.owns))], 1 / GRID), what)

    def _report_hang(self, crew: Crew) -> None:
        """The workers of the other nodes wait for the one that hangs."""
        workers = crew.agent.workers
        if workers.up_at is not None and not workers.exits:
            self._put(crew, 0.0, _hung(crew.agent, 30.0, Activity(Stance.COLLECTIVE, "all_reduce", "train.py:88")))

    # ---- what will happen to a crew ----

    def _put(self, crew: Crew, delay_s: float, what: Coming) -> None:
        self._count += 1
        at = _on_grid(self.now + delay_s)
        insort(crew.coming, (at, self._count, what), key=lambda coming: (-coming[0], -coming[1]))
        if not crew.is_suspended and (crew.wakes_at is None or at < crew.wakes_at):
            self._wake_at(crew, at)

    def _schedule(self, crew: Crew) -> None:
        """Look at the crew when something happens to it, or its agent must be woken."""
        if crew.is_over or crew.is_suspended:
            return
        is_calm = self._is_calm(crew)
        if not is_calm:
            self._catch_up(crew)
        agent = crew.agent
        crew.quiet_until = quiet_until(agent) if is_calm else None
        at = crew.quiet_until if crew.quiet_until is not None else crew.next_wake()
        if crew.coming:
            at = crew.coming[-1][0] if at is None else min(at, crew.coming[-1][0])
        if at is None or at == float("inf"):
            crew.wakes_at = None
            return
        at = max(self.now, _on_grid(at))
        if at != crew.wakes_at:
            self._wake_at(crew, at)

    def _wake_at(self, crew: Crew, at: float) -> None:
        crew.wakes_at = at
        self._plan(at, crew.name, partial(self._wake, crew, at))

    def _is_calm(self, crew: Crew) -> bool:
        """Nothing but beats happens at this crew's link, and all the nodes that it watches beat."""
        link = crew.link
        return (
            crew.parked is not None
            and not link.saying.queue
            and link.beating.call is None
            and link.beating.wanted is None
            and not link.reading.is_owed
            and not (crew.hears_silence or crew.is_cut or self.is_store_out)
        )

    def _wake(self, crew: Crew, at: float) -> None:
        if crew.is_over or crew.is_suspended or crew.wakes_at != at:
            return
        crew.wakes_at = None
        if crew.coming and crew.coming[-1][0] <= self.now:
            _, _, what = crew.coming.pop()
            self._come(crew, what)
        else:
            wakes_at = crew.next_wake()
            if crew.quiet_until is not None or (wakes_at is not None and wakes_at <= self.now):
                self._happen(crew, Woken(0.0))
            else:
                self._schedule(crew)

    def _come(self, crew: Crew, what: Coming) -> None:
        self._catch_up(crew)
        match what:
            case Arrival(call):
                self._arrive(crew, call)
            case Reply(call):
                self._answer(crew, call)
            case HeldBack(call):
                if crew.parked is call and self._unread(crew):
                    self._return_read(crew)
            case CallFailed():
                self._tell_link(crew, what)
            case _:
                self._happen(crew, what)
                return  # which has scheduled it
        self._schedule(crew)

    # ---- links and the store ----

    def _tell_link(self, crew: Crew, happened: Input) -> None:
        """The link makes a step. Its calls are made, and its agent is told its news."""
        link, calls = link_step(crew.link, happened, self.now)
        crew.link, news = taken(link)
        if crew.parked is not None and crew.link.reading.is_owed:
            self._return_read(crew)  # the real one returns within `LOOK_S`
        self._make(crew, calls)
        for event in news:
            self._put(crew, 0.0, event)

    def _make(self, crew: Crew, calls: Iterable[Call]) -> None:
        for call in calls:
            self._put(crew, call.pause_s + self.speed.way_s, Arrival(call))

    def _is_reachable(self, crew: Crew) -> bool:
        return not (self.is_store_out or crew.is_cut)

    def _arrive(self, crew: Crew, call: Call) -> None:
        if not self._is_reachable(crew):
            self._fail(crew, call)
        elif isinstance(call, SendEntry):
            if not self._arriving:
                self._plan(self.now, LAST, self._take)
            self._arriving.append((crew, call, entry_as_others(call.entry, crew.agent, crew.owns)))
        elif isinstance(call, SendBeat):
            self._put(crew, self.speed.way_s, Reply(call))
        else:
            crew.parked = call
            if not call.wait_s or self._unread(crew) >= call.least:
                self._return_read(crew)
            elif self._unread(crew):
                self._hold(crew, call)

    def _answer(self, crew: Crew, call: Call) -> None:
        if not self._is_reachable(crew):
            self._fail(crew, call)
            return
        match call:
            case SendEntry():
                self._tell_link(crew, Appended())
            case SendBeat(beat):
                counts = {node: self._counter(node, self.now) for node in beat.watch}
                self._tell_link(crew, Beaten({**counts, beat.node: beat.count}))
            case Read(after):
                self._tell_link(crew, BatchRead(self._batch(crew, after)))
            case _:
                assert_never(call)

    def _fail(self, crew: Crew, call: Call) -> None:
        self._put(crew, self.speed.fails_s, CallFailed(LANES[type(call)], "it does not answer"))

    def _hang_up(self, crew: Crew) -> None:
        """The connection on which a read waits is gone."""
        call, crew.parked = crew.parked, None
        if call is not None:
            self._fail(crew, call)
        self._schedule(crew)

    def _return_read(self, crew: Crew) -> None:
        call, crew.parked = crew.parked, None
        if call is not None:
            busy_s = self._unread(crew) * len(self.of) / self.speed.reads_per_s
            self._put(crew, self.speed.way_s + busy_s, Reply(call))

    def _unread(self, crew: Crew) -> int:
        return self._begins + len(self._journal) - crew.position

    def _hold(self, crew: Crew, call: Read) -> None:
        self._put(crew, min(HELD_S * call.least, MOST_HELD_S), HeldBack(call))

    def _batch(self, crew: Crew, after: int) -> Batch:
        end, life = self._begins + len(self._journal), crew.link.life
        if after == end:
            return Batch(end, life=life)
        if after < self._begins or after not in self._folds:
            return Batch(end, (), self.job, life)  # the store hands out a fold to those that are far behind
        known = self._batches.get((after, end))
        if known is None:
            known = Entries(self._journal[after - self._begins :])
            known.folded = self._folds[after], self.job
            self._batches[after, end] = known
        return Batch(end, known, life=life)

    def _take(self) -> None:
        """Take in what has arrived now, in the order of the nodes. It lands as fast as the store can."""
        arriving, self._arriving = self._arriving, []
        said = sorted((pair for _, _, some in arriving for pair in some), key=itemgetter(0))
        at, each = max(self.now, self._free_at), 1.0 / self.speed.appends_per_s
        most, landed = max(1, int(STUFF_S * self.speed.appends_per_s)), dict[NodeId, float]()
        for first in range(0, len(said), most):
            some = said[first : first + most]
            at = _on_grid(at + len(some) * each)
            self._plan(at, "", partial(self._land, [entry for _, entry in some]))
            landed.update((node, at) for node, _ in some)
        self._free_at = at
        for crew, call, own in arriving:
            if not crew.is_over:
                self._put(crew, max(landed[node] for node, _ in own) - self.now + self.speed.way_s, Reply(call))

    def _land(self, entries: Sequence[Entry]) -> None:
        before = self.job
        self._journal.extend(entries)
        self.job = fold_all(before, tuple(entries))
        self._folds[self._begins + len(self._journal)] = self.job
        for watcher in self.watchers:
            watcher.landed(self.now, before, entries, self.job)
        for crew in list(self.crews):
            call = crew.parked
            if call is None or not self._is_reachable(crew) or crew.is_suspended:
                continue
            unread = self._unread(crew)
            if unread >= call.least:
                self._return_read(crew)
            elif unread == len(entries):
                self._hold(crew, call)
        if len(self._folds) > self._most_folds:
            self._forget()

    def _forget(self) -> None:
        """Drop what every agent has read."""
        end = self._begins + len(self._journal)
        first = min((crew.position for crew in self.crews if not (crew.is_suspended or crew.is_cut)), default=end)
        first = max((at for at in self._folds if at <= first), default=self._begins)
        del self._journal[: max(0, first - self._begins)]
        self._begins = max(first, self._begins)
        self._folds = {at: job for at, job in self._folds.items() if at >= first}
        self._batches = {key: batch for key, batch in self._batches.items() if key[0] >= first}
        self._most_folds = len(self._folds) + max(FOLDS, MOST_KEPT // max(1, len(self.of)))

    # ---- coming back to a crew ----

    def _seek(self, crew: Crew) -> None:
        """If the agents of another crew are alike, let one agent step for all."""
        crew.seeks = False
        if crew.quiet_until is None or crew.coming or crew.is_over or crew.hears_silence:
            return
        agent = crew.agent
        if agent.said or not can_share(agent) or standing(agent.job, agent.me)[-1] != STAGGERED:
            return
        key = _key(crew)
        for other in self.crews:
            if other is crew or other.coming or other.quiet_until is None or _key(other) != key:
                continue
            if not are_links_alike(crew.link, other.link) or not are_alike(other.agent, agent, self.now):
                continue
            few, many = (crew, other) if len(crew.owns) <= len(other.owns) else (other, crew)
            self._catch_up(few)
            self._catch_up(many)
            count = max(few.agent.contact.sent, many.agent.contact.sent)
            many.agent = evolve(many.agent, contact=evolve(many.agent.contact, sent=count, count=count))
            many.owns.update(few.owns)
            self.of.update(dict.fromkeys(few.owns, many))
            few.is_over = True
            self.crews.remove(few)
            self._schedule(many)
            return


def _key(crew: Crew) -> tuple[object, ...]:
    """Equal for crews that may be alike. Quick to compare."""
    agent = crew.agent
    return id(agent.job), agent.workers.up_at is None, crew.link.reading.position, agent.stage, agent.quick


def _are_same(a: Members, b: Members) -> bool:
    """The same nodes, in the same order."""
    return a is b or tuple(a.nodes) == tuple(b.nodes)


def _count(agent: Agent, at: float) -> int:
    """The counter of the agent's node at this time. Beats that the agent has counted and that come later are taken
    off."""
    sent, beat_at = agent.contact.sent, agent.contact.beat_at
    return sent if beat_at is None or beat_at <= at else max(0, sent - ceil((beat_at - at) / agent.job.terms.beat_s))


def _on_grid(at: float) -> float:
    return ceil(at * GRID) / GRID


def _watchers(job: Job, nodes: Sequence[Node]) -> Set[Node]:
    """Who watches one of these live nodes."""
    ring, found = job.ring, set[Node]()
    places = {node: at for at, node in enumerate(ring)} if nodes else {}
    wanted = set(nodes)
    for node in nodes:
        is_row = isinstance(job.phase, Gathering) and node in job.phase.expected
        most = min(len(ring) - 1, NEIGHBOURS + EXPECTED if is_row else NEIGHBOURS)
        near = {ring[places[node] - k] for k in range(1, most + 1)} - found
        found.update(before for before in near if not wanted.isdisjoint(watched(job, before)))
    return found


def _unwatched(command: Command) -> Command:
    return evolve(command, watch=()) if isinstance(command, Beat) else command


def _exit(agent: Agent, local_rank: int, exitcode: int, message: str) -> WorkerExit:
    assignment = agent.workers.assignment
    rank = 0 if assignment is None else assignment.workers[local_rank].rank
    return WorkerExit(local_rank, WorkerFailure(local_rank, rank, exitcode, pid=1000 + local_rank, message=message))


def _hung(agent: Agent, for_s: float, activity: Activity) -> WorkersExited:
    """All workers of this agent were found to hang."""
    exits = (_exit(agent, i, -9, "") for i in range(agent.spec.local_world_size))
    cause = NoProgress(for_s, 0, activity=activity)
    hung = tuple(evolve(exit, failure=evolve(exit.failure, cause=cause)) for exit in exits if exit.failure is not None)
    return WorkersExited(0.0, agent.workers.round, hung)
